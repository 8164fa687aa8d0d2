"""Budgets with which a run takes less time: components that stream a little stay loaded beside each other.

[Note: choosing budgets] By itself a plan gives a component all that its device has, and whatever is there already
leaves for it; a run then copies the same weights forth and back each time. A component that keeps fewer blocks copies
those that stream while it computes, and evicts less. So where a repeated run would reload anything, one component after
another, then two at a time, are tried on each device that is open to them with several budgets and stores, while a run
gets shorter by the reckoning: from what was planned, and from all of them where they compute fastest. The plan with the
budgets is made only if its own prediction is shorter, too. Only where the user set no budget, and all times are known.
What has tiles is tried with room for one piece and for tiles of several sizes ([Note: room for tiles] in
`tile_room.py`), also where its device and its budget are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from ..options.profile import OffloadProfile
from ..units import MIB, align_up
from .capacity import Machine
from .device_plan import DevicePlan, find_allowed
from .device_store import rate_from, store_room
from .prefetch_schedule import spread_residents
from .run import Use
from .run_play import RunPlayer
from .sizes import Sizes
from .staging_layout import window_seconds
from .tile_room import keep_for_uses, room_levels, seconds_with_colors, tiled_times, tiles_seconds, with_room
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
    """Those on each of which alone it may be, with any budget; none: it stays where it is, with what it may take."""
    stores: tuple[str, ...] = ()
    """The devices from whose memory it may stream."""
    cold_s: Mapping[int, float] = field(default_factory=dict)
    """How much longer the first forward of each use takes where nothing is staged."""
    store: str | None = None
    """The one from which it was planned to."""
    tile_bytes: int | None = None
    """What was planned to be kept for its tiles."""


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
    beside_bytes: int
    """What they take of the device beside weights, in the tiles for which there is room."""
    cold_s: Mapping[int, float] = field(default_factory=dict)
    """How much longer the first forward of each use takes where nothing is staged."""
    store: str | None = None
    """The device from whose memory it streams; None: from where it rests."""
    tile_bytes: int | None = None
    """What is kept for its tiles (`Use.tile_bytes`)."""


def choose_budgets(parts: Mapping[str, Settled], uses: Sequence[Use], machine: Machine) -> list[dict[str, Budgeted]]:
    """Return which components had better be elsewhere, keep fewer blocks, or keep less for tiles.

    Up to two answers: the best that keeps room for one piece of everything, and a better one that does not. None where
    that gains nothing. Arithmetic by estimates; some hundred of them take tens of milliseconds.

    Args:
        machine: without what is kept for the uses.
    """
    reckoned = Reckoning(parts, uses, keep_for_uses(machine, uses))
    whole: dict[str, list[Budgeted]] = {}
    tiled: dict[str, list[Budgeted]] = {}
    for name, part in parts.items():
        own = numbered(uses, name)
        whole[name] = options_of(part, own, reckoned.machine)
        levels = sorted({level for _, use in own for level in room_levels(use)}, reverse=True)
        tiled[name] = [] if levels else whole[name]
        tiled[name] += [
            option
            for level in levels
            for using in [with_room(uses, {name: level})]
            for option in options_of(part, numbered(using, name), keep_for_uses(machine, using), tile_bytes=level)
        ]
    before_s = reckoned.seconds_of({})
    found = reckoned.best(whole, [{}])
    answers = [found]
    if any(use.tiling is not None for use in uses):
        answers.append(reckoned.best({name: pareto(options) for name, options in tiled.items()}, [{}, found[1]]))
    best: list[dict[str, Budgeted]] = []
    for seconds, chosen in answers:
        if seconds < before_s * (1 - LEAST_GAIN):
            best.append(dict(chosen))
            before_s = seconds
    return best


class Reckoning:
    """What a run takes by estimate with some of its components elsewhere, or with other budgets."""

    def __init__(self, parts: Mapping[str, Settled], uses: Sequence[Use], machine: Machine) -> None:
        self.parts = parts
        self.uses = uses
        self.machine = machine
        self.player = RunPlayer(uses, machine)
        self.tiled_uses: dict[tuple[int, int | None], Use] = {}
        self.tiles_s: dict[tuple[int, int, Tiles], float | None] = {}
        self.planned_s = {
            name: sum(use.num_passes * part.pass_s[number] for number, use in numbered(uses, name))
            for name, part in parts.items()
        }
        """By component, what its forwards take as planned."""

    def seconds_of(self, chosen: Mapping[str, Budgeted]) -> float:
        if not may_store(self.parts, chosen, self.machine):
            return math.inf
        shares = {name: (chosen[name].share,) if name in chosen else part.shares for name, part in self.parts.items()}
        uses = [
            self.with_tiles(number, use, chosen.get(use.component, self.parts[use.component]).tile_bytes)
            for number, use in enumerate(self.uses)
        ]

        def pass_s(number: int, tiles: Tiles | None) -> float | None:
            use = uses[number]
            name = use.component
            if tiles is None or use.tiling is None:
                return (chosen[name] if name in chosen else self.parts[name]).pass_s[number]
            share, store = shares[name][0], chosen[name].store if name in chosen else self.parts[name].store
            key = id(share), number, tiles
            if key not in self.tiles_s:
                rate = rate_from(store, share.device, self.machine)
                self.tiles_s[key] = tiles_seconds(self.parts[name].sizes, share, use, tiles, rate)
            return self.tiles_s[key]

        def cold_s(number: int, tiles: Tiles | None) -> float:
            name = self.uses[number].component
            return (chosen[name] if name in chosen else self.parts[name]).cold_s.get(number, 0.0)

        run = self.player.sum_up(shares, uses, pass_s=pass_s, cold_s=cold_s)
        if run.seconds is None or any(use.tile_bytes is None for use, _ in run.chosen_tiles):
            return math.inf  # tiles keep what they take: that is another choice
        seconds = seconds_with_colors(run.seconds, (choice for _, choice in run.chosen_tiles))
        return seconds + run.overfull_bytes * OVERFULL_S

    def with_tiles(self, number: int, use: Use, tile_bytes: int | None) -> Use:
        """Return a use with what is kept for its tiles."""
        if use.tiling is None or tile_bytes is None:
            return use
        key = number, tile_bytes
        if key not in self.tiled_uses:
            self.tiled_uses[key] = replace(use, tile_bytes=tile_bytes)
        return self.tiled_uses[key]

    def best(
        self, options: Mapping[str, Sequence[Budgeted]], starts: Sequence[Mapping[str, Budgeted]]
    ) -> tuple[float, Mapping[str, Budgeted]]:
        """Return the shortest run that changes of one or two components find, from some starts and the quickest one."""
        quickest = {
            name: min(found, key=lambda option: (option.store is not None, option.forwards_s))
            for name, found in options.items()
            if found and self.parts[name].devices
        }
        tried = [improve(start, self.parts, options, self.planned_s, self.seconds_of) for start in (*starts, quickest)]
        return min(tried, key=lambda found: found[0])


def options_of(
    part: Settled, uses: Sequence[tuple[int, Use]], machine: Machine, *, tile_bytes: int | None = None
) -> list[Budgeted]:
    """Return the ways to compute a component that are open to it: where it is not, with other tiles alone."""
    found: list[Budgeted] = []
    if part.devices:
        ways = [pair for pair in product(part.devices, (None, *part.stores)) if pair[0] != pair[1]]
    elif tile_bytes is not None and len(part.shares) == 1 and part.shares[0].device != "cpu":
        ways = [(part.shares[0].device, part.store)]
    else:
        ways = []
    for device, store in ways:
        found += budgets_on(
            part.sizes, device, store, uses, machine, part.profile, is_open=bool(part.devices), tile_bytes=tile_bytes
        )
    return found


def pareto(options: Sequence[Budgeted]) -> list[Budgeted]:
    """Return the options of which no other one at the same places is as fast and takes no more."""
    kept: list[Budgeted] = []

    def takes(option: Budgeted) -> tuple[float, int, int]:
        share = option.share
        return option.forwards_s, share.device_bytes + option.beside_bytes, share.fixed_bytes + share.resident_bytes

    for option in sorted(options, key=takes):
        _, *bytes_ = takes(option)
        if not any(
            (other.share.device, other.store) == (option.share.device, option.store)
            and all(theirs <= ours for theirs, ours in zip(takes(other)[1:], bytes_, strict=True))
            for other in kept
        ):
            kept.append(option)
    return kept


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
            room_bytes = store_room(None, machine, "cpu", store).num_bytes
            stored[store] = stored.get(store, 0) + min(room_bytes, sum(share.streamed_bytes for share in shares))
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
    *,
    is_open: bool = True,
    tile_bytes: int | None = None,
) -> list[Budgeted]:
    """Return a component alone on a device with several budgets, as far as it can compute with them.

    Args:
        is_open: whether other budgets than the user's may be tried.
        tile_bytes: what the uses keep for their tiles.
    """
    numbers = tuple(range(len(sizes.component.blocks)))
    allowed = find_allowed(sizes, device, numbers, machine, profile, first=True, keeps_free=True, current=None)
    blocks, from_ram = [size for size in sizes.blocks if size], machine.device(device).link_bytes_per_s
    room_there = 0 if store is None else store_room(sizes, machine, device, store).num_bytes
    rate = from_ram if store is None else store_room(sizes, machine, device, store).bytes_per_s
    if not blocks or rate is None or from_ram is None or any(device not in use.times for _, use in uses):
        return []
    if store is not None and rate <= from_ram:
        return []
    total, largest = sum(blocks), max(blocks)
    fixed = allowed.whole.device_bytes - total
    levels = {total * level // NUM_LEVELS // largest * largest for level in range(1, NUM_LEVELS) if is_open}
    # A budget that is not the user's is raised to what lets copies and computes overlap (`find_limit`).
    least = align_up(allowed.least_bytes + largest, MIB) - fixed
    # What is computed in the tiles for which there is room.
    tiles = {
        number: choice.tiles
        for number, use in uses
        if use.tiling is not None and tile_bytes is not None
        for choice in [use.tiling.choose(tile_bytes)]
        if choice is not None
    }
    beside = max((use.held_bytes + (use.kept_bytes or 0) for _, use in uses), default=0)
    found = []
    for room in (total, *sorted(levels, reverse=True)):
        left = min(room, allowed.left_bytes)
        if left < largest or (room < total and left < max(room, least)) or (store is not None and left == total):
            continue
        # What the store has no room for comes from RAM.
        streamed = max(1, total - left)
        stored = min(streamed, room_there) if store is not None else streamed
        if not stored:
            continue
        works = works_of(sizes, device, uses, tiles, streamed / (stored / rate + (streamed - stored) / from_ram))
        cold: Mapping[int, float] = {}
        share, passes = allowed.whole, {number: count * work.least_s for number, (count, work) in works.items()}
        if left < total:
            share, passes, cold = fastest(sizes, allowed.whole, left, uses, works)
        budget_bytes = fixed + room if room < total else None
        forwards_s = sum(use.num_passes * passes[number] for number, use in uses)
        found.append(
            Budgeted(
                device=device,
                budget_bytes=budget_bytes,
                share=share,
                pass_s=passes,
                forwards_s=forwards_s,
                beside_bytes=beside,
                cold_s=cold,
                store=store,
                tile_bytes=tile_bytes,
            )
        )
    return found


def works_of(
    sizes: Sizes, device: str, uses: Sequence[tuple[int, Use]], tiles: Mapping[int, Tiles], rate: float
) -> dict[int, tuple[int, Workload]]:
    """Return how often the blocks run in a forward of each use, and what they do each time."""
    copies = tuple(size / rate for size in sizes.blocks)
    found = {}
    for number, use in uses:
        times, count = use.times[device], use.num_calls
        if number in tiles and use.tiling is not None:
            times, count = tiled_times(times, use.tiling, tiles[number]), use.tiling.num_forwards(tiles[number])
        found[number] = count, Workload(sizes.blocks, times.blocks_s, copies, times.other_s)
    return found


def fastest(
    sizes: Sizes,
    whole: DevicePlan,
    left_bytes: int,
    uses: Sequence[tuple[int, Use]],
    works: Mapping[int, tuple[int, Workload]],
) -> tuple[DevicePlan, dict[int, float], dict[int, float]]:
    """Return a share that streams beside residents spread evenly, and what a forward of each use takes, by estimate.

    The last is how much longer the first forward of each takes.
    """
    largest, total = max(sizes.blocks), sum(sizes.blocks)
    found: list[tuple[float, int, DevicePlan, dict[int, float]]] = []
    for factor in STAGING_SIZES:
        staging_bytes = min(left_bytes, int(factor * largest))
        resident = spread_residents(sizes.blocks, left_bytes - staging_bytes)
        resident_bytes = sum(sizes.blocks[number] for number in resident)
        passes = {
            number: count * window_seconds(work, resident, left_bytes - resident_bytes)
            for number, (count, work) in works.items()
        }
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
    resident = spread_residents(sizes.blocks, share.resident_bytes)
    cold = {
        number: max(0.0, window_seconds(work, resident, share.staging_bytes, is_first=True) - passes[number] / count)
        for number, (count, work) in works.items()
    }
    return share, passes, cold
