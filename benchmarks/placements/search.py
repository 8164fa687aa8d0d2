"""All placements of a run by reckoned time: devices, cuts, stores, budgets, residents and tiles.

[Note: what is enumerated] For each component: every device alone, with every budget of whole blocks and with all that
the device has, its streamed blocks from page-locked RAM or from each other device; every ordered choice of two or three
devices, cut between any two blocks, each share with all that its device has. Within each budget all choices of
residents. A picture in one piece and in each of the tiles that the planner may choose, on one device. All combinations
of these over the components count, but for those that cannot be among the best: a component's choice that takes
no less memory and no less time than another one at the same places, and what exceeds the bound of [Note: bound].

[Note: bound] A run takes at least all its forwards, and reloads on each device what its components hold there beyond
what the device has: what is kept from one use to the next lies there at once while any of them computes. So a
combination that is not complete takes at least that of its components, and the fastest forwards of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappush, heapreplace
from itertools import combinations, pairwise, permutations

from torch import nn

from highwater.memory.errors import DoesNotFit, InvalidInput
from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.capacity import Machine
from highwater.memory.planner.device_plan import DevicePlan, plan_share
from highwater.memory.planner.device_store import reached_at, store_room
from highwater.memory.planner.run import Use
from highwater.memory.planner.run_plan import first_and_further, hop_seconds, run_seconds
from highwater.memory.planner.sizes import Sizes
from highwater.memory.planner.tile_room import keep_for_uses
from highwater.memory.planner.tiles import Tiles, candidates
from highwater.memory.weights.component import Component
from highwater.memory.weights.form_numbers import AS_THEY_CAME
from highwater.memory.weights.module_component import component_from_module

from .instance import Instance, Part
from .runs import Placed, with_all_residents

__all__ = ["Option", "Search", "options_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to place a component, and what its forwards take then."""

    placement: str
    shares: tuple[DevicePlan, ...]
    use: Use
    pass_s: float
    tiles: Tiles | None = None
    budget_bytes: int | None = None
    store: str = ""
    stored_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.use.num_passes * self.pass_s

    def is_no_better(self, other: Option) -> bool:
        """Whether another one at the same places takes no more of anything."""
        return (
            self.store == other.store
            and [share.device for share in self.shares] == [share.device for share in other.shares]
            and other.seconds <= self.seconds * (1 + 1e-9)
            and other.stored_bytes <= self.stored_bytes
            and (other.use.activation_bytes or 0) <= (self.use.activation_bytes or 0)
            and all(
                theirs.device_bytes <= ours.device_bytes and lasting(theirs) <= lasting(ours)
                for ours, theirs in zip(self.shares, other.shares, strict=True)
            )
        )


def lasting(share: DevicePlan) -> int:
    """Return the bytes of a share that can stay from one use to the next."""
    return share.device_bytes - share.staging_bytes - share.scratch_bytes


def options_of(instance: Instance, part: Part, module: nn.Module) -> list[Option]:
    """Return all ways to place a component that may be among the best."""
    component = component_from_module(module, name=part.name, kind=part.kind)
    with with_all_residents():
        found = sorted(every_option(instance, part, component), key=lambda option: option.seconds)
    kept: list[Option] = []
    for option in found:
        if not any(option.is_no_better(other) for other in kept):
            kept.append(option)
    return kept


def every_option(instance: Instance, part: Part, component: Component) -> Iterator[Option]:
    sizes = Sizes(component, AS_THEY_CAME)
    pictures = [None, *candidates(part.size)] if part.side else [None]
    for tiles in pictures:
        use = part.use(tiles)
        machine = keep_for_uses(instance.machine, [use])
        for device in instance.names:
            for store in ("", *(name for name in instance.names if name != device)):
                yield from alone(sizes, part, use, tiles, machine, device, store)
    use = part.use()
    machine = keep_for_uses(instance.machine, [use])
    for count in (2, 3):
        for devices in permutations(instance.names, count):
            for ends in combinations(range(1, part.num_blocks), count - 1):
                option = split(sizes, part, use, machine, devices, ends)
                if option is not None:
                    yield option


def alone(
    sizes: Sizes, part: Part, use: Use, tiles: Tiles | None, machine: Machine, device: str, store: str
) -> Iterator[Option]:
    """Yield a component on one device, with every budget of whole blocks that it may have."""
    blocks = tuple(range(part.num_blocks))
    reached = reached_at(machine, device, store_room(sizes, machine, device, store)) if store else machine
    for count in range(part.num_blocks, 0, -1):
        budget = None if count == part.num_blocks else count * part.block_bytes
        share = share_on(sizes, device, blocks, reached, use, budget, first=True)
        if share is None or (budget is not None and share.device_bytes + part.block_bytes <= budget):
            continue
        pass_s = run_seconds((share,), use.times, 0.0)
        if pass_s is None or (store and not share.streamed):
            continue
        yield Option(
            placement=f"{part.name}={device}:{store or 'pinned'}",
            shares=(share,),
            use=use,
            pass_s=pass_s,
            tiles=tiles,
            budget_bytes=budget,
            store=store,
            stored_bytes=share.streamed_bytes if store else 0,
        )


