"""How long a run takes under a schedule: ours, and those of others.

All are written against one cost model (`Clock`): a host that launches for nothing, a compute stream, a copy stream
and one link. The engine's own run on a simulated device, whose launches and latencies are set to nothing, takes the
same time as `run_offsets` says (`tests/engine/planner/test_other_schedules.py`). That nothing is charged for launches
flatters those who copy tensor by tensor or let the host wait. What a run starts with is on the device, nothing is on
its way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = [
    "Outcome",
    "Part",
    "Work",
    "held_bytes",
    "least_seconds",
    "run_comfyui",
    "run_diffusers",
    "run_mmgp",
    "run_offsets",
    "run_window",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What moves as one and then computes; no bytes: part of the rest."""

    weight_bytes: int
    compute_s: float
    name: str = ""

    @property
    def tower(self) -> str:
        """The stack of numbered parts that it stands in."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One step, in the order in which it runs, and the bytes of the rest, over a link of so many bytes per second."""

    parts: tuple[Part, ...]
    rest_bytes: int
    link_bytes_per_s: float

    @property
    def weight_bytes(self) -> int:
        return self.rest_bytes + sum(part.weight_bytes for part in self.parts)

    @property
    def compute_s(self) -> float:
        return sum(part.compute_s for part in self.parts)

    @property
    def movable(self) -> list[int]:
        return [index for index, part in enumerate(self.parts) if part.weight_bytes]

    def copy_s(self, num_bytes: int) -> float:
        return num_bytes / self.link_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The seconds of a run, and the most bytes of weights that it held on the device."""

    seconds: float
    peak_bytes: int


class Clock:
    """When the host, the compute stream and the copy stream of one device are free, in seconds."""

    def __init__(self, link_bytes_per_s: float) -> None:
        self.link_bytes_per_s = link_bytes_per_s
        self.host_s = self.compute_s = self.link_s = 0.0

    def compute(self, seconds: float, after_s: float = 0.0) -> float:
        """Queue a compute that waits for a moment; returns when it ends."""
        self.compute_s = max(self.compute_s, self.host_s, after_s) + seconds
        return self.compute_s

    def copy(self, num_bytes: int, after_s: float = 0.0) -> float:
        """Queue a copy that waits for a moment; returns when it ends."""
        self.link_s = max(self.link_s, self.host_s, after_s) + num_bytes / self.link_bytes_per_s
        return self.link_s

    def copy_and_wait(self, num_bytes: int) -> None:
        """Copy on the compute stream while the host waits."""
        self.host_s = self.compute_s = self.copy(num_bytes, after_s=self.compute_s)

    def synchronize(self, *moments_s: float) -> None:
        """Wait on the host for these moments, or for everything on the device."""
        self.host_s = max(self.host_s, *(moments_s or (self.compute_s, self.link_s)))


def least_seconds(work: Work, budget_bytes: int, num_steps: int) -> float:
    """Return what no schedule is faster than that holds no more than the budget, whatever it moves as one.

    From the end of one part to the end of a later one, at most a step on, passes at least the time to copy what those
    between have more than the budget holds. The sum of such times over stretches that do not overlap, with the
    computes of all other parts, is a bound; this is the largest of these sums.
    """
    room_s = work.copy_s(max(0, budget_bytes - work.rest_bytes))
    # By the number of parts that have ended: copies less computes so far, and what the stretches so far add.
    ahead_s, added_s = [0.0], [0.0]
    for part in work.parts * num_steps:
        ahead_s.append(ahead_s[-1] + work.copy_s(part.weight_bytes) - part.compute_s)
        recent = range(max(0, len(added_s) - len(work.parts)), len(added_s))
        added_s.append(max(added_s[-1], ahead_s[-1] - room_s + max(added_s[i] - ahead_s[i] for i in recent)))
    return num_steps * work.compute_s + added_s[-1]


def run_offsets(
    work: Work, resident: Collection[int], staging_bytes: int, offsets: Sequence[Mapping[int, int]], num_steps: int
) -> Outcome:
    """Ours: residents, and staging memory in which every other part has an offset; steps take turns with its rounds.

    What a part lacks in its range is copied as soon as the parts that lie there have computed. Waits are events: the
    host never stops, and the last part of a step is followed by the first of the next.
    """
    clock = Clock(work.link_bytes_per_s)
    sizes = {index: work.parts[index].weight_bytes for here in offsets for index in here}
    edges = {0, staging_bytes}
    edges |= {edge for here in offsets for index, begin in here.items() for edge in (begin, begin + sizes[index])}
    cells = list(pairwise(sorted(edges)))
    owners: dict[tuple[int, int], tuple[int, int]] = {}
    freed_s = dict.fromkeys(cells, 0.0)
    for step in range(num_steps):
        here = offsets[step % len(offsets)] if offsets else {}
        for index, part in enumerate(work.parts):
            if not part.weight_bytes or index in resident:
                clock.compute(part.compute_s)
                continue
            stays = [(index, begin) for begin in (here[index], *(there[index] for there in offsets))]
            lacking = [
                [cell for cell in cells if stay[1] <= cell[0] < stay[1] + sizes[index] and owners.get(cell) != stay]
                for stay in stays
            ]
            found = next((number for number, cells_lacked in enumerate(lacking) if not cells_lacked), 0)
            for begin, end in sorted(lacking[found], key=lambda cell: freed_s[cell]):
                clock.copy(end - begin, after_s=freed_s[begin, end])
            ended_s = clock.compute(part.compute_s, after_s=clock.link_s if lacking[found] else 0.0)
            for cell in cells:
                if stays[found][1] <= cell[0] < stays[found][1] + sizes[index]:
                    owners[cell], freed_s[cell] = stays[found], ended_s
    return Outcome(seconds=clock.compute_s, peak_bytes=held_bytes(work, resident) + staging_bytes)


def run_window(work: Work, resident: Collection[int], staging_bytes: int, num_steps: int) -> Outcome:
    """The same, if staging memory could be cut anywhere: bytes are copied in order of use, so many ahead of the last.

    No offsets do better, but those in which something stays from step to step.
    """
    clock = Clock(work.link_bytes_per_s)
    freed: deque[tuple[int, float]] = deque()
    reach, end, free_s = staging_bytes, 0, 0.0
    for _ in range(num_steps):
        for index, part in enumerate(work.parts):
            if not part.weight_bytes or index in resident:
                clock.compute(part.compute_s)
                continue
            begin, end = end, end + part.weight_bytes
            while begin < end:
                while reach <= begin:
                    last, free_s = freed.popleft()
                    reach = last + staging_bytes
                clock.copy(min(end, reach) - begin, after_s=free_s)
                begin = min(end, reach)
            freed.append((end, clock.compute(part.compute_s, after_s=clock.link_s)))
    return Outcome(seconds=clock.compute_s, peak_bytes=held_bytes(work, resident) + staging_bytes)


def held_bytes(work: Work, resident: Collection[int]) -> int:
    """Return the bytes of weights that stay on the device: the rest and the residents."""
    return work.rest_bytes + sum(work.parts[index].weight_bytes for index in resident)


def run_mmgp(work: Work, budget_bytes: int, num_steps: int) -> Outcome:
    """mmgp 3.8.2, whose slices are the parts here: one ahead, and the whole device synchronized at each boundary.

    Residents are spread evenly through each tower of five floors or more: budget less base less two floors, counted in
    largest floors. With one tower the last floor is followed by the first; with more, the first of each is loaded
    while everything waits. Flattered: base and floors are all it holds, and the room is shared by the towers' bytes.
    """
    floors: dict[str, list[int]] = {}
    for index in work.movable:
        floors.setdefault(work.parts[index].tower, []).append(index)
    resident = choose_floors(work, list(floors.values()), budget_bytes)
    following: dict[int, int] = {}
    for indices in floors.values():
        streamed = [index for index in indices if index not in resident]
        following.update(pairwise(streamed))
        if len(floors) == 1 and len(streamed) > 1:
            following[streamed[-1]] = streamed[0]
    clock = Clock(work.link_bytes_per_s)
    coming = None
    for _ in range(num_steps):
        for index, part in enumerate(work.parts):
            if part.weight_bytes and index not in resident:
                clock.synchronize()
                if coming != index:
                    clock.copy_and_wait(part.weight_bytes)
                coming = following.get(index)
                if coming is not None:
                    clock.copy(work.parts[coming].weight_bytes)
            clock.compute(part.compute_s)
    streamed = [work.parts[index].weight_bytes for index in work.movable if index not in resident]
    two_bytes = min(2, len(streamed)) * max(streamed, default=0)
    return Outcome(seconds=clock.compute_s, peak_bytes=held_bytes(work, resident) + two_bytes)


def choose_floors(work: Work, towers: Sequence[Sequence[int]], budget_bytes: int) -> set[int]:
    if budget_bytes >= work.weight_bytes:
        return set(work.movable)
    largest = max(work.parts[index].weight_bytes for index in work.movable)
    room = budget_bytes - work.rest_bytes - 2 * largest
    resident: set[int] = set()
    for indices in towers:
        sizes = [work.parts[index].weight_bytes for index in indices]
        share = sum(sizes) / (work.weight_bytes - work.rest_bytes)
        count = min(len(indices), int(max(0, room) * share // max(sizes))) if len(indices) >= 5 else 0
        resident |= {indices[math.ceil((number + 1) * len(indices) / count) - 1] for number in range(count)}
    return resident


def run_diffusers(work: Work, num_steps: int) -> Outcome:
    """diffusers 0.42 group offload, block level with a stream: every group streams, one ahead, at any budget.

    What is in no group is copied while everything waits, in every step. The host waits for the copy stream before it
    queues the next group, and for the compute stream before it drops one. The last group does not fetch the first.
    """
    clock = Clock(work.link_bytes_per_s)
    groups = work.movable
    following = dict(pairwise(groups))
    for _ in range(num_steps):
        clock.copy_and_wait(work.rest_bytes)
        ready_s = clock.copy(work.parts[groups[0]].weight_bytes)
        for index, part in enumerate(work.parts):
            if part.weight_bytes:
                clock.synchronize(ready_s)
                if index in following:
                    ready_s = clock.copy(work.parts[following[index]].weight_bytes)
            clock.compute(part.compute_s)
            if part.weight_bytes:
                clock.synchronize(clock.compute_s)
    two = max(work.parts[a].weight_bytes + work.parts[b].weight_bytes for a, b in pairwise(groups))
    return Outcome(seconds=clock.compute_s, peak_bytes=work.rest_bytes + two)


def run_comfyui(work: Work, budget_bytes: int, num_steps: int, *, num_streams: int = 2) -> Outcome:
    """ComfyUI 0.33 without dynamic VRAM, whose parts are single layers: weights are cast where they are used.

    The largest layers stay, the others are copied inside their own forward. With offload streams (two on NVIDIA and
    AMD, none elsewhere) a layer's copy waits for what was queued before the layer in front of it computed: one layer
    ahead, whatever a layer is; without, copies and computes take turns.
    """
    resident, buffer_bytes = choose_layers(work, budget_bytes, num_streams)
    clock = Clock(work.link_bytes_per_s)
    # When the compute stream came to each of the last casts: what the stream of the next one waits for.
    reached = deque([0.0] * num_streams, maxlen=max(1, num_streams))
    for _ in range(num_steps):
        for index, part in enumerate(work.parts):
            ready_s = 0.0
            if part.weight_bytes and index not in resident:
                reached.append(clock.compute_s)
                ready_s = clock.copy(part.weight_bytes, after_s=reached[0])
            clock.compute(part.compute_s, after_s=ready_s)
    kept = sum(work.parts[index].weight_bytes for index in resident)
    return Outcome(seconds=clock.compute_s, peak_bytes=work.rest_bytes + kept + buffer_bytes)


def choose_layers(work: Work, budget_bytes: int, num_streams: int) -> tuple[set[int], int]:
    """Return the layers that stay, and the bytes kept for casting: the largest that streams, and those beside it."""
    if budget_bytes >= work.weight_bytes:
        return set(work.movable), 0
    by_size = sorted(work.movable, key=lambda i: (work.parts[i].weight_bytes, work.parts[i].name), reverse=True)
    sizes = [work.parts[index].weight_bytes for index in by_size]
    resident: set[int] = set()
    kept, buffer_bytes = work.rest_bytes, 0
    for place, index in enumerate(by_size):
        needed = max(buffer_bytes, sum(sizes[place : place + 1 + num_streams]))
        if kept + sizes[place] + needed < budget_bytes:
            resident.add(index)
            kept += sizes[place]
        else:
            buffer_bytes = needed
    return resident, buffer_bytes
