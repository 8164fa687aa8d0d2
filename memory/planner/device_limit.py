"""How many bytes of a device the weights of a component may take, by budgets, reserves and what forwards need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from ..errors import DoesNotFit, InvalidInput
from ..options.budget import BudgetItem
from ..options.profile import OffloadProfile
from ..units import MIB, align_up, format_bytes
from ..weights.component import Component
from .capacity import DeviceCapacity, KeptFree, Machine
from .run import SLACK
from .sizes import Sizes

__all__ = ["find_kept", "find_limit", "held_later", "refuse_small_limit", "steady_limit"]

# Forwards of these take more beside their weights than a watermark's few bytes.
LARGE_ACTIVATIONS = ("diffusion", "vae")
MAX_HOLDERS = 3
"""Computing components that an error names."""


def find_limit(
    component: Component, capacity: DeviceCapacity, profile: OffloadProfile, overlapping_bytes: int, whole_bytes: int
) -> tuple[int, str, list[str]]:
    """Return the most bytes that the weights may take of a device, what sets that limit, and why it was raised.

    Args:
        overlapping_bytes: the fewest with which copies and computes overlap; a profile's own budget is raised to them.
        whole_bytes: what the weights take if all of them are resident.
    """
    available = available_bytes(component, capacity, profile)
    budget = smallest_budget(component, capacity, profile)
    if budget is None:
        return available, f"{format_bytes(available)} available on {capacity.name}", []
    limit = min(limit_by(budget, capacity), available)
    if limit == available and (budget.most(capacity.total_bytes) or available + 1) > available:
        return available, f"{format_bytes(available)} available on {capacity.name}", []
    needed = min(align_up(overlapping_bytes, MIB), whole_bytes, available)
    if not budget.from_profile or limit >= needed:
        return limit, f"budget {budget}", []
    raised = format_bytes(needed)
    reason = f"profile {profile.name}'s budget {budget} is too small for {component.name}: raised to {raised}"
    return needed, f"budget {raised}", [reason]


def find_kept(component: Component, capacity: DeviceCapacity, machine: Machine, profile: OffloadProfile) -> KeptFree:
    """Return what is kept free for the forwards of a component: what they are known to need, else what they may need.

    The second only where the user set neither a budget nor a reserve.
    """
    kept = machine.needs(component, capacity.name) if machine.needs is not None else None
    kept = kept or KeptFree(num_bytes=0, why="", is_known=False)
    asked = component.name, component.kind
    is_said = profile.reserve_for(capacity.name, *asked, capacity.total_bytes) or any(
        not budget.from_profile for budget in profile.budgets_for(capacity.name, *asked)
    )
    if kept.is_known or is_said or component.kind not in LARGE_ACTIVATIONS:
        return kept
    if kept.num_bytes >= capacity.unlearned_bytes:
        return kept
    why = "their size is not known yet"
    return KeptFree(num_bytes=capacity.unlearned_bytes, why=why, is_known=False)


def held_later(kept: KeptFree, capacity: DeviceCapacity) -> int:
    """Return what of a device stays free for what a pipeline holds once more steps have run, beside what it holds now.

    Where what stays free for forwards, with its slack, is more than the low mark, that has room for it. Without it the
    low mark is passed by a few bytes, and the component gives way until the high mark is free.
    """
    return kept.num_bytes // SLACK if kept.is_known and kept.num_bytes <= capacity.kept_free_bytes else 0


def steady_limit(
    limit: int, grown_limit: int, capacity: DeviceCapacity, planned_bytes: int, planned_limit: int, largest_bytes: int
) -> int:
    """Return the limit of a component that is in place and streams, so that a wobble of free memory moves nothing.

    It gives way when less than the low mark would be free, and then until the high mark is. It grows again when more is
    free than the high mark and a block.

    Args:
        grown_limit: what it may take where it grows; a little less than the limit (`held_later`).
        planned_bytes, planned_limit: what its plan takes, and the limit for which that was made.
        largest_bytes: of its blocks: so much may be left of what it may take.
    """
    held, band = capacity.held_bytes, capacity.band_bytes
    if limit < held:
        return limit - band
    if limit > held + band + largest_bytes:
        return grown_limit
    return planned_limit if planned_bytes == held <= planned_limit <= limit else held


def smallest_budget(component: Component, capacity: DeviceCapacity, profile: OffloadProfile) -> BudgetItem | None:
    """Return the smaller budget of the two that count, the component's and the device's; None where neither is set."""
    budgets = profile.budgets_for(capacity.name, component.name, component.kind)
    return min(budgets, key=lambda budget: limit_by(budget, capacity), default=None)


def limit_by(budget: BudgetItem, capacity: DeviceCapacity) -> int:
    """Return the most bytes of a device that a budget allows; a device's budget also counts the siblings' bytes."""
    limit = budget.limit(capacity.total_bytes, capacity.available_bytes, capacity.kept_free_bytes)
    most = budget.most(capacity.total_bytes)
    if most is None or budget.target != capacity.name:
        return limit
    return max(0, min(limit, most - capacity.sibling_bytes))


def available_bytes(component: Component, capacity: DeviceCapacity, profile: OffloadProfile) -> int:
    """Return the available bytes of a device less the profile's reserve, at most its ceiling.

    What the watermark keeps free counts towards the reserve.
    """
    reserve = profile.reserve_for(capacity.name, component.name, component.kind, capacity.total_bytes)
    available = max(0, capacity.available_bytes - max(0, reserve - capacity.kept_free_bytes))
    return available if capacity.ceiling_bytes is None else min(available, capacity.ceiling_bytes)


def refuse_small_limit(
    sizes: Sizes,
    blocks: Sequence[int],
    machine: Machine,
    device: str,
    profile: OffloadProfile,
    limit: int,
    *,
    first: bool,
) -> NoReturn:
    """Raise the error of a component whose least form exceeds the limit of a device.

    Raises:
        InvalidInput: the user's budget or reserve is the reason.
        DoesNotFit: the device is.
    """
    component, capacity = sizes.component, machine.device(device)
    fixed_bytes, scratch_bytes = sizes.fixed_bytes(blocks, first=first), sizes.scratch_bytes(blocks)
    largest_bytes = max((sizes.blocks[number] for number in blocks), default=0)
    least_bytes = fixed_bytes + largest_bytes + scratch_bytes
    decodes = f", {format_bytes(scratch_bytes)} to decode weights" if scratch_bytes else ""
    decodes += " (all at once: granularity 'block' needs less)" if component.widens_whole else ""
    form = (
        f"at least {format_bytes(least_bytes)} ({format_bytes(fixed_bytes)} of non-block weights, "
        f"{format_bytes(largest_bytes)} for the largest block{decodes})"
    )
    budget = smallest_budget(component, capacity, profile)
    available = available_bytes(component, capacity, profile)
    if budget is not None and not budget.from_profile and limit < available:
        shared_bytes = capacity.sibling_bytes if budget.target == capacity.name else 0
        held = f"; components that compute hold {format_bytes(shared_bytes)} of it" if shared_bytes else ""
        enough = f"; allowed: {align_up(least_bytes + shared_bytes, MIB) // MIB}MiB or more"
        raise InvalidInput(
            f"budget {str(budget)!r} is too small: {component.name} needs {form} on {capacity.name}{held}"
            f"{enough if least_bytes <= available else ''}"
        )
    reserve = profile.reserve_for(capacity.name, component.name, component.kind, capacity.total_bytes)
    if reserve > capacity.kept_free_bytes:
        most = capacity.available_bytes + capacity.kept_free_bytes - least_bytes
        enough = f"; allowed: {most // MIB}MiB or less" if capacity.available_bytes >= least_bytes else ""
        raise InvalidInput(
            f"a reserve of {format_bytes(reserve)} leaves {format_bytes(available)} of {capacity.name}: "
            f"{component.name} needs {form}{enough}"
        )
    holders = [f"{name} computes and holds {format_bytes(held)}" for name, held in capacity.computing[:MAX_HOLDERS]]
    if len(capacity.computing) > MAX_HOLDERS:
        holders.append(f"{len(capacity.computing) - MAX_HOLDERS} more compute")
    marked_bytes = capacity.kept_free_bytes - capacity.lent_bytes
    lent = [f"{format_bytes(capacity.lent_bytes)} lent to another program"] if capacity.lent_bytes else []
    told = ", ".join([f"{format_bytes(marked_bytes)} reserved", *lent, *holders])
    helps = ", or ".join(part for part in find_remedies(sizes, blocks, machine, device, limit, first=first) if part)
    raise DoesNotFit(
        f"{component.name} needs {form} on {capacity.name}: {format_bytes(max(0, limit))} available of "
        f"{format_bytes(capacity.total_bytes)}, {told}; {helps}"
    )


def find_remedies(
    sizes: Sizes, blocks: Sequence[int], machine: Machine, device: str, limit: int, *, first: bool
) -> tuple[str, str]:
    """Return what would make room for the least form, by the numbers: all but the last remedy, and the last.

    No precision does: encoded, a block takes scratch to be widened in, more than it saves.
    """
    capacity, least_bytes = machine.device(device), sizes.least_bytes(blocks, first=first)
    marked_bytes = capacity.kept_free_bytes - capacity.lent_bytes
    held_bytes, lent_bytes = sum(held for _, held in capacity.computing), capacity.lent_bytes
    missing_bytes = least_bytes - max(0, limit)
    remedies = []
    # One that is too little alone may help with the others.
    if held_bytes:
        remedies.append(f"wait until {'it has' if len(capacity.computing) == 1 else 'they have'} computed")
    if lent_bytes:
        remedies.append("end the loan (`highwater lend --give-back`)")
    if marked_bytes and held_bytes + lent_bytes + marked_bytes >= missing_bytes:
        remedies.append("lower the watermark")
    if sizes.component.widens_whole:
        remedies.append("choose granularity 'block'")
    others = [other for other in machine.accelerators if other.name != device and other.available_bytes >= least_bytes]
    roomiest = max(others, key=lambda other: other.available_bytes, default=None)
    return ", ".join(remedies), f"place it on {roomiest.name if roomiest is not None else 'the CPU'}"
