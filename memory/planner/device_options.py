"""The ways to compute a component: on each accelerator alone, split, or with another GPU as its store.

What each takes is estimated by bounds that need no schedule ([Note: choosing devices] in `device_choice.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from ..options.placement import SplitRatio
from ..options.profile import OffloadProfile
from ..weights.component import Component
from .block_groups import GROWTHS, MOST_GROUPS, cut_runs, of_devices
from .calls_at_once import compute_at_once, devices_by_block
from .capacity import DeviceCapacity, Machine
from .device_plan import Allowed, DevicePlan, find_allowed
from .device_store import StoreRoom, store_room
from .layer_split import Cutter
from .pipeline import NUM_CALLS, pipeline_of
from .run import Use, longest_use
from .run_plan import ASSUMED_BYTES_PER_S, copy_rate, hop_seconds
from .sizes import Sizes
from .step_seconds import step_seconds

__all__ = ["SMALLEST_GAIN", "Choice", "choose_for", "choose_in_turn", "find_choices", "stored_elsewhere"]

# Another choice has to be so much faster to be preferred.
SMALLEST_GAIN = 0.005
# The second device's part of a split over two; of few blocks each cut is tried.
TRIED_RATIOS = (0.15, 0.3, 0.45, 0.6, 0.75)
# Of groups in turn, their numbers beside that of the devices, and how they grow: what a plan then tries closely.
TRIED_GROUPS = (1, 1.5, 2, 3, 4, 5, 6, 8, 12)
TRIED_GROWTHS = (0.0, 0.3)
# Moving single blocks between more groups gains a hundredth at most: that is left to the plan.
MOST_MOVED = 36
# As few blocks as these are cut as closely as in a plan.
FEW_UNITS = 16
# The numbers by which orders of devices are compared, and how many of those are then looked at closely.
QUICK_GROUPS = (1, 2, 3, 5)
MOST_ORDERS = 2
# Over more devices than these, only the orders by available memory are tried.
MOST_PERMUTED = 3
# A copy is queued in pieces, so of a link's time hardly any hides behind nothing.
BLOCKS_AHEAD = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to compute a component: devices, the blocks of each, and what a forward takes at least."""

    component: Component
    devices: tuple[SplitRatio, ...]
    shares: tuple[DevicePlan, ...]
    copied_bytes: Mapping[str, int]
    """The bytes that a call copies to each device."""
    store: StoreRoom | None = None
    """The other device from whose memory they come."""
    has_groups: bool = False
    """Whether the devices of a split have groups of blocks in turn."""
    at_once: tuple[tuple[Use, float], ...] = ()
    """What a forward of each use takes whose calls its devices compute at the same time."""

    @property
    def names(self) -> str:
        return " & ".join(split.device for split in self.devices)

    @property
    def streams(self) -> bool:
        return any(self.copied_bytes.values())

    def pass_s(self, use: Use, machine: Machine) -> float:
        """Return what a forward takes at least, all its calls together."""
        at_once_s = next((seconds for known, seconds in self.at_once if known is use), None)
        return use.num_calls * self.call_s(use, machine) if at_once_s is None else at_once_s

    def call_s(self, use: Use, machine: Machine) -> float:
        """Return what a call takes at least: computing or copying on each device, whichever is longer, and hops."""
        seconds = 0.0
        for index, share in enumerate(self.shares):
            times = use.times.get(share.device)
            computing_s = 0.0
            if times is not None:
                computing_s = sum(times.blocks_s[number] for number in share.blocks)
                computing_s += times.other_s if index == 0 else 0.0
            copying_s = 0.0
            if share.device != "cpu":
                rate = (self.store and self.store.bytes_per_s) or copy_rate(machine.device(share.device))
                copying_s = self.copied_bytes[share.device] / rate
            seconds += max(computing_s, copying_s)
        return seconds + self.hop_s(use, machine)

    def hop_s(self, use: Use, machine: Machine) -> float:
        """Return what the hops of a call take; over a link of which nothing is known, at an assumed speed."""
        return hop_seconds(self.shares, use.carried_bytes, machine, assumed=ASSUMED_BYTES_PER_S) or 0.0


def stored_elsewhere(choice: Choice, part: Sizes, machine: Machine) -> list[Choice]:
    """Return the same where what streams comes from another device's free memory, no slower than from RAM."""
    (share, *others), found = choice.shares, []
    copied = choice.copied_bytes[share.device]
    if others or not copied:
        return []
    for device in machine.chosen_from:
        if device.name != share.device:
            room = store_room(part, machine, share.device, device.name)
            if room.num_bytes >= copied and is_no_slower(room, copy_rate(machine.device(share.device))):
                found.append(replace(choice, store=room))
    return found


