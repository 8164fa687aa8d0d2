"""How long a step of several calls takes over the devices of a split that compute at the same time.

[Note: launched in turn] One call is launched whole before the next, each with streams of its own. A device computes,
and a link moves, one thing at a time; what is launched later takes the time that is left, in parts if need be. Each
border to another device costs a hop of the hidden states, over the home device, which is the first one. What a block
returns elsewhere goes home beside what computes next there, by way of a copy on its device. A later call begins when
the one before has reached its first block, follows it block by block, and ends behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .capacity import DeviceCapacity, Machine
from .device_plan import DevicePlan
from .run import Use

__all__ = [
    "NUM_CALLS",
    "ONE_SCRATCH",
    "STREAMS",
    "Pipeline",
    "compute_at_once",
    "devices_by_block",
    "hop_seconds_between",
    "pipeline_of",
    "step_seconds",
    "why_in_turn",
]

# Two calls: the conditional and the unconditional half of a step.
NUM_CALLS = 2
# Each copy between devices takes so much more than its bytes do.
LATENCY_S = 1e-5
# A copy within a device reads and writes its memory: about so fast.
MEMORY_BYTES_PER_S = 1e12
# Why calls are made one after the other where not everything is resident.
STREAMS = "blocks stream, and each call of a forward would fetch them"
# Why they are where there is one memory to decode in.
ONE_SCRATCH = "weights are decoded into one scratch memory"
# What sums of floats may be off.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What one call of a component takes on the devices of a split, in seconds or in any other unit of time.

    Args:
        block_s: of each device, in the order of the split, what each block takes there.
        hop_s: of each device, what a hop of the hidden states takes between it and the first one.
        copy_s: of each device, what a copy of the hidden states within it takes.
        rest_s: of each device, what is computed there before and behind the blocks, half each, if it is the first one.
        launch_s: what the host takes to launch all of it.
        outputs: how many blocks each block stands for, whose hidden states go home one by one; one each by default.
    """

    block_s: tuple[tuple[float, ...], ...]
    hop_s: tuple[float, ...]
    copy_s: tuple[float, ...] = ()
    rest_s: tuple[float, ...] = ()
    launch_s: float = 0.0
    num_calls: int = NUM_CALLS
    outputs: tuple[int, ...] = ()

    @classmethod
    def alike(
        cls,
        *,
        block_s: Sequence[float],
        speeds: Sequence[float],
        hop_s: float,
        rest_s: float = 0.0,
        num_calls: int = NUM_CALLS,
    ) -> Pipeline:
        """Return it for devices that differ in their speeds alone; times are those at speed 1."""
        return cls(
            block_s=tuple(tuple(seconds / speed for seconds in block_s) for speed in speeds),
            hop_s=(hop_s,) * len(speeds),
            rest_s=tuple(rest_s / speed for speed in speeds),
            num_calls=num_calls,
        )

    @property
    def num_devices(self) -> int:
        return len(self.block_s)

    def joined(self, units: Sequence[Sequence[int]]) -> Pipeline:
        """Return it for units of consecutive blocks, each of which stands for its blocks."""
        return replace(
            self,
            block_s=tuple(tuple(sum(times[number] for number in unit) for unit in units) for times in self.block_s),
            outputs=tuple(map(len, units)),
        )

    def rest_on(self, device: int) -> float:
        return self.rest_s[device] if self.rest_s else 0.0

    def alone_on(self, device: int) -> float:
        """Return what all calls take on one device alone, one after the other."""
        return self.num_calls * max(self.launch_s, sum(self.block_s[device]) + self.rest_on(device))

    @property
    def alone_s(self) -> float:
        """What all calls take on the fastest device alone."""
        return min(map(self.alone_on, range(self.num_devices)))


class Engine:
    """What a device computes or a link moves, in the order in which it is launched: each work takes the time left."""

    def __init__(self) -> None:
        self.begins, self.untils = [0.0], [math.inf]
        """Of each stretch of time in which there is nothing to do."""

    def run(self, ready_s: float, seconds: float) -> float:
        """Work for so long from a time on, in parts if need be; returns when it is done."""
        if not seconds:
            return ready_s
        index = bisect_right(self.untils, ready_s)
        left_s, end_s = seconds, ready_s
        while left_s > seconds * ROUNDING:
            begin_s, until_s = self.begins[index], self.untils[index]
            start_s = max(begin_s, ready_s)
            end_s = min(start_s + left_s, until_s)
            if end_s == start_s:
                break  # so little is left that a float does not tell
            left_s -= end_s - start_s
            if start_s == begin_s and end_s < until_s:
                self.begins[index] = end_s
                return end_s
            kept = [gap for gap in ((begin_s, start_s), (end_s, until_s)) if gap[1] > gap[0]]
            self.begins[index : index + 1] = [gap[0] for gap in kept]
            self.untils[index : index + 1] = [gap[1] for gap in kept]
            index += start_s > begin_s
        return end_s


