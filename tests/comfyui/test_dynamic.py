"""Core's dynamic models under our nodes: core's own results, budgets that hold, bytes that are true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from highwater.tests.comfyui.graphs import CASES, CORE, CORE_IN_HALVES, Graph, Loaders, lora, new_run, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult
from highwater.tests.comfyui.test_equal import assert_same, computes_at_once

MIB = 1 << 20
PAGE_BYTES = 32 * MIB
WIDE = "wide_flux.safetensors"
WIDE_BYTES = 351_000_000  # 335 MiB, in 11 pages
MANAGED_CASES = ["plain", "lora_at_1", "clones_with_different_patches", "lora_on_text", "controlnet", "autoencoder"]


def slow(*values: str) -> Any:
    """Return the parameters of a case that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *(("ours", case) for case in CASES),
        *(("managed", case) for case in MANAGED_CASES),
        *(slow("managed", case) for case in CASES if case not in MANAGED_CASES),
    ],
)
def test_the_dynamic_engine_computes_what_core_does(
    dynamic_host: HostProcess, case: str, kind: str, reference: Callable, ours: Callable
) -> None:
    actual = ours(dynamic_host, case, Loaders(kind=kind, engine="dynamic"))
    engines = {entry["engine"] for entry in dynamic_host.part("components")}
    assert engines - {"core" if case == "weight_hook" else ""} == {"dynamic"}  # core makes a static copy for hooks
    assert_same(actual, reference(dynamic_host, case))


# Of `blocks` what dynamic VRAM could have a hand in; all modes are compared on a static host.
BLOCKS = {
    "resident": Loaders(engine="blocks"),
    "streamed": Loaders(engine="blocks", profile="4MiB"),
    "managed": Loaders(engine="blocks", kind="managed"),
    "split": Loaders(placement="gpu:0&gpu:1"),
}
FLUX_CASES = ["lora_at_1", "clones_with_different_patches", "weight_hook", "merge", "quantized", "guided", "wan"]
BLOCK_CASES = [
    *(("resident", case) for case in CASES),
    *((mode, case) for mode in ("streamed", "split") for case in FLUX_CASES),
    *(slow("managed", case) for case in CASES if case != "vision"),
]


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize(("mode", "case"), BLOCK_CASES)
def test_blocks_compute_what_a_host_without_dynamic_vram_does(
    dynamic_host: HostProcess, gpu_host: HostProcess, mode: str, case: str, reference: Callable, ours: Callable
) -> None:
    """Core's own two kinds of models differ with a LoRA: the reference is the static one."""
    actual = ours(dynamic_host, case, BLOCKS[mode])
    assert_same(actual, reference(gpu_host, case, CORE_IN_HALVES if computes_at_once(dynamic_host) else CORE))


@pytest.fixture
def fresh(dynamic_host: HostProcess) -> Iterator[HostProcess]:
    """The dynamic host with nothing loaded, no watermark, and no budget but those of a test."""

    def reset() -> None:
        graph = Graph()
        graph.add("HighwaterWatermark", device="*", low="0", high="0")
        graph.add("TestOccupy", device=0, free_bytes=-1, run=next(new_run))
        assert dynamic_host.run(graph.nodes).outcome == "success"
        dynamic_host.forget()

    reset()
    yield dynamic_host
    reset()


def component(host: HostProcess, name: str = "wide_flux") -> dict[str, Any]:
    (found,) = (entry for entry in host.part("components") if entry["name"] == name and entry["engine"] != "kept")
    return found


def sample(
    host: HostProcess, loaders: Loaders, name: str = WIDE, *, watermark: str = "", **options: Any
) -> PromptResult:
    graph = Graph()
    if watermark:
        graph.add("HighwaterWatermark", device="gpu:0", low=watermark, high=watermark)
    graph.keep(sample_flux(graph, loaders.diffusion_model(graph, name), **options))
    result = host.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    return result


def evictions_after(host: HostProcess, t_s: float) -> list[dict[str, Any]]:
    return [event for event in host.part("events") if event["kind"] == "evict" and event["t_s"] > t_s]


