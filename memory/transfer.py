"""Slabs, streams, events and staging slots: the only file that touches a device stream.

[Note: ordering] Weights travel on one copy stream per component and device; everything else runs on the stream
that is current when a block is entered, the compute stream. Four rules keep them apart, all by events, none by a
device-wide synchronize:

1. All memory is allocated on one stream, the home stream, because an allocator hands it out again in that stream's
   order. A copy into memory that was just allocated waits for the home stream: a kernel queued there may still read it.
2. A block computes after its copy: the compute stream waits for the slot's (or the resident block's) ready event.
3. A slot is refilled after its last use: the copy stream waits for the slot's free event.
4. Memory is freed after its last copy and its last use: the home stream waits for both (`CopyStream.drain`).
5. A pass on another stream than the last one waits for that one: slots, scratch and events are those of one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .devices import Device
from .units import slab_offsets

__all__ = ["CopyStream", "SlabLayout", "StagingSlot", "allocate_device", "allocate_host"]


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Where the tensors of one block lie in a flat slab of bytes; the same on the host and on a device."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]
    slab_bytes: int

    @classmethod
    def of(cls, tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> SlabLayout:
        offsets, slab_bytes = slab_offsets(shape.numel() * dtype.itemsize for shape, dtype in tensors)
        shapes, dtypes = tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors)
        return cls(shapes, dtypes, tuple(offsets), slab_bytes)

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views into a slab of uint8; allocates nothing.

        Detached ones: they share the slab's version but, unlike views, do not keep its first owner alive once
        they are pointed elsewhere.
        """
        with torch.inference_mode(False), torch.no_grad():
            return [
                slab[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape).detach()
                for shape, dtype, offset in zip(self.shapes, self.dtypes, self.offsets, strict=True)
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


def allocate_host(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate a slab of host bytes, page-locked if asked and possible; `Tensor.is_pinned` tells which."""
    with torch.inference_mode(False):
        if pinned:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # the driver's limit; torch.OutOfMemoryError is one too
                pass
        return torch.empty(num_bytes, dtype=torch.uint8)


class StagingSlot:
    """Device memory through which streamed blocks pass, one at a time."""

    def __init__(self, num_bytes: int, copies: CopyStream) -> None:
        self.slab = copies.allocate(num_bytes)
        self.block: int | None = None
        self.version = 0
        """The version of the master when it was copied: a host may write to masters."""
        self.in_use = False
        self.ready = torch.Event(device=copies.device.torch_device)
        self.free = torch.Event(device=copies.device.torch_device)

    def holds(self, block: int, source: torch.Tensor) -> bool:
        """Whether the slot has this block as its master now is."""
        return self.block == block and self.version == source._version


class CopyStream:
    """The stream on which weights reach one device, overlapping what computes there."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device.torch_device)
        self.home = self.compute_stream
        self.last_compute = self.home

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

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Event:
        """Queue a copy of a host slab to the device; returns its ready event. Blocks the host if not pinned."""
        ready = torch.Event(device=self.device.torch_device)
        self.copy_and_record(target, source, ready)
        return ready

    def refill(self, slot: StagingSlot, block: int, source: torch.Tensor) -> None:
        """Queue a block's copy into a slot once its last use is over (rule 3)."""
        assert not slot.in_use, f"slot refilled while block {slot.block} computes"
        self.stream.wait_event(slot.free)
        self.copy_and_record(slot.slab[: source.numel()], source, slot.ready)
        slot.block, slot.version = block, source._version

    def copy_and_record(self, target: torch.Tensor, source: torch.Tensor, ready: torch.Event) -> None:
        with self.stream, torch.no_grad():
            target.copy_(source, non_blocking=True)
            ready.record(self.stream)

    def await_on_compute(self, ready: torch.Event) -> None:
        """Let the compute stream wait for a copy (rule 2); the host goes on."""
        self.compute_stream.wait_event(ready)

    def mark_free(self, slot: StagingSlot) -> None:
        """Note on the compute stream that the slot's content is no longer needed."""
        slot.free.record(self.compute_stream)
        slot.in_use = False

    def finish(self) -> None:
        """Wait on the host until every queued copy is done: masters may be written to then. Not for a step."""
        self.stream.synchronize()
        self.compute_stream.wait_stream(self.stream)

    def drain(self) -> None:
        """Let the home stream wait for every queued copy and compute, so that memory may be freed (rule 4)."""
        self.home.wait_stream(self.stream)
        for used in (self.last_compute, self.compute_stream):
            if used != self.home:
                self.home.wait_stream(used)
