"""Loaders of ComfyUI's models that say ``auto``: each is where the plan of the whole workflow has it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from highwater.headless.comfy_stub import comfy_api, folder_paths
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.request import PlanRequest, plan_together
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.units import GIB, MIB

comfy_api.install()
from highwater.nodes import auto_placements, device_choices, graph_plans, workflow_plans  # noqa: E402
from highwater.nodes.default_profile import set_default_profile  # noqa: E402
from highwater.nodes.described_hardware import parse_hardware  # noqa: E402
from highwater.nodes.open_placements import chosen_of, widget_text  # noqa: E402
from highwater.nodes.planned_calls import Prediction  # noqa: E402
from highwater.nodes.workflow_reading.reading import read_workflow  # noqa: E402

CPU = DeviceCapacity(name="cpu", total_bytes=GIB, available_bytes=GIB)
NUM_BLOCKS = 12  # of 1 MiB each


def machine(*available_mib: float) -> Machine:
    gpus = (
        DeviceCapacity(
            name=f"gpu:{index}", total_bytes=GIB, available_bytes=int(mib * MIB), link_bytes_per_s=1e9 * (index + 1)
        )
        for index, mib in enumerate(available_mib)
    )
    return Machine(devices=(CPU, *gpus), pinned_bytes=GIB)


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of models, nothing that was chosen before, and two GPUs of which neither holds the diffusion model."""
    before = folder_paths.models_directory, folder_paths.output_directory
    folder_paths.configure(models=tmp_path, output=tmp_path)
    for folder, number in (("diffusion_models", NUM_BLOCKS), ("vae", 2)):
        (tmp_path / folder).mkdir()
        weights = {f"double_blocks.{number}.weight": torch.ones(512, 512) for number in range(number)}
        save_file(weights, tmp_path / folder / "tiny.safetensors")
    forget()
    use(monkeypatch, machine(8, 11))
    yield
    forget()
    folder_paths.models_directory, folder_paths.output_directory = before


def forget() -> None:
    auto_placements.chosen_before.clear()
    auto_placements.taken.clear()


def use(monkeypatch: pytest.MonkeyPatch, here: Machine) -> None:
    names = [device.name for device in here.devices]
    monkeypatch.setattr(device_choices, "device_names", lambda: names)
    monkeypatch.setattr(auto_placements, "accelerator_names", lambda: [name for name in names if name != "cpu"])
    monkeypatch.setattr(graph_plans, "machine_for", lambda hardware, marks: hardware.machine() if hardware else here)


