"""How long a step of several calls takes over the devices of a split that compute at the same time.

[Note: launched in turn] One call is launched whole before the next, each with streams of its own. A device computes,
and a link moves, one thing at a time; what is launched later takes the time that is left, in parts if need be. Each
border to another device costs a hop of the hidden states, over the home device, which is the first one. What a block
returns elsewhere goes home beside what computes next there, by way of a copy on its device. A later call begins when
the one before has reached its first block, follows it block by block, and ends behind it.

[Note: one work] Blocks that follow each other on one device, with the copies of what they return, are one work there:
until they are done the device waits for nothing else, so no later call gets between them. They are played one by one
only where the host may launch one later than the device could begin it, where one takes no time and so waits for
nothing, and where an earlier call computes between them, so that what they return goes home at other times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import add

from .pipeline import Pipeline

__all__ = ["StepClock", "step_seconds"]

# What sums of floats may be off.
ROUNDING = 1e-9


class Engine:
    """What a device computes or a link moves, in the order in which it is launched: each work takes the time left.

    The works of one call come in the order of time, so each call goes through what is left once.
    """

    __slots__ = ("begin_s", "gaps", "kept", "until_s")

    def __init__(self) -> None:
        self.begin_s, self.until_s = 0.0, math.inf
        """The stretch of time without work that the call has reached."""
        self.gaps: list[tuple[float, float]] = []
        """Those behind it, the next one last."""
        self.kept: list[tuple[float, float]] = []
        """Those before it that the call leaves."""

    def begin_call(self) -> None:
        """Go back to the first stretch without work."""
        self.gaps.append((self.begin_s, self.until_s))
        self.gaps += reversed(self.kept)
        self.kept.clear()
        self.begin_s, self.until_s = self.gaps.pop()

    def run(self, ready_s: float, seconds: float) -> float:
        """Work for so long from a time on, in parts if need be; returns when it is done."""
        begin_s = self.begin_s
        start_s = ready_s if ready_s > begin_s else begin_s
        end_s = start_s + seconds
        if seconds and end_s < self.until_s:
            if start_s > begin_s:
                self.kept.append((begin_s, start_s))
            self.begin_s = end_s
            return end_s
        return self.run_in_parts(ready_s, seconds) if seconds else ready_s

    def run_in_parts(self, ready_s: float, seconds: float) -> float:
        begin_s, until_s, left_s, least_s = self.begin_s, self.until_s, seconds, seconds * ROUNDING
        while left_s > least_s:
            start_s = ready_s if ready_s > begin_s else begin_s
            if start_s < until_s:
                if start_s > begin_s:
                    self.kept.append((begin_s, start_s))
                begin_s = start_s + left_s
                if begin_s < until_s:
                    break
                begin_s = until_s
                left_s -= until_s - start_s
            else:
                if begin_s < until_s:
                    self.kept.append((begin_s, until_s))
                begin_s, until_s = self.gaps.pop()
        self.begin_s, self.until_s = begin_s, until_s
        return begin_s

    def go_to(self, ready_s: float) -> float:
        """Go on to the first stretch without work that ends behind a time; returns when work begins there."""
        while self.until_s <= ready_s or self.until_s <= self.begin_s:
            if self.until_s > self.begin_s:
                self.kept.append((self.begin_s, self.until_s))
            self.begin_s, self.until_s = self.gaps.pop()
        return max(ready_s, self.begin_s)


class StepClock:
    """Tells what all calls of a pipeline take together over any groups of blocks, by a simulation of each group.

    What does not depend on the groups is summed up once.

    Args:
        late: a call takes so much longer than the one before, as a part.
    """

    def __init__(self, pipeline: Pipeline, *, late: float = 0.0) -> None:
        self.pipeline = pipeline
        self.num_blocks = len(pipeline.block_s[0])
        outputs = pipeline.outputs or (1,) * self.num_blocks
        copy_s = pipeline.copy_s or (0.0,) * pipeline.num_devices
        # What the first device computes is there.
        self.copies = [[seconds * count for count in outputs] for seconds in (0.0, *copy_s[1:])]
        """Of each device, what the copies of what each block returns take within it."""
        self.part_s = pipeline.launch_s / max(1, self.num_blocks)
        takes = [[*map(add, *both)] for both in zip(pipeline.block_s, self.copies, strict=True)]
        self.is_one_work = [
            all(seconds) and min(with_copies, default=0.0) >= self.part_s
            for seconds, with_copies in zip(pipeline.block_s, takes, strict=True)
        ]
        """Of each device, whether blocks that follow each other are one work there ([Note: one work])."""
        self.slower = [1 + late * call for call in range(pipeline.num_calls)]
        ends = [[0.0, *accumulate(times)] for times in takes]
        hops = [[count * hop_s for count in outputs] for hop_s in pipeline.hop_s]
        self.ends, self.hops = [ends] * pipeline.num_calls, [hops] * pipeline.num_calls
        """Of each call and device, what all blocks up to each one take there, with the copies of what they return; and
        what that takes on its way home."""
        if late:
            self.ends = [scaled(ends, factor) for factor in self.slower]
            self.hops = [scaled(hops, factor) for factor in self.slower]

    def seconds(self, groups: Sequence[tuple[int, int]]) -> float:
        """Return what all calls take.

        Args:
            groups: of each, in the order in which they run, the device that has it, and its number of blocks.
        """
        pipeline = self.pipeline
        engines, link = [Engine() for _ in pipeline.block_s], Engine()
        behind = [0.0] * self.num_blocks  # of each block, or of the first one of a group that was one work
        begun_s = ended_s = 0.0
        part_s, is_one_work = self.part_s, self.is_one_work
        for call, slower in enumerate(self.slower):
            for engine in (*engines, link):
                engine.begin_call()
            launched_s = call * pipeline.launch_s
            rest_s = slower * pipeline.rest_on(0) / 2
            home_s = now_s = begun_s = engines[0].run(max(begun_s, launched_s), rest_s)
            before = first = 0
            hop_s = [slower * seconds for seconds in pipeline.hop_s]
            call_ends, call_hops = self.ends[call], self.hops[call]
            for device, count in groups:
                now_s = max(now_s, behind[first], launched_s + first * part_s, home_s if device != before else 0.0)
                if device and device != before:
                    now_s = link.run(now_s, hop_s[device])
                before = device
                engine, ends, hops = engines[device], call_ends[device], call_hops[device]
                last = first + count
                takes_s = ends[last] - ends[first]
                if not device and is_one_work[0]:
                    home_s = now_s = behind[first] = engine.run(now_s, takes_s)
                elif is_one_work[device] and (start_s := engine.go_to(now_s)) + takes_s < engine.until_s:
                    since_s = start_s - ends[first]
                    for end_s, out_s in zip(ends[first + 1 : last + 1], hops[first:last], strict=True):
                        done_s = since_s + end_s
                        home_s = link.run(done_s if done_s > home_s else home_s, out_s)
                    behind[first] = start_s + slower * pipeline.block_s[device][first]
                    now_s = engine.run(now_s, takes_s)
                else:
                    for number in range(first, last):
                        now_s = max(now_s, behind[number], launched_s + number * part_s)
                        now_s = behind[number] = engine.run(now_s, slower * pipeline.block_s[device][number])
                        if device:
                            now_s = engine.run(now_s, slower * self.copies[device][number])
                            home_s = link.run(max(home_s, now_s), hops[number])
                        else:
                            home_s = now_s
                first = last
            ended_s = engines[0].run(max(home_s, ended_s, launched_s + pipeline.launch_s), rest_s)
        return ended_s


def step_seconds(pipeline: Pipeline, device_of: Sequence[int]) -> float:
    """Return what all calls take together ([Note: launched in turn]).

    Args:
        device_of: of each block, in the order in which they run, the number of its device.
    """
    return StepClock(pipeline).seconds([(device, len([*blocks])) for device, blocks in groupby(device_of)])


def scaled(rows: Sequence[Sequence[float]], factor: float) -> list[list[float]]:
    return [[factor * number for number in row] for row in rows]
