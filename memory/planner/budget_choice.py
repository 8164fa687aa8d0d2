"""Budgets with which a run takes less time: components that stream a little stay loaded beside each other.

[Note: choosing budgets] By itself a plan gives a component all that its device has, and whatever is there already
leaves for it; a run then copies the same weights forth and back each time. A component that keeps fewer blocks copies
those that stream while it computes, and evicts less. So where a repeated run would reload anything, one component after
another, then two at a time, are tried on each device that is open to them with several budgets and stores, while a run
gets shorter by the reckoning: from what was planned, and from all of them where they compute fastest. The plan with the
budgets is made only if its own prediction is shorter, too. Only where the user set no budget, and all times are known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from ..options.profile import OffloadProfile
from ..units import MIB, align_up
from .capacity import Machine
from .device_plan import DevicePlan, find_allowed
from .device_store import rate_from, store_room
from .prefetch_schedule import spread_residents
from .run import Use
from .run_plan import first_and_further, tiled_seconds
from .sizes import Sizes
from .staging_layout import window_seconds
from .tiles import Tiles
from .workload import Workload

__all__ = ["Budgeted", "Settled", "choose_budgets"]

# Each further choice has to make a run so much shorter, and all of them together.
LEAST_STEP = 0.002
LEAST_GAIN = 0.01
# The budgets that are tried: these parts of the blocks, in whole blocks.
NUM_LEVELS = 8
# The staging memory that is tried beside the residents, in blocks.
STAGING_SIZES = (1.0, 1.5, 2.0)
MOST_ROUNDS = 3
# A run needs so many bytes of a device that it does not have: no choice at all.
OVERFULL_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """A component as it was planned, and where else it may compute."""

    sizes: Sizes
    profile: OffloadProfile
    shares: tuple[DevicePlan, ...]
    pass_s: Mapping[int, float]
    """What a forward takes, by the number of the use."""
    devices: tuple[str, ...] = ()
    """Those on each of which alone it may be, with any budget; none: it stays as it is."""
    stores: tuple[str, ...] = ()
    """The devices from whose memory it may stream."""
    store: str | None = None
    """The one from which it was planned to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgeted:
    """A component on one device with a budget, by estimate."""

    device: str
    budget_bytes: int | None
    """The most that its weights may take; None: all that the device has."""
    share: DevicePlan
    pass_s: Mapping[int, float]
    forwards_s: float
    """What all forwards of a run take at least."""
    store: str | None = None
    """The device from whose memory it streams; None: from where it rests."""


def choose_budgets(parts: Mapping[str, Settled], uses: Sequence[Use], machine: Machine) -> dict[str, Budgeted]:
    """Return the components that had better be elsewhere or keep fewer blocks; none where that gains nothing.

    Arithmetic by estimates; some hundred of them take tens of milliseconds.
    """

    def seconds_of(chosen: Mapping[str, Budgeted]) -> float:
        if not may_store(parts, chosen, machine):
            return math.inf
        shares = {name: (chosen[name].share,) if name in chosen else part.shares for name, part in parts.items()}
        passes = {
            number: (chosen[use.component] if use.component in chosen else parts[use.component]).pass_s[number]
            for number, use in enumerate(uses)
        }

        def pass_s(number: int, tiles: Tiles | None) -> float | None:
            tiling = uses[number].tiling
            if tiles is None or tiling is None:
                return passes[number]
            name = uses[number].component
            share, store = shares[name][0], chosen[name].store if name in chosen else parts[name].store
            return tiled_seconds(share, tiling, tiles, rate_from(store, share.device, machine))

        run = first_and_further(shares, uses, machine, pass_s=pass_s)
        over = sum(
            max(0, -run.remaining_bytes(device) - machine.device(device).kept_free_bytes) for device in run.devices
        )
        return math.inf if run.seconds is None else run.seconds + over * OVERFULL_S

    options = {
        name: [
            option
            for device, store in product(part.devices, (None, *part.stores))
            if device != store
            for option in budgets_on(part.sizes, device, store, numbered(uses, name), machine, part.profile)
        ]
        for name, part in parts.items()
    }
    planned_s = {
        name: sum(use.num_passes * part.pass_s[number] for number, use in numbered(uses, name))
        for name, part in parts.items()
    }
    quickest = {
        name: min(found, key=lambda option: (option.store is not None, option.forwards_s))
        for name, found in options.items()
        if found
    }
    before_s = seconds_of({})
    starts = [improve(start, parts, options, planned_s, seconds_of) for start in ({}, quickest)]
    best_s, best = min(starts, key=lambda found: found[0])
    return dict(best) if best_s < before_s * (1 - LEAST_GAIN) else {}