def node(name: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": name, "inputs": inputs}


def graph(placement: Any = "auto", vae: str = "auto", engine: str = "auto", **more: Any) -> dict[str, Any]:
    return {
        "text": node("SomeEncoder"),
        "model": node(
            "HighwaterLoadDiffusionModel", unet_name="tiny.safetensors", placement=placement, profile="auto",
            precision="as stored", engine=engine,
        ),
        "vae": node(
            "HighwaterLoadVAE", vae_name="tiny.safetensors", placement=vae, profile="auto", precision="as stored"
        ),
        "latent": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sample": node(
            "KSampler", model=["model", 0], positive=["text", 0], negative=["text", 0], latent_image=["latent", 0],
            seed=1, steps=20, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1,
        ),
        "decode": node("VAEDecode", samples=["sample", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="x"),
        **more,
    }  # fmt: skip


def test_a_model_that_no_gpu_holds_is_split_and_the_node_says_why() -> None:
    text, notes = auto_placements.choose_placement(graph(), "model")
    placement, more_notes = device_choices.resolve_placement(text)
    assert [split.device for split in placement.items[0].devices] in (["gpu:0", "gpu:1"], ["gpu:1", "gpu:0"])
    assert not more_notes
    (note,) = notes
    assert note.startswith(f"placement auto chooses {text}: split over ") and "would stream" in note


def test_default_is_still_comfyuis_device() -> None:
    """And what is named stays where it is."""
    for given, device in (("default", "gpu:0"), ("gpu:1", "gpu:1")):
        planned = auto_placements.plan_as_chosen(graph(placement=given, vae="gpu:1"))
        part = next(iter(planned.plans.values())).components[0]
        assert [share.device for share in part.shares] == [device]
        assert not planned.chosen


def test_all_loaders_of_a_workflow_follow_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = graph_plans.plan_graph
    asked: list[Any] = []

    def plan(graph: Any, **given: Any) -> Any:
        asked.append(graph)
        return planned(graph, **given)

    monkeypatch.setattr(graph_plans, "plan_graph", plan)
    auto_placements.choose_placement(graph(), "model")
    use(monkeypatch, machine(30, 30))  # the first model is there by now
    vae, (note,) = auto_placements.choose_placement(graph(), "vae")
    assert vae in ("gpu:0", "gpu:1") and note.startswith(f"placement auto chooses {vae}: ")
    assert len(asked) == 1


def test_a_loader_that_loads_again_is_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI gave its model up: what was free then counts no more. What other loaders were given stays."""
    before = {name: auto_placements.choose_placement(graph(), name)[0] for name in ("model", "vae")}
    use(monkeypatch, machine(30, 40))
    assert auto_placements.choose_placement(graph(), "model")[0] == "gpu:1" != before["model"]
    planned = auto_placements.plan_as_chosen(graph())
    assert [*planned.placements.values()] == ["gpu:1", before["vae"]]


def test_a_plan_alone_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    auto_placements.plan_as_chosen(graph())
    use(monkeypatch, machine(30, 40))
    assert auto_placements.choose_placement(graph(), "model")[0] == "gpu:1"


def test_the_default_profile_counts_in_the_choice_and_in_the_plan() -> None:
    set_default_profile({"profile": "gpu:1=2MiB"})
    try:
        planned = auto_placements.plan_as_chosen(graph())
        assert [str(plan.profile) for plan in planned.plans.values()] == ["gpu:1=2MiB"] * 2
        assert any("from the setting Default profile" in line for line in planned.text().splitlines())
        one = auto_placements.choose_placement(graph(), "model")[0]
    finally:
        set_default_profile({"profile": ""})
    assert auto_placements.choose_placement(graph(), "model")[0] != one  # its node runs again, too


def test_a_budget_that_no_loader_follows_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models in turn that one GPU does not hold together: a budget would end the reloads, had a loader one."""

    def budgets(may_budget: bool) -> list[Any]:
        def asked(requests: Sequence[PlanRequest], uses: Sequence[Use]) -> Any:
            return plan_together([replace(request, may_budget=may_budget) for request in requests], uses)

        monkeypatch.setattr(workflow_plans, "plan_together", asked if may_budget else plan_together)
        planned = workflow_plans.plan_workflow(read_workflow(two), machine(100, 17), predict)
        return [plan.profile.budgets for plan in planned.plans.values()]

    def predict(call: Any) -> Prediction:
        times = {f"gpu:{index}": BlockTimes(blocks_s=(0.001,) * len(call.component.blocks)) for index in range(2)}
        return Prediction(num_passes=1, activation_bytes=0, times=times)

    two = graph(placement="gpu:1", vae="gpu:1")
    two["vae"] = two["model"]
    two["decode"] = {**two["sample"], "inputs": {**two["sample"]["inputs"], "model": ["vae", 0]}}
    two["save"] = node("SaveLatent", samples=["decode", 0], filename_prefix="x")
    two["first"] = node("SaveLatent", samples=["sample", 0], filename_prefix="x")
    assert any(budgets(may_budget=True))
    assert not any(budgets(may_budget=False))


def test_what_was_chosen_before_is_given_when_the_workflow_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before, _ = auto_placements.choose_placement(graph(), "model")
    use(monkeypatch, machine(30, 40))
    planned = auto_placements.plan_as_chosen(graph(vae="gpu:1"))
    model, _ = planned.placements.values()
    assert model.partition("/")[0] == before  # the plan says its groups, too
    changed = graph()
    changed["model"]["inputs"]["profile"] = "-1MiB"  # the loader runs again: it is chosen anew
    assert auto_placements.choose_placement(changed, "model")[0] == "gpu:1"


def test_a_linked_text_is_chosen_like_a_widgets() -> None:
    linked = graph(placement=["word", 0], word=node("PrimitiveString", value="auto"))
    linked["vae"]["inputs"]["placement"] = ["word", 0]
    by_link = {name: auto_placements.choose_placement(linked, name)[0] for name in ("vae", "model")}
    forget()
    assert by_link == {name: auto_placements.choose_placement(graph(), name)[0] for name in ("vae", "model")}


@pytest.mark.parametrize("available", [(), (100,)])
def test_there_is_nothing_to_choose_on_one_gpu(monkeypatch: pytest.MonkeyPatch, available: tuple[int, ...]) -> None:
    use(monkeypatch, machine(*available))
    assert auto_placements.choose_placement(graph(), "model") == ("default", [])


def test_where_nothing_can_be_planned_comfyui_chooses() -> None:
    lost = graph()
    for name in ("model", "vae"):
        lost[name]["inputs"][{"model": "unet_name", "vae": "vae_name"}[name]] = "lost.safetensors"
    text, (note,) = auto_placements.choose_placement(lost, "model")
    assert text == "default" and "default is used" in note and "'lost.safetensors'" in note
    text, (note,) = auto_placements.choose_placement(graph(), "a node that another one expands to")
    assert text == "default" and "not one of the workflow's own" in note
    assert auto_placements.choose_placement(None, None)[0] == "default"
    unused = {name: value for name, value in graph().items() if name not in ("sample", "decode", "save")}
    assert auto_placements.choose_placement(unused, "model")[0] == "default"


@pytest.mark.parametrize("loader", ["HighwaterLoadControlNet", "dynamic"])
def test_what_cannot_be_split_is_left_to_comfyui(loader: str) -> None:
    """A ControlNet computes where its model does; ComfyUI's dynamic VRAM splits none."""
    if loader == "dynamic":
        text, _ = auto_placements.choose_placement(graph(engine="dynamic"), "model")
    else:
        control = node(loader, control_net_name="x", placement="auto", profile="auto", precision="as stored")
        text, _ = auto_placements.choose_placement(graph(control=control), "control")
    assert text == "default"


@pytest.mark.parametrize("name", ["ControlNetLoader", "MultiGPU_WorkUnits", "SelectModelDevice"])
def test_a_model_stays_for_nodes_of_cores_that_need_it_there(name: str) -> None:
    """Core's ControlNets guide on ComfyUI's device alone, and what is split has no MultiGPU clones."""
    inputs = {"control_net_name": "x"} if name == "ControlNetLoader" else {"model": ["model", 0], "max_gpus": 2}
    staying = graph(other=node(name, **inputs))
    text, (note,) = auto_placements.choose_placement(staying, "model")
    assert text == "default" and f"node other ({name})" in note
    planned = auto_placements.plan_as_chosen(staying)
    elsewhere = auto_placements.plan_as_chosen(staying, parse_hardware("gpu:0=600MiB,gpu:1=1GiB,host=1GiB"))
    for each in (planned, elsewhere):
        assert each.placements["node model (HighwaterLoadDiffusionModel)"] == "gpu:0"
    assert auto_placements.choose_placement(staying, "vae")[0] == planned.chosen["vae"].text


def test_the_text_of_a_controlnet_that_follows_its_model_says_so() -> None:
    described = read_workflow(graph(placement="gpu:1"))
    (plan, _) = workflow_plans.plan_workflow(described, machine(8, 11)).plans.values()
    model = replace(described.models[0], kind="control")
    for placement, text in ((None, "default"), ("default", "default"), ("auto", "default"), ("gpu:1", "gpu:1")):
        assert widget_text(plan, replace(model, asked=replace(model.asked, placement=placement))) == text


@pytest.mark.parametrize("ratio", ["", "@30%", "@0.45"])
@pytest.mark.parametrize("groups", ["", "/4", "/auto"])
def test_every_text_of_a_plan_is_one_that_the_widget_takes(ratio: str, groups: str) -> None:
    planned = auto_placements.plan_as_chosen(graph(placement=f"gpu:0&gpu:1{ratio}{groups}", vae="gpu:0:gpu:1"))
    for text in planned.placements.values():
        assert text in device_choices.placement_choices()
        assert device_choices.resolve_placement(text)[1] == []


@pytest.mark.parametrize("text", ["text=gpu:1", "vae=gpu:1", "auto,vae=gpu:1", "diffusion=auto"])
def test_what_a_checkpoints_placement_does_not_name_is_on_comfyuis_device(text: str) -> None:
    (model, *_) = read_workflow(graph()).models
    asked = replace(model, part="model", asked=replace(model.asked, placement=text))
    placement = workflow_plans.placement_of(asked, ["cpu", "gpu:0", "gpu:1"], ["tiny.model"], "gpu:0", [])
    assert [split.device for split in placement.item_for("tiny.model", "diffusion").devices] == ["gpu:0"]


def test_the_parts_of_a_checkpoint_have_an_item_each() -> None:
    described = read_workflow(graph())
    parts = tuple(
        replace(model, part=part, node=described.models[0].node)
        for model, part in zip(described.models, ("model", "vae"), strict=True)
    )
    plans = list(workflow_plans.plan_workflow(described, machine(8, 11)).plans.values())
    chosen = chosen_of(parts, plans)["model"]
    placement, notes = device_choices.resolve_part_placement(chosen.text)
    assert [item.component for item in placement.items] == ["diffusion", "vae"] and not notes
    assert [line.partition(":")[0] for line in chosen.why] == ["diffusion", "vae"]
