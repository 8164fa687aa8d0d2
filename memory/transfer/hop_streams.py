"""Copies to another device beside what the source device computes next.

[Note: hops beside computing] Torch queues a copy between devices on the current stream of its source, so that the next
kernel there waits for it. Here a copy on the device, at the speed of its memory, takes the place of the source: that
one can be written to at once, and the copy goes on a stream of its own. The target's current stream waits for it, as
torch has it.
"""

from __future__ import annotations

import torch

from .stream_pool import take_stream

__all__ = ["send_beside"]

hop_streams: dict[tuple[torch.device, int], torch.Stream] = {}
"""By the source device and the id of the stream that computes there."""


def hop_stream(compute: torch.Stream) -> torch.Stream:
    """Return the stream for copies from a stream that computes, the same one each time."""
    key = compute.device, compute.stream_id
    if key not in hop_streams:
        hop_streams[key] = take_stream(compute.device)
    return hop_streams[key]


def send_beside(held: torch.Tensor, target: torch.device, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy on another accelerator, or ``into``, filled; the source device computes on meanwhile.

    Args:
        held: a copy on the device that is never written to; the caller may free it at once.
    """
    compute = torch.accelerator.current_stream(held.device.index)
    beside = hop_stream(compute)
    beside.wait_stream(compute)
    with beside:
        sent = held.to(target) if into is None else into.copy_(held)
    held.record_stream(beside)
    return sent
