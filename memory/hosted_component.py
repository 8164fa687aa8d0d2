"""A component that a host loads and unloads: what the host may ask the engine about it, and what it may tell.

The host (ComfyUI) decides when a component comes and goes and writes single weights; the engine decides which blocks
are resident, and which component is evicted when memory runs short. A host needs no other file of the engine, beside
the values of `options/`, errors and units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import nn

from .errors import DoesNotFit, InvalidInput, UnsafeState, allowed_values
from .file_tensors import FileTensors
from .hosted_weight import HostedWeight
from .manager.claims.kept import EVERYTHING_KEPT, KeepLimit, parse_limit
from .manager.default import default_manager
from .manager.departures import Departure
from .manager.member import Member
from .manager.module_plans import Draft, bytes_in_ram, plan_modules
from .manager.observed import ObservedModel
from .manager.oom_message import read_shortage
from .manager.steered import SteeredComponent, SteeringHost
from .manager.vae_room import VaeRoom
from .options.placement import AUTO_GROUPS, AUTO_PLACEMENT, Placement, PlacementItem, SplitRatio
from .options.precision import DEFAULT_PRECISION, Precision, PrecisionRequest, precision_for
from .options.profile import OffloadProfile
from .planner.tiles import TiledSize, Tiles, choose_tiles, halve_tiles, tile_lengths
from .quantizing import quantize_tensors
from .repeated_call import has_hooks_of_others, repeat_if_short
from .runtime.blocks.pristine_slab import KnownOrigins
from .runtime.forwards.recording_pauses import host_recordings
from .transfer.devices import list_devices
from .units import format_bytes
from .verification.comparison import same_bits
from .verification.findings import Verification
from .verify_hosted import Comparison
from .weights.component import Component
from .weights.file_layouts import describe_for_host, describe_foreign, is_quanto
from .weights.form_numbers import rests_of
from .weights.mapped_files import find_sources
from .weights.module_component import component_from_module
from .weights.movable import has_packed_weights, why_not_movable
from .weights.safetensors_header import read_header
from .weights.side_factors import SideFactors

__all__ = [
    "EVERYTHING_KEPT",
    "Comparison",
    "Departure",
    "FileTensors",
    "HostedComponent",
    "HostedWeight",
    "KeepLimit",
    "ObservedModel",
    "Precision",
    "SideFactors",
    "SteeredComponent",
    "TiledSize",
    "Tiles",
    "Verification",
    "choose_tiles",
    "device_name",
    "drop_kept_weights",
    "halve_tiles",
    "has_hooks_of_others",
    "has_packed_weights",
    "is_out_of_memory",
    "is_quanto_file",
    "keep_steered",
    "note_steered_unload",
    "note_steered_use",
    "observe_host",
    "open_workflow_id",
    "parse_limit",
    "pause_recordings_with",
    "precision_for",
    "quantize_tensors",
    "refuse_damaged",
    "repeat_if_short",
    "same_bits",
    "steer_host",
    "take_off_steered",
    "tile_lengths",
    "vae_room",
    "watch_evictions",
    "why_not_movable",
]


class HostedComponent:
    """One component of a host; under management from `join` to `release`, by the process-wide manager.

    Args:
        kind: what it is (diffusion, text, vae, control, vision).
        placement: the device that computes it is the host's to say; a split of this placement counts if it begins
            there.
        node_id: the node that loads it, for the report.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        *,
        profile: OffloadProfile | None = None,
        precision: PrecisionRequest = DEFAULT_PRECISION,
        placement: Placement = AUTO_PLACEMENT,
        node_id: str | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.profile = OffloadProfile() if profile is None else profile
        self.precision = precision
        self.placement = placement
        self.node_id = node_id
        self.member: Member | None = None
        self.kept: tuple[bool, KeepLimit] = False, EVERYTHING_KEPT
        """Whether it is to be evicted last, and up to how many bytes; holds before it joins, too."""
        self.noted_off: str | None = None
        """Why its devices computed in turn when that was noted last; empty where they did not."""
        self.noted_in: ref[Any] | None = None
        """The sampling in which that was, as long as it lives."""
        self.draft: tuple[str, Draft] | None = None
        """What was planned of it for a device before it joined."""
        self.reasons: tuple[str, ...] = ()
        """What was decided for it before it joined, such as what moves it; the report shows it with the plan."""
        self.origins: KnownOrigins = {}
        """What its weights were read from, before it joined."""
        self.parts: WeakSet[HostedComponent] = WeakSet()
        """The parts of the same file, itself among them: together they keep to a budget for a device."""
        self.weights_of: Member | None = None
        self.known_weights: dict[str, HostedWeight] = {}

    # -- what the host may ask

    @property
    def is_managed(self) -> bool:
        return self.member is not None

    @property
    def book_name(self) -> str:
        """Its id in the books; before it joins them, its name."""
        return self.name if self.member is None else self.member.id

    @property
    def weights(self) -> Mapping[str, HostedWeight]:
        """The weights under management by the host's keys; none before `join`."""
        if self.member is None:
            return {}
        if self.weights_of is not self.member:
            self.weights_of = self.member
            self.known_weights = {
                slot.spec.name: HostedWeight(bundle.own, slot)
                for share in self.member.managed.shares
                for bundle in share.bundles
                for slot in bundle.own.slots
                if not slot.is_buffer
            }
        return self.known_weights

    @property
    def encoded_names(self) -> set[str]:
        """The keys of weights that rest in an encoded form."""
        return {key for key, weight in self.weights.items() if weight.is_encoded}

    @property
    def rests(self) -> str:
        """How its encoded weights rest, such as ``in eight bits``; empty where it has none."""
        return rests_of(self.member.managed.plan.forms) if self.member is not None else ""

    @property
    def held_bytes(self) -> int:
        """The bytes that it has of the device on which it begins."""
        if self.member is None:
            return 0
        return default_manager().ledger.held(self.member.id, self.member.managed.primary.name)

    def missing_bytes(self) -> dict[torch.device, int]:
        """Return what its plan takes beyond what it has there of the other devices of a split."""
        if self.member is None:
            return {}
        manager = default_manager()
        missing = {
            manager.devices[share.device].torch_device: share.device_bytes
            - manager.ledger.held(self.member.id, share.device)
            for share in self.member.managed.plan.shares[1:]
        }
        return {device: num_bytes for device, num_bytes in missing.items() if num_bytes > 0}

    def summary(self) -> str:
        """Return what is loaded in one line for a log."""
        if self.member is None:
            return f"{self.name}: not managed"
        plan = self.member.managed.plan
        return (
            f"{self.member.id}: {sum(len(share.resident) for share in plan.shares)} of {plan.num_blocks} blocks "
            f"resident, {format_bytes(self.held_bytes)} on {' & '.join(share.device for share in plan.shares)}"
        )

    def describe(self, module: nn.Module) -> Component:
        """Return the blocks by which the module is managed, or would be."""
        if self.member is not None:
            return self.member.managed.component
        return component_from_module(module, name=self.name, kind=self.kind)

    def planned_bytes(self, module: nn.Module, device: torch.device) -> int:
        """Return the bytes that the component would take of a device now: of the free, its own and the idle ones.

        Raises:
            InvalidInput: no form of this component meets the budget.
        """
        manager, name = default_manager(), device_name(device)
        if self.member is not None and self.member.managed.primary.torch_device == device:
            return manager.planned_bytes(self.member, name)
        sources = find_sources({self.name: module}, {})
        try:
            draft = plan_modules(
                {self.name: module},
                manager.machine(freed_bytes=bytes_in_ram({self.name: module}, sources), is_hosted=True),
                placement=self.placement_on(device),
                profile=self.profile,
                precision=self.precision,
                kinds={self.name: self.kind},
                sources=sources,
                draft=self.draft_for(name),
                is_hosted=True,
            )
        except DoesNotFit:
            return self.describe(module).weight_bytes
        self.draft = name, draft
        return draft.plan[self.name].device_bytes.get(name, 0)

    def draft_for(self, device: str) -> Draft | None:
        return self.draft[1] if self.draft is not None and self.draft[0] == device else None

    def placement_on(self, device: torch.device) -> Placement:
        """Return the placement that was asked for if it begins on this device, else the device.

        Raises:
            InvalidInput: the engine does not see this device.
        """
        here, names = device_name(device), [found.name for found in list_devices()]
        if here not in names:
            raise InvalidInput(
                f"placement of {self.name}: this machine has no device {here!r}; {allowed_values(here, names)}"
            )
        asked = self.placement.item_for(self.name, self.kind)
        if asked.devices and asked.devices[0].device == here:
            if self.kind == "diffusion" and len(asked.devices) > 1 and asked.groups is None:
                return Placement(items=(replace(asked, component="*", groups=AUTO_GROUPS),))
            return self.placement
        return Placement(items=(PlacementItem(component="*", devices=(SplitRatio(device=here),)),))

    # -- what the host may tell

    def come_with(self, parts: WeakSet[HostedComponent]) -> None:
        """Keep to a budget for a device together with these, before any of them joins."""
        self.parts = parts

    def came_from(self, origins: KnownOrigins) -> None:
        """Note what its weights were read from (`FileTensors.origins`)."""
        self.origins = origins

    def join(self, module: nn.Module, device: torch.device) -> None:
        """Take the module under management for a device, packed in host memory; again if the device changed."""
        if self.member is not None and self.member.managed.primary.torch_device != device:
            self.release()
        if self.member is None:
            (self.member,), _ = default_manager().add(
                {self.name: module},
                kinds={self.name: self.kind},
                placement=self.placement_on(device),
                profile=self.profile,
                precision=self.precision,
                name=None,
                node_id=self.node_id,
                is_hosted=True,
                draft=self.draft_for(device_name(device)),
                reasons=self.reasons,
                origins={self.name: self.origins},
            )
            self.draft, self.origins = None, {}
            for part in self.parts:
                if part is not self and part.member is not None:
                    self.member.come_with(part.member)
            if self.kept[0]:
                default_manager().commands.keep([self.member], *self.kept)

    def load(self, ceiling_bytes: int | None = None) -> None:
        """Load it now; it takes at most so many bytes of its first device, or the least with which it can compute.

        Raises:
            DoesNotFit, InvalidInput: no plan fits the device, or the budget.
            torch.OutOfMemoryError, or whatever ends the loading: nothing of the component is on a device.
        """
        member = self.joined()
        ceilings = None if ceiling_bytes is None else {member.managed.primary.name: ceiling_bytes}
        default_manager().hosting.load(member, ceilings)

    def set_factors(self, factors: Mapping[str, SideFactors]) -> None:
        """Add these to encoded weights whenever they are decoded, by their keys, and nothing to others.

        They rest and move with their blocks. Those of other ranks than before ask for `load` afterwards; others are
        overwritten where they are, and those that are set already cost nothing.

        Raises:
            InvalidInput: a weight is not encoded, or of another shape. Nothing has changed.
            MemoryError, torch.OutOfMemoryError: some blocks have theirs; the same again, or none, can be set.
        """
        default_manager().hosting.set_factors(self.joined(), factors)

    def unload(self) -> None:
        """Take it off every device; it stays packed in host memory."""
        default_manager().hosting.unload(self.joined())

    def free_memory(
        self, device: torch.device, num_bytes: int, reason: str, *, is_loaded: Callable[[nn.Module], bool]
    ) -> int:
        """Free bytes of a device, of components that the manager chooses; returns what was freed.

        Args:
            is_loaded: whether the host counts a module as loaded. The others it is about to load, and the room is for
                them.
        """
        member, manager = self.joined(), default_manager()
        members = list(manager.members.values())  # in one step: another thread may add or remove some
        hosted = [other for other in members if other.is_hosted]
        arriving = [other.id for other in hosted if other is not member and not is_loaded(other.managed.module)]
        by_host = [other.id for other in manager.steered.components()]  # the host asks those itself
        excluded = [*arriving, *by_host]
        return manager.free_memory(device_name(device), num_bytes, reason, exclude=excluded, allow_unrunnable=False)

    def keep(self, kept: bool, limit: KeepLimit, device: torch.device) -> None:
        """Evict it last up to a limit (True), or in the usual order (False); ``device``: where it is loaded.

        Raises:
            InvalidInput: the limit exceeds the device; nothing changes then.
        """
        manager, name = default_manager(), device_name(device)
        if kept and name in manager.devices and name != "cpu":
            limit.refuse_beyond(self.name, name, manager.devices[name].total_bytes())
        if self.member is not None:
            manager.commands.keep([self.member], kept, limit)
        self.kept = kept, limit

    def take_off(self, reason: str) -> list[Departure]:
        """Take it off every device now; it stays packed in host memory. Returns what that freed, by the driver.

        Raises:
            UnsafeState: it computes.
        """
        return default_manager().commands.release_from(self.member, reason=reason) if self.member is not None else []

    def release(self) -> None:
        """Leave every device and the books; the module's weights are ordinary tensors again. Idempotent."""
        member, self.member = self.member, None
        self.weights_of, self.known_weights = None, {}
        if member is not None:
            default_manager().remove(member)

    def leave(self) -> None:
        """As `release`, for a component that its host dropped: what its files have of it may be kept. Idempotent."""
        if self.member is not None:
            self.member.leave_weights()
        self.release()

    def settle(self) -> None:
        """End open passes and wait for copies: the host may then write any weight where it is."""
        if self.member is not None:
            self.member.managed.settle()

    def finish_copies(self) -> None:
        """Wait until nothing is copied to any device: the host may then read any weight where it is."""
        if self.member is not None:
            self.member.managed.finish_copies()

    def recover(self) -> None:
        """Close a pass that an interrupt left open."""
        if self.member is not None:
            self.member.managed.passes.recover_for(None)

    @contextmanager
    def decoded(self, key: str) -> Iterator[None]:
        """Give the host the wide form of an encoded weight, to read and write; others as they are."""
        weight = self.weights.get(key)
        if weight is None or not weight.is_encoded:
            yield
        else:
            with weight.held_on(weight.slot.held.device):
                yield

    def compare(self, module: nn.Module, *, left_out: frozenset[str]) -> Comparison:
        """Begin to compare runs of the loaded component with runs of the host's own load of it.

        Args:
            left_out: attributes of modules that the host keeps, and a run may change.
        """
        bundles = [bundle for share in self.member.managed.shares for bundle in share.bundles] if self.member else []
        slots = [slot for bundle in bundles for slot in bundle.own.slots]
        return Comparison(self.name, self.describe(module), module, slots, left_out=left_out)

    # -- micro-batches

    @property
    def is_split(self) -> bool:
        """Whether several devices compute it."""
        return self.member is not None and len(self.member.managed.shares) > 1

    def why_one_by_one(self) -> str:
        """Return why `run_micro_batches` makes calls one after the other; empty where it does not."""
        return self.joined().managed.why_one_by_one()

    def run_micro_batches(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Make independent calls of which its devices compute parts at the same time, as `ManagedComponent` does."""
        return self.joined().managed.run_micro_batches(calls)

    @property
    def computes_at_once(self) -> bool:
        """Whether its devices computed the halves of the last step at the same time."""
        return self.noted_off == ""

    def was_at_once_in(self, sampling: object) -> bool:
        """Whether the last step that was noted was one of this sampling, and its halves were computed at once."""
        return self.computes_at_once and self.noted_in is not None and self.noted_in() is sampling

    def note_micro_batches(self, off: str, sampling: object = None) -> None:
        """Note in its plan and the event log that its devices compute in turn, and why, or at the same time.

        Once, until that changes.

        Args:
            sampling: what lives as long as the sampling whose step it is; not kept alive here.
        """
        self.noted_in = ref(sampling) if sampling is not None else None
        if off == self.noted_off:
            return
        was_off, self.noted_off = bool(self.noted_off), off
        member = self.joined()
        said = f"off: {off}" if off else "its devices compute the halves of a step at the same time"
        if off or was_off:  # else its plan expects as much
            member.managed.note_micro_batches(said)
        where = "&".join(member.managed.device_names)
        default_manager().event_log.note("plan", member.id, 0, where, f"micro-batches: {said}")

    def joined(self) -> Member:
        if self.member is None:
            raise UnsafeState(f"{self.name} is not managed: join it first")
        return self.member


# -- what concerns all of a host's components


def device_name(device: Any) -> str:
    """Return a torch device in our words: ``cpu`` or ``gpu:N``."""
    device = torch.device(device)
    return "cpu" if device.type == "cpu" else f"gpu:{device.index or 0}"


def is_quanto_file(path: str) -> bool:
    """Whether a safetensors file is in optimum-quanto's format; reads its header. Raises `InvalidInput`."""
    return is_quanto(tensor.name for tensor in read_header(path).tensors)


def refuse_damaged(path: str, *, takes_quanto: bool = False) -> None:
    """Check a safetensors file before the host reads it; reads its header.

    Args:
        takes_quanto: the host reads files of optimum-quanto.

    Raises:
        InvalidInput: it is damaged, or in a quantized format of other libraries; names who loads that.
    """
    names = [tensor.name for tensor in read_header(path).tensors]
    found = describe_foreign(names) if takes_quanto else describe_for_host(names)
    if found:
        raise InvalidInput(f"{path}: {found}")


@dataclass(frozen=True)
class EvictionListener:
    """Hears all that the manager tells; two with the same function are equal."""

    tell: Callable[[nn.Module], None]

    def __call__(self, message: Mapping[str, Any]) -> None:
        member = default_manager().members.get(message.get("component", ""))
        if member is not None and member.is_hosted and message.get("kind") == "evict":
            self.tell(member.managed.module)


def steer_host(host: SteeringHost) -> None:
    """Make the manager see the components that a host moves itself, and keep room beside them. Idempotent."""
    default_manager().hosting.steer(host)


def observe_host(read: Callable[[], Iterable[ObservedModel]]) -> None:
    """Make the manager count the models that a host loaded by itself (`Hosting.observe`). Idempotent."""
    default_manager().hosting.observe(read)


def note_steered_use(component: SteeredComponent) -> None:
    """Note that the host uses a component that it moves."""
    default_manager().hosting.note_use(component)


def note_steered_unload(component: SteeredComponent, freed_bytes: Mapping[str, int]) -> None:
    """Note that the host took a component that it moves off its devices."""
    default_manager().hosting.note_unload(component, freed_bytes)


def keep_steered(component: SteeredComponent, kept: bool, limit: KeepLimit) -> None:
    """Evict a component that the host moves last up to a limit (True), or in the usual order (False).

    Raises:
        InvalidInput: the limit exceeds its device; nothing changes then.
    """
    default_manager().commands.keep([component], kept, limit)


def take_off_steered(component: SteeredComponent, reason: str) -> list[Departure]:
    """Make the host take a component off every device now; returns what that freed, by the driver.

    Raises:
        UnsafeState: it computes.
    """
    return default_manager().commands.release_from(component, reason=reason)


def pause_recordings_with(host_pause: Callable[[], AbstractContextManager[Any]] | None) -> None:
    """Pause the host's recording of allocations with this while the engine allocates memory in a forward; None: it
    makes none ([Note: recordings] in `runtime/forwards/recording_pauses.py`)."""
    host_recordings.pause_with(host_pause)


def drop_kept_weights(reason: str) -> None:
    """Drop the weights that were kept of components that left."""
    default_manager().drop_kept(reason)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or its cause, tells that a device ran out of memory."""
    return read_shortage(error) is not None


def vae_room() -> VaeRoom:
    """Return what counts and makes room for VAEs that decode in tiles."""
    return default_manager().vae_room


def open_workflow_id() -> str | None:
    """Return the workflow whose node runs now; None outside of nodes."""
    return default_manager().workflow_id


def watch_evictions(tell: Callable[[nn.Module], None]) -> None:
    """Call a function with the module of every hosted component that lost bytes of a device. Idempotent."""
    default_manager().subscribe(EvictionListener(tell), unless_equal=True)