def last_event_s(host: HostProcess) -> float:
    return max((event["t_s"] for event in host.part("events")), default=-1.0)


def told(result: PromptResult) -> str:
    return " | ".join(line for output in result.outputs.values() for line in output.get("text", []))


# -- budgets


@pytest.mark.parametrize("kind", ["ours", "managed"])
def test_a_budget_is_kept_to_the_page_lowered_and_raised(fresh: HostProcess, kind: str) -> None:
    expected = sample(fresh, CORE).kept()
    for share in (0.4, 0.7, 0.4, 2.0, 0.7):
        budget = int(WIDE_BYTES * share)
        result = sample(fresh, Loaders(kind=kind, profile=f"{budget / MIB}MiB"))
        found = component(fresh)
        held = found["tiers"]["gpu:0"]
        assert min(budget, WIDE_BYTES) - PAGE_BYTES <= held <= budget
        assert (found["engine"], found["in_effect"]) == ("dynamic", True)
        assert held - MIB <= found["plan"]["resident_pages"] * PAGE_BYTES <= held
        assert "engine dynamic" in told(result) and "at most" in told(result)
        assert "again" not in told(result), "nothing is read twice"
        assert_same(result.kept(), expected)


def test_a_budget_survives_loras_and_other_models(fresh: HostProcess) -> None:
    """Core lifts the limit whenever it loads a clone of the model, or loads it again."""
    budget = int(WIDE_BYTES * 0.4)
    graph = Graph()
    model = Loaders(profile=f"{budget / MIB}MiB").diffusion_model(graph, WIDE)
    patched = lora(graph, model, 1.0, "wide_flux_lora.safetensors")
    graph.keep(sample_flux(graph, patched), "patched")
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph)), "other")
    graph.keep(sample_flux(graph, model), "plain")
    for _ in range(2):
        assert fresh.run(graph.nodes).outcome == "success"
        assert budget - PAGE_BYTES <= component(fresh)["tiers"]["gpu:0"] <= budget
        fresh.forget()


def test_a_budget_that_leaves_memory_free_does(fresh: HostProcess) -> None:
    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=900 * MIB, run=next(new_run))
    assert fresh.run(graph.nodes).outcome == "success"
    sample(fresh, Loaders(profile="-700MiB"))
    held = component(fresh)["tiers"]["gpu:0"]
    assert 200 * MIB - 2 * PAGE_BYTES <= held <= 200 * MIB
    assert fresh.ask_devices("read")["devices"][0]["used_bytes"] <= 1844 * MIB - 700 * MIB


@pytest.mark.expects_errors
def test_a_budget_below_the_small_weights_is_refused_in_one_line(fresh: HostProcess) -> None:
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders(profile="0.001MiB").diffusion_model(graph, WIDE)))
    failed = fresh.run(graph.nodes)
    assert failed.outcome == "error"
    message = failed.error.splitlines()[0]
    assert "budget" in message and "wide_flux" in message and "allowed: at least" in message
    sample(fresh, Loaders(profile="100MiB"))


def test_clones_share_their_memory_and_the_nodes_say_so(fresh: HostProcess) -> None:
    graph = Graph()
    model = CORE.diffusion_model(graph, WIDE)
    small, large = (
        graph.add("HighwaterManageModel", model=model, **Loaders(profile=f"{size}MiB").request) for size in (100, 300)
    )
    graph.keep(sample_flux(graph, small), "small")
    graph.keep(sample_flux(graph, large, seed=5), "large")
    result = fresh.run(graph.nodes)
    assert result.outcome == "success", result.brief_error
    said = [" ".join(result.outputs[node]["text"]) for node, _ in (small, large)]
    assert sum("the one loaded last sets the budget" in text for text in said) == 1
    held = component(fresh)["tiers"]["gpu:0"]
    assert held <= 300 * MIB
    assert (held <= 100 * MIB) == (component(fresh)["node_id"] == small[0])


