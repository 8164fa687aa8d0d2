"""What a run leaves: nothing dead on core's list of loaded models, and no page-locked memory once all is free."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, lora, sample_flux
from highwater.tests.comfyui.host_process import HostProcess, PromptResult

pytestmark = pytest.mark.slow(one_in=3)

FORMS = {
    "resident": Loaders(),
    "streamed": Loaders(profile="4MiB"),
    "split": Loaders(placement="gpu:0&gpu:1"),
    "fp8": Loaders(precision="fp8 scaled"),
    "managed": Loaders(kind="managed"),
    "cpu": Loaders(placement="cpu"),
}


@pytest.fixture(scope="module")
def host_without_gc(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    """Python collects no cycles in it by itself; the host does now and then."""
    with start_gpu_host() as host:
        host.get("/highwater_test/loaded")
        yield host


def sample(
    host: HostProcess,
    loaders: Loaders,
    *,
    nag: bool = False,
    workers: int = 0,
    trouble: str = "",
    outlives: bool = False,
) -> PromptResult:
    graph = Graph()
    model = loaders.diffusion_model(graph)
    if nag:
        model = graph.add("NAGuidance", model=lora(graph, model, 1.0), nag_scale=5.0, nag_alpha=0.5, nag_tau=1.5)
    if workers:
        model = graph.add("MultiGPU_WorkUnits", model=model, max_gpus=workers)
    if trouble:
        model = graph.add(
            "TestTrouble", model=model, kind=trouble, call=1, module="diffusion_model.single_blocks.1.linear2"
        )
    if outlives:
        graph.add("TestOutlive", model=model, hold=True)
    graph.keep(sample_flux(graph, model, cfg=3.0))
    return host.run(graph.nodes)


def wait_for_no_dead_entry(host: HostProcess) -> None:
    """The host's own collection of cycles may be under way in another thread."""
    host.wait_until(lambda: all(loaded["same"] for loaded in host.get("/highwater_test/loaded")), "no dead entry")


@pytest.mark.parametrize("form", FORMS)
def test_core_splits_work_after_our_models_are_gone(host_without_gc: HostProcess, form: str) -> None:
    """Its node reads every entry of the list; one whose patcher is gone, but not its model, stopped it."""
    expected = sample(host_without_gc, CORE, workers=2).kept()["value.samples"]
    assert sample(host_without_gc, FORMS[form], nag=True).outcome == "success"
    assert sample(host_without_gc, CORE).outcome == "success"  # what the last prompt made is forgotten
    for _ in range(2):
        wait_for_no_dead_entry(host_without_gc)
        actual = sample(host_without_gc, FORMS[form], workers=2)
        if form == "split":  # our own halves at once or core's on clones: not both
            assert "and has MultiGPU clones" in actual.brief_error
            continue
        assert actual.outcome == "success", actual.brief_error
        if form not in ("cpu", "fp8"):
            assert torch.equal(actual.kept()["value.samples"], expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_that_outlives_its_patchers_is_not_on_cores_list(host_without_gc: HostProcess, form: str) -> None:
    """Another pack, or a cycle, may hold the module: only the patchers tell that the host is done with it."""
    assert sample(host_without_gc, FORMS[form], outlives=True).outcome == "success"
    assert sample(host_without_gc, CORE).outcome == "success"  # what the last prompt made is forgotten
    listed = host_without_gc.get("/highwater_test/loaded")
    graph = Graph()
    graph.add("TestOutlive", hold=False)
    assert host_without_gc.run(graph.nodes).outcome == "success"
    assert listed and not any(loaded["outlives"] for loaded in listed), listed


@pytest.mark.parametrize("trouble", ["", "error", "interrupt", "out of memory"])
@pytest.mark.parametrize("form", FORMS)
def test_all_page_locked_memory_is_back_when_all_is_free(host_without_gc: HostProcess, form: str, trouble: str) -> None:
    sample(host_without_gc, FORMS[form], trouble=trouble)
    left: dict[str, object] = {}

    def is_back() -> bool:
        # Each time: while the host still collects after a prompt, it overhears it.
        host_without_gc.post("/free", {"unload_models": True, "free_memory": True})
        devices = host_without_gc.ask_devices("read")
        left["devices"] = [device["used_bytes"] for device in devices["devices"]]
        left["pinned"] = [devices["pinned"]["used_bytes"], devices["pinned"]["registered_bytes"]]
        left["listed"] = host_without_gc.get("/highwater_test/loaded")
        return not any(any(amounts) for amounts in left.values())

    try:
        host_without_gc.wait_until(is_back, "all memory back and nothing on core's list")
    except RuntimeError as error:
        pytest.fail(f"{left}, {host_without_gc.part('components')}: {error}")
