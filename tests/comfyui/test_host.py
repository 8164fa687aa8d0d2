"""What the host says of the pack, and whether the pack left the host as it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from highwater.tests.comfyui.graphs import CORE, Graph, Loaders, sample_flux
from highwater.tests.comfyui.host_process import HostProcess

HELPER_PACK = Path(__file__).with_name("helper_pack")

# In a process of its own: the tests' own may have simulated devices, which would be offered as placements.
HEADLESS_SCHEMAS = """
import json, sys
from highwater.headless.comfy_stub import comfy_api, folder_paths
comfy_api.install()
folder_paths.configure(models=sys.argv[1], output=sys.argv[1])
from highwater.nodes import extension
print(json.dumps(comfy_api.object_info([*extension.NODE_CLASSES, *extension.MODEL_NODES])))
"""


def test_a_host_ends_when_whoever_started_it_is_gone() -> None:
    """A worker of the test run that is interrupted stops nothing."""
    command = [sys.executable, "-c", "import lifeline, time; lifeline.end_with_standard_input(); time.sleep(6000)"]
    with subprocess.Popen(command, cwd=HELPER_PACK, stdin=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.stdin.close()
        assert process.wait(600) == -signal.SIGTERM


def our_schemas(host: HostProcess) -> dict[str, Any]:
    return {name: info for name, info in host.get("/object_info").items() if name.startswith("Highwater")}


def test_the_schemas_are_those_of_the_headless_host(cpu_host: HostProcess) -> None:
    command = [sys.executable, "-c", HEADLESS_SCHEMAS, str(cpu_host.base / "models")]
    headless = json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)
    ours = our_schemas(cpu_host)
    assert len(ours) == 22
    assert headless.keys() == ours.keys()
    for name, info in ours.items():
        assert headless[name] | {"python_module": ""} == info | {"python_module": ""}


def test_devices_are_offered_as_the_host_calls_them(gpu_host: HostProcess) -> None:
    (kind, options) = our_schemas(gpu_host)["HighwaterLoadDiffusionModel"]["input"]["required"]["placement"]
    assert kind == "COMBO"
    expected = ["default", "auto", "cpu", "gpu:0", "gpu:1", "gpu:0&gpu:1", "gpu:1&gpu:0", "gpu:0:gpu:1", "gpu:1:gpu:0"]
    assert options["options"] == expected
    device_node = gpu_host.get("/object_info/SelectModelDevice")["SelectModelDevice"]
    core_options = device_node["input"]["required"]["device"][1]["options"]
    assert [option for option in expected if option.count("gpu") < 2 and option != "auto"] == core_options


def assert_same_functions(with_pack: HostProcess, without: HostProcess) -> None:
    """Function by function: name, place and code, of every module that both hosts have loaded by now."""
    found, expected = (host.get("/highwater_test/functions") for host in (with_pack, without))
    shared = {name.partition(":")[0] for name in found} & {name.partition(":")[0] for name in expected}
    assert {"comfy.model_patcher", "comfy.model_management", "execution", "torch.nn.modules.module"} <= shared
    assert len(shared) > 300
    changed = {name for name, _ in found.items() ^ expected.items() if name.partition(":")[0] in shared}
    assert changed == set()


def test_no_function_of_the_host_or_of_torch_is_replaced(
    cpu_host: HostProcess, plain_host: HostProcess, ours: Callable
) -> None:
    """After the pack has loaded, sampled and reported."""
    for case in ("images", "lora_at_1"):
        ours(cpu_host, case, Loaders())
        ours(plain_host, case, CORE)
    assert_same_functions(cpu_host, plain_host)


def test_no_function_is_replaced_while_a_model_streams(
    start_gpu_host: Callable[..., HostProcess], gpu_host: HostProcess, ours: Callable
) -> None:
    """With the streamed and split models still there, whose blocks have hooks."""
    for case, loaders in (("lora_at_1", Loaders(profile="4MiB")), ("images", Loaders(placement="gpu:0&gpu:1"))):
        ours(gpu_host, case, loaders)
    (component,) = (entry for entry in gpu_host.part("components") if entry["kind"] == "diffusion")
    assert component["in_effect"] and len(component["plan"]["shares"]) == 2
    with start_gpu_host(with_pack=False) as without:
        for case in ("lora_at_1", "images"):
            ours(without, case, CORE)
        assert_same_functions(gpu_host, without)


def test_a_linked_watermark_is_set_before_the_model_is_loaded(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    begin_s = gpu_host.last_event_s()
    graph = Graph()
    # Hardly more than the default of a device this small, 10 and 15%, so that nothing else changes.
    mark = graph.add("HighwaterWatermark", device="gpu:0", low="184.5MiB", high="276.8MiB")
    model = graph.add(
        "HighwaterLoadDiffusionModel", unet_name="tiny_flux.safetensors", **Loaders().request, watermark=mark
    )
    graph.keep(sample_flux(graph, model))
    assert gpu_host.run(graph.nodes).outcome == "success"
    kinds = [event["kind"] for event in gpu_host.events_after(begin_s)]
    assert kinds.index("watermark") < kinds.index("load")


def test_the_pack_is_imported_without_an_error(host: HostProcess) -> None:
    """The other tests look at the log as they go; this is about the start."""
    log = host.log()
    assert "IMPORT FAILED" not in log
    assert "highwater" in log.partition("Import times for custom nodes")[2]
    assert "Cannot import" not in log


def test_runs_nodes_and_events_carry_their_ids(gpu_host: HostProcess) -> None:
    gpu_host.forget()
    num_messages = len(gpu_host.messages)
    graph = Graph()
    graph.keep(sample_flux(graph, Loaders(profile="4MiB").diffusion_model(graph)))
    workflow = {"workflow": {"id": "the-workflow"}}
    result = gpu_host.run(graph.nodes, extra_pnginfo=workflow)
    report = gpu_host.report()
    features = ("run_boundaries", "node_boundaries", "events", "forecast", "free")
    assert report["host_features"] == dict.fromkeys(features, True)
    assert report["runs"][-1]["run_id"] == result.prompt_id
    nodes = {node["node_id"]: node for node in report["nodes"] if node["run_id"] == result.prompt_id}
    sampler = next(node for node in nodes.values() if node["title"] == "KSampler")
    assert sampler["workflow_id"] == "the-workflow"
    assert sampler["bytes_moved"] > 0 and sampler["weights_bytes"]["gpu:0"] > 0
    told = [message["data"] for message in gpu_host.messages[num_messages:] if message["type"] == "highwater.memory"]
    assert told
    assert {message["prompt_id"] for message in told} <= {result.prompt_id, None}
    assert any(message["workflow_id"] == "the-workflow" for message in told)


def test_the_comparison_is_with_a_host_that_has_no_pack(plain_host: HostProcess, ours: Callable) -> None:
    assert our_schemas(plain_host) == {}
    assert ours(plain_host, "plain", CORE)


def test_an_old_host_loads_the_pack_and_samples(old_host: HostProcess, reference: Callable, ours: Callable) -> None:
    """ComfyUI 0.8.0 knows Flux in one size only: a tiny Wan. What it lacks stands in the report."""
    expected = reference(old_host, "wan")
    actual = ours(old_host, "wan", Loaders())
    assert all(bool((actual[name] == tensor).all()) for name, tensor in expected.items())
    host_features = old_host.part("host_features")
    assert "missing" in str(host_features["run_boundaries"])
    assert old_host.error_lines() == []
