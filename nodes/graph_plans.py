"""A graph planned for this machine or for a described one: what the command line and the Plan node show."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput, allowed_values
from ..memory.manager.watermark import in_bytes
from ..memory.options.marks import ALL, HOST
from ..memory.options.placement import canonical_device
from .call_seconds import MeasuredSeconds, StatedSeconds
from .lora_headers import LoraReader, changes_by_names
from .pipeline_predictions import PipelinePredictor, known_seconds
from .planned_calls import PlannedCall, Prediction, Predictor
from .workflow_plans import WorkflowPlan, plan_workflow
from .workflow_reading import PIPELINE, read_workflow
from .workflow_reading.model_paths import image_size

if TYPE_CHECKING:
    from ..memory.options.marks import Marks
    from ..memory.planner.capacity import Machine
    from .core_predictions import CorePredictor
    from .described_hardware import Hardware

__all__ = ["machine_for", "plan_graph"]


def machine_for(hardware: Hardware | None, marks: Mapping[str, Marks]) -> Machine:
    """Return the numbers to plan with: the described machine's, or this one's as it is now.

    Args:
        marks: how much of its devices stays free, by device, in place of the default.

    Raises:
        InvalidInput: the machine has no such device, or a smaller one.
    """
    from ..memory import default_manager

    return keep_free(hardware.machine() if hardware else default_manager().machine(), marks)


def plan_graph(
    graph: Any, *, source: str, hardware: Hardware | None = None, marks: Mapping[str, Marks] | None = None
) -> WorkflowPlan:
    """Plan all that a workflow loads and computes, with its loaders' own settings; either format of a graph.

    Files are looked for in the host's folders. Nothing is loaded; pipelines are traced, which takes some seconds.

    Args:
        source: named first in every complaint.
        marks: as in `machine_for`; a Watermark node of the workflow counts instead for its device.

    Raises:
        InvalidInput, DoesNotFit: as `read_workflow` and `plan_workflow`.
    """
    from .watermark import DeviceWatermark  # importable only where a host, or its stand-in, is

    described = read_workflow(graph, source=source, widgets_of=find_widgets(), image_size=image_size)
    machine = machine_for(hardware, marks or {})
    try:
        for setting in described.watermarks:
            asked = DeviceWatermark.parse(setting.device, setting.low, setting.high)
            machine = keep_free(machine, {asked.device: asked.marks})
    except InvalidInput as error:
        raise InvalidInput(f"{source}: {error}") from None
    seconds = known_seconds() if hardware is None else StatedSeconds(hardware.rates)
    traces = PipelinePredictor(seconds)
    predictors: list[Predictor] = [traces]
    read_lora: LoraReader = changes_by_names
    core: CorePredictor | None = None
    if is_in_comfyui():
        from .core_predictions import CorePredictor as Core

        core = Core(seconds)
        predictors.append(core)
        read_lora = core.read_lora
        if any(model.kind != PIPELINE for model in described.models):
            machine = within_hosts_limit(machine, core.kept_free_bytes)
    try:
        planned = plan_workflow(described, machine, first_of(predictors), home=home_of(machine), read_lora=read_lora)
    except InvalidInput as error:
        raise InvalidInput(f"{source}: {error}") from None
    why = [f"needs of {folder.name}: {reason}" for (folder, _), reason in traces.failed.items()]
    if core is not None:
        why += [f"{what}: {reason}" for what, reason in core.failed.items()]
    elif seconds.may_trace and any(model.kind != PIPELINE for model in described.models):
        why.append("seconds of ComfyUI's own models: only ComfyUI has their code; its node Plan tells them")
    if isinstance(seconds, MeasuredSeconds):
        seconds.remember()
        why += [seconds.problem] if seconds.problem else []
    return replace(planned, notes=(*planned.notes, *why), rated=seconds.rated)


def is_in_comfyui() -> bool:
    """Whether this process is a ComfyUI: it has imported what loads its models."""
    return "comfy.sd" in sys.modules and find_spec("comfy") is not None


def find_widgets() -> Callable[[str], Sequence[str] | None]:
    """Return what tells the widgets of classes of nodes that are installed."""
    if not is_in_comfyui():
        return lambda class_type: None
    from .host.node_widgets import widgets_of

    return widgets_of


def first_of(predictors: Sequence[Predictor]) -> Predictor:
    """Return what asks one after the other, until one knows a call."""

    def predict(call: PlannedCall) -> Prediction | None:
        return next((found for predictor in predictors if (found := predictor(call)) is not None), None)

    return predict


def home_of(machine: Machine) -> str:
    """Return the device that ComfyUI uses where a loader says ``default``: its first accelerator."""
    return machine.accelerators[0].name if machine.accelerators else "cpu"


def within_hosts_limit(machine: Machine, num_bytes: int) -> Machine:
    """Return the machine on which a host keeps so much of each accelerator free of the weights that it loads."""
    devices = (
        capacity
        if capacity.name == "cpu"
        else replace(capacity, ceiling_bytes=max(0, capacity.available_bytes + capacity.kept_free_bytes - num_bytes))
        for capacity in machine.devices
    )
    return replace(machine, devices=tuple(devices))


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
