"""The examples with a pipeline of diffusers, run as they are on a simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKFLOWS = Path(__file__).parents[3] / "workflows"
NAMES = ["highwater-diffusers-pipeline", "highwater-text-encoder-on-demand"]

# In a process of its own, because the manager of a process knows the devices that were there when it was made.
SCRIPT = """
import json, sys
import torch
from highwater.headless import simdevice
from highwater.headless.comfy_stub.comfy_api import install, list_node_classes, object_info
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import parse_workflow
from highwater.memory import default_manager
from highwater.tests.page_graphs import prompt_of

torch.set_num_threads(1)
models, output, path = sys.argv[1:]
try:
    simdevice.install("sim", num_devices=1)
except simdevice.CompilerMissing as error:
    sys.exit(f"NOT TESTED: {error}")
with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=256 << 20)]):
    runner = WorkflowRunner(default_manager(), models_directory=models, output_directory=output)
    info = object_info(list_node_classes().values())
    result = runner.run(parse_workflow(prompt_of(json.load(open(path)), info)), name=path)
    parts = default_manager().report()["components"]
    told = {
        "images": [image["filename"] for shown in result.outputs.values() for image in shown.get("images", ())],
        "tiers": {part["name"]: part["plan"]["tier"] for part in parts},
        "host_bytes": {part["name"]: part["tiers"].get("host", 0) + part["tiers"].get("pinned", 0) for part in parts},
    }
    runner.cache.clear()
print(json.dumps(told))
"""


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_and_its_text_encoders_rest_where_it_says(
    models_directory: Path, tmp_path: Path, name: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(models_directory), str(tmp_path), str(WORKFLOWS / f"{name}.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    if "NOT TESTED" in done.stderr and os.environ.get("CI") != "true":
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["images"]) == 1
    on_disk = {part for part, tier in told["tiers"].items() if tier == "disk"}
    encoders = {part for part in told["tiers"] if "text_encoder" in part}
    assert len(encoders) == 2
    assert (encoders <= on_disk) is (name == "highwater-text-encoder-on-demand")
    assert encoders <= on_disk or encoders.isdisjoint(on_disk)
    assert all(told["host_bytes"][part] < 4096 for part in on_disk & encoders), told
