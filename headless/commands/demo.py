"""The demo: two pipelines that do not fit together, run after each other, and a picture of their memory."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...memory import MemoryManager
from ...memory.transfer.devices import list_devices
from ...memory.units import MIB
from ...nodes.described_hardware import Hardware, parse_hardware
from ...nodes.pipelines.diffusers_pipelines import import_diffusers
from ..runner.workflow import Workflow, load_workflow, parse_workflow
from .console import Console
from .session import run_workflow
from .timeline import draw_timeline

if TYPE_CHECKING:
    from ..runner.runner import WorkflowRunner

__all__ = ["choose_hardware", "run_demo"]

WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows"
# Room for one tiny pipeline beside the watermark that the workflows set, not for two.
DEMO_HARDWARE = "gpu:0=64MiB@25GB/s,gpu:1=48MiB@12GB/s,host=8GiB"
ONE_PIPELINE_BYTES = 45 * MIB
DEMO_RUNS = (
    ("A", "demo_flux", "Flux"),
    ("B", "demo_sd", "Stable Diffusion; it does not fit beside A, so parts of A are evicted"),
    (
        "A again",
        "demo_flux_again",
        "another seed: the loader's result is cached, and its evicted weights are loaded again",
    ),
    ("A on two", "demo_flux_two_gpus", "Flux split over two devices, with eight-bit weights"),
)


def choose_hardware() -> Hardware | None:
    """Return what the demo simulates: nothing where the machine has an accelerator of its own."""
    accelerators = [device for device in list_devices() if not device.is_cpu]
    return None if accelerators else parse_hardware(DEMO_HARDWARE)


def run_demo(
    runner: WorkflowRunner, out: Path, console: Console, *, simulated: bool, has_marks: bool = False
) -> dict[str, Any]:
    """Run the four workflows, write images, ``report.json`` and ``memory.png`` to ``out``; return the report.

    Args:
        has_marks: whether the user chose marks for the devices, which then count instead of those of the workflows.
    """
    import_diffusers()  # seconds that belong to no run
    loaded = [(name, load_workflow(WORKFLOWS / f"{file}.json")) for name, file, _ in DEMO_RUNS]
    for turn, (name, _, what) in enumerate(DEMO_RUNS):
        if has_marks:
            own = loaded[turn][1]
            loaded[turn] = name, parse_workflow(without_marks(own.prompt), source=own.source)
        if not simulated:
            loaded[turn] = name, fit_to_machine(loaded[turn][1], runner.manager)
        console.title(f"Run {name}: {what}")
        run_workflow(runner, *loaded[turn], console, loaded[turn + 1 :])
    report = write_results(runner, out)
    console.show_summary(report)
    console.say(f"Images, report.json and memory.png are in {out}")
    return report


def write_results(runner: WorkflowRunner, out: Path) -> dict[str, Any]:
    """Write the report and its picture; each file appears whole or not at all."""
    report = runner.manager.report()
    out.mkdir(parents=True, exist_ok=True)
    draft = out / "report.json.part"
    draft.write_text(json.dumps(report, indent=1), encoding="utf-8")
    draft.replace(out / "report.json")
    draw_timeline(report, out / "memory.png")
    return report


def fit_to_machine(workflow: Workflow, manager: MemoryManager) -> Workflow:
    """Return the workflow for real accelerators: a watermark that leaves room for one tiny pipeline only.

    On a single device the split becomes that device.
    """
    _, *accelerators = manager.device_reports()
    graph = copy.deepcopy(dict(workflow.prompt))
    free = accelerators[0].free_bytes + accelerators[0].managed_bytes
    low_mebibytes = max(0, free - ONE_PIPELINE_BYTES) // MIB
    for node in graph.values():
        if node["class_type"] == "HighwaterWatermark":
            node["inputs"] |= {"device": "gpu:0", "low": f"{low_mebibytes}MiB", "high": f"{low_mebibytes}MiB"}
        if node["class_type"] == "HighwaterLoadPipeline" and len(accelerators) < 2:
            node["inputs"]["placement"] = node["inputs"]["placement"].partition("&")[0]
    return parse_workflow(graph, source=workflow.source)


def without_marks(prompt: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workflow's graph without its Watermark nodes."""
    graph = copy.deepcopy(dict(prompt))
    own = [id for id, node in graph.items() if node["class_type"] == "HighwaterWatermark"]
    for id in own:
        del graph[id]
    for node in graph.values():
        links = [name for name, value in node["inputs"].items() if isinstance(value, list) and value[0] in own]
        for name in links:
            del node["inputs"][name]
    return graph