def test_a_budget_below_the_embeddings_is_kept(fresh: HostProcess) -> None:
    """CLIP-L's embeddings have 72 MiB and come first: a weight is on the device as a whole or not at all."""

    def encode(loaders: Loaders) -> dict[str, torch.Tensor]:
        graph = Graph()
        graph.keep(graph.add("CLIPTextEncode", text="a lighthouse", clip=loaders.text_encoder(graph)))
        return fresh.run(graph.nodes).kept()

    expected = encode(CORE)
    embedding_bytes = 49408 * 768 * 2
    for size in (10, 60, 120):
        assert_same(encode(Loaders(kind="managed", profile=f"{size}MiB")), expected)
        found = component(fresh, "clip_l")
        held = found["tiers"]["gpu:0"]
        assert held <= size * MIB and found["in_effect"]
        assert (held >= embedding_bytes) == (size * MIB >= embedding_bytes + PAGE_BYTES)


def test_a_budget_ends_when_core_loads_the_model_without_its_node(fresh: HostProcess) -> None:
    """The loader's model stays in core's cache, and is loaded through the loader's own patcher."""
    for is_managed in (True, False, True):
        graph = Graph()
        model = CORE.diffusion_model(graph, WIDE)
        if is_managed:
            model = graph.add("HighwaterManageModel", model=model, **Loaders(profile="100MiB").request)
        graph.keep(sample_flux(graph, model))
        assert fresh.run(graph.nodes).outcome == "success"
        found = component(fresh)
        assert found["in_effect"]
        assert found["plan"]["budget_bytes"] == (100 * MIB if is_managed else None)
        assert found["node_id"] == (model[0] if is_managed else None)
        assert (found["tiers"]["gpu:0"] <= 100 * MIB) == is_managed


def test_a_model_that_holds_nothing_is_not_in_use(fresh: HostProcess) -> None:
    graph = Graph()
    graph.add("TestHold", value=Loaders(profile="100MiB").diffusion_model(graph, WIDE))
    assert fresh.run(graph.nodes).outcome == "success"
    found = component(fresh)
    assert (found["tiers"], found["leased"]) == ({}, False)


def test_a_static_copy_that_core_makes_for_hooks_is_counted(fresh: HostProcess) -> None:
    """Core runs a LoRA for one conditioning on a copy that its dynamic VRAM does not move, and no budget reaches it."""
    graph = Graph()
    model = Loaders(profile="100MiB").diffusion_model(graph, WIDE)
    hooks = graph.add("CreateHookLoraModelOnly", lora_name="wide_flux_lora.safetensors", strength_model=0.8)
    settings = {"strength": 1.0, "set_cond_area": "default", "hooks": hooks}
    positive = graph.add("ConditioningSetProperties", cond_NEW=graph.conditioning(1), **settings)
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    graph.keep(graph.sampler(model, positive, graph.conditioning(2), latent, cfg=3.0))
    assert fresh.run(graph.nodes).outcome == "success"
    (copy,) = (entry for entry in fresh.part("components") if entry["engine"] == "core")
    assert (copy["name"], copy["node_id"]) == ("wide_flux", model[0])
    used = fresh.ask_devices("read")["devices"][0]["used_bytes"]
    assert used - MIB < copy["tiers"]["gpu:0"] <= used
    (reason,) = copy["plan"]["reasons"]
    assert "static copy" in reason and "engine blocks" in reason


@pytest.mark.parametrize("engines", [("dynamic", "blocks"), ("dynamic", "dynamic"), ("blocks", "dynamic")])
def test_the_last_of_two_nodes_behind_each_other_counts(fresh: HostProcess, engines: tuple[str, str]) -> None:
    expected = sample(fresh, CORE).kept()
    fresh.forget()
    graph = Graph()
    first, second = engines
    model = Loaders(engine=first, profile="300MiB").diffusion_model(graph, WIDE)
    model = graph.add("HighwaterManageModel", model=model, **Loaders(engine=second, profile="150MiB").request)
    graph.keep(sample_flux(graph, model))
    for _ in range(2):
        result = fresh.run(graph.nodes)
        assert_same(result.kept(), expected)
        assert "static copy" not in told(result) and "shares" not in told(result)
        used = [entry for entry in fresh.part("components") if entry["tiers"].get("gpu:0", 0) > MIB]
        (entry,) = used
        assert entry["engine"] in engines and entry["tiers"]["gpu:0"] <= 150 * MIB