def split(
    sizes: Sizes, part: Part, use: Use, machine: Machine, devices: Sequence[str], ends: Sequence[int]
) -> Option | None:
    """Return a component that is cut there; None where that does not fit."""
    cuts = [0, *ends, part.num_blocks]
    runs = [tuple(range(begin, end)) for begin, end in pairwise(cuts)]
    shares = []
    for index, (device, run) in enumerate(zip(devices, runs, strict=True)):
        share = share_on(sizes, device, run, machine, use, None, first=index == 0)
        if share is None:
            return None
        shares.append(share)
    hop_s = hop_seconds(shares, use.carried_bytes, machine)
    pass_s = run_seconds(shares, use.times, hop_s or 0.0)
    if pass_s is None:
        return None
    ratios = [f"{device}@{len(run) / part.num_blocks:g}" for device, run in zip(devices[1:], runs[1:], strict=True)]
    text = f"{part.name}={'&'.join([devices[0], *ratios])}:pinned"
    return Option(placement=text, shares=tuple(shares), use=use, pass_s=pass_s)


def share_on(
    sizes: Sizes, device: str, run: tuple[int, ...], machine: Machine, use: Use, budget: int | None, *, first: bool
) -> DevicePlan | None:
    limits = () if budget is None else (BudgetItem(target=use.component, limit_bytes=budget),)
    seconds = {number: use.times[device].blocks_s[number] for number in range(len(sizes.component.blocks))}
    try:
        return plan_share(
            sizes, device, run, machine, OffloadProfile(budgets=limits), first=first, block_seconds=seconds
        )
    except (DoesNotFit, InvalidInput):
        return None


class Search:
    """The best placements of a run, by reckoned time.

    Args:
        num_best: how many to find.
    """

    def __init__(self, instance: Instance, modules: Mapping[str, nn.Module], num_best: int) -> None:
        self.machine = instance.machine
        self.num_best = num_best
        self.options = [options_of(instance, part, modules[part.name]) for part in instance.parts]
        self.least_s = [0.0]
        """What the forwards of the last components take at least, by how many these are."""
        for found in reversed(self.options):
            self.least_s.append(self.least_s[-1] + min((option.seconds for option in found), default=0.0))
        self.rooms = {
            device.name: device.available_bytes + device.kept_free_bytes for device in self.machine.accelerators
        }
        self.best: list[tuple[float, int, tuple[Option, ...]]] = []
        self.num_tried = 0

    def find(self) -> list[Placed]:
        """Return the best placements, the fastest first."""
        if all(self.options):
            self.extend((), 0.0)
        return [placed(chosen) for _, _, chosen in sorted(self.best, key=lambda found: -found[0])]

    @property
    def worst_s(self) -> float:
        """What the slowest of the best takes: nothing above it is looked at."""
        return -self.best[0][0] if len(self.best) == self.num_best else float("inf")

    def extend(self, chosen: tuple[Option, ...], forwards_s: float) -> None:
        if len(chosen) == len(self.options):
            self.take(chosen)
            return
        rest_s = self.least_s[len(self.options) - len(chosen) - 1]
        for option in self.options[len(chosen)]:
            seconds = forwards_s + option.seconds
            if seconds + rest_s >= self.worst_s:
                break  # they are sorted
            more = (*chosen, option)
            if seconds + rest_s + self.reload_s(more) < self.worst_s:
                self.extend(more, seconds)

    def reload_s(self, chosen: Sequence[Option]) -> float:
        """Return what reloads in a run take at least ([Note: bound])."""
        lasting_bytes, working, stored = dict.fromkeys(self.rooms, 0), dict.fromkeys(self.rooms, 0), {}
        for option in chosen:
            for share in option.shares:
                kept = lasting(share)
                lasting_bytes[share.device] += kept
                beside = share.device_bytes - kept + (option.use.activation_bytes or 0)
                working[share.device] = max(working[share.device], beside)
            if option.store:
                stored[option.store] = stored.get(option.store, 0) + option.stored_bytes
        seconds = 0.0
        for device in self.machine.accelerators:
            over = lasting_bytes[device.name] + working[device.name] + stored.get(device.name, 0)
            over -= self.rooms[device.name]
            if over > 0:
                seconds += over / (device.link_bytes_per_s or 1.0)
        return seconds

    def take(self, chosen: tuple[Option, ...]) -> None:
        self.num_tried += 1
        machine = self.machine
        for option in chosen:
            if option.store:
                machine = beside(machine, option.store, option.stored_bytes)
        uses = [option.use for option in chosen]
        shares = {option.use.component: option.shares for option in chosen}
        run = first_and_further(shares, uses, machine, pass_s=lambda number, _: chosen[number].pass_s)
        fits = all(run.remaining_bytes(name) + machine.device(name).kept_free_bytes >= 0 for name in run.devices)
        if run.seconds is None or not fits or run.seconds >= self.worst_s:
            return
        entry = (-run.seconds, self.num_tried, chosen)
        if len(self.best) < self.num_best:
            heappush(self.best, entry)
        else:
            heapreplace(self.best, entry)


def beside(machine: Machine, store: str, num_bytes: int) -> Machine:
    """Return the machine with so many bytes less of a device."""
    devices = [
        replace(device, available_bytes=max(0, device.available_bytes - num_bytes)) if device.name == store else device
        for device in machine.devices
    ]
    return replace(machine, devices=tuple(devices))


def placed(chosen: Sequence[Option]) -> Placed:
    budgets = tuple(
        BudgetItem(target=option.use.component, limit_bytes=option.budget_bytes)
        for option in chosen
        if option.budget_bytes is not None
    )
    return Placed(
        placement=",".join(option.placement for option in chosen),
        profile=OffloadProfile(budgets=budgets),
        tiles={option.use.component: option.tiles for option in chosen},
        tries_residents=True,
    )