def is_no_slower(room: StoreRoom, from_ram: float) -> bool:
    """Whether a store is known to be as fast as RAM; through RAM, as where cards have no access, that is no gain."""
    if room.link is None or room.link.bytes_per_s is None:
        return False
    return room.link.bytes_per_s > from_ram * (1 - SMALLEST_GAIN if room.link.is_direct else 1)


def find_choices(
    part: Sizes,
    accelerators: Sequence[DeviceCapacity],
    machine: Machine,
    profile: OffloadProfile,
    uses: Sequence[Use],
    *,
    may_split: bool,
) -> list[Choice]:
    """Return the ways to compute a component: on each accelerator alone, and split.

    Split in runs if one accelerator does not hold all of it; in groups in turn if a forward consists of several calls.
    """
    names = [device.name for device in accelerators]
    alone = [choose_for(part, (SplitRatio(device=name),), machine, profile, uses) for name in names]
    found = [choice for choice in alone if choice is not None]
    if not may_split:
        return found
    orders = [order for count in range(2, MOST_PERMUTED + 1) for order in permutations(names[:MOST_PERMUTED], count)]
    orders += [tuple(names[:count]) for count in range(MOST_PERMUTED + 1, len(names) + 1)]
    orders = [order for order in orders if len(order) <= len(part.component.blocks)]
    is_held = len(found) == len(names) and not any(choice.streams for choice in found)
    if not is_held:
        for order in orders:
            for ratios in cuts_of(part, order, machine, profile):
                choice = choose_for(part, ratios, machine, profile, uses)
                if choice is not None:
                    found.append(choice)
    if any(use.num_calls > 1 and not use.one_by_one for use in uses):
        splits = [tuple(SplitRatio(device=name) for name in order) for order in orders]
        part = part.decoding(NUM_CALLS)
        quick = [choose_in_turn(part, split, machine, profile, uses, is_quick=True) for split in splits]
        fastest = sorted(filter(None, quick), key=lambda choice: total_s(choice, uses, machine))
        closely = (choose_in_turn(part, choice.devices, machine, profile, uses) for choice in fastest[:MOST_ORDERS])
        found += [choice for choice in closely if choice is not None]
    return found


def total_s(choice: Choice, uses: Sequence[Use], machine: Machine) -> float:
    """Return what all forwards of some uses take at least."""
    return sum(use.num_passes * choice.pass_s(use, machine) for use in uses)


def choose_in_turn(
    part: Sizes,
    devices: tuple[SplitRatio, ...],
    machine: Machine,
    profile: OffloadProfile,
    uses: Sequence[Use],
    *,
    is_quick: bool = False,
) -> Choice | None:
    """Return a component split in groups in turn, about as a plan would cut it, or about as fast if ``is_quick``.

    None where it does not fit all resident, or nothing tells how long it takes.
    """
    use = longest_use(uses, part.component.name)
    used = devices[: max(1, len(part.component.blocks))]
    pipeline = None if use is None else pipeline_of(use, [split.device for split in used], machine)
    if use is None or pipeline is None or len(used) < 2:
        return None
    part = part.decoding(NUM_CALLS)
    cutter = Cutter(part, used, machine, profile, pipeline)
    if is_quick:
        runs = cutter.best(beside(QUICK_GROUPS, len(used)), (0.0,), is_close=False, most_moved=0)
    elif len(cutter.units) <= FEW_UNITS:
        runs = cutter.best(range(len(used), FEW_UNITS + 1), GROWTHS)
    else:
        runs = cutter.best(beside(TRIED_GROUPS, len(used)), TRIED_GROWTHS, is_close=False, most_moved=MOST_MOVED)
    if runs is None:
        return None
    known_s = (use, cutter.seconds(runs)) if is_quick else None
    choice = choose_for(part, used, machine, profile, uses, of_devices(runs, len(used)), known_s)
    return replace(choice, has_groups=True) if choice is not None and compute_at_once(choice.shares, use) else None


def beside(factors: Sequence[float], num_devices: int) -> list[int]:
    """Return numbers of groups that are so many times the number of devices."""
    return [min(MOST_GROUPS, round(num_devices * factor)) for factor in factors]


