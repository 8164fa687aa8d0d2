"""Placement ``auto`` in the real host: the GPUs that the plan of the workflow chooses, and core's own results there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, images, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.test_equal import assert_same

MIB = 1 << 20
AUTO = Loaders(placement="auto")


def occupy(host: HostProcess, **free_mib: int) -> None:
    """Leave so much free of each GPU."""
    graph = Graph()
    for device, mib in enumerate(free_mib.values()):
        graph.add("TestOccupy", device=device, free_bytes=mib * MIB if mib >= 0 else -1, run=next(new_run))
    assert host.run(graph.nodes).outcome == "success"


@pytest.fixture
def crowded(gpu_host: HostProcess) -> Iterator[HostProcess]:
    """A host whose first GPU, on which ComfyUI computes by default, has hardly more room than what is kept free."""
    gpu_host.forget()
    occupy(gpu_host, first=530, second=-1)
    yield gpu_host
    gpu_host.forget()
    occupy(gpu_host, first=-1, second=-1)


def where(host: HostProcess) -> dict[str, list[str]]:
    """Return the devices of each kind of component."""
    return {part["kind"]: [share["device"] for share in part["plan"]["shares"]] for part in host.part("components")}


@pytest.mark.parametrize("kind", ["ours", "managed"])
def test_all_models_go_where_the_plan_has_them(crowded: HostProcess, kind: str) -> None:
    def run(loaders: Loaders) -> tuple[dict[str, Any], list[str], str]:
        """Return what a run gives, what its loaders say of auto, and its plan."""
        graph = Graph()
        images(graph, loaders)
        node_id, _ = graph.add("HighwaterPlan", devices="")
        result = crowded.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        (plan,) = result.outputs[node_id]["text"]
        texts = [line for output in result.outputs.values() for line in output.get("text", ())]
        return result.kept(), [line for line in texts if line.startswith("placement auto")], str(plan)

    expected, _, _ = run(CORE)
    crowded.forget()
    got, notes, plan = run(Loaders(kind=kind, placement="auto"))
    assert_same(got, expected)
    assert where(crowded) == {"diffusion": ["gpu:1"], "vae": ["gpu:1"]}
    assert len(notes) == 2
    assert all(note.startswith("placement auto chooses gpu:1: gpu:1 has the most memory") for note in notes)
    assert plan.count("placement: gpu:1\n") == 2


def test_a_model_that_no_gpu_holds_is_split(gpu_host: HostProcess) -> None:
    def run(loaders: Loaders) -> PromptResult:
        gpu_host.forget()
        graph = Graph()
        graph.keep(sample_flux(graph, loaders.diffusion_model(graph, "big_flux.safetensors")))
        result = gpu_host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        return result

    got = run(AUTO)
    assert [sorted(devices) for devices in where(gpu_host).values()] == [["gpu:0", "gpu:1"]]
    (note,) = (line for line in got.outputs["1"]["text"] if line.startswith("placement auto"))
    (plan,) = (part["plan"] for part in gpu_host.part("components"))
    streams = any(share["streamed_blocks"] for share in plan["shares"])
    kept = "less of it streams" if streams else "all of it is resident"
    assert f"split over gpu:0 & gpu:1, where {kept}; on gpu:0 alone " in note
    assert_same(got.kept(), run(CORE).kept())


def test_a_model_that_comes_later_is_placed_beside_what_is_there(crowded: HostProcess) -> None:
    """And what is there stays, though there is more room on the other GPU by then."""
    graph = Graph()
    graph.keep(sample_flux(graph, AUTO.diffusion_model(graph)), "first")
    assert crowded.run(graph.nodes).outcome == "success"
    for device, free_bytes in enumerate((-1, 600 * MIB)):  # in this prompt: ComfyUI keeps what the last one loaded
        graph.add("TestOccupy", device=device, free_bytes=free_bytes, run=next(new_run))
    graph.keep(sample_flux(graph, AUTO.diffusion_model(graph, "other_flux.safetensors")), "second")
    result = crowded.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    found = {part["name"]: part["plan"]["shares"][0]["device"] for part in crowded.part("components")}
    assert found["tiny_flux"] == "gpu:1"


def test_a_checkpoint_has_each_part_placed(crowded: HostProcess) -> None:
    graph = Graph()
    model, clip, vae = AUTO.checkpoint(graph)
    positive, negative = (graph.add("CLIPTextEncode", clip=clip, text=text) for text in ("a fox", "a hen"))
    latent = graph.add("EmptyLatentImage", width=32, height=32, batch_size=1)
    sampled = graph.sampler(model, positive, negative, latent, cfg=3.0)
    graph.keep(graph.add("VAEDecode", samples=sampled, vae=vae))
    result = crowded.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    assert set(map(tuple, where(crowded).values())) == {("gpu:1",)}
    (note,) = (line for line in result.outputs[model[0]]["text"] if line.startswith("placement auto"))
    assert note.startswith(
        "placement auto chooses diffusion=gpu:1,text=gpu:1,vae=gpu:1: diffusion: gpu:1 has the most memory"
    )


@pytest.mark.parametrize("free_mib", [700, 900, 1000, 1100, 1300])
def test_a_plan_leaves_free_what_core_does(gpu_host: HostProcess, free_mib: int) -> None:
    """Some 0.8 GiB for computing: what is left of a card may hold none of a model."""
    gpu_host.forget()
    occupy(gpu_host, first=free_mib, second=free_mib)
    try:
        graph = Graph()
        graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, "wide_flux.safetensors")))
        node_id, _ = graph.add("HighwaterPlan", devices="")
        gpu_host.forget()
        result = gpu_host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        (share,) = (part["plan"]["shares"][0] for part in gpu_host.part("components") if part["name"] == "wide_flux")
    finally:
        occupy(gpu_host, first=-1, second=-1)
    planned = re.search(r"^wide_flux .*?(\d+) of \d+ ", result.outputs[node_id]["text"][0], re.MULTILINE)
    assert planned is not None
    assert share["resident_blocks"] == int(planned[1])


@pytest.mark.parametrize("name", ["wide_flux.safetensors", "big_flux.safetensors"])
def test_under_dynamic_vram_core_moves_what_is_not_split(dynamic_host: HostProcess, name: str) -> None:
    def run(loaders: Loaders) -> PromptResult:
        dynamic_host.forget()
        graph = Graph()
        graph.keep(sample_flux(graph, loaders.diffusion_model(graph, name)))
        result = dynamic_host.run(graph.nodes)
        assert result.outcome == "success", result.brief_error
        return result

    got = run(AUTO)
    (engine,) = {part["engine"] for part in dynamic_host.part("components") if part["engine"] != "kept"}
    assert engine == ("blocks" if name.startswith("big") else "dynamic")
    assert_same(got.kept(), run(CORE).kept())
