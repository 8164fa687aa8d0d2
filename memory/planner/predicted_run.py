"""What a run is predicted to take with its plans.

A component whose forwards are timed in a run gets the schedule that these times give. That takes a forward to warm up,
one that is timed, and another one that profits; what computes less often goes on with the schedule of its plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..weights.component import Component
from .calls_at_once import compute_at_once, devices_by_block
from .capacity import Machine
from .device_plan import DevicePlan
from .device_store import reached_at, store_room
from .launched_passes import launched_pass_seconds
from .pipeline import pipeline_of
from .plan import Plan
from .replanning import replan_shares
from .run import BlockTimes, Tiling, Use
from .run_plan import RunPlan, first_and_further, hop_seconds, run_seconds
from .sizes import Sizes
from .staging_layout import first_seconds, pass_seconds
from .step_seconds import step_seconds
from .tile_room import each_tile
from .tiles import Tiles
from .workload import Workload, find_speeds, find_workload, in_order

__all__ = ["PredictedRun", "forward_seconds"]

# The forwards of a run after which its schedule is by their times.
LEAST_TIMED = 3


class PredictedRun:
    """The shares that components have once the times of their blocks were measured, and what a run takes with those.

    Args:
        components: by name, what the plans are of.
    """

    def __init__(
        self, components: Mapping[str, Component], plans: Sequence[Plan], uses: Sequence[Use], machine: Machine
    ) -> None:
        self.components = components
        self.plans = {part.component: (part, plan.profile) for plan in plans for part in plan.components}
        self.uses = uses
        self.machine = machine
        first: dict[str, Mapping[str, BlockTimes]] = {}
        for use in uses:
            if use.times:
                first.setdefault(use.component, use.times)
        self.shares = {name: self.settled(name, first.get(name, {})) for name in self.plans}
        self.played = {(name, id(times)): self.shares[name] for name, times in first.items() if name in self.plans}
        """By component and the times of a use, the shares with what a pass takes then."""
        self.tiled: dict[tuple[int, Tiles], tuple[tuple[DevicePlan, ...], Mapping[str, BlockTimes]]] = {}
        """By use and tiles, the same of one tile, and what that computes."""

    def settled(self, name: str, times: Mapping[str, BlockTimes], num_forwards: int = 1) -> tuple[DevicePlan, ...]:
        """Return the shares that a component has when its blocks take these times, as far as its forwards show them.

        The plan's own where nothing streams, or no times are predicted.

        Args:
            num_forwards: how often the blocks run for one forward, as in tiles.
        """
        plan, profile = self.plans[name]
        seconds = seconds_where(plan.shares, times)
        if seconds is None or not plan.streams:
            return plan.shares
        forwards = num_forwards * sum(use.num_passes * use.num_calls for use in self.uses if use.component == name)
        if forwards < LEAST_TIMED and len(plan.shares) == 1:
            shares = self.replayed(name, plan.shares, seconds)
            if shares[0].pass_s is not None:
                return self.as_launched(name, shares, times)
        shares = replan_shares(self.components[name], plan, self.machine, profile, seconds).shares
        return self.as_launched(name, shares, times)

    def during(self, use: Use) -> tuple[DevicePlan, ...]:
        """Return the shares while a use computes: what stays and where blocks lie is by the first use of a component,
        what a pass takes is by the times of this one."""
        name, key = use.component, (use.component, id(use.times))
        if key not in self.played:
            shares, seconds = self.shares[name], seconds_where(self.shares[name], use.times)
            if seconds is not None:
                shares = self.as_launched(name, self.replayed(name, shares, seconds), use.times)
            self.played[key] = shares
        return self.played[key]

    def replayed(
        self, name: str, shares: tuple[DevicePlan, ...], seconds: Mapping[int, float]
    ) -> tuple[DevicePlan, ...]:
        """Return shares with what a pass takes whose blocks compute so long, in this order."""
        found = []
        for share in shares:
            work = self.workload(name, share, seconds) if share.streamed else None
            if work is not None:
                resident, offsets = share.schedule_in(in_order(share.blocks, seconds))
                share = replace(share, pass_s=pass_seconds(work, resident, share.staging_bytes, offsets))
            found.append(share)
        return tuple(found)

    def as_launched(
        self, name: str, shares: tuple[DevicePlan, ...], times: Mapping[str, BlockTimes]
    ) -> tuple[DevicePlan, ...]:
        """Return shares with the seconds of a forward as its host launches it, where one device streams all by one
        link."""
        plan, _ = self.plans[name]
        share = shares[0]
        bytes_per_s = self.machine.device(share.device).link_bytes_per_s
        streams_all = len(shares) == 1 and share.streamed and not (plan.store or share.blocking or share.read_bytes)
        if not streams_all or not bytes_per_s:
            return shares
        sizes = Sizes(self.components[name], plan.forms).blocks
        pass_s = launched_pass_seconds(share, times[share.device], sizes, bytes_per_s)
        return (replace(share, pass_s=pass_s),) if pass_s else shares

    def run(self) -> RunPlan:
        """Return what the run does ([Note: repeated run] in `run_plan.py`)."""
        shares = {name: plan.shares for name, (plan, _) in self.plans.items()}
        return first_and_further(shares, self.uses, self.machine, pass_s=self.pass_s, cold_s=self.cold_s)

    def cold_s(self, number: int, tiles: Tiles | None) -> float:
        """Return how much longer a first forward takes before which nothing was staged; of splits that is not known."""
        use = self.uses[number]
        shares, times = self.during(use), use.times
        if tiles is not None and use.tiling is not None:
            shares, times = self.of_tile(number, use.tiling, tiles)
        seconds = seconds_where(shares, times)
        if len(shares) > 1 or seconds is None:
            return 0.0
        (share,) = shares
        work = self.workload(use.component, share, seconds) if share.streamed else None
        if work is None or share.pass_s is None:
            return 0.0
        resident, offsets = share.schedule_in(in_order(share.blocks, seconds))
        return max(0.0, first_seconds(work, resident, share.staging_bytes, offsets) - share.pass_s)

    def workload(self, name: str, share: DevicePlan, seconds: Mapping[int, float]) -> Workload | None:
        """Return what a share does in a pass; None where the speed of copies is not known.

        Args:
            seconds: what the blocks of all shares compute, in the order in which they run.
        """
        plan, _ = self.plans[name]
        all_sizes = Sizes(self.components[name], plan.forms).blocks
        sizes = {number: all_sizes[number] for number in in_order(share.blocks, seconds)}
        machine, files = self.machine, frozenset(share.streamed if share.read_bytes else ())
        if plan.store:
            room = store_room(None, machine, share.device, plan.store)
            machine, files = reached_at(machine, share.device, room), frozenset()
        speeds = find_speeds(machine.device(share.device), sizes, share.blocking, files)
        return None if speeds is None else find_workload(sizes, speeds, 0, share.blocking, files, seconds)

    def pass_s(self, number: int, tiles: Tiles | None) -> float | None:
        """Return what a forward of a use takes, in one piece or all its tiles; None where that is not known."""
        use = self.uses[number]
        if tiles is None or use.tiling is None or len(self.shares[use.component]) != 1:
            return forward_seconds(self.during(use), use, self.machine)
        call_s = run_seconds(*self.of_tile(number, use.tiling, tiles), 0.0)
        return None if call_s is None else use.tiling.num_forwards(tiles) * call_s

    def of_tile(
        self, number: int, tiling: Tiling, tiles: Tiles
    ) -> tuple[tuple[DevicePlan, ...], Mapping[str, BlockTimes]]:
        """Return the shares while tiles are computed, which copy what streams once for each, and what each computes."""
        if (number, tiles) not in self.tiled:
            count = tiling.num_forwards(tiles)
            each = {device: each_tile(found, count) for device, found in tiling.times(tiles).items()}
            self.tiled[number, tiles] = self.settled(self.uses[number].component, each, count), each
        return self.tiled[number, tiles]


def seconds_where(shares: Sequence[DevicePlan], times: Mapping[str, BlockTimes]) -> dict[int, float] | None:
    """Return the seconds of all blocks, each on the device where it computes; None where a device has no times."""
    if any(share.device not in times for share in shares):
        return None
    by_device = {share.device: times[share.device].by_block() for share in shares}
    where = {number: share.device for share in shares for number in share.blocks}
    order = [number for number in times[shares[0].device].order if number in where]
    return {number: by_device[where[number]][number] for number in order} or None


def forward_seconds(shares: Sequence[DevicePlan], use: Use, machine: Machine) -> float | None:
    """Return what a forward takes, all its calls together: at the same time where they can be, else in turn."""
    if compute_at_once(shares, use):
        pipeline = pipeline_of(use, [share.device for share in shares], machine)
        return None if pipeline is None else step_seconds(pipeline, devices_by_block(shares))
    hop_s = hop_seconds(shares, use.carried_bytes, machine)
    call_s = None if hop_s is None else run_seconds(shares, use.times, hop_s)
    return None if call_s is None else use.num_calls * call_s
