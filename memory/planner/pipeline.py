"""What one call of a component takes on the devices of a split, and moving its hidden states between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from .capacity import DeviceCapacity, Machine
from .run import Use

__all__ = ["NUM_CALLS", "Pipeline", "hop_seconds_between", "hops_of_call", "pipeline_of"]

# Two calls: the conditional and the unconditional half of a step.
NUM_CALLS = 2
# Each copy between devices takes so much more than its bytes do.
LATENCY_S = 1e-5
# A copy within a device reads and writes its memory: about so fast.
MEMORY_BYTES_PER_S = 1e12


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


def hop_seconds_between(
    devices: Sequence[str], carried_bytes: int, machine: Machine, *, assumed: float | None = None
) -> tuple[float, ...] | None:
    """Return of each device what a hop takes between it and the first one; None where a link is not known.

    Args:
        assumed: how fast a link is taken to be that is not known, in bytes per second.
    """
    home, *others = (machine.device(device) for device in devices)
    rates = [bytes_per_s_between(home, other, assumed) for other in others]
    known = [rate for rate in rates if rate is not None]
    if not carried_bytes:
        return (0.0,) * len(devices)
    return (0.0, *(LATENCY_S + carried_bytes / rate for rate in known)) if len(known) == len(rates) else None


def bytes_per_s_between(one: DeviceCapacity, other: DeviceCapacity, assumed: float | None) -> float | None:
    """Return how fast copies between two devices are: as measured, else as the slower of their links to the host."""
    peers = one.peer(other.name), other.peer(one.name)
    measured = [peer.bytes_per_s for peer in peers if peer is not None and peer.bytes_per_s]
    links = [rate for device in (one, other) if (rate := device.link_bytes_per_s or assumed)]
    return min(measured, default=None) or (min(links) if len(links) == 2 else None)


def hops_of_call(hop_s: Sequence[float], device_of: Sequence[int]) -> float:
    """Return what the hidden states of a call take from device to device, each time over the first one.

    Args:
        hop_s: of each device, what a hop takes between it and the first one.
        device_of: of each block, in the order in which they run, the number of its device.
    """
    return sum(hop_s[one] + hop_s[other] for one, other in pairwise([0, *device_of, 0]) if one != other)
