"""Which devices compute the components that the user left to ``auto``: as a whole run is predicted to take least time.

[Note: choosing devices] A component may compute on each accelerator alone, or, if none holds it beside its
activations, split over several. One whose forwards consist of several calls may also be split in groups in turn, all of
it resident, where that is predicted to be faster ([Note: groups in turn] in `block_groups.py`). What a choice costs is
the time of all forwards and of what has to come back to the devices in a repeated run ([Note: repeated run] in
`run_plan.py`), by bounds that need no schedule. One component after the other gets its best choice beside those of the
others, until nothing gains. Of choices that are about as fast comes first: everything resident, no streaming from RAM,
on fewer devices, on the device with most memory available.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

from ..options.placement import AUTO_GROUPS, PlacementItem
from ..options.profile import OffloadProfile
from ..units import format_bytes, format_seconds
from .capacity import DeviceCapacity, Machine
from .device_options import SMALLEST_GAIN, Choice, choose_for, choose_in_turn, find_choices, stored_elsewhere
from .run import Use
from .run_plan import copy_rate
from .run_play import RunPlayer
from .sizes import Sizes
from .tied_weights import can_split
from .tiles import Tiles

__all__ = ["Part", "choose_devices"]

# So many combinations of choices are tried one by one; beyond that, changes of one or two components at a time.
MOST_COMBINATIONS = 512
MOST_ROUNDS = 4
# What a byte costs that a device does not have: more than any time that is saved.
OVERFULL_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A component as its loader asked for it."""

    sizes: Sizes
    item: PlacementItem
    profile: OffloadProfile
    may_split: bool = True
    """Whether ``auto`` may split it: its run is known. The code of a module alone may not work on two devices."""


def choose_devices(
    parts: Sequence[Part], uses: Sequence[Use], machine: Machine
) -> dict[str, tuple[PlacementItem, str]]:
    """Return the placement of the components that were left to ``auto``, each with the reason.

    Empty where there is nothing to choose: no accelerator, or one alone. Moves nothing and plans no schedules.
    """
    accelerators = by_room(machine)
    left_open = {part.sizes.component.name for part in parts if not part.item.devices}
    if len(accelerators) < 2 or not left_open:
        return {}
    options: dict[str, list[Choice]] = {}
    for part in parts:
        name, given = part.sizes.component.name, part.item.devices
        own = [use for use in uses if use.component == name]
        if given:
            in_turn = (
                None if part.item.groups is None else choose_in_turn(part.sizes, given, machine, part.profile, own)
            )
            choice = in_turn or choose_for(part.sizes, given, machine, part.profile, own)
            found = [] if choice is None else [choice]
        else:
            others = [device for device in accelerators if device.name != part.item.tier] or accelerators
            may_split = part.may_split and can_split(part.sizes.component)
            found = find_choices(part.sizes, others, machine, part.profile, own, may_split=may_split)
            if part.item.tier == "device":
                found = [choice for choice in found if not choice.streams] or found
            elif part.item.tier is None:
                found += [stored for choice in found for stored in stored_elsewhere(choice, part.sizes, machine)]
        if found:
            options[name] = found
        else:  # the plan refuses it, and says why
            left_open.discard(name)
    run = [use for use in uses if use.component in options]
    chosen = best_choices(options, run, machine, [name for name in order_of(run) if name in left_open])
    items = {part.sizes.component.name: part.item for part in parts}
    return {
        name: (placed(items[name], chosen[name]), explain(chosen, name, options, machine)) for name in sorted(left_open)
    }


def placed(item: PlacementItem, choice: Choice) -> PlacementItem:
    """Return what was asked of a component with the devices that were chosen."""
    tier = choice.store.device if choice.store is not None else item.tier
    groups = AUTO_GROUPS if choice.has_groups else None
    return replace(item, component=choice.component.name, devices=choice.devices, tier=tier, groups=groups)


def by_room(machine: Machine) -> list[DeviceCapacity]:
    """Return the accelerators for ``auto``: most available memory first, of equals the fastest link."""
    return sorted(
        machine.chosen_from,
        key=lambda device: (device.available_bytes, device.link_bytes_per_s or 0.0),
        reverse=True,
    )


def order_of(uses: Sequence[Use]) -> list[str]:
    """Return the components of a run, those with most forwards first."""
    passes: dict[str, int] = {}
    for use in uses:
        passes[use.component] = passes.get(use.component, 0) + use.num_passes
    return sorted(passes, key=lambda name: -passes[name])


