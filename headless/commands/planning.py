"""The plans of a workflow's pipelines, for this machine or for a described one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput, allowed_values
from ...memory.manager.watermark import in_bytes
from ...memory.options.marks import ALL, HOST
from ...memory.options.placement import canonical_device
from ...memory.options.precision import fill_precisions, parse_precision
from ...memory.planner.plan import Machine, Plan
from ...memory.weights.known_forms import FORMS
from ...nodes.plans import plan_pipeline

if TYPE_CHECKING:
    from ...memory.options.marks import Marks
    from ...memory.options.precision import Precisions
    from ..runner.node_inputs import Link
    from ..runner.workflow import Workflow, WorkflowNode
    from .hardware import Hardware

__all__ = ["machine_for", "plan_workflow"]


def machine_for(hardware: Hardware | None, marks: Mapping[str, Marks]) -> Machine:
    """Return the numbers to plan with: the described machine's, or this one's as it is now.

    Args:
        marks: how much of its devices stays free, by device, in place of the default.

    Raises:
        InvalidInput: the machine has no such device, or a smaller one.
    """
    from ...memory import default_manager

    return keep_free(hardware.machine() if hardware else default_manager().machine(), marks)


def plan_workflow(path: Path, hardware: Hardware | None, models: Path, marks: Mapping[str, Marks]) -> dict[str, Plan]:
    """Plan every pipeline that a workflow loads, with the loader's own settings; keyed by file and node.

    Args:
        marks: as in `machine_for`; a Watermark node of the workflow counts instead for its device.
    """
    from ...nodes.pipelines.pipeline_folders import find_pipeline
    from ..comfy_stub import folder_paths
    from ..comfy_stub.comfy_api import install
    from ..runner.workflow import load_workflow

    install()
    from ...nodes.watermark import DeviceWatermark

    folder_paths.configure(models=models, output=Path("out"))
    workflow = load_workflow(path, ask_nodes=False)
    machine = machine_for(hardware, marks)
    for node in workflow.nodes.values():
        if node.schema.node_id == "HighwaterWatermark":
            asked = DeviceWatermark.parse(*(value_of(path, node, name) for name in ("device", "low", "high")))
            machine = keep_free(machine, {asked.device: asked.marks})
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
            precision=precision_of(path, node, workflow),
        )
    if not plans:
        raise InvalidInput(f"{path}: loads no pipeline; a plan needs a HighwaterLoadPipeline node")
    return plans


def precision_of(path: Path, node: WorkflowNode, workflow: Workflow) -> str | Precisions:
    """Return the precision of a loader: its own words, or those of the Precision nodes that are linked to it."""
    link = node.inputs.get("precision_options")
    own = value_of(path, node, "precision")
    if link is None:
        return own
    return fill_precisions(linked_precisions(path, link, workflow), parse_precision(own, forms=FORMS))


def linked_precisions(path: Path, link: Link, workflow: Workflow) -> Precisions:
    from ...nodes.precision import combine, read_options

    node = workflow.nodes[link.node_id]
    if node.schema.node_id != "HighwaterPrecision":
        raise InvalidInput(
            f"{path}: {node.label} gives precision_options; a plan reads those of a Precision node alone"
        )
    widgets = {name: value for name, value in node.inputs.items() if name != "others"}
    for name, value in widgets.items():
        if not isinstance(value, str | int | float):
            value_of(path, node, name)  # refuses a linked one
    others = node.inputs.get("others")
    return combine(read_options(**widgets), others and linked_precisions(path, others, workflow))


def value_of(path: Path, node: WorkflowNode, name: str) -> str:
    """Return a widget's value. Raises `InvalidInput` for a linked one: a plan cannot know what another node gives."""
    value = node.inputs[name]
    if not isinstance(value, str):
        raise InvalidInput(
            f"{path}: {node.label}: input {name!r} is linked to another node; a plan needs a fixed value"
        )
    return value


def keep_free(machine: Machine, asked: Mapping[str, Marks]) -> Machine:
    """Return the machine with other watermarks than the default ones. Raises `InvalidInput`, as `machine_for`."""
    names = [capacity.name for capacity in machine.accelerators]
    lows: dict[str, int] = {}
    for device in sorted(asked, key=lambda name: name != ALL):
        wanted = device.strip().lower() if device.strip().lower() == HOST else canonical_device(device)
        if wanted not in (ALL, HOST, *names):
            allowed = allowed_values(device, [ALL, *names, HOST])
            raise InvalidInput(f"watermark device {device!r} does not exist; {allowed}")
        for name in names if wanted == ALL else [wanted]:
            total_bytes = machine.device("cpu" if name == HOST else name).total_bytes
            lows[name] = in_bytes(asked[device], name, total_bytes).low_bytes
    capacities = tuple(
        replace(
            capacity,
            available_bytes=max(0, capacity.available_bytes + capacity.kept_free_bytes - lows[capacity.name]),
            kept_free_bytes=lows[capacity.name],
            unlearned_bytes=0,
        )
        if capacity.name in lows
        else capacity
        for capacity in machine.devices
    )
    return replace(machine, devices=capacities, host_kept_bytes=lows.get(HOST, machine.host_kept_bytes))
