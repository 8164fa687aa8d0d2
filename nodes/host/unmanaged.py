"""Unmanaged models, which core or another pack moves: their bytes are counted, and idle ones can leave.

[Note: unmanaged] Nothing says how such a model moves: Nunchaku's patcher moves it whole and tells core of no bytes, and
its own offloading moves blocks by itself. So the bytes on each device are read off its tensors. What compiled code
holds stands in no tensor and is not seen. It leaves a device by core's own way to clear room, whole or in part as its
patcher knows. While core loads several models at once, those that it has loaded already are not taken off again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...memory.hosted_component import SteeredComponent, device_name, note_steered_unload, note_steered_use, steer_host
from ...memory.units import format_bytes
from . import aimdo
from .core_fields import NOTE
from .core_loading import ByModel, entry_of, is_needed_by_load, loading, set_callbacks, unload
from .hosted import Request, is_cpu
from .load_device import placement_without_effect
from .node_results import result_of

__all__ = ["UnmanagedModel", "is_unmanaged", "leave_to_core", "see_model", "while_core_loads"]

KEY = "highwater_unmanaged"
NUM_SAMPLES = 16
"""How many tensors of a model are looked at to see whether it has moved."""


@contextmanager
def while_core_loads() -> Iterator[None]:
    """In the body core is loading models: what it has loaded already for the same use stays.

    It has cleared room before: an event tells which models left for that.
    """
    for component in unmanaged.components():
        component.tell_of_loss()
    before = loading.note(True)
    try:
        yield
    finally:
        loading.note(before)


class UnmanagedModel(SteeredComponent):
    """A model that is not managed, as the manager sees it; all patchers of the model share it."""

    engine = "core"
    takes_budgets = False

    def __init__(self, model: torch.nn.Module, name: str, kind: str) -> None:
        super().__init__(name, kind)
        self.names_file = name != type(model).__name__
        self.result = result_of(model)
        self.model_ref = weakref.ref(model)
        self.reason = ""
        self.runs = False
        self.has_run = False
        """Whether a sampling run with it has ended, and no other has begun."""
        self.samples: list[weakref.ref[torch.Tensor]] = []
        self.seen: object = None
        """Where the samples were when its bytes were counted, and what core took it to have loaded."""
        self.counted: Mapping[str, int] = {}
        """Its bytes by device, as counted last."""
        self.told: Mapping[str, int] = {}
        """Its bytes by device that the event log knows of."""

    def note_asked(self, request: Request, reason: str) -> None:
        """Note which node asked, and why the model is not managed."""
        self.node_id, self.reason = request.node_id, reason

    def note_reason(self, reason: str) -> None:
        """Note why it is not managed, unless that is known."""
        self.reason = self.reason or reason

    def note_running(self, runs: bool) -> None:
        """Note that sampling begins or has ended."""
        self.runs, self.has_run = runs, not runs

    def note_idle(self, is_idle: bool) -> None:
        """Note for a while that nothing uses it, though nothing told of the end of its last use."""
        self.has_run = is_idle

    # -- what is there

    @property
    def is_computing(self) -> bool:
        """Whether it samples, or is needed by what core does now. Nothing tells when another use of it ends."""
        entry = entry_of(self.model_ref())
        if entry is None or self.runs or is_needed_by_load(entry):
            return True
        return bool(entry.currently_used) and not self.has_run

    @property
    def is_in_use(self) -> bool:
        entry = entry_of(self.model_ref())
        return self.runs or (entry is not None and is_needed_by_load(entry))

    def device_bytes(self) -> Mapping[str, int]:
        """Return the bytes of its tensors on each device; counts them only if it has moved since."""
        model = self.model_ref()
        if model is None:
            return {}
        if self.seen is None or self.seen != self.look(model):
            tensors = [*model.parameters(), *model.buffers()]
            self.samples = [weakref.ref(tensor) for tensor in tensors[:: max(1, len(tensors) // NUM_SAMPLES)]]
            self.seen, self.counted = self.look(model), count_bytes(tensors)
        return self.counted

    def look(self, model: torch.nn.Module) -> object:
        samples = [sample() for sample in self.samples]
        if any(sample is None for sample in samples):
            return None
        return [sample.device for sample in samples if sample is not None], model.model_loaded_weight_memory

    def paged_bytes(self, device: str) -> int:
        return 0  # torch's allocator has them

    @property
    def is_in_effect(self) -> bool:
        return False

    def describe(self) -> Mapping[str, Any]:
        model = self.model_ref()
        tensors = [*model.parameters(), *model.buffers()] if model is not None else []
        return {
            "component": self.name,
            "kind": self.kind,
            "engine": self.engine,
            "weight_bytes": sum(tensor.nbytes for tensor in tensors),
            "budget_bytes": None,
            "placement": next(iter(self.device_bytes()), "cpu"),
            "shares": [],
            "reasons": [f"not managed: {self.reason}"],
        }

    # -- what is done

    def free_memory(self, device: str, num_bytes: int) -> int:
        model = self.model_ref()
        before = self.device_bytes().get(device, 0)
        if model is None or self.is_computing or not before:
            return 0
        unload(model, num_bytes)
        self.seen = None
        self.told = self.device_bytes()
        return max(0, before - self.told.get(device, 0))

    def take_off(self, device: str) -> int:
        model, before = self.model_ref(), self.device_bytes().get(device, 0)
        if model is None or not before:
            return 0
        unload(model)
        self.seen = None
        self.told = self.device_bytes()
        return max(0, before - self.told.get(device, 0))

    def tell_of_loss(self) -> None:
        """Tell the manager which bytes core has taken off devices since it was told last."""
        before, self.told = self.told, self.device_bytes()
        lost = {device: num_bytes - self.told.get(device, 0) for device, num_bytes in before.items()}
        if any(num_bytes > 0 for num_bytes in lost.values()):
            note_steered_unload(self, {device: max(0, num_bytes) for device, num_bytes in lost.items()})

    def leave_first(self, device: str) -> None:
        """Core has an order of its own."""


def count_bytes(tensors: list[torch.Tensor]) -> dict[str, int]:
    """Return the bytes of tensors by accelerator; memory that several share counts once."""
    found: dict[str, dict[int, int]] = {}
    for tensor in tensors:
        if not is_cpu(tensor.device) and not tensor.is_meta:
            found.setdefault(device_name(tensor.device), {})[tensor.data_ptr()] = tensor.nbytes
    return {device: sum(sizes.values()) for device, sizes in found.items()}


class UnmanagedModels:
    """What core and other packs move, as the manager sees it."""

    def __init__(self) -> None:
        self.known: ByModel[UnmanagedModel] = ByModel()

    def of(self, model: torch.nn.Module, name: str, kind: str) -> UnmanagedModel:
        return self.known.get(model) or self.known.add(model, UnmanagedModel(model, name, kind))

    def components(self) -> list[UnmanagedModel]:
        """Return the models that are not managed, the last used first."""
        return sorted(self.known.values(), key=lambda component: -component.last_use)

    def keep_free(self, num_bytes: int | None) -> None:
        """Core keeps free what its own options say."""

    def pinned_bytes(self) -> int:
        return 0


unmanaged = UnmanagedModels()


def see_model(patcher: ModelPatcher, *, name: str, kind: str) -> UnmanagedModel:
    """Make the manager count the bytes of a model that no node of ours manages; its patcher stays as it is."""
    steer_host(unmanaged)
    component = unmanaged.of(patcher.model, name, kind)
    component.note_reason("no node of Highwater manages it")
    return component


def is_unmanaged(model: torch.nn.Module) -> bool:
    """Whether the manager counts the bytes of a model here."""
    return unmanaged.known.get(model) is not None


def note_sampling(patcher: ModelPatcher) -> None:
    component = unmanaged.known.get(patcher.model)
    if component is not None:
        component.note_running(True)
        component.tell_of_loss()
        note_steered_use(component)


def note_sampled(patcher: ModelPatcher) -> None:
    component = unmanaged.known.get(patcher.model)
    if component is not None:
        component.note_running(False)


def leave_to_core(
    patcher: ModelPatcher, reason: str, *, name: str, kind: str, request: Request, notes: Iterable[str] = ()
) -> ModelPatcher:
    """Leave a model to core and count its bytes; its patcher, which is returned, carries the note for the node.

    Args:
        notes: what the node has to say of it already.
    """
    steer_host(unmanaged)
    component = unmanaged.of(patcher.model, name, kind)
    component.note_asked(request, reason)
    set_callbacks(patcher, KEY, {CallbacksMP.ON_PRE_RUN: note_sampling, CallbacksMP.ON_CLEANUP: note_sampled})
    weights = format_bytes(int(component.describe()["weight_bytes"]))
    stays = f"{weights} of it are counted, and it leaves for others while it is idle"
    static = "; ComfyUI's dynamic VRAM does not move it, and takes dynamic models off the device for it"
    told = f"not managed: {reason}; {stays}{static if aimdo.is_on() else ''}"
    told += placement_without_effect(request, patcher.load_device)
    patcher.set_attachments(NOTE, "; ".join([*notes, told]))
    return patcher
