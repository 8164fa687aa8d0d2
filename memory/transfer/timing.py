"""How long blocks compute, copies to a device take, and computing waits for copies, by events."""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from ..units import MIB
from .devices import Device

__all__ = ["TELLING_BYTES", "CallTimes", "CopySpeeds", "PassTimes", "Stopwatch", "WaitTimes"]

# Smaller copies are not timed: their time depends more on the launch than on the link.
TELLING_BYTES = 2 * MIB
# How many copies of equally many bytes are timed: the first may take longer.
NUM_TIMED = 2
# The second pass is timed: the first one warms up.
TIMED_PASS = 2
# Of so many passes one tells how long computing waits for copies.
TIMED_OF = 8
# Of the calls of one size the second is timed, and then one of so many.
TIMED_OF_CALLS = 16
# The sizes of which calls are counted; with more of them it begins anew.
MAX_COUNTED = 64
# So many calls may be over and not taken yet.
MAX_ENDED = 16
# Timing ends after so many passes that skipped blocks.
MAX_PARTIAL = 8

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


class CallTimes:
    """The seconds of whole calls that find all weights on one device: of each size the second, then one of some.

    Two events on the stream that computes, read when both are over; on the CPU, where a call ends as it returns, a
    clock. What of a call the device waits for its host is in it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.left: dict[Hashable, int] = {}
        """By size, how many calls are left until one is timed."""
        self.open: tuple[Any, float | torch.Event] | None = None
        """What is timed now, and when it began."""
        self.ended: list[tuple[Any, float | torch.Event, float | torch.Event]] = []
        """What was timed and is not taken yet, in order."""

    def go_on_with(self, left: dict[Hashable, int]) -> None:
        """Count calls where those of the same component were counted before it came back as another object."""
        self.left = left

    def is_due(self, size: Hashable) -> bool:
        """Count a call; returns whether it is to be timed."""
        left = self.left.get(size, 1)
        if left:
            if size not in self.left and len(self.left) >= MAX_COUNTED:
                self.left.clear()
            self.left[size] = left - 1
            return False
        if len(self.ended) >= MAX_ENDED or self.device.is_recorded():
            return False
        self.left[size] = TIMED_OF_CALLS - 1
        return True

    def start(self, key: Hashable) -> None:
        """Begin to time a call."""
        self.open = key, self.mark()

    def stop(self, *, completed: bool) -> None:
        """End what is timed; it counts only if it completed."""
        timed, self.open = self.open, None
        if timed is not None and completed:
            self.ended.append((*timed, self.mark()))

    def take(self) -> list[tuple[Any, float]]:
        """Return what was timed and its seconds, each once, as far as it is over."""
        taken: list[tuple[Any, float]] = []
        while self.ended:
            key, began, ended = self.ended[0]
            if isinstance(began, torch.Event) and isinstance(ended, torch.Event):
                if not ended.query():
                    break
                taken.append((key, began.elapsed_time(ended) / 1000))
            elif isinstance(began, float) and isinstance(ended, float):
                taken.append((key, ended - began))
            del self.ended[0]
        return taken

    def mark(self) -> float | torch.Event:
        if self.device.is_cpu:
            return time.perf_counter()
        event = torch.Event(device=self.device.torch_device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device.torch_device.index))
        return event


class PassTimes:
    """The seconds that each block of one device computes, taken in one pass after each loading.

    Args:
        blocks: those that the pass has to run.
    """

    def __init__(self, device: Device, blocks: Collection[int]) -> None:
        self.device = device
        self.blocks = frozenset(blocks)
        self.passes = self.num_partial = 0
        self.watch: Stopwatch[int] | None = None
        """While a pass is timed, and until its times are taken."""
        self.call: Any = None
        """Which call that is, or was."""

    @property
    def is_timing(self) -> bool:
        """Whether the pass that runs is timed."""
        return self.watch is not None and self.passes == TIMED_PASS

    def note_call(self, call: Any) -> None:
        """Note which call is timed."""
        self.call = call

    def start_over(self) -> None:
        """Time another pass: the component was loaded in another form."""
        self.passes = self.num_partial = 0

    def begin(self) -> None:
        """Time the pass that begins, if it is the one to time."""
        self.passes += 1
        if self.passes == TIMED_PASS and not self.device.is_cpu:
            self.watch, self.call = Stopwatch(self.device), None

    def start(self, block: int, stream: torch.Stream) -> None:
        """Begin to time a block, decoding included: its copy has arrived."""
        if self.watch is not None and self.passes == TIMED_PASS:
            self.watch.start(block, stream)

    def stop(self, block: int, stream: torch.Stream) -> None:
        if self.watch is not None and self.passes == TIMED_PASS:
            self.watch.stop(block, stream)

    def take(self) -> dict[int, float] | None:
        """Return the seconds of each block, in the order in which they ran, once, when they are known."""
        if self.watch is None or self.passes <= TIMED_PASS:
            return None
        seconds = self.watch.read()
        if seconds is None:
            return None
        self.watch = None
        if seconds.keys() == self.blocks:
            return seconds
        if self.num_partial < MAX_PARTIAL:  # blocks were skipped: the next pass may be a whole one
            self.num_partial += 1
            self.passes = TIMED_PASS - 1
        return None


class WaitTimes:
    """The seconds for which computing on a device waited for copies to it; reading them waits for nothing.

    One pass of some is timed, and stands for those since the last one: two events for each block cost more than what
    else a step does for it. Synchronous copies, as from pageable memory, hold up the host, and are not seen.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.seconds = 0.0
        self.num_passes = 0
        self.num_ended = 0
        """The passes whose waits are not in `seconds` yet."""
        self.pass_s: float | None = None
        """The waits of the last pass that was timed."""
        self.is_timed = False
        self.open: list[tuple[torch.Event, torch.Event]] = []
        """Before and behind each wait of the pass that was timed, until they are read."""

    def begin_pass(self) -> None:
        self.num_passes += 1
        self.is_timed = self.num_passes % TIMED_OF == TIMED_PASS and not self.open

    def end_pass(self) -> None:
        self.is_timed = False
        self.num_ended += 1

    def await_event(self, stream: torch.Stream, ready: torch.Event) -> None:
        """Make a stream wait for an event, and time that in a timed pass."""
        if not self.is_timed:
            stream.wait_event(ready)
            return
        before, behind = (torch.Event(device=self.device.torch_device, enable_timing=True) for _ in range(2))
        before.record(stream)
        stream.wait_event(ready)
        behind.record(stream)
        self.open.append((before, behind))

    def read(self) -> float:
        """Return the seconds of all passes that have ended, as far as one of them was timed and is over."""
        if self.open and not self.is_timed and all(event.query() for events in self.open for event in events):
            self.pass_s = sum(before.elapsed_time(behind) for before, behind in self.open) / 1000
            self.open.clear()
        if self.pass_s is not None and not self.open:
            self.seconds += self.num_ended * self.pass_s
            self.num_ended = 0
        return self.seconds


class CopySpeeds:
    """How fast copies reach a device, from page-locked memory and from other; each is timed until it is known.

    The time that a copy waits is not counted.
    """

    def __init__(self, device: Device) -> None:
        self.watches: dict[bool, Stopwatch[tuple[int, int]]] = {
            is_pinned: Stopwatch[tuple[int, int]](device) for is_pinned in (True, False)
        }
        """The copies that still run, by whether the memory is page-locked; a stretch is numbered per size."""

    @contextmanager
    def timed(self, source: torch.Tensor, stream: torch.Stream) -> Iterator[None]:
        """Time the copy in the body if the speed of such copies is not known yet."""
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
