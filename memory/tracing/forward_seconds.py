"""How long a traced forward takes on a device of given speeds, by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .trace import Kernel, Trace

__all__ = ["BlockSeconds", "LaunchedKernels", "Seconds", "launched", "seconds_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockSeconds:
    """The times of one segment: a block from its entry to its exit, or what runs between two."""

    block: str
    """Its path; empty between blocks."""
    seconds: float
    """By how much it moves the end of the device's work, waits for the host included."""
    busy_s: float
    """How long the device computes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """The times of a forward."""

    total_s: float
    """From the first launch to the end of the last kernel."""
    segments: tuple[BlockSeconds, ...]

    @property
    def blocks(self) -> Mapping[str, float]:
        """The seconds by block, all its calls together; what runs between blocks stands under the empty name."""
        found: dict[str, float] = {}
        for segment in self.segments:
            found[segment.block] = found.get(segment.block, 0.0) + segment.seconds
        return found


def seconds_of(
    trace: Trace,
    *,
    flops_per_s: float,
    memory_bytes_per_s: float,
    launch_s: float,
    link_bytes_per_s: float = 25e9,
    latency_s: float = 1e-5,
) -> Seconds:
    """Return how long a device takes for a trace whose weights it has: it computes while the host launches ahead.

    A kernel takes the longer of the times for its flops and its traffic. The host takes ``launch_s`` for each, and
    waits for the few copies that bring a forward's constants. A block that moves elsewhere while it computes, or the
    rate at which a card really runs a kernel, is not in it.

    Raises:
        ValueError: a rate is not positive, or ``launch_s`` or ``latency_s`` is negative.
    """
    if min(flops_per_s, memory_bytes_per_s, link_bytes_per_s) <= 0 or min(launch_s, latency_s) < 0:
        raise ValueError("rates must be positive, launch_s and latency_s not negative")
    host_s = device_s = 0.0
    found = []
    for segment in trace.segments:
        began_s, busy_s = device_s, 0.0
        for flops, traffic_bytes, link_bytes in segment.kernels:
            host_s += launch_s
            if link_bytes:
                device_s = host_s = max(host_s, device_s) + latency_s + link_bytes / link_bytes_per_s
                continue
            kernel_s = max(flops / flops_per_s, traffic_bytes / memory_bytes_per_s)
            busy_s += kernel_s
            device_s = max(host_s, device_s) + kernel_s
        found.append(BlockSeconds(block=segment.block, seconds=device_s - began_s, busy_s=busy_s))
    return Seconds(total_s=device_s, segments=tuple(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedKernels:
    """Kernels that run one after the other in a block or between two, up to a copy for which the host waits."""

    launch_s: float
    """What the host takes to launch them."""
    busy_s: float
    """How long the device computes."""
    end_s: float
    """How long after the first launch they end at the soonest: each begins when it was launched."""
    copy_s: float
    """What the copy behind them takes, for which the host waits; 0 where there is none."""


def launched(
    kernels: Sequence[Kernel],
    *,
    flops_per_s: float,
    memory_bytes_per_s: float,
    launch_s: float,
    link_bytes_per_s: float = 25e9,
    latency_s: float = 1e-5,
) -> Iterator[LaunchedKernels]:
    """Yield what a device and its host take for kernels, whatever both wait for before: the arguments of `seconds_of`.

    A device that is free at ``d``, with a host that launches the first at ``h``, ends at the later of ``d + busy_s``
    and ``h + end_s``: so the times of a forward follow from those of its blocks.
    """
    host_s = busy_s = end_s = 0.0
    for flops, traffic_bytes, link_bytes in kernels:
        host_s += launch_s
        if link_bytes:
            copy_s = latency_s + link_bytes / link_bytes_per_s
            yield LaunchedKernels(launch_s=host_s, busy_s=busy_s, end_s=end_s, copy_s=copy_s)
            host_s = busy_s = end_s = 0.0
            continue
        kernel_s = max(flops / flops_per_s, traffic_bytes / memory_bytes_per_s)
        busy_s += kernel_s
        end_s = max(host_s, end_s) + kernel_s
    if host_s:
        yield LaunchedKernels(launch_s=host_s, busy_s=busy_s, end_s=end_s, copy_s=0.0)
