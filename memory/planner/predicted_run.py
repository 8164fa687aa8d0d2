"""What a run is predicted to take with its plans: each forward by the schedule that measured times will give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..weights.component import Component
from .capacity import Machine
from .device_plan import DevicePlan
from .device_store import rate_from
from .plan import Plan
from .replanning import replan_shares
from .run import BlockTimes, Tiling, Use
from .run_plan import RunPlan, first_and_further, hop_seconds, run_seconds
from .sizes import Sizes
from .staging_layout import first_seconds
from .step_seconds import compute_at_once, devices_by_block, pipeline_of, step_seconds
from .tile_room import each_tile
from .tiles import Tiles
from .workload import Workload

__all__ = ["PredictedRun", "forward_seconds"]


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
        self.tiled_s: dict[tuple[int, Tiles], float | None] = {}
        self.shares = {
            name: self.settled(name, next((use.times for use in uses if use.component == name and use.times), {}))
            for name in self.plans
        }

    def settled(self, name: str, times: Mapping[str, BlockTimes]) -> tuple[DevicePlan, ...]:
        """Return the shares that a component has when its blocks take these times, which its first pass shows.

        The plan's own where nothing streams, or no times are predicted.
        """
        plan, profile = self.plans[name]
        seconds = seconds_where(plan.shares, times)
        if seconds is None or not plan.streams:
            return plan.shares
        return replan_shares(self.components[name], plan, self.machine, profile, seconds).shares

    def run(self) -> RunPlan:
        """Return what the run does ([Note: repeated run] in `run_plan.py`)."""
        shares = {name: plan.shares for name, (plan, _) in self.plans.items()}
        return first_and_further(shares, self.uses, self.machine, pass_s=self.pass_s, cold_s=self.cold_s)

    def cold_s(self, number: int, tiles: Tiles | None) -> float:
        """Return how much longer a first forward takes before which nothing was staged; of splits that is not known."""
        use = self.uses[number]
        name, tiling = use.component, use.tiling
        found = use.times if tiles is None or tiling is None else tiling.times(tiles)
        count = 1 if tiles is None or tiling is None else tiling.num_forwards(tiles)
        shares = (
            self.shares[name] if count == 1 else self.settled(name, {at: each_tile(found[at], count) for at in found})
        )
        if len(shares) > 1 or shares[0].pass_s is None or shares[0].device not in found:
            return 0.0
        (share,) = shares
        rate = rate_from(self.plans[name][0].store, share.device, self.machine)
        if rate is None:
            return 0.0
        times, sizes = each_tile(found[share.device], count), Sizes(self.components[name], self.plans[name][0].forms)
        work = Workload(sizes.blocks, times.blocks_s, tuple(size / rate for size in sizes.blocks), times.other_s)
        return max(0.0, first_seconds(work, share.resident, share.staging_bytes, share.offsets) - share.pass_s)

    def pass_s(self, number: int, tiles: Tiles | None) -> float | None:
        """Return what a forward of a use takes, in one piece or all its tiles; None where that is not known."""
        use = self.uses[number]
        shares = self.shares[use.component]
        if tiles is None or use.tiling is None or len(shares) != 1:
            return forward_seconds(shares, use, self.machine)
        if (number, tiles) not in self.tiled_s:
            self.tiled_s[number, tiles] = self.tiles_s(use, use.tiling, tiles)
        return self.tiled_s[number, tiles]

    def tiles_s(self, use: Use, tiling: Tiling, tiles: Tiles) -> float | None:
        """Return what all tiles take on one device, which copies what streams once for each."""
        count, times = tiling.num_forwards(tiles), tiling.times(tiles)
        each = {device: each_tile(found, count) for device, found in times.items()}
        call_s = run_seconds(self.settled(use.component, each), each, 0.0)
        return None if call_s is None else count * call_s


def seconds_where(shares: Sequence[DevicePlan], times: Mapping[str, BlockTimes]) -> dict[int, float] | None:
    """Return the seconds of all blocks, each on the device where it computes; None where a device has no times."""
    if any(share.device not in times for share in shares):
        return None
    by_device = {share.device: times[share.device].by_block() for share in shares}
    where = {number: share.device for share in shares for number in share.blocks}
    return {number: by_device[where[number]][number] for number in sorted(where)} or None


def forward_seconds(shares: Sequence[DevicePlan], use: Use, machine: Machine) -> float | None:
    """Return what a forward takes, all its calls together: at the same time where they can be, else in turn."""
    if compute_at_once(shares, use):
        pipeline = pipeline_of(use, [share.device for share in shares], machine)
        return None if pipeline is None else step_seconds(pipeline, devices_by_block(shares))
    hop_s = hop_seconds(shares, use.carried_bytes, machine)
    call_s = None if hop_s is None else run_seconds(shares, use.times, hop_s)
    return None if call_s is None else use.num_calls * call_s