# -- the VRAM watermark (keep free)


def test_a_watermark_keeps_memory_free_of_dynamic_pages_until_it_goes(fresh: HostProcess) -> None:
    """Core keeps 256 MiB free by itself; a mark that is lower changes nothing."""

    def free_bytes() -> int:
        return 1844 * MIB - fresh.ask_devices("read")["devices"][0]["used_bytes"]

    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=800 * MIB, run=next(new_run))
    assert fresh.run(graph.nodes).outcome == "success"
    expected = sample(fresh, CORE).kept()
    before = free_bytes()
    for mark in (600, 400, 100):
        result = sample(fresh, Loaders(), watermark=f"{mark}MiB")
        assert free_bytes() >= min(mark * MIB, before)
        assert_same(result.kept(), expected)
        assert component(fresh)["tiers"]["gpu:0"] > 0
    sample(fresh, Loaders(), watermark="0")
    assert free_bytes() <= before + PAGE_BYTES


# -- both kinds in one host


@pytest.mark.parametrize("kept", [None, WIDE])
def test_memory_that_torch_needs_comes_from_pages_in_the_policys_order(fresh: HostProcess, kept: str | None) -> None:
    """For an allocation of torch's comfy-aimdo takes pages away in the order it was told, and the pack is not asked."""
    names = (WIDE, "other_wide_flux.safetensors")
    graph = Graph()
    for name in names:
        graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, name)), name)
        assert fresh.run(graph.nodes).outcome == "success"
    before = {name: component(fresh, name.split(".")[0])["tiers"]["gpu:0"] for name in names}
    if kept:
        fresh.post("/highwater_test/keep", {"name": "wide_flux", "kept": True})
    graph.add("TestOccupy", device=0, free_bytes=300 * MIB, run=next(new_run))
    assert fresh.run(graph.nodes).outcome == "success"
    lost = {name: before[name] - component(fresh, name.split(".")[0])["tiers"]["gpu:0"] for name in names}
    first, last = reversed(names) if kept else names
    assert (lost[first] >= PAGE_BYTES, lost[last]) == (True, 0)


def test_idle_dynamic_pages_are_room_for_our_blocks(fresh: HostProcess) -> None:
    """Beside 352 MiB of idle pages 180 MiB are left above the mark, and ours are 335: some pages leave for them."""
    expected = sample(fresh, CORE).kept()
    fresh.forget()
    graph = Graph()
    graph.add("HighwaterWatermark", device="gpu:0", low="900MiB", high="900MiB")
    graph.add("TestOccupy", device=0, free_bytes=1100 * MIB + WIDE_BYTES, run=next(new_run))
    assert fresh.run(graph.nodes).outcome == "success"
    graph = Graph()
    graph.keep(sample_flux(graph, CORE.diffusion_model(graph, WIDE)), "dynamic")
    assert fresh.run(graph.nodes).outcome == "success"
    before = component(fresh)["tiers"]["gpu:0"]
    graph.keep(sample_flux(graph, Loaders(engine="blocks").diffusion_model(graph, WIDE)))
    assert_same(fresh.run(graph.nodes).kept(), expected)
    entries = {entry["engine"]: entry for entry in fresh.part("components") if entry["name"] == "wide_flux"}
    (share,) = entries["blocks"]["plan"]["shares"]
    assert share["resident_blocks"] == share["blocks"]
    assert 0 < entries["dynamic"]["tiers"]["gpu:0"] < before


