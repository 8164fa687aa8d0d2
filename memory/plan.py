"""The plan: which blocks of a component rest where, decided in whole bytes before anything moves.

[Note: budgets] A device holds, for one component: the *fixed* tensors (the rest, and the buffers of the blocks
there), the *resident* blocks, the *staging* slots through which the other blocks stream, and the *scratch* into
which eight-bit weights are widened. The four sum to `SharePlan.device_bytes`, and the engine allocates exactly
that. Residents are spread evenly through the execution order, so that every copy has compute to hide behind:
at 25% streamed and copies twice as slow as compute that runs like all-resident, a leading prefix 1.21x slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .component import Component
from .errors import DoesNotFit, InvalidInput, allowed_values
from .footprint import all_resident_bytes, block_bytes, fixed_tensors, resting_bytes, wide_bytes
from .placement import DeviceShare, Placement, PlacementItem
from .profile import BudgetItem, OffloadProfile
from .schedule import cut_runs, spread_residents
from .units import format_bytes
from .upcast import Precision, cast_tensors

__all__ = [
    "ComponentPlan",
    "DeviceCapacity",
    "Machine",
    "Plan",
    "SharePlan",
    "plan_component",
    "plan_components",
    "replan",
]

# One slot computes while the other fills; a third would only help where copies and computes vary a lot.
NUM_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCapacity:
    """What one component may take of a device: bytes free now, its own, and those of idle components."""

    name: str
    total_bytes: int
    available_bytes: int
    kept_free_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The numbers a plan is made from; ``pinned_bytes`` is how much host memory may be page-locked."""

    devices: tuple[DeviceCapacity, ...]
    pinned_bytes: int = 0

    def device(self, name: str) -> DeviceCapacity:
        return next(device for device in self.devices if device.name == name)

    @property
    def accelerators(self) -> tuple[DeviceCapacity, ...]:
        return tuple(device for device in self.devices if device.name != "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePlan:
    """One device's part of a component; block numbers are positions in `Component.blocks`."""

    device: str
    blocks: tuple[int, ...]
    resident: frozenset[int]
    fixed_bytes: int
    resident_bytes: int
    num_slots: int = 0
    slot_bytes: int = 0
    scratch_bytes: int = 0

    @property
    def streamed(self) -> tuple[int, ...]:
        return tuple(block for block in self.blocks if block not in self.resident)

    @property
    def staging_bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    @property
    def device_bytes(self) -> int:
        return self.fixed_bytes + self.resident_bytes + self.staging_bytes + self.scratch_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentPlan:
    """The decision for one component, and why."""

    component: str
    kind: str
    weight_bytes: int
    shares: tuple[SharePlan, ...]
    tier: str
    precision: Precision
    cast: frozenset[str]
    placement: PlacementItem
    reasons: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        return sum(len(share.blocks) for share in self.shares)

    @property
    def device_bytes(self) -> dict[str, int]:
        return {share.device: share.device_bytes for share in self.shares}

    def text(self) -> str:
        """Return the decision as lines for people, the reasons last."""
        form = f"{format_bytes(self.weight_bytes)} {self.precision.value}, rests in {self.tier}"
        lines = [f"{self.component}: {form}"]
        lines += [f"  {describe_share(share)}" for share in self.shares]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "kind": self.kind,
            "weight_bytes": self.weight_bytes,
            "precision": self.precision.value,
            "tier": self.tier,
            "placement": str(self.placement),
            "shares": [
                {
                    "device": share.device,
                    "blocks": len(share.blocks),
                    "resident_blocks": len(share.resident),
                    "streamed_blocks": len(share.streamed),
                    "fixed_bytes": share.fixed_bytes,
                    "resident_bytes": share.resident_bytes,
                    "staging_bytes": share.staging_bytes,
                    "scratch_bytes": share.scratch_bytes,
                    "device_bytes": share.device_bytes,
                }
                for share in self.shares
            ],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for a set of components; `text` prints them, `placement` can be pasted back."""

    components: tuple[ComponentPlan, ...]
    profile: OffloadProfile = field(default_factory=OffloadProfile)

    def __getitem__(self, component: str) -> ComponentPlan:
        return next(plan for plan in self.components if plan.component == component)

    @property
    def placement(self) -> str:
        """The plan as one placement text: ``auto`` replaced by what it chose."""
        return str(Placement(items=tuple(plan.placement for plan in self.components)))

    def to_json(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "components": [plan.to_json() for plan in self.components],
        }

    def text(self) -> str:
        """Return the plan as lines for people: a component each, its reasons below, the placement at the end."""
        return "\n".join([*(plan.text() for plan in self.components), f"placement: {self.placement}"])


def describe_share(share: SharePlan) -> str:
    parts = [f"{format_bytes(share.fixed_bytes)} fixed"]
    if share.blocks:
        parts.append(
            f"{len(share.resident)} of {len(share.blocks)} blocks resident {format_bytes(share.resident_bytes)}"
        )
    if share.num_slots:
        slots = f"{share.num_slots} slot{'s' if share.num_slots > 1 else ''} of {format_bytes(share.slot_bytes)}"
        parts.append(f"{len(share.streamed)} streamed through {slots}")
    if share.scratch_bytes:
        parts.append(f"{format_bytes(share.scratch_bytes)} scratch")
    return f"{share.device}: {format_bytes(share.device_bytes)} = {', '.join(parts)}"


def plan_components(
    components: Sequence[Component],
    machine: Machine,
    *,
    placement: Placement,
    profile: OffloadProfile,
    precision: Precision,
) -> Plan:
    """Plan every component as if it were alone: they compute one after another and evict each other.

    Raises:
        InvalidInput: a budget or tier that cannot be met as written.
        DoesNotFit: a component whose least form exceeds what its device can have.
    """
    plans = tuple(
        plan_component(
            component,
            machine,
            item=placement.item_for(component.name, component.kind),
            profile=profile,
            precision=precision,
        )
        for component in components
    )
    return Plan(components=plans, profile=profile)


def plan_component(
    component: Component,
    machine: Machine,
    *,
    item: PlacementItem,
    profile: OffloadProfile,
    precision: Precision,
) -> ComponentPlan:
    """Decide for one component; arithmetic on ints, moves nothing. Raises as `plan_components`."""
    reasons: list[str] = []
    cast = cast_tensors(component, precision)
    devices = item.devices or choose_device(machine, reasons)
    tier = choose_tier(component, item, devices, machine, cast, reasons)
    groups = split_blocks(component, devices, machine, cast, reasons)
    shares = tuple(
        plan_share(component, share.device, group, machine, profile, cast, first=index == 0, reasons=reasons)
        for index, (share, group) in enumerate(zip(devices, groups, strict=True))
    )
    refuse_streaming_at_tier_device(component, tier, shares, cast)
    if precision is Precision.FP8_SCALED and not cast:
        reasons.append("no block has weights that can be cast: everything stays as stored")
    return ComponentPlan(
        component=component.name,
        kind=component.kind,
        weight_bytes=all_resident_bytes(component, cast),
        shares=shares,
        tier=tier,
        precision=precision,
        cast=cast,
        placement=replace(item, component=component.name, devices=devices, tier=tier),
        reasons=tuple(reasons),
    )


def replan(component: Component, plan: ComponentPlan, machine: Machine, profile: OffloadProfile) -> ComponentPlan:
    """Decide anew what is resident, with the memory there is now; devices, split and precision stay.

    Raises as `plan_components`.
    """
    # The reasons of what stays (device, tier, split) are kept; those about room are found again.
    reasons = [reason for reason in plan.reasons if " stream, " not in reason and "staging slot" not in reason]
    shares = tuple(
        plan_share(
            component, share.device, share.blocks, machine, profile, plan.cast, first=index == 0, reasons=reasons
        )
        for index, share in enumerate(plan.shares)
    )
    refuse_streaming_at_tier_device(component, plan.tier, shares, plan.cast)
    return replace(plan, shares=shares, reasons=tuple(reasons))


def refuse_streaming_at_tier_device(
    component: Component, tier: str, shares: Sequence[SharePlan], cast: frozenset[str]
) -> None:
    if tier == "device" and any(share.num_slots for share in shares):
        raise DoesNotFit(
            f"{component.name} at tier 'device' needs {format_bytes(all_resident_bytes(component, cast))}, "
            f"which its budget does not hold; allow a tier of pinned or host, or choose 'fp8 scaled'"
        )


def choose_device(machine: Machine, reasons: list[str]) -> tuple[DeviceShare, ...]:
    """Return where ``auto`` computes: the accelerator that can give most, else the CPU."""
    if not machine.accelerators:
        reasons.append("auto: no accelerator here, computes on the CPU")
        return (DeviceShare(device="cpu"),)
    best = max(machine.accelerators, key=lambda device: device.available_bytes)
    if len(machine.accelerators) > 1:
        reasons.append(f"auto: {best.name} can give most, {format_bytes(best.available_bytes)}")
    return (DeviceShare(device=best.name),)


def choose_tier(
    component: Component,
    item: PlacementItem,
    devices: Sequence[DeviceShare],
    machine: Machine,
    cast: frozenset[str],
    reasons: list[str],
) -> str:
    """Return where the weights rest while they are not resident."""
    on_cpu = devices[0].device == "cpu"
    if item.tier is not None:
        allowed = ["host"] if on_cpu else ["device", "pinned", "host"]
        if item.tier not in allowed:
            raise InvalidInput(
                f"placement {str(item)!r}: tier {item.tier!r} is not available for {component.name} on "
                f"{devices[0].device}; {allowed_values(item.tier, allowed)}"
            )
        return item.tier
    if on_cpu:
        return "host"
    host_bytes = all_resident_bytes(component, cast)
    if host_bytes <= machine.pinned_bytes:
        return "pinned"
    reasons.append(
        f"rests in pageable RAM: {format_bytes(machine.pinned_bytes)} may be pinned, "
        f"{format_bytes(host_bytes)} would be needed; copies block the host"
    )
    return "host"


def split_blocks(
    component: Component,
    devices: Sequence[DeviceShare],
    machine: Machine,
    cast: frozenset[str],
    reasons: list[str],
) -> list[tuple[int, ...]]:
    """Cut the blocks into one run per device, in order, by bytes: as the ratios say, else by what is available."""
    sizes = [block_bytes(block, cast) for block in component.blocks]
    if len(devices) == 1:
        return [tuple(range(len(sizes)))]
    if len(sizes) < len(devices):
        raise InvalidInput(
            f"{component.name} has {len(sizes)} blocks and cannot be split over {len(devices)} devices; name one device"
        )
    left = 1.0 - sum(share.ratio or 0.0 for share in devices)
    available = [machine.device(share.device).available_bytes for share in devices]
    open_bytes = sum(num_bytes for share, num_bytes in zip(devices, available, strict=True) if share.ratio is None)
    ratios = [
        share.ratio if share.ratio is not None else left * num_bytes / max(1, open_bytes)
        for share, num_bytes in zip(devices, available, strict=True)
    ]
    runs = cut_runs(sizes, ratios)
    for share, run, ratio in zip(devices, runs, ratios, strict=True):
        reasons.append(f"split: blocks {run[0]} to {run[-1]} on {share.device}, {ratio:.0%} asked")
    return runs


def plan_share(
    component: Component,
    device: str,
    blocks: tuple[int, ...],
    machine: Machine,
    profile: OffloadProfile,
    cast: frozenset[str],
    *,
    first: bool,
    reasons: list[str],
) -> SharePlan:
    """Decide what of these blocks is resident on one device and what streams."""
    capacity = machine.device(device)
    sizes = {number: block_bytes(component.blocks[number], cast) for number in blocks}
    fixed = resting_bytes(fixed_tensors(component, blocks, first=first))
    scratch = max((wide_bytes(component.blocks[number], cast) for number in blocks), default=0)
    whole = SharePlan(
        device=device,
        blocks=blocks,
        resident=frozenset(blocks),
        fixed_bytes=fixed,
        resident_bytes=sum(sizes.values()),
        scratch_bytes=scratch,
    )
    if device == "cpu":
        return whole
    budget = profile.budget_for(device, component.name, component.kind)
    limit = capacity.available_bytes
    if budget is not None:
        limit = budget.limit(capacity.total_bytes, capacity.available_bytes)
    if whole.device_bytes <= limit:
        return whole
    largest = max(sizes.values(), default=0)
    room = limit - fixed - scratch
    num_slots = NUM_SLOTS if room >= NUM_SLOTS * largest else 1
    if room < largest or not blocks:
        refuse_budget(component, capacity, budget, limit, fixed, scratch, largest)
    resident = spread_residents([sizes[number] for number in blocks], room - num_slots * largest)
    resident_numbers = frozenset(blocks[position] for position in resident)
    streamed = [sizes[number] for number in blocks if number not in resident_numbers]
    source = f"budget {budget}" if budget is not None else f"{capacity.name} can give {format_bytes(limit)}"
    reasons.append(f"{source}: {len(streamed)} of {len(blocks)} blocks stream, {format_bytes(sum(streamed))} per pass")
    if num_slots == 1:
        reasons.append("one staging slot only: copies wait for computes; a larger budget would overlap them")
    return SharePlan(
        device=device,
        blocks=blocks,
        resident=resident_numbers,
        fixed_bytes=fixed,
        resident_bytes=sum(sizes[number] for number in resident_numbers),
        num_slots=min(num_slots, len(streamed)),
        slot_bytes=max(streamed),
        scratch_bytes=scratch,
    )


def refuse_budget(
    component: Component,
    capacity: DeviceCapacity,
    budget: BudgetItem | None,
    limit: int,
    fixed_bytes: int,
    scratch_bytes: int,
    largest_block_bytes: int,
) -> None:
    """Raise the error of a component whose least form does not fit: the user's budget, or the device."""
    least = fixed_bytes + scratch_bytes + largest_block_bytes
    form = (
        f"at least {format_bytes(least)} ({format_bytes(fixed_bytes)} fixed, "
        f"{format_bytes(largest_block_bytes)} for the largest block, {format_bytes(scratch_bytes)} scratch)"
    )
    if budget is not None and limit < capacity.available_bytes:
        raise InvalidInput(f"budget {str(budget)!r} is too small: {component.name} needs {form} on {capacity.name}")
    raise DoesNotFit(
        f"{component.name} needs {form} on {capacity.name}: {format_bytes(max(0, limit))} can be had of "
        f"{format_bytes(capacity.total_bytes)}, {format_bytes(capacity.kept_free_bytes)} kept free; "
        "lower the watermark, choose 'fp8 scaled', or place it on another device"
    )