def step_seconds(pipeline: Pipeline, device_of: Sequence[int], *, late: float = 0.0) -> float:
    """Return what all calls take together ([Note: launched in turn]), by a simulation of each block of each call.

    Args:
        device_of: of each block, in the order in which they run, the number of its device.
        late: a call takes so much longer than the one before, as a part.
    """
    engines, link = [Engine() for _ in pipeline.block_s], Engine()
    copies = pipeline.copy_s or (0.0,) * pipeline.num_devices
    outputs = pipeline.outputs or (1,) * len(device_of)
    part_s = pipeline.launch_s / max(1, len(device_of))
    begun_s = ended_s = 0.0
    behind = [0.0] * len(device_of)
    for call in range(pipeline.num_calls):
        slower, launched_s = 1 + late * call, call * pipeline.launch_s
        rest_s = slower * pipeline.rest_on(0) / 2
        home_s = now_s = begun_s = engines[0].run(max(begun_s, launched_s), rest_s)
        before = 0
        for number, device in enumerate(device_of):
            now_s = max(now_s, behind[number], launched_s + number * part_s)
            if device != before:
                now_s = max(now_s, home_s)
                if device:
                    now_s = link.run(now_s, slower * pipeline.hop_s[device])
                before = device
            now_s = behind[number] = engines[device].run(now_s, slower * pipeline.block_s[device][number])
            if device:  # its output goes home beside what it computes next
                now_s = engines[device].run(now_s, slower * outputs[number] * copies[device])
                home_s = link.run(max(home_s, now_s), slower * outputs[number] * pipeline.hop_s[device])
            else:
                home_s = now_s
        ended_s = engines[0].run(max(home_s, ended_s, launched_s + pipeline.launch_s), rest_s)
    return ended_s


def pipeline_of(use: Use, devices: Sequence[str], machine: Machine) -> Pipeline | None:
    """Return what a use takes on the devices of a split; None where the times of one, or its link, are not known."""
    times = [use.times[device] for device in devices if device in use.times]
    hops = hop_seconds_between(devices, use.carried_bytes, machine)
    if len(times) < len(devices) or hops is None:
        return None
    return Pipeline(
        block_s=tuple(time.blocks_s for time in times),
        hop_s=hops,
        copy_s=(2 * use.carried_bytes / MEMORY_BYTES_PER_S,) * len(devices),
        rest_s=tuple(time.other_s for time in times),
        launch_s=times[0].launch_s,
        num_calls=use.num_calls,
    )


def hop_seconds_between(devices: Sequence[str], carried_bytes: int, machine: Machine) -> tuple[float, ...] | None:
    """Return of each device what a hop takes between it and the first one; None where a link is not known."""
    home, *others = (machine.device(device) for device in devices)
    rates = [bytes_per_s_between(home, other) for other in others]
    known = [rate for rate in rates if rate is not None]
    if not carried_bytes:
        return (0.0,) * len(devices)
    return (0.0, *(LATENCY_S + carried_bytes / rate for rate in known)) if len(known) == len(rates) else None


def bytes_per_s_between(one: DeviceCapacity, other: DeviceCapacity) -> float | None:
    """Return how fast copies between two devices are: as measured, else as the slower of their links to the host."""
    peers = one.peer(other.name), other.peer(one.name)
    measured = [peer.bytes_per_s for peer in peers if peer is not None and peer.bytes_per_s]
    links = [device.link_bytes_per_s for device in (one, other) if device.link_bytes_per_s]
    return min(measured, default=None) or (min(links) if len(links) == 2 else None)


def compute_at_once(shares: Sequence[DevicePlan], use: Use) -> bool:
    """Whether devices of a split compute the calls of a forward at the same time."""
    return len(shares) > 1 and not why_in_turn(shares, use)


def why_in_turn(shares: Sequence[DevicePlan], use: Use | None) -> str:
    """Return why devices of a split compute one call of a forward after the other; empty where they need not.

    Args:
        use: what is computed; None where that is not known.
    """
    if use is not None and use.one_by_one:
        return use.one_by_one
    if use is not None and use.num_calls == 1:
        return "a forward is one call: a split buys memory, not speed"
    if any(share.streamed for share in shares):
        return STREAMS
    if any(share.scratch_bytes and share.decodes < NUM_CALLS for share in shares):
        return ONE_SCRATCH
    return ""


def devices_by_block(shares: Sequence[DevicePlan]) -> list[int]:
    """Return of each block, in order, the number of the share that has it."""
    found = {number: index for index, share in enumerate(shares) for number in share.blocks}
    return [found[number] for number in sorted(found)]
