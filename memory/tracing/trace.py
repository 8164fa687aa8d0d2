"""What a trace of a forward says, in ints, and the error of a forward that cannot be traced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import one_line
from .call_shapes import Shapes

__all__ = ["BlockTrace", "EntryTrace", "Kernel", "Segment", "Trace", "Untraceable", "Work"]


class Untraceable(RuntimeError):
    """A forward that cannot be traced, as what it does depends on the values of tensors, or it fails."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Kernel(NamedTuple):
    """One thing that a device does."""

    flops: int
    """Of matrix products, convolutions and attention; a multiply-add counts as two."""
    traffic_bytes: int
    """What it reads and writes of the device's memory, each argument once."""
    link_bytes: int = 0
    """What a copy brings from the host's memory, or to it, while the host waits; 0 for what computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What runs in one block from its entry to its exit, or between two blocks."""

    block: str
    """The path of the block's module; empty between blocks."""
    kernels: tuple[Kernel, ...]
    """In their order. Equal segments of one trace share the same tuple."""
    entry_bytes: int
    """What the forward holds beyond its inputs as the segment begins."""
    peak_bytes: int
    """The most that it holds meanwhile."""


class Work(NamedTuple):
    """How much a device does: of each a device takes some time, which decides which one it takes most for."""

    flops: int
    traffic_bytes: int
    num_kernels: int

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> Work:
        """Return it of what computes; copies between host and device are none of it."""
        computing = [kernel for kernel in kernels if not kernel.link_bytes]
        traffic_bytes = sum(kernel.traffic_bytes for kernel in computing)
        return cls(sum(kernel.flops for kernel in computing), traffic_bytes, len(computing))

    def times(self, factor: float) -> Work:
        """Return so many times as much."""
        return Work(*(round(number * factor) for number in self))


class EntryTrace(NamedTuple):
    """One call of a module or, from outside of it, of one of its direct children: as an engine sees passes begin."""

    number: int
    """0 for the module, 1 and up for its children."""
    shapes: Shapes
    work: Work


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTrace:
    """All that runs in one block, in however many calls."""

    name: str
    peak_bytes: int
    flops: int
    traffic_bytes: int
    num_kernels: int


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One forward: bytes beside the weights and beyond the inputs, and what the device does, in order.

    Bytes are what tensors ask for: no rounding by an allocator, no workspaces of kernels.
    """

    segments: tuple[Segment, ...]
    peak_bytes: int
    output_bytes: int
    """What of the output the forward allocated."""
    output_shapes: tuple[tuple[int, ...], ...] = ()
    """Of the tensors that it returns, in order."""
    carried_bytes: int = 0
    """The most that a block returns: what the blocks hand on to each other."""
    entries: tuple[EntryTrace, ...] = ()
    """The passes of which the call consists, in order."""

    @cached_property
    def work(self) -> Work:
        return Work.of(kernel for segment in self.segments for kernel in segment.kernels)

    @property
    def flops(self) -> int:
        return self.work.flops

    @cached_property
    def work_of_blocks(self) -> Work:
        """Without what lies between the blocks."""
        return Work.of(kernel for segment in self.segments if segment.block for kernel in segment.kernels)

    @property
    def traffic_bytes(self) -> int:
        return self.work.traffic_bytes

    @property
    def num_kernels(self) -> int:
        return self.work.num_kernels

    @cached_property
    def blocks(self) -> Mapping[str, BlockTrace]:
        """By name, in the order of their first calls; what runs between blocks stands under the empty name."""
        by_name: dict[str, list[Segment]] = {}
        for segment in self.segments:
            by_name.setdefault(segment.block, []).append(segment)
        return {
            name: BlockTrace(
                name=name,
                peak_bytes=max(segment.peak_bytes for segment in segments),
                **Work.of(kernel for segment in segments for kernel in segment.kernels)._asdict(),
            )
            for name, segments in by_name.items()
        }
