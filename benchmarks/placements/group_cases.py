"""Splits in groups in turn whose planning is timed: steps of several calls, whose times and hops are known."""

from __future__ import annotations

from dataclasses import dataclass

from highwater.memory.options.placement import parse_placement
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.request import PlanRequest
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import Component

# What all blocks take on a device of speed 1, as Flux's at 1024x1024 on an RTX 4090, what lies between them, and what
# the host takes to launch it all.
BLOCKS_S, REST_S, LAUNCH_S = 0.6, 0.001, 0.002
LINK_BYTES_PER_S = 25e9


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupCase:
    num_blocks: int
    speeds: tuple[float, ...]
    num_calls: int
    carried_mib: int
    """What the blocks hand on to each other."""
    placement: str
    """`ALL` stands for the names of all devices."""
    before_ms: int
    """What the first plan took when each block of each call was still played, on two cores of a Xeon at 2.5 GHz."""
    limit_ms: int

    def request(self, component: Component) -> PlanRequest:
        names = [f"gpu:{index}" for index in range(len(self.speeds))]
        sizes = [block.weight_bytes for block in component.blocks]
        times = {
            name: BlockTimes(
                blocks_s=tuple(BLOCKS_S * size / sum(sizes) / speed for size in sizes),
                other_s=REST_S / speed,
                launch_s=LAUNCH_S,
            )
            for name, speed in zip(names, self.speeds, strict=True)
        }
        devices = [DeviceCapacity(name="cpu", total_bytes=64 * GIB, available_bytes=64 * GIB)]
        devices += [
            DeviceCapacity(name=name, total_bytes=24 * GIB, available_bytes=24 * GIB, link_bytes_per_s=LINK_BYTES_PER_S)
            for name in names
        ]
        use = Use(
            component=component.name, kind=component.kind, num_passes=20, num_calls=self.num_calls,
            carried_bytes=self.carried_mib * MIB, activation_bytes=GIB, times=times,
        )  # fmt: skip
        return PlanRequest(
            components=(component,),
            machine=Machine(devices=tuple(devices), pinned_bytes=32 * GIB),
            placement=parse_placement(self.placement.replace("ALL", "&".join(names)), devices=["cpu", *names]),
            uses=(use,),
        )


def group_case(
    num_blocks: int,
    speeds: tuple[float, ...],
    num_calls: int,
    carried_mib: int,
    placement: str,
    before_ms: int,
    limit_ms: int,
) -> GroupCase:
    return GroupCase(
        num_blocks=num_blocks,
        speeds=speeds,
        num_calls=num_calls,
        carried_mib=carried_mib,
        placement=placement,
        before_ms=before_ms,
        limit_ms=limit_ms,
    )


EQUAL_EIGHT, UNEQUAL_EIGHT = (1.0,) * 8, (1.0, 1.0, 1.0, 0.5, 0.5, 0.8, 0.8, 0.3)
GROUP_CASES = (
    group_case(57, (1.0, 1.0), 2, 28, "auto", 159, 100),
    group_case(57, (1.0, 0.5), 2, 28, "auto", 161, 100),
    group_case(57, (1.0, 1.0), 4, 28, "auto", 234, 100),
    group_case(57, (1.0, 1.0), 2, 28, "ALL/auto", 123, 100),
    group_case(57, (1.0,) * 4, 4, 28, "auto", 353, 300),
    group_case(2000, EQUAL_EIGHT, 4, 1, "auto", 1669, 300),
    group_case(2000, EQUAL_EIGHT, 4, 28, "auto", 437, 300),
    group_case(2000, EQUAL_EIGHT, 2, 28, "ALL/auto", 314, 300),
    group_case(2000, EQUAL_EIGHT, 4, 28, "ALL/auto", 529, 300),
    group_case(2000, UNEQUAL_EIGHT, 8, 28, "ALL/auto", 1011, 300),
)
