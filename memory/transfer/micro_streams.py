"""The streams of micro-batches: each computes on streams of its own, one per device, while another one computes too.

The first one computes on the caller's streams.

[Note: lock-step] One thread launches one micro-batch after the other. What the first one leaves in a module for the
blocks after it, such as a cache, the second one finds there as a tensor that may not be computed yet. So the second one
follows the first by events: it begins when the first one has reached its first block, each block waits for the first
one's call of that block, and what comes behind the last block waits for the end of the first one. None of this costs
time where devices compute in the order of launches, since the second one could not overtake the first. What the first
one leaves later than a block, for that block of the second, is not ordered. Where it wrote to a tensor that it was
given, the second one begins behind its end.

[Note: memory of micro-batches] An allocator hands out memory again in the order of the stream on which it was
allocated. So the streams of micro-batches begin behind what the caller had queued, its streams go on behind all of
them, and they begin again behind those: whatever is freed after the end was used before. What a caller gets is noted as
used on its own streams. What code around the calls keeps from the first one, such as a ControlNet its hint, it can use
on the caller's streams as ever: it was allocated there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from .stream_pool import take_stream

__all__ = ["MicroStreams"]

known_streams: dict[tuple[torch.device, int], torch.Stream] = {}
"""By device, and by the number of the micro-batch: a new stream would get memory of its own from torch's allocator."""


def stream_for(device: torch.device, number: int) -> torch.Stream:
    """Return the stream of a micro-batch on a device, the same one each time."""
    key = device, number
    if key not in known_streams:
        known_streams[key] = take_stream(device)
    return known_streams[key]


class MicroStreams:
    """The streams of the micro-batches of one step, from its begin to its end; of one thread.

    Args:
        devices: those of the blocks, the home device first.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.callers = [torch.accelerator.current_stream(device.index) for device in self.devices]
        self.index = torch.accelerator.current_device_index()
        self.begun = [self.mark(caller) for caller in self.callers]
        """When the caller's streams were through with what it had queued before."""
        self.used: list[list[torch.Stream]] = []
        """Of each micro-batch that has begun, its streams in the order of the devices."""
        self.behind: dict[int, torch.Event] = {}
        """When the micro-batch before this one was through each block."""
        self.last_block: int | None = None
        """The last block that the micro-batch before this one ran."""
        self.now_begun: torch.Event | None = None
        """When this micro-batch reached its first block."""
        self.now_behind: dict[int, torch.Event] = {}
        self.now_last: int | None = None

    @property
    def number(self) -> int:
        """The number of the micro-batch that is launched now, from 0."""
        return len(self.used) - 1

    @property
    def current(self) -> list[torch.Stream]:
        """Its streams, in the order of the devices."""
        return self.used[-1]

    def next(self, *, follows: bool = True) -> None:
        """Launch what follows on the streams of the next micro-batch.

        Args:
            follows: in lock-step with the one before; False, and where that one ran no block: behind the end of all
                before.
        """
        number = len(self.used)
        streams = [stream_for(device, number) for device in self.devices] if number else self.callers
        for begun, stream in zip(self.begun, streams, strict=True):
            if number:
                stream.wait_event(begun)
        before = [stream for streams in self.used for stream in streams]
        for stream in streams:
            if self.now_begun is not None and follows:
                stream.wait_event(self.now_begun)
            else:
                self.wait_for(stream, before)
        self.used.append(streams)
        self.behind, self.last_block = self.now_behind, self.now_last
        self.now_begun, self.now_behind, self.now_last = None, {}, None
        self.set_current(streams)

    def enter_block(self, number: int, device: torch.device) -> None:
        """Make a block's stream wait until the micro-batch before this one is through the block.

        The first one tells the next micro-batch that it may begin: behind what this one queued at home before.
        """
        if self.now_begun is None:
            self.now_begun = self.mark(self.current[0])
        if not self.number:
            return
        stream = self.stream_on(device)
        if number in self.behind:
            stream.wait_event(self.behind[number])
        else:
            self.wait_for(stream, self.used[-2])

    def leave_block(self, number: int, device: torch.device) -> None:
        """Note that this micro-batch has queued a call of a block; behind the last one wait for the one before."""
        stream = self.stream_on(device)
        if number == self.last_block:
            self.wait_for(stream, self.used[-2])
        self.now_behind[number] = self.mark(stream)
        self.now_last = number

    def note_use(self, tensor: torch.Tensor) -> None:
        """Note that this micro-batch uses a tensor that another one may have allocated."""
        tensor.record_stream(self.stream_on(tensor.device))

    def stream_on(self, device: torch.device) -> torch.Stream:
        return self.current[self.devices.index(device)]

    def end(self, results: Iterable[torch.Tensor]) -> None:
        """Go on with the caller's streams, behind all micro-batches ([Note: memory of micro-batches]).

        Args:
            results: what the caller gets of them.
        """
        self.set_current(self.callers)
        for place, caller in enumerate(self.callers):
            self.wait_for(caller, [streams[place] for streams in self.used])
        for place, caller in enumerate(self.callers):
            for streams in self.used:
                self.wait_for(streams[place], [caller])
        callers = dict(zip(self.devices, self.callers, strict=True))
        for tensor in results:
            if tensor.device in callers:
                tensor.record_stream(callers[tensor.device])

    def set_current(self, streams: Sequence[torch.Stream]) -> None:
        for stream in streams:
            torch.accelerator.set_stream(stream)
        torch.accelerator.set_device_index(self.index)

    @staticmethod
    def wait_for(stream: torch.Stream, others: Sequence[torch.Stream]) -> None:
        for other in others:
            if other != stream:
                stream.wait_stream(other)

    @staticmethod
    def mark(stream: torch.Stream) -> torch.Event:
        event = torch.Event(device=stream.device)
        event.record(stream)
        return event