def cuts_of(
    part: Sizes, order: Sequence[str], machine: Machine, profile: OffloadProfile
) -> list[tuple[SplitRatio, ...]]:
    """Return where to cut a component: in proportion to what devices have, each filled before the next, and between."""
    found = [tuple(SplitRatio(device=name) for name in order)]
    if len(order) == 2:
        num_blocks = len(part.blocks)
        few = [round(number / num_blocks, 3) for number in range(1, num_blocks)]
        tried = few if num_blocks <= len(TRIED_RATIOS) + 1 else TRIED_RATIOS
        found += [(SplitRatio(device=order[0]), SplitRatio(device=order[1], ratio=ratio)) for ratio in tried]
    total = sum(part.blocks)
    rooms = [allowed_on(part, name, machine, profile, first=index == 0) for index, name in enumerate(order)]
    ratios, left = [], 1.0
    for room in rooms[:-1]:
        ratio = min(left, room / total)
        ratios.append(ratio)
        left -= ratio
    ratios.append(left)
    smallest = min(part.blocks) / total / 2
    if all(ratio > smallest for ratio in ratios):
        # In whole thousandths, cut off: the text that gives the same plan again stays short.
        later = [int(ratio * 1000) / 1000 for ratio in ratios[1:]]
        if sum(later) < 1.0 and all(later):
            splits = [SplitRatio(device=order[0])]
            splits += [SplitRatio(device=name, ratio=ratio) for name, ratio in zip(order[1:], later, strict=True)]
            found.append(tuple(splits))
    return found


def allowed_on(part: Sizes, device: str, machine: Machine, profile: OffloadProfile, *, first: bool) -> int:
    """Return the bytes that blocks may take of a device if no other share is there."""
    numbers = tuple(range(len(part.component.blocks)))
    allowed = find_allowed(part, device, numbers, machine, profile, first=first, keeps_free=first, current=None)
    return max(0, allowed.left_bytes)


def choose_for(
    part: Sizes,
    devices: tuple[SplitRatio, ...],
    machine: Machine,
    profile: OffloadProfile,
    uses: Sequence[Use] = (),
    groups: Sequence[tuple[int, ...]] = (),
    known_s: tuple[Use, float] | None = None,
) -> Choice | None:
    """Return a component on given devices; None where its least form exceeds one of them.

    Args:
        uses: its own.
        groups: the blocks of each device; by default one run each, by the ratios.
        known_s: what a forward of one of the uses takes if its calls are computed at the same time.
    """
    used = devices[: max(1, len(part.component.blocks))]
    runs: Sequence[tuple[int, ...]] = groups or [tuple(range(len(part.component.blocks)))]
    if len(used) > 1 and not groups:
        left = 1.0 - sum(split.ratio or 0.0 for split in used)
        rooms = [machine.device(split.device).available_bytes for split in used]
        in_all = sum(room for split, room in zip(used, rooms, strict=True) if split.ratio is None) or 1
        ratios = [split.ratio or left * room / in_all for split, room in zip(used, rooms, strict=True)]
        runs = cut_runs(part.blocks, ratios)
    shares, copied = [], {}
    for index, (split, run) in enumerate(zip(used, runs, strict=True)):
        allowed = find_allowed(
            part, split.device, run, machine, profile, first=index == 0, keeps_free=True, current=None
        )
        share = allowed.whole
        if not allowed.holds_all:
            if allowed.least_bytes > allowed.limit_bytes or not run:
                return None
            share, copied[split.device] = estimate_streaming(allowed)
        copied.setdefault(split.device, 0)
        shares.append(share)
    choice = Choice(component=part.component, devices=used, shares=tuple(shares), copied_bytes=copied)
    if choice.streams or len(shares) < 2:
        return choice
    names, at_once = [split.device for split in used], []
    for use in uses:
        if not compute_at_once(shares, use):
            continue
        if known_s is not None and known_s[0] is use:
            at_once.append(known_s)
        elif (pipeline := pipeline_of(use, names, machine)) is not None:
            at_once.append((use, step_seconds(pipeline, devices_by_block(shares))))
    return replace(choice, at_once=tuple(at_once))


def estimate_streaming(allowed: Allowed) -> tuple[DevicePlan, int]:
    """Return a share that streams about as much as a plan would, and the bytes of that."""
    total = sum(allowed.sizes.values())
    staging_bytes = min(allowed.left_bytes, BLOCKS_AHEAD * allowed.largest_bytes)
    resident_bytes = max(0, allowed.left_bytes - staging_bytes)
    share = replace(
        allowed.whole,
        resident=frozenset(),
        resident_bytes=resident_bytes,
        staging_bytes=staging_bytes,
        streamed_bytes=total - resident_bytes,
        streamed_block_bytes=allowed.largest_bytes,
    )
    return share, total - resident_bytes