def test_ours_leave_for_a_dynamic_newcomer_and_come_back(fresh: HostProcess) -> None:
    wide, tiny = CORE, Loaders(engine="blocks", profile="unlimited")
    expected = {name: sample(fresh, CORE, name).kept() for name in (WIDE, "tiny_flux.safetensors")}
    for _ in range(2):
        for name, loaders in ((WIDE, wide), ("tiny_flux.safetensors", tiny)):
            assert_same(sample(fresh, loaders, name).kept(), expected[name])
    assert fresh.ask_devices("read")["devices"][0]["num_ooms"] == 0


def test_core_takes_from_ours_what_a_dynamic_newcomer_lacks_and_an_event_says_so(fresh: HostProcess) -> None:
    """Core asks for the newcomer's bytes whole and for 0.8 GiB beside it, and takes of ours what that is short of."""
    ours, newcomer = Loaders(engine="blocks", profile="unlimited"), CORE
    names = (WIDE, "other_wide_flux.safetensors")
    expected = [sample(fresh, CORE, name).kept() for name in names]
    fresh.forget()
    graph = Graph()
    graph.keep(sample_flux(graph, ours.diffusion_model(graph, names[0])))
    assert_same(fresh.run(graph.nodes).kept(), expected[0])
    before = component(fresh)["tiers"]["gpu:0"]
    before_s = last_event_s(fresh)
    graph.add("TestOccupy", device=0, free_bytes=1100 * MIB, run=next(new_run))
    assert fresh.run(graph.nodes).outcome == "success"
    graph.keep(sample_flux(graph, newcomer.diffusion_model(graph, names[1])), "newcomer")
    assert_same(fresh.run(graph.nodes).kept("newcomer"), expected[1])
    (event,) = evictions_after(fresh, before_s)
    assert (event["component"], event["device"]) == ("wide_flux", "gpu:0")
    assert event["reason"].startswith("ComfyUI asked for memory; ")
    left = component(fresh)["tiers"]["gpu:0"]
    assert 0 < event["bytes"] == before - left < before, "some blocks leave, not the model"


@pytest.mark.parametrize("reads", [False, True], ids=["alone", "while another thread reads the report"])
def test_an_unloaded_dynamic_model_leaves_an_event(fresh: HostProcess, reads: bool) -> None:
    graph = Graph()
    model = Loaders().diffusion_model(graph, WIDE)
    graph.keep(sample_flux(graph, model))
    fresh.run(graph.nodes)
    held = component(fresh)["tiers"]["gpu:0"]
    if reads:
        fresh.post("/highwater_test/read_in_unload", {})
    before_s = last_event_s(fresh)
    fresh.forget()
    (event,) = (event for event in evictions_after(fresh, before_s) if event["component"] == "wide_flux")
    assert (event["bytes"], event["reason"]) == (held, "ComfyUI unloaded it")


# -- which engine, and why


@pytest.mark.parametrize("kind", ["ours", "managed"])
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"placement": "gpu:0&gpu:1"}, "cannot split"),
        ({"precision": "fp8 scaled"}, "fp8 scaled was asked for"),
        ({"profile": "1", "precision": "by profile"}, "profile 1 asks for"),
        ({"profile": "4MiB,prefetch=2"}, "the profile sets prefetch="),
        ({"profile": "4MiB,pinned=none"}, "the profile sets pinned="),
        ({"profile": "5"}, "the profile sets pinned="),
        ({"placement": "cpu"}, "is for GPUs"),
    ],
    ids=str,
)
@pytest.mark.expects_errors
def test_auto_takes_blocks_for_what_only_they_can_do_and_says_why(
    fresh: HostProcess, kind: str, asked: dict[str, str], why: str
) -> None:
    result = sample(fresh, Loaders(kind=kind, **asked), "tiny_flux.safetensors")
    assert "engine blocks: " in told(result) and why in told(result)
    if asked != {"placement": "cpu"}:
        found = component(fresh, "tiny_flux")
        assert found["engine"] == "blocks"
        assert why in " ".join(found["plan"]["reasons"])
    graph = Graph()
    model = Loaders(kind=kind, engine="dynamic", **asked).diffusion_model(graph)
    graph.keep(sample_flux(graph, model))
    refused = fresh.run(graph.nodes)
    assert refused.outcome == "error"
    message = refused.error.splitlines()[0]
    assert "engine dynamic of tiny_flux: " in message and why in message and "allowed: engine auto or blocks" in message


