"""The plan of a whole workflow, for this machine or for a described one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memory.errors import InvalidInput, allowed_values
from ...memory.manager.watermark import in_bytes
from ...memory.options.marks import ALL, HOST
from ...memory.options.placement import canonical_device
from ...memory.planner.plan import Machine

if TYPE_CHECKING:
    from ...memory.options.marks import Marks
    from ...nodes.pipelines.pipeline_predictions import DeviceRates
    from ...nodes.workflow_plans import WorkflowPlan
    from .hardware import Hardware

__all__ = ["machine_for", "plan_workflow"]

# What is not said of a described device: as simulated ones have it.
MEMORY_BYTES_PER_S = 1e12
LAUNCH_S = 5e-6


def machine_for(hardware: Hardware | None, marks: Mapping[str, Marks]) -> Machine:
    """Return the numbers to plan with: the described machine's, or this one's as it is now.

    Args:
        marks: how much of its devices stays free, by device, in place of the default.

    Raises:
        InvalidInput: the machine has no such device, or a smaller one.
    """
    from ...memory import default_manager

    return keep_free(hardware.machine() if hardware else default_manager().machine(), marks)


def plan_workflow(path: Path, hardware: Hardware | None, models: Path, marks: Mapping[str, Marks]) -> WorkflowPlan:
    """Plan all that a workflow loads and computes, with its loaders' own settings; either format.

    Args:
        models: the folder of models, in which the workflow's files are looked for.
        marks: as in `machine_for`; a Watermark node of the workflow counts instead for its device.
    """
    from ..comfy_stub import folder_paths
    from ..comfy_stub.comfy_api import install

    install()
    from ...nodes.pipelines.pipeline_predictions import PipelinePredictor
    from ...nodes.watermark import DeviceWatermark
    from ...nodes.workflow_plans import plan_workflow as plan_described
    from ...nodes.workflow_reading import read_workflow
    from ..runner.workflow_file import read_graph

    folder_paths.configure(models=models, output=Path("out"))
    described = read_workflow(read_graph(path), source=str(path))
    machine = machine_for(hardware, marks)
    for setting in described.watermarks:
        asked = DeviceWatermark.parse(setting.device, setting.low, setting.high)
        machine = keep_free(machine, {asked.device: asked.marks})
    try:
        return plan_described(described, machine, PipelinePredictor(rates_of(hardware)), home=home_of(machine))
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None


def rates_of(hardware: Hardware | None) -> dict[str, DeviceRates]:
    """Return how fast devices compute for which that was said; nothing is assumed of others."""
    from ...nodes.pipelines.pipeline_predictions import DeviceRates

    return {
        device.name: DeviceRates(
            flops_per_s=device.flops_per_s,
            memory_bytes_per_s=MEMORY_BYTES_PER_S,
            launch_s=LAUNCH_S,
            link_bytes_per_s=device.link_bytes_per_s,
        )
        for device in (hardware.devices if hardware is not None else ())
        if device.flops_per_s
    }


def home_of(machine: Machine) -> str:
    """Return the device that ComfyUI uses where a loader says ``default``: its first accelerator."""
    return machine.accelerators[0].name if machine.accelerators else "cpu"


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
