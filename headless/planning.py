"""Plans of files and workflows from headers alone, for this machine or for a described one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..memory.component import Component, component_from_files
from ..memory.errors import InvalidInput
from ..memory.placement import parse_placement
from ..memory.plan import Machine, Plan, plan_components
from ..memory.profile import parse_profile
from ..memory.upcast import parse_precision

if TYPE_CHECKING:
    from .hardware import Hardware

__all__ = ["plan_files", "plan_workflow"]


def this_machine() -> Machine:
    from ..memory import default_manager

    return default_manager().machine(None)


def plan_parts(
    parts: Sequence[Component], hardware: Hardware | None, *, profile: str, placement: str, precision: str
) -> Plan:
    machine = hardware.machine() if hardware else this_machine()
    devices = [device.name for device in machine.devices]
    names = [part.name for part in parts]
    return plan_components(
        parts,
        machine,
        placement=parse_placement(placement, devices=devices, components=names),
        profile=parse_profile(profile, devices=devices, components=names),
        precision=parse_precision(precision),
    )


def plan_files(
    paths: Sequence[Path], hardware: Hardware | None, *, profile: str, placement: str, precision: str
) -> Plan:
    """Plan single-file models as if one workflow used them all.

    Raises:
        InvalidInput, DoesNotFit: as `plan_components`, and for a bad header.
    """
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise InvalidInput(f"two files are named {max(names, key=names.count)!r}; plan them one at a time")
    parts = [component_from_files([path]) for path in paths]
    return plan_parts(parts, hardware, profile=profile, placement=placement, precision=precision)


def plan_workflow(path: Path, hardware: Hardware | None, models: Path) -> dict[str, Plan]:
    """Plan every pipeline that a workflow loads, with the loader's own settings; keyed by file and node."""
    from ..nodes.pipeline_folders import check_pipeline, find_pipeline
    from . import folder_paths
    from .comfy_api import install
    from .workflow import Link, load_workflow

    install()
    folder_paths.configure(models=models, output=Path("out"))
    workflow = load_workflow(path)
    plans = {}
    for node in workflow.nodes.values():
        if node.schema.node_id != "HighwaterLoadPipeline":
            continue
        linked = [name for name, value in node.inputs.items() if isinstance(value, Link) and name != "watermark"]
        if linked:
            raise InvalidInput(
                f"{path}: {node.label}: input {linked[0]!r} comes from another node; a plan needs its value"
            )
        folder = find_pipeline(node.inputs["pipeline"])
        parts = [
            component_from_files(sorted((folder / name).glob("*.safetensors")), name=name)
            for name in check_pipeline(folder)
        ]
        plans[f"{path.name}: {node.label}"] = plan_parts(
            parts,
            hardware,
            profile=node.inputs["profile"],
            placement=node.inputs["placement"],
            precision=node.inputs["precision"],
        )
    if not plans:
        raise InvalidInput(f"{path}: loads no pipeline; a plan needs a HighwaterLoadPipeline node")
    return plans