@pytest.mark.parametrize("kind", ["ours", "managed"])
def test_a_host_without_dynamic_vram_uses_blocks_and_says_why(gpu_host: HostProcess, kind: str) -> None:
    result = sample(gpu_host, Loaders(kind=kind, engine="dynamic"), "tiny_flux.safetensors")
    assert "dynamic VRAM is off" in told(result) and "engine blocks is used" in told(result)
    assert component(gpu_host, "tiny_flux")["engine"] == "blocks"
    assert "engine" not in told(sample(gpu_host, Loaders(kind=kind), "tiny_flux.safetensors"))


def test_the_parts_of_a_checkpoint_each_say_their_budget(fresh: HostProcess) -> None:
    graph = Graph()
    _, clip, _ = Loaders(profile="text=100MiB").checkpoint(graph)
    graph.keep(graph.add("CLIPTextEncode", text="a lighthouse", clip=clip))
    result = fresh.run(graph.nodes)
    assert "at most 100MiB of shallow_sd/clip on gpu:0" in told(result)
    assert told(result).count("engine dynamic: ") == 2  # what holds for the other two is said once


# -- trouble


@pytest.mark.expects_errors
@pytest.mark.parametrize("engine", ["dynamic", "blocks"])
@pytest.mark.parametrize("kind", ["interrupt", "error", "out of memory"])
def test_trouble_in_a_model_changes_nothing_after(fresh: HostProcess, kind: str, engine: str) -> None:
    expected = sample(fresh, CORE).kept()
    fresh.forget()
    budget = 200 * MIB
    for trouble in (kind, None):
        graph = Graph()
        model = Loaders(profile="200MiB", engine=engine).diffusion_model(graph, WIDE)
        graph.add("TestHold", value=model)
        if trouble:
            module = "diffusion_model.single_blocks.1.linear2"
            model = graph.add("TestTrouble", model=model, kind=trouble, module=module, call=2)
        graph.keep(sample_flux(graph, model))
        result = fresh.run(graph.nodes)
        assert (result.outcome == "success") == (trouble is None)
    assert_same(result.kept(), expected)
    found = component(fresh)
    assert found["engine"] == engine
    least = budget - PAGE_BYTES if engine == "dynamic" else 0  # blocks keep more free after an out-of-memory
    assert least <= found["tiers"]["gpu:0"] <= budget
    assert not found["leased"]


@pytest.mark.parametrize("engine", ["dynamic", "blocks"])
@pytest.mark.parametrize("node", ["SelectModelDevice", "MultiGPU_WorkUnits"])
def test_cores_own_multi_gpu_nodes_take_models_of_both_engines(fresh: HostProcess, node: str, engine: str) -> None:
    settings = {"device": "gpu:1"} if node == "SelectModelDevice" else {"max_gpus": 2}

    def run(loaders: Loaders) -> dict[str, torch.Tensor]:
        graph = Graph()
        model = graph.add(node, model=loaders.diffusion_model(graph, WIDE), **settings)
        graph.keep(sample_flux(graph, model, cfg=3.0))
        return fresh.run(graph.nodes).kept()

    actual = run(Loaders(profile="100MiB", engine=engine))
    held = [n for entry in fresh.part("components") for place, n in entry["tiers"].items() if place.startswith("gpu")]
    assert held and all(num_bytes <= 100 * MIB for num_bytes in held)
    assert_same(actual, run(CORE))


def test_placement_on_the_second_gpu_stays_dynamic(fresh: HostProcess) -> None:
    expected = sample(fresh, CORE).kept()
    result = sample(fresh, Loaders(placement="gpu:1", profile="100MiB"))
    assert_same(result.kept(), expected)
    found = component(fresh)
    assert found["engine"] == "dynamic"
    assert 0 < found["tiers"]["gpu:1"] <= 100 * MIB


# -- what is seen


