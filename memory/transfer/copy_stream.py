"""Slabs, streams and events: what every copy to a device goes through.

[Note: ordering] Weights travel on one copy stream per component and device; everything else runs on the stream
that is current when a block is entered, the compute stream. Four rules keep them apart, all by events, none by a
device-wide synchronize:

1. All memory is allocated on one stream, the home stream, because an allocator hands it out again in that stream's
   order. A copy into memory that was just allocated waits for the home stream: a kernel queued there may still read it.
2. A block computes after its copy: the compute stream waits for its ready event.
3. Staging memory is overwritten after its last use: the copy stream waits for the free event of the block there.
4. Memory is freed after its last copy and its last use: the home stream waits for both (`CopyStream.drain`).
5. A pass on another stream than the last one waits for that one: staging memory, scratch and events are those of one
   order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ..units import MIB, slab_offsets
from .devices import Device
from .pinned_memory import Slabs

__all__ = [
    "Bounce",
    "CopySpeeds",
    "CopyStream",
    "Form",
    "SlabLayout",
    "Stopwatch",
    "allocate_device",
    "allocate_slabs",
]

# The copy of fewer bytes says more of launching it than of the link.
TELLING_BYTES = 2 * MIB
# How many copies of equally many bytes are timed: the first may take longer.
NUM_TIMED = 2

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Form:
    """What a tensor is apart from its contents; the strides leave no gaps and overlap nowhere."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Form:
        """Return the form of a dense copy; a dense tensor's own strides. What has no memory is to be contiguous."""
        if tensor.is_meta:
            strides = torch.empty(tensor.shape, device="meta").stride()
        else:
            strides = torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.shape, dtype or tensor.dtype, strides)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a tensor in the order of this form; copies it if it has other strides."""
        if tensor.stride() != self.strides:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Where the tensors of one block lie in a flat slab of bytes; the same on the host and on a device."""

    forms: tuple[Form, ...]
    offsets: tuple[int, ...]
    slab_bytes: int

    @classmethod
    def of(cls, forms: Sequence[Form]) -> SlabLayout:
        offsets, slab_bytes = slab_offsets(form.num_bytes for form in forms)
        return cls(tuple(forms), tuple(offsets), slab_bytes)

    def end_of(self, place: int) -> int:
        """Return where a tensor ends in the slab."""
        return self.offsets[place] + self.forms[place].num_bytes

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views into a slab of uint8; allocates nothing.

        Detached ones: they share the slab's version but, unlike views, do not keep its first owner alive once they are
        pointed elsewhere.
        """
        with torch.inference_mode(False), torch.no_grad():
            return [
                slab[offset : offset + form.num_bytes].view(form.dtype).as_strided(form.shape, form.strides).detach()
                for form, offset in zip(self.forms, self.offsets, strict=True)
            ]


def allocate_device(num_bytes: int, device: Device) -> torch.Tensor:
    """Allocate a slab of bytes on a device.

    Never as an inference tensor: those can only be written by the thread mode that made them, and nodes run in
    inference mode while workers do not.

    Raises:
        torch.OutOfMemoryError: the device has not that much; nothing was allocated.
    """
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)


class CopyStream:
    """The stream on which weights reach one device, overlapping what computes there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device.torch_device)
        self.home = self.compute_stream
        self.last_compute = self.home
        self.speeds = CopySpeeds(device)

    @property
    def compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device.torch_device)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a slab on the device, in the home stream's order (rule 1). Raises `torch.OutOfMemoryError`."""
        with self.home:
            slab = allocate_device(num_bytes, self.device)
        self.stream.wait_stream(self.home)
        return slab

    def begin_pass(self) -> None:
        """Order this pass behind the last one, wherever that ran (rule 5)."""
        compute = self.compute_stream
        if compute != self.last_compute:
            compute.wait_stream(self.last_compute)
            self.last_compute = compute

    def event(self) -> torch.Event:
        return torch.Event(device=self.device.torch_device)

    def await_free(self, ready: torch.Event, free: torch.Event) -> None:
        """Make the next copy wait for the last use of what it overwrites (rule 3), and the host for that one's copy.

        The host is then no further ahead than staging memory is large, and hears of an interrupt that soon.
        """
        ready.synchronize()
        self.stream.wait_event(free)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy of host memory to the device. Blocks the host if it is not pinned."""
        with self.stream, torch.no_grad(), self.speeds.timed(source, self.stream):
            target.copy_(source, non_blocking=True)

    def mark_ready(self, ready: torch.Event) -> None:
        """Note on the copy stream that what was queued so far is there."""
        ready.record(self.stream)

    def mark_free(self, free: torch.Event, stream: torch.Stream) -> None:
        """Note on the stream that computed with it that what was used so far is no longer needed."""
        free.record(stream)

    def await_on_compute(self, ready: torch.Event) -> None:
        """Make the compute stream wait for a copy (rule 2); the host goes on."""
        self.compute_stream.wait_event(ready)

    def finish(self) -> None:
        """Wait on the host until every queued copy is done: masters may be written to then. Not for a step."""
        self.stream.synchronize()
        self.compute_stream.wait_stream(self.stream)

    def drain(self) -> None:
        """Make the home stream wait for every queued copy and compute, so that memory may be freed (rule 4)."""
        self.home.wait_stream(self.stream)
        for used in (self.last_compute, self.compute_stream):
            if used != self.home:
                self.home.wait_stream(used)

    def wait(self) -> None:
        """Wait on the host until every queued copy is done. Not for a step."""
        self.stream.synchronize()


class Bounce:
    """Two buffers of host memory through which what is read from a file reaches one device; open while that is loaded.

    One is filled by the host while the other is copied, if they are page-locked.
    """

    def __init__(self, copies: CopyStream) -> None:
        self.copies = copies
        self.slabs: tuple[list[torch.Tensor], dict[str, int]] = [], {}
        self.done = [copies.event(), copies.event()]
        self.turn = 0
        self.was_refused = False
        """Whether the driver would not lock them."""

    @property
    def buffers(self) -> list[torch.Tensor]:
        return self.slabs[0]

    @property
    def host_bytes(self) -> dict[str, int]:
        """What the buffers take of host memory, by tier."""
        return self.slabs[1]

    @property
    def buffer_bytes(self) -> int:
        return self.buffers[0].numel()

    def open(self, buffer_bytes: int, *, locks: bool) -> None:
        """Allocate both buffers, page-locked if that is wanted and the driver agrees."""
        assert not self.buffers
        limit = 4 * buffer_bytes if locks else 0  # where locking rounds up to a power of two it is less than double
        slabs = allocate_slabs([buffer_bytes] * 2, pinned_bytes=limit, streams=[self.copies])
        buffers = list(slabs)
        pageable_bytes = sum(buffer.numel() for buffer in buffers if not buffer.is_pinned())
        self.slabs = buffers, {"pinned": slabs.locked_bytes, "host": pageable_bytes}
        self.was_refused = slabs.was_refused

    def close(self) -> None:
        """Give both buffers back once nothing is copied from them."""
        self.copies.wait()
        self.slabs = [], {}

    def take(self) -> torch.Tensor:
        """Return the buffer whose turn it is, when its last copy is done."""
        self.turn = 1 - self.turn
        self.done[self.turn].synchronize()
        return self.buffers[self.turn]

    def send(self, parts: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Queue the copies of what was read into parts of the buffer that was taken last, each to its target."""
        for source, target in parts:
            self.copies.copy(target, source)
        self.copies.mark_ready(self.done[self.turn])


def allocate_slabs(sizes: Sequence[int], *, pinned_bytes: int, streams: Sequence[CopyStream]) -> Slabs:
    """Return host slabs, at most so many bytes of them page-locked, that outlive the copies of these streams."""
    copies = list(streams)

    def wait_for_copies() -> None:
        for stream in copies:
            stream.wait()

    return Slabs(sizes, pinned_bytes=pinned_bytes, before_unlock=wait_for_copies)


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
        """By whether the memory is page-locked; the stretches are numbered for each number of bytes."""

    @contextmanager
    def timed(self, source: torch.Tensor, stream: torch.Stream) -> Iterator[None]:
        """Time the copy in the body, if it tells something that is not known."""
        watch = self.watches.get(source.is_pinned()) if self.watches and source.nbytes >= TELLING_BYTES else None
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
        for is_pinned, watch in list(self.watches.items()):
            found = [num_bytes / seconds for (num_bytes, _), seconds in (watch.read() or {}).items() if seconds]
            if found:
                taken[is_pinned] = max(found)
                del self.watches[is_pinned]
        return taken
