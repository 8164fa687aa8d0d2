"""The workload of a device in one pass: bytes, compute times and copy times of its blocks, measured or assumed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..weights.component import Component
from .capacity import DeviceCapacity

__all__ = ["Workload", "balanced_workload", "find_blocking", "find_in_file", "find_speeds", "find_workload", "in_order"]

# By how much a synchronous copy is assumed to be slower if that was not measured: about as pageable memory is.
BLOCKING_COPIES = 2.0
# And by how much one that reads a file first: about as a fast disk is.
FILE_COPIES = 8.0
# What each copy takes beside its bytes, about as on cards behind PCIe; of small blocks that is a good part.
COPY_LATENCY_S = 1e-5


@dataclass(frozen=True, slots=True)
class Workload:
    """What one pass does on a device: bytes, seconds of computing and of copying, per block as they run."""

    sizes: tuple[int, ...]
    compute_s: tuple[float, ...]
    copy_s: tuple[float, ...]
    idle_s: float = 0.0
    """The time between two passes, in which this device computes nothing."""
    blocking: frozenset[int] = frozenset()
    """The blocks whose copies are synchronous: rather these are resident, where all else is equal."""

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def least_s(self) -> float:
        """What a pass takes if all copies hide behind computes."""
        return sum(self.compute_s) + self.idle_s

    def streamed_sizes(self, resident: Collection[int]) -> list[int]:
        """Return the bytes of the blocks that stream beside these residents."""
        return [size for position, size in enumerate(self.sizes) if position not in resident]


def balanced_workload(
    sizes: Sequence[int],
    room_bytes: int,
    *,
    blocking: frozenset[int] = frozenset(),
    in_file: frozenset[int] = frozenset(),
) -> Workload:
    """Return an assumed workload, for where speeds are not known.

    It assumes compute times in proportion to bytes, and in sum as long as all copies: where one of the two is far
    longer any order will do; where they are equal the order matters most.
    """
    streamed_share = 1 - min(1.0, max(0, room_bytes - 2 * max(sizes)) / sum(sizes))
    compute_s = tuple(size * streamed_share for size in sizes)
    slowness = {**dict.fromkeys(blocking, BLOCKING_COPIES), **dict.fromkeys(in_file, FILE_COPIES)}
    copy_s = tuple(size * slowness.get(position, 1.0) for position, size in enumerate(sizes))
    return Workload(tuple(sizes), compute_s, copy_s, blocking=blocking)


def in_order(blocks: tuple[int, ...], block_seconds: Mapping[int, float] | None) -> list[int]:
    """Return blocks in the order in which they ran, as far as that was seen."""
    ours = frozenset(blocks)
    return [number for number in block_seconds or blocks if number in ours]


def find_blocking(component: Component, blocks: tuple[int, ...], pinned: frozenset[str] | None) -> frozenset[int]:
    """Return the blocks whose copies are synchronous, because they do not rest in page-locked memory."""
    if pinned is None:
        return frozenset()
    return frozenset(number for number in blocks if component.blocks[number].name not in pinned)


def find_in_file(component: Component, blocks: tuple[int, ...], names: frozenset[str]) -> frozenset[int]:
    """Return the blocks that rest in their file, by the names of these."""
    return frozenset(number for number in blocks if component.blocks[number].name in names)


def find_speeds(
    capacity: DeviceCapacity, sizes: Mapping[int, int], blocking: frozenset[int], in_file: frozenset[int]
) -> dict[int, float] | None:
    """Return the bytes per second at which each block is copied, by how it rests; None if no speed was measured.

    That of a file never is: a link's speed does not tell how fast it is read. Where only one of the two others was
    measured, the other one is estimated from it.
    """
    pinned, pageable = capacity.link_bytes_per_s, capacity.pageable_bytes_per_s
    pinned = pinned or pageable
    if pinned is None or in_file:
        return None
    pageable = pageable or pinned / BLOCKING_COPIES
    return {number: pageable if number in blocking else pinned for number in sizes}


def find_workload(
    sizes: Mapping[int, int],
    speeds: Mapping[int, float] | None,
    left_bytes: int,
    blocking: frozenset[int],
    in_file: frozenset[int],
    block_seconds: Mapping[int, float] | None,
) -> Workload:
    """Return the workload of a pass, in seconds if all of them are known."""
    positions = frozenset(position for position, number in enumerate(sizes) if number in blocking)
    if block_seconds is None or speeds is None:
        files = frozenset(position for position, number in enumerate(sizes) if number in in_file)
        files = files if len(files) < len(sizes) else frozenset()  # all alike
        return balanced_workload(list(sizes.values()), left_bytes, blocking=positions, in_file=files)
    compute_s = tuple(block_seconds[number] for number in sizes)
    return Workload(
        sizes=tuple(sizes.values()),
        compute_s=compute_s,
        copy_s=tuple(COPY_LATENCY_S + size / speeds[number] for number, size in sizes.items()),
        idle_s=max(0.0, sum(block_seconds.values()) - sum(compute_s)),
        blocking=positions,
    )