def test_badges_and_peaks_count_pages(fresh: HostProcess) -> None:
    """The sampler's node shows the model's pages, which no allocator of torch's counts; its loader where they are."""
    graph = Graph()
    model = Loaders(profile="200MiB").diffusion_model(graph, WIDE)
    sampled = sample_flux(graph, model)
    graph.keep(sampled)
    result = fresh.run(graph.nodes)
    nodes = {node["node_id"]: node for node in fresh.part("nodes") if node["run_id"] == result.prompt_id}
    held = component(fresh)["tiers"]["gpu:0"]
    sampler = nodes[sampled[0]]
    assert sampler["weights_bytes"] == {"gpu:0": held}
    assert sampler["peak_bytes"]["gpu:0"] >= held
    device = next(device for device in fresh.part("devices") if device["name"] == "gpu:0")
    assert held <= device["managed_bytes"] <= device["total_bytes"] - device["free_bytes"]


def test_a_forgotten_model_leaves_nothing(fresh: HostProcess) -> None:
    before = fresh.ask_devices("read")
    sample(fresh, Loaders(profile="200MiB"))
    assert fresh.ask_devices("read")["driver"]["mapped_bytes"] > before["driver"]["mapped_bytes"]
    fresh.forget()
    after = fresh.ask_devices("read")
    assert after["driver"]["mapped_bytes"] == before["driver"]["mapped_bytes"]
    assert [device["used_bytes"] for device in after["devices"]] == [
        device["used_bytes"] for device in before["devices"]
    ]
    assert [entry for entry in fresh.part("components") if entry["name"] == "wide_flux"] == []


def test_the_free_button_takes_dynamic_pages_too(fresh: HostProcess) -> None:
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders().diffusion_model(graph, WIDE)))
    expected = fresh.run(graph.nodes).kept()
    held = component(fresh)["tiers"]["gpu:0"]
    freed = fresh.post("/highwater/free")["freed_bytes"]["gpu:0"]
    assert held - MIB < freed <= held
    assert component(fresh)["tiers"].get("gpu:0", 0) < MIB
    graph.keep(sample_flux(graph, ["1", 0], seed=7), "again")
    assert fresh.run(graph.nodes).outcome == "success"
    assert component(fresh)["tiers"]["gpu:0"] == held
    assert torch.isfinite(expected["value.samples"]).all()


@pytest.mark.expects_errors
def test_verify_says_that_there_is_nothing_of_ours(fresh: HostProcess) -> None:
    graph = Graph()
    model = Loaders().diffusion_model(graph, WIDE)
    latent = graph.add("EmptySD3LatentImage", width=64, height=64, batch_size=1)
    inputs = {"positive": graph.conditioning(1), "negative": graph.conditioning(2), "latent_image": latent}
    graph.add("HighwaterVerify", model=model, text="", cfg=3.0, seed=1, **inputs)
    result = fresh.run(graph.nodes)
    assert "engine dynamic" in result.error and "engine blocks" in result.error


@pytest.mark.parametrize("dynamic", ["model", "control"])
def test_a_guide_and_its_model_may_have_different_engines(
    fresh: HostProcess, gpu_host: HostProcess, dynamic: str, reference: Callable
) -> None:
    """Core loads both in one call. Its own text encoder computes a little differently with dynamic VRAM."""

    class Mixed(Loaders):
        def checkpoint(self, graph: Graph, name: str = "shallow_sd.safetensors") -> Any:
            return Loaders(engine="dynamic" if dynamic == "model" else "blocks").checkpoint(graph, name)

        def controlnet(self, graph: Graph, name: str = "shallow_sd_control.safetensors") -> Any:
            return Loaders(engine="dynamic" if dynamic == "control" else "blocks").controlnet(graph, name)

    graph = Graph()
    CASES["controlnet"](graph, Mixed())
    actual = {f"kept {name}": tensor for name, tensor in fresh.run(graph.nodes).kept().items()}
    assert {entry["engine"] for entry in fresh.part("components")} == {"dynamic", "blocks"}
    assert_same(actual, reference(fresh if dynamic == "model" else gpu_host, "controlnet"))
