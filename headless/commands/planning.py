"""Plans of files and workflows from headers alone, for this machine or for a described one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput, allowed_values
from ...memory.model_loading import load_model
from ...memory.options.placement import canonical_device, parse_placement
from ...memory.options.precision import parse_precision
from ...memory.options.profile import parse_profile
from ...memory.planner.plan import Machine, Plan, plan_components
from ...memory.weights.component import Component, component_from_files
from ...memory.weights.module_component import component_from_module

if TYPE_CHECKING:
    from ..runner.workflow import WorkflowNode
    from .hardware import Hardware

__all__ = ["plan_files", "plan_workflow"]


def machine_for(hardware: Hardware | None) -> Machine:
    """Return the numbers to plan with: the described machine's, or this one's as it is now."""
    from ...memory import default_manager

    return hardware.machine() if hardware else default_manager().admission.machine(None)


def plan_parts(
    parts: Sequence[Component], machine: Machine, *, profile: str, placement: str, precision: str | None
) -> Plan:
    devices = [device.name for device in machine.devices]
    names = [part.name for part in parts]
    return plan_components(
        parts,
        machine,
        placement=parse_placement(placement, devices=devices, components=names),
        profile=parse_profile(profile, devices=devices, components=names),
        precision=parse_precision(precision),
    )


def describe(paths: Sequence[Path], name: str) -> Component:
    """Return a model in numbers: as a module where a config beside the files names its class, else from the headers.

    A class declares which of its parts are one piece and which weights stay out of eight bits. Building its module
    without memory imports its library.
    """
    header = component_from_files(paths, name=name)
    if not (paths[0].parent / "config.json").is_file():
        return header
    try:
        module = load_model(list(paths), ignore_unexpected=True)
    except InvalidInput:  # another model's config, or names that its library translates: the plan says what is missing
        return header
    return replace(component_from_module(module, name=name, kind=header.kind), has_file=True)


def plan_files(
    paths: Sequence[Path], hardware: Hardware | None, *, profile: str, placement: str, precision: str | None
) -> Plan:
    """Plan single-file models as if one workflow used them all; precision None is what the profile says.

    Raises:
        InvalidInput, DoesNotFit: as `plan_components`, and for a bad header.
    """
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise InvalidInput(f"two files are named {max(names, key=names.count)!r}; plan them one at a time")
    parts = [describe([path], path.stem) for path in paths]
    return plan_parts(parts, machine_for(hardware), profile=profile, placement=placement, precision=precision)


def plan_workflow(path: Path, hardware: Hardware | None, models: Path) -> dict[str, Plan]:
    """Plan every pipeline that a workflow loads, with the loader's own settings; keyed by file and node."""
    from ...nodes.pipelines.pipeline_folders import check_pipeline, find_pipeline, weights_files
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
        parts = [
            describe(weights_files(folder / name) or sorted((folder / name).glob("*.safetensors")), name)
            for name in check_pipeline(folder)
        ]
        plans[f"{path.name}: {node.label}"] = plan_parts(
            parts,
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
        raise InvalidInput(f"{path}: {node.label}: input {name!r} comes from another node; a plan needs its value")
    return value


def keep_free(machine: Machine, *, device: str, low: str, high: str) -> Machine:
    """Return the machine with the watermark that a workflow sets, in place of the default one."""
    from ...nodes.watermark import Watermark

    mark = Watermark.parse(device, low, high)
    names = [capacity.name for capacity in machine.accelerators]
    wanted = canonical_device(mark.device)
    if wanted != "*" and wanted not in names:
        raise InvalidInput(f"watermark device {device!r} is not here; {allowed_values(device, ['*', *names])}")
    capacities = tuple(
        replace(
            capacity,
            available_bytes=max(0, capacity.available_bytes + capacity.kept_free_bytes - mark.low_bytes),
            kept_free_bytes=mark.low_bytes,
            unlearned_bytes=0,
        )
        if capacity.name in names and wanted in ("*", capacity.name)
        else capacity
        for capacity in machine.devices
    )
    return replace(machine, devices=capacities)
