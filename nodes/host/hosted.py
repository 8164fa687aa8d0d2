"""What all of core's patchers of one model share: how it was asked for, and its membership once it was loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from torch.utils.hooks import RemovableHandle

from ...memory import default_manager
from ...memory.errors import DoesNotFit
from ...memory.manager.member import Member
from ...memory.manager.module_plans import plan_modules
from ...memory.options.placement import parse_placement
from ...memory.options.precision import parse_precision
from ...memory.options.profile import parse_profile
from ...memory.runtime.parameter_slots import ParameterSlot
from ...memory.runtime.weight_group import WeightGroup
from ...memory.transfer.devices import list_devices
from ...memory.weights.module_component import component_from_module

__all__ = ["Hosted", "Request", "Weight", "is_cpu", "name_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a node asks for; texts as its widgets hold them."""

    profile: str = "auto"
    precision: str = "as stored"
    placement: str = "auto"
    node_id: str | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a model under management: where it moves, and who holds it."""

    group: WeightGroup
    slot: ParameterSlot

    @contextmanager
    def held_on(self, device: torch.device) -> Iterator[None]:
        """Give core a wide copy on a device to write to; what it wrote is the new version."""
        resting = self.slot.held
        with torch.inference_mode(False):
            self.slot.hold(torch.nn.Parameter(self.group.wide(self.slot.spec.name, device), requires_grad=False))
        try:
            yield
            written = self.slot.held
        finally:
            self.slot.hold(resting)
        self.group.overwrite(self.slot.spec.name, written)


class Token:
    """Held by every patcher of one model: when the last is dropped, the component is released."""


class Hosted:
    """What all clones of one model share: how it was asked for, and its membership once it was loaded."""

    def __init__(self, name: str, kind: str, request: Request) -> None:
        self.name = name
        self.kind = kind
        self.request = request
        self.member: Member | None = None
        self.weights_of: Member | None = None
        self.known_weights: dict[str, Weight] = {}
        self.patched: set[str] = set()
        self.notes: list[str] = []
        self.loaded_on: torch.device | None = None
        """Where core last had it loaded; not copied with the model."""
        self.check: RemovableHandle | None = None
        """What looks at a ControlNet's inputs."""
        self.token_ref: Callable[[], Token | None] = lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Hosted:
        return Hosted(self.name, self.kind, self.request)  # streams and slabs are not copied

    def token(self) -> Token:
        token = self.token_ref()
        if token is None:
            token = Token()
            self.token_ref = weakref.ref(token)
            weakref.finalize(token, self.end).atexit = False
        return token

    def end(self) -> None:
        """The last patcher is gone: core's list has no entry of this model any more, then its memory goes."""
        forget_dead_entries()
        self.release()

    def release(self) -> None:
        """Leave every device and the books; the model's weights are ordinary tensors again."""
        member, self.member = self.member, None
        self.weights_of, self.known_weights = None, {}
        if member is not None:
            default_manager().remove(member)

    @property
    def groups(self) -> list[WeightGroup]:
        return [group for share in self.member.managed.shares for group in share.groups] if self.member else []

    @property
    def weights(self) -> dict[str, Weight]:
        """The weights under management by core's keys; none before the model was loaded."""
        if self.member is None:
            return {}
        if self.weights_of is not self.member:
            self.weights_of = self.member
            self.known_weights = {
                slot.spec.name: Weight(group, slot)
                for group in self.groups
                for slot in group.slots
                if not slot.is_buffer
            }
        return self.known_weights

    @property
    def cast_names(self) -> set[str]:
        """The keys of weights that rest in eight bits."""
        return {key for key, weight in self.weights.items() if weight.slot.encoding is not None}

    @contextmanager
    def widened(self, key: str) -> Iterator[None]:
        """Give core the wide form of a weight that rests in eight bits, to read and write; others as they are."""
        weight = self.weights.get(key)
        if weight is None or weight.slot.encoding is None:
            yield
        else:
            with weight.held_on(weight.slot.held.device):
                yield

    def join(self, model: torch.nn.Module, device: torch.device) -> Member:
        """Take the model under management for a device, packed in host memory; again if the device changed."""
        if self.member is not None and self.member.managed.primary.torch_device != device:
            self.release()
        if self.member is None:
            manager = default_manager()
            names = [found.name for found in list_devices()]
            (self.member,), _ = manager.add(
                {self.name: model},
                kinds={self.name: self.kind},
                placement=parse_placement(self.placement_on(device), devices=names),
                profile=parse_profile(self.request.profile, devices=names, components=[self.name]),
                precision=parse_precision(self.request.precision),
                name=None,
                node_id=self.request.node_id,
                is_hosted=True,
            )
        return self.member

    def placement_on(self, device: torch.device) -> str:
        """Return the placement in our grammar: what was asked for if it begins on this device, else the device."""
        here = name_of(device)
        asked = self.request.placement
        return asked if asked.partition("&")[0] == here else here

    def planned_bytes(self, model: torch.nn.Module, device: torch.device) -> int:
        """Return the bytes that the component would take of a device now: of the free, its own and the idle ones."""
        manager = default_manager()
        if self.member is not None and self.member.managed.primary.torch_device == device:
            return manager.planned_bytes(self.member, name_of(device))
        names = [found.name for found in list_devices()]
        try:
            _, plan = plan_modules(
                {self.name: model},
                manager.admission.machine(None, is_hosted=True),
                placement=parse_placement(self.placement_on(device), devices=names),
                profile=parse_profile(self.request.profile, devices=names, components=[self.name]),
                precision=parse_precision(self.request.precision),
                kinds={self.name: self.kind},
                sources={},
            )
        except DoesNotFit:
            return component_from_module(model, name=self.name, kind=self.kind).weight_bytes
        return plan[self.name].device_bytes.get(name_of(device), 0)


def forget_dead_entries() -> None:
    """Take what has no patcher any more off core's list, as core does itself once the model is gone."""
    listed = comfy.model_management.current_loaded_models
    for index in reversed(range(len(listed))):
        slot = listed[index]
        if slot.model is None and slot.real_model is not None:
            listed.pop(index)
            if slot.model_finalizer is not None:
                slot.model_finalizer.detach()


def is_cpu(device: Any) -> bool:
    return torch.device(device).type == "cpu"


def name_of(device: Any) -> str:
    """Return a torch device in our words: ``cpu`` or ``gpu:N``."""
    device = torch.device(device)
    return "cpu" if device.type == "cpu" else f"gpu:{device.index or 0}"
