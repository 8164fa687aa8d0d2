"""The plans of a workflow's pipelines, for this machine or for a described one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput, allowed_values
from ...memory.options.placement import canonical_device
from ...memory.planner.plan import Machine, Plan
from ...nodes.plans import plan_pipeline

if TYPE_CHECKING:
    from ..runner.workflow import WorkflowNode
    from .hardware import Hardware

__all__ = ["machine_for", "plan_workflow"]


def machine_for(hardware: Hardware | None) -> Machine:
    """Return the numbers to plan with: the described machine's, or this one's as it is now."""
    from ...memory import default_manager

    return hardware.machine() if hardware else default_manager().machine()


def plan_workflow(path: Path, hardware: Hardware | None, models: Path) -> dict[str, Plan]:
    """Plan every pipeline that a workflow loads, with the loader's own settings; keyed by file and node."""
    from ...nodes.pipelines.pipeline_folders import find_pipeline
    from ..comfy_stub import folder_paths
    from ..comfy_stub.comfy_api import install
    from ..runner.workflow import load_workflow

    install()
    folder_paths.configure(models=models, output=Path("out"))
    workflow = load_workflow(path, ask_nodes=False)
    machine = machine_for(hardware)
    for node in workflow.nodes.values():
        if node.schema.node_id == "HighwaterWatermark":
            machine = keep_free(machine, **{name: value_of(path, node, name) for name in ("device", "low", "high")})
    plans = {}
    for node in workflow.nodes.values():
        if node.schema.node_id != "HighwaterLoadPipeline":
            continue
        folder = find_pipeline(value_of(path, node, "pipeline"))
        plans[f"{path.name}: {node.label}"] = plan_pipeline(
            folder,
            machine,
            profile=value_of(path, node, "profile"),
            placement=value_of(path, node, "placement"),
            precision=value_of(path, node, "precision"),
        )
    if not plans:
        raise InvalidInput(f"{path}: loads no pipeline; a plan needs a HighwaterLoadPipeline node")
    return plans


def value_of(path: Path, node: WorkflowNode, name: str) -> str:
    """Return a widget's value. Raises `InvalidInput` for a linked one: a plan cannot know what another node gives."""
    value = node.inputs[name]
    if not isinstance(value, str):
        raise InvalidInput(
            f"{path}: {node.label}: input {name!r} is linked to another node; a plan needs a fixed value"
        )
    return value


def keep_free(machine: Machine, *, device: str, low: str, high: str) -> Machine:
    """Return the machine with the watermark that a workflow sets, in place of the default one."""
    from ...nodes.watermark import DeviceWatermark

    asked = DeviceWatermark.parse(device, low, high)
    names = [capacity.name for capacity in machine.accelerators]
    wanted = canonical_device(asked.device)
    if wanted != "*" and wanted not in names:
        raise InvalidInput(f"watermark device {device!r} does not exist; {allowed_values(device, ['*', *names])}")
    capacities = tuple(
        replace(
            capacity,
            available_bytes=max(0, capacity.available_bytes + capacity.kept_free_bytes - asked.mark.low_bytes),
            kept_free_bytes=asked.mark.low_bytes,
            unlearned_bytes=0,
        )
        if capacity.name in names and wanted in ("*", capacity.name)
        else capacity
        for capacity in machine.devices
    )
    return replace(machine, devices=capacities)
