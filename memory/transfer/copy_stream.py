"""The copy stream and its events: what every copy to a device goes through.

[Note: ordering] Weights travel on one copy stream per component and device; everything else runs on the stream
that is current when a block is entered, the compute stream. Four rules keep them apart, all by events, none by a
device-wide synchronize:

1. All memory is allocated on one stream, the home stream, because an allocator hands it out again in that stream's
   order. A copy into memory that was just allocated waits for the home stream: a kernel queued there may still read it.
2. A block computes after its copy: the compute stream waits for its ready event.
3. Staging memory is overwritten after its last use: the copy stream waits for the free event of the block there.
4. Memory is freed after its last copy and its last use: the home stream waits for both (`CopyStream.drain`).
5. A pass on another stream than the last one waits for that one: staging memory, scratch and events are those of one
   order. Only a micro-batch that uses none of these computes beside the one before ([Note: lock-step] in
   `micro_streams.py`).
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from .devices import Device
from .slabs import allocate_device
from .timing import TELLING_BYTES, CopySpeeds, WaitTimes

__all__ = ["CopyStream", "LastUse"]

LastUse: TypeAlias = tuple[torch.Stream, torch.Event]
"""Which stream used memory last, and the end of that use."""


class CopyStream:
    """The stream on which weights reach one device, overlapping what computes there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.index = device.torch_device.index
        self.stream = torch.Stream(device=device.torch_device)
        self.home = self.compute_stream
        self.last_compute = self.home
        self.other_computes: list[torch.Stream] = []
        """The streams of micro-batches beside the last one."""
        self.speeds = CopySpeeds(device)
        self.waits = WaitTimes(device)
        self.beside: CopyStream | None = None
        """Copies the same weights at rest to another device."""

    def wait_beside(self, other: CopyStream) -> None:
        """Wait for another stream, too, where the host waits for this one: both copy from the same weights at rest."""
        self.beside = other

    @property
    def compute_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.index)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate a slab on the device, in the home stream's order (rule 1). Raises `torch.OutOfMemoryError`."""
        with self.home:
            slab = allocate_device(num_bytes, self.device)
        self.stream.wait_stream(self.home)
        return slab

    def begin_pass(self, *, beside: bool = False) -> None:
        """Order this pass behind the last one, wherever that ran (rule 5).

        Args:
            beside: compute beside the last one, which was ordered as this one is to be.
        """
        if self.waits.open or self.waits.num_ended:
            self.waits.read()
        self.waits.begin_pass()
        compute = self.compute_stream
        if beside:
            self.other_computes.append(self.last_compute)
        else:
            self.follow(compute)
        self.last_compute = compute

    def follow(self, stream: torch.Stream) -> None:
        """Make a stream wait for the last passes."""
        for used in (self.last_compute, *self.other_computes):
            if used != stream:
                stream.wait_stream(used)
        self.other_computes.clear()

    def begin_step(self) -> None:
        """Order the caller's stream behind the last pass: micro-batches begin behind that stream."""
        self.follow(self.compute_stream)
        self.last_compute = self.compute_stream

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
        # Bytes have no gradients: no_grad would only cost its microseconds.
        if source.nbytes >= TELLING_BYTES and self.speeds.watches:
            with self.stream, self.speeds.timed(source, self.stream):
                target.copy_(source, non_blocking=True)
        else:
            with self.stream:
                target.copy_(source, non_blocking=True)

    def mark_ready(self, ready: torch.Event) -> None:
        """Record an event on the copy stream behind all copies that are queued."""
        ready.record(self.stream)

    def mark_free(self, free: torch.Event, stream: torch.Stream) -> None:
        """Record an event on the compute stream behind the last use of the memory."""
        free.record(stream)

    def mark_use(self) -> LastUse:
        """Record an event on the compute stream behind the last use of memory there; returns both."""
        stream, end = self.compute_stream, self.event()
        end.record(stream)
        return stream, end

    def await_use(self, used_on: torch.Stream, end: torch.Event) -> None:
        """Make the compute stream wait for a use that `mark_use` recorded, perhaps on another stream."""
        stream = self.compute_stream
        if stream != used_on:
            stream.wait_event(end)

    def await_on_compute(self, ready: torch.Event) -> torch.Stream:
        """Make the compute stream wait for a copy (rule 2), and return it; the host goes on."""
        stream = self.compute_stream
        self.waits.await_event(stream, ready)
        return stream

    def await_at_home(self, ready: torch.Event) -> None:
        """Make the home stream wait for a copy, which it then may read; the host goes on."""
        self.home.wait_event(ready)

    def finish(self) -> None:
        """Wait on the host until every queued copy is done; weights at rest may be written to then. Not for a step."""
        self.wait()
        self.compute_stream.wait_stream(self.stream)

    def drain(self) -> None:
        """Make the home stream wait for every queued copy and compute, so that memory may be freed (rule 4)."""
        self.home.wait_stream(self.stream)
        for used in (self.last_compute, *self.other_computes, self.compute_stream):
            if used != self.home:
                self.home.wait_stream(used)

    def wait(self) -> None:
        """Wait on the host until every queued copy is done. Not for a step."""
        if self.beside is not None:
            self.beside.wait()
        self.stream.synchronize()