def improve(
    start: Mapping[str, Budgeted],
    parts: Mapping[str, Settled],
    options: Mapping[str, Sequence[Budgeted]],
    planned_s: Mapping[str, float],
    seconds_of: Callable[[Mapping[str, Budgeted]], float],
) -> tuple[float, Mapping[str, Budgeted]]:
    """Return what a run takes with the best choice found by changes of one component, or of two, and that choice.

    Args:
        planned_s: by component, what its forwards take as planned.
    """
    best, best_s = start, seconds_of(start)

    def try_all(names: Sequence[str], among: Mapping[str, Sequence[Budgeted]]) -> None:
        nonlocal best, best_s
        others = {other: option for other, option in best.items() if other not in names}
        rest_s = sum(others[name].forwards_s if name in others else planned_s[name] for name in parts.keys() - {*names})
        for found in product(*((None, *among[name]) for name in names)):
            chosen = dict(zip(names, found, strict=True))
            own_s = sum(planned_s[name] if each is None else each.forwards_s for name, each in chosen.items())
            if rest_s + own_s < best_s * (1 - LEAST_STEP):
                changed = {**others, **{name: each for name, each in chosen.items() if each is not None}}
                seconds = seconds_of(changed)
                if seconds < best_s * (1 - LEAST_STEP):
                    best, best_s = changed, seconds

    for _ in range(MOST_ROUNDS):
        round_s = best_s
        for name in options:
            try_all([name], options)
        # Two at a time only with other budgets where they are.
        here = {name: [each for each in options[name] if is_there(each, parts[name], best.get(name))] for name in parts}
        for pair in combinations(options, 2):
            try_all(pair, here)
        if best_s == round_s:
            break
    return best_s, best


def is_there(option: Budgeted, part: Settled, chosen: Budgeted | None) -> bool:
    """Whether an option leaves a component on its device, and its store."""
    if chosen is not None:
        return (option.device, option.store) == (chosen.device, chosen.store)
    return (option.device, option.store) == (part.shares[0].device, part.store)


def numbered(uses: Sequence[Use], component: str) -> list[tuple[int, Use]]:
    """Return the uses of a component with their numbers."""
    return [(number, use) for number, use in enumerate(uses) if use.component == component]


def may_store(parts: Mapping[str, Settled], chosen: Mapping[str, Budgeted], machine: Machine) -> bool:
    """Whether each device that stores has room for what it stores, and nothing computes there."""
    stored: dict[str, int] = {}
    computing = set()
    for name, part in parts.items():
        shares = (chosen[name].share,) if name in chosen else part.shares
        store = chosen[name].store if name in chosen else part.store
        computing |= {share.device for share in shares}
        if store:
            stored[store] = stored.get(store, 0) + sum(share.streamed_bytes for share in shares)
    return not computing & stored.keys() and all(
        num_bytes <= store_room(None, machine, "cpu", device).num_bytes for device, num_bytes in stored.items()
    )


def budgets_on(
    sizes: Sizes,
    device: str,
    store: str | None,
    uses: Sequence[tuple[int, Use]],
    machine: Machine,
    profile: OffloadProfile,
) -> list[Budgeted]:
    """Return a component alone on a device with several budgets, as far as it can compute with them."""
    numbers = tuple(range(len(sizes.component.blocks)))
    allowed = find_allowed(sizes, device, numbers, machine, profile, first=True, keeps_free=True, current=None)
    blocks, from_ram = [size for size in sizes.blocks if size], machine.device(device).link_bytes_per_s
    rate = from_ram if store is None else store_room(sizes, machine, device, store).bytes_per_s
    if not blocks or rate is None or from_ram is None or any(device not in use.times for _, use in uses):
        return []
    if store is not None and rate <= from_ram:
        return []
    total, largest = sum(blocks), max(blocks)
    fixed = allowed.whole.device_bytes - total
    levels = {total * level // NUM_LEVELS // largest * largest for level in range(1, NUM_LEVELS)}
    # A budget that is not the user's is raised to what lets copies and computes overlap (`find_limit`).
    least = align_up(allowed.least_bytes + largest, MIB) - fixed
    found = []
    for room in (total, *sorted(levels, reverse=True)):
        left = min(room, allowed.left_bytes)
        if left < largest or (room < total and left < max(room, least)) or (store is not None and left == total):
            continue
        share, passes = allowed.whole, {number: use.num_calls * use.times[device].pass_s for number, use in uses}
        if left < total:
            share, passes = fastest(sizes, allowed.whole, left, rate, uses)
        budget_bytes = fixed + room if room < total else None
        forwards_s = sum(use.num_passes * passes[number] for number, use in uses)
        found.append(
            Budgeted(
                device=device,
                budget_bytes=budget_bytes,
                share=share,
                pass_s=passes,
                forwards_s=forwards_s,
                store=store,
            )
        )
    return found


def fastest(
    sizes: Sizes, whole: DevicePlan, left_bytes: int, rate: float, uses: Sequence[tuple[int, Use]]
) -> tuple[DevicePlan, dict[int, float]]:
    """Return a share that streams beside residents spread evenly, and what a forward of each use takes, by estimate."""
    largest, total = max(sizes.blocks), sum(sizes.blocks)
    found: list[tuple[float, int, DevicePlan, dict[int, float]]] = []
    for factor in STAGING_SIZES:
        staging_bytes = min(left_bytes, int(factor * largest))
        resident = spread_residents(sizes.blocks, left_bytes - staging_bytes)
        resident_bytes = sum(sizes.blocks[number] for number in resident)
        passes = {}
        for number, use in uses:
            times = use.times[whole.device]
            work = Workload(sizes.blocks, times.blocks_s, tuple(size / rate for size in sizes.blocks), times.other_s)
            passes[number] = use.num_calls * window_seconds(work, resident, left_bytes - resident_bytes)
        share = replace(
            whole,
            resident=frozenset(),
            resident_bytes=resident_bytes,
            staging_bytes=left_bytes - resident_bytes,
            streamed_bytes=total - resident_bytes,
            streamed_block_bytes=largest,
        )
        found.append((sum(use.num_passes * passes[number] for number, use in uses), len(found), share, passes))
    _, _, share, passes = min(found, key=lambda each: each[:2])
    return share, passes