def best_choices(
    options: Mapping[str, Sequence[Choice]], uses: Sequence[Use], machine: Machine, left_open: Sequence[str]
) -> dict[str, Choice]:
    """Return the choice of each component with which the run takes least time, as far as the search finds it."""
    player = RunPlayer(uses, machine)
    best = {name: found[0] for name, found in options.items()}
    best_s = cost_of(best, uses, machine, player)
    # What its forwards take at least: many choices need no more to be ruled out.
    least_s = {
        id(choice): sum(use.num_passes * choice.pass_s(use, machine) for use in uses if use.component == name)
        for name, found in options.items()
        for choice in found
    }

    def try_all(names: Sequence[str]) -> None:
        nonlocal best, best_s
        for choices in product(*(options[name] for name in names)):
            changed = {**best, **dict(zip(names, choices, strict=True))}
            at_least_s = sum(least_s[id(choice)] for choice in changed.values())
            if at_least_s > best_s * (1 + SMALLEST_GAIN) or not are_apart(changed):
                continue
            seconds = cost_of(changed, uses, machine, player)
            is_alike = seconds <= best_s * (1 + SMALLEST_GAIN)
            if seconds < best_s * (1 - SMALLEST_GAIN) or (is_alike and rank_of(changed) < rank_of(best)):
                best, best_s = changed, seconds

    if prod(len(options[name]) for name in left_open) <= MOST_COMBINATIONS:
        try_all(left_open)
        return best
    for _ in range(MOST_ROUNDS):
        before = best
        for name in left_open:
            try_all([name])
        for pair in combinations(left_open, 2):
            if prod(len(options[name]) for name in pair) <= MOST_COMBINATIONS:
                try_all(pair)
        if best is before:
            break
    return best


def are_apart(chosen: Mapping[str, Choice]) -> bool:
    """Whether no component computes where another one stores: it would take that memory."""
    stores = {choice.store.device for choice in chosen.values() if choice.store is not None}
    return not stores or all(split.device not in stores for choice in chosen.values() for split in choice.devices)


def rank_of(chosen: Mapping[str, Choice]) -> tuple[int, int, int]:
    """Return what decides between choices that are about as fast: how many stream, from RAM, and over what devices."""
    from_ram = sum(choice.streams and choice.store is None for choice in chosen.values())
    num_devices = sum(len(choice.devices) for choice in chosen.values())
    return sum(choice.streams for choice in chosen.values()), from_ram, num_devices


def cost_of(chosen: Mapping[str, Choice], uses: Sequence[Use], machine: Machine, player: RunPlayer) -> float:
    """Return what a repeated run takes at least, in seconds; assumed link speeds where they are not known."""
    shares = {name: choice.shares for name, choice in chosen.items()}

    def pass_s(number: int, tiles: Tiles | None) -> float:
        use = uses[number]
        times = use.tiling.work(tiles) if tiles is not None and use.tiling is not None else 1.0
        return times * chosen[use.component].pass_s(use, machine)

    rates = {device.name: copy_rate(device) for device in machine.accelerators}
    run = player.sum_up(shares, uses, pass_s=pass_s, cold_s=lambda number, tiles: 0.0, rates=rates)
    # Activations may take what the watermark keeps free of weights.
    return (run.seconds or 0.0) + run.overfull_bytes * OVERFULL_S


def explain(chosen: Mapping[str, Choice], name: str, options: Mapping[str, Sequence[Choice]], machine: Machine) -> str:
    """Return why a component computes where it does, in one line."""
    choice = chosen[name]
    largest = by_room(machine)[0]
    if choice.store is not None:
        from_ram, way = copy_rate(machine.device(choice.devices[0].device)), choice.store.way
        is_faster = (choice.store.bytes_per_s or 0.0) > from_ram * (1 + SMALLEST_GAIN)
        beside_ram = "faster than from RAM" if is_faster else "as fast as from RAM"
        return f"auto: streams from free memory of {choice.store.device}, which is {beside_ram}: {way}"
    if choice.has_groups:
        return explain_groups(choice, options[name], machine)
    if len(choice.devices) > 1:
        kept = "all of it is resident" if not choice.streams else "less of it streams"
        alone = next((other for other in options[name] if len(other.devices) == 1), None)
        if alone is None:
            return f"auto: split over {choice.names}: no device alone can compute it"
        would = format_bytes(sum(alone.copied_bytes.values()))
        return f"auto: split over {choice.names}, where {kept}; on {alone.names} alone {would} would stream"
    device = choice.devices[0].device
    if device == largest.name:
        return f"auto: {device} has the most memory available, {format_bytes(largest.available_bytes)}"
    others = [
        other
        for other, at in chosen.items()
        if other != name and any(split.device == largest.name for split in at.devices)
    ]
    if others:
        return f"auto: on {device} it stays loaded beside {', '.join(others)} on {largest.name}"
    return f"auto: {device}, with which a run takes least time"


def explain_groups(choice: Choice, options: Sequence[Choice], machine: Machine) -> str:
    """Return why a component is split in groups in turn, in one line."""
    use, seconds = max(choice.at_once, key=lambda known: known[0].num_passes)
    alone = [(other.pass_s(use, machine), other.names) for other in options if len(other.devices) == 1]
    told = f"auto: {choice.names} compute the {use.num_calls} calls of a forward at the same time"
    if not alone:
        return f"{told}: about {format_seconds(seconds)}; no device alone can compute it"
    alone_s, name = min(alone)
    return f"{told}: about {format_seconds(seconds)}, on {name} alone {format_seconds(alone_s)}"
