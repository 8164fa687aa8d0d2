"""The example graphs, against what the real host says of its nodes and of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from highwater.tests.comfyui.conftest import DEVICE_BYTES
from highwater.tests.comfyui.host_process import HostProcess
from highwater.tests.page_graphs import prompt_of

ROOT = Path(__file__).parents[2]
GRAPHS = sorted((ROOT / "workflows").glob("*.json"))
SECOND_GPU = "highwater-second-gpu"
CORE_NODES = ROOT / "tests" / "core_nodes.json"


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_an_example_fits_the_live_nodes(
    cpu_host: Any, graph_problems: Callable[[Any, Any], list[str]], path: Path
) -> None:
    assert graph_problems(json.loads(path.read_text(encoding="utf-8")), cpu_host.get("/object_info")) == []


def test_what_is_recorded_of_the_hosts_nodes_still_holds(cpu_host: Any) -> None:
    """The tests without a host use the record: names, types and order, nothing else."""
    live = cpu_host.get("/object_info")
    for name, recorded in json.loads(CORE_NODES.read_text(encoding="utf-8")).items():
        assert live[name]["output"] == recorded["output"]
        assert {k: v for k, v in live[name]["input_order"].items() if k != "hidden"} == recorded["input_order"]
        for section, inputs in recorded["input"].items():
            for widget, (kind, _) in inputs.items():
                found = live[name]["input"][section][widget][0]
                assert ("COMBO" if isinstance(found, list) else found) == kind


def test_the_host_offers_the_examples(cpu_host: Any) -> None:
    [names] = [names for pack, names in cpu_host.get("/workflow_templates").items() if pack == "highwater"]
    assert sorted(names) == [path.stem for path in GRAPHS]


TINY = [path for path in GRAPHS if "highwater-tiny" in path.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def bare_host(start_gpu_host: Callable[..., HostProcess], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A host on simulated GPUs without any model file."""
    with start_gpu_host(models=tmp_path_factory.mktemp("no_models")) as host:
        yield host


@pytest.mark.parametrize("path", TINY, ids=lambda path: path.stem)
def test_an_example_with_tiny_models_runs(bare_host: HostProcess, path: Path) -> None:
    """Without a model file; what it shows is what its note says."""
    bare_host.forget()
    graph = json.loads(path.read_text(encoding="utf-8"))
    result = bare_host.run(prompt_of(graph, bare_host.get("/object_info")))
    assert result.outcome == "success", result.brief_error
    assert [image["filename"] for output in result.outputs.values() for image in output.get("images", [])]
    [encoder] = [part for part in bare_host.part("components") if part["kind"] == "text"]
    [model] = [part for part in bare_host.part("components") if part["kind"] == "diffusion"]
    assert model["tiers"].get("gpu:0")
    is_released = path.stem == "highwater-release-after-use"
    place = "gpu:1" if path.stem == SECOND_GPU else "gpu:0"
    assert bool(encoder["tiers"].get(place)) != is_released
    if is_released:
        [event] = [event for event in bare_host.part("events") if "Release node" in str(event["reason"])]
        assert event["component"] == encoder["id"]
    assert (encoder["kept"], model["kept"]) == (path.stem == "highwater-keep-text-encoder", False)


def test_there_are_examples_of_tiny_models() -> None:
    assert {path.stem for path in TINY} == {
        "highwater-first-image",
        "highwater-keep-text-encoder",
        "highwater-release-after-use",
        SECOND_GPU,
    }


def test_an_example_for_two_gpus_runs_on_one_and_says_so(start_gpu_host: Callable[..., HostProcess]) -> None:
    path = next(path for path in GRAPHS if path.stem == SECOND_GPU)
    with start_gpu_host(total_bytes=[DEVICE_BYTES]) as host:
        result = host.run(prompt_of(json.loads(path.read_text(encoding="utf-8")), host.get("/object_info")))
        assert result.outcome == "success", result.brief_error
        told = [line for output in result.outputs.values() for line in output.get("text", [])]
        placed = [line for line in told if "placement gpu:1: this machine has no gpu:1, so default is used" in line]
        assert len(placed) == 2, told
        assert all({*part["tiers"]} & {"gpu:0"} for part in host.part("components"))
