"""How long stretches of a stream and copies to a device take, by events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from ..units import MIB
from .devices import Device

__all__ = ["TELLING_BYTES", "CopySpeeds", "Stopwatch"]

# The copy of fewer bytes says more of launching it than of the link: such copies are not timed.
TELLING_BYTES = 2 * MIB
# How many copies of equally many bytes are timed: the first may take longer.
NUM_TIMED = 2

Key = TypeVar("Key")


class Stopwatch(Generic[Key]):
    """Seconds of named stretches of a stream, taken by events and read when they are over, without waiting for them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stretches: dict[Key, list[torch.Event]] = {}

    def start(self, key: Key, stream: torch.Stream) -> None:
        self.stretches[key] = [self.mark(stream)]

    def stop(self, key: Key, stream: torch.Stream) -> None:
        if key in self.stretches:
            self.stretches[key].append(self.mark(stream))

    def mark(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=self.device.torch_device, enable_timing=True)
        event.record(stream)
        return event

    def read(self) -> dict[Key, float] | None:
        """Return the seconds of each stretch that was stopped; None while one of them is not over."""
        stopped = {key: events for key, events in self.stretches.items() if len(events) == 2}
        if not all(event.query() for events in stopped.values() for event in events):
            return None
        return {key: start.elapsed_time(stop) / 1000 for key, (start, stop) in stopped.items()}


class CopySpeeds:
    """How fast copies reach a device, from page-locked memory and from other; each is timed until it is known.

    What a copy has to wait for is no part of its time.
    """

    def __init__(self, device: Device) -> None:
        self.watches: dict[bool, Stopwatch[tuple[int, int]]] = {
            is_pinned: Stopwatch[tuple[int, int]](device) for is_pinned in (True, False)
        }
        """Those that run still, by whether the memory is page-locked; the stretches are numbered for each number of
        bytes."""

    @contextmanager
    def timed(self, source: torch.Tensor, stream: torch.Stream) -> Iterator[None]:
        """Time the copy in the body, if it tells something that is not known."""
        watch = self.watches.get(source.is_pinned())
        keys = [(source.nbytes, number) for number in range(NUM_TIMED)]
        key = next((key for key in keys if watch is not None and key not in watch.stretches), None)
        if watch is None or key is None:
            yield
            return
        watch.start(key, stream)
        yield
        watch.stop(key, stream)

    def take(self) -> dict[bool, float]:
        """Return the bytes per second of the fastest copies, by whether the memory is page-locked; each once."""
        taken = {}
        for is_pinned, watch in [timed for timed in self.watches.items() if timed[1].stretches]:
            found = [num_bytes / seconds for (num_bytes, _), seconds in (watch.read() or {}).items() if seconds]
            if found:
                taken[is_pinned] = max(found)
                del self.watches[is_pinned]
        return taken
