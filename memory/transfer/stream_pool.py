"""Streams that wait for no other one of ours.

[Note: stream pool] Torch has few streams of a device, and hands them out in turn: after some 32 the first one comes
again, and what is queued on the two is one order. Those that live as long as the process are each another one, as far
as there are enough.
"""

from __future__ import annotations

import torch

__all__ = ["take_stream"]

# So many a device's pool has, at most.
POOL_STREAMS = 32

taken: set[tuple[torch.device, int]] = set()
"""The device and the id of each stream that was handed out."""


def take_stream(device: torch.device) -> torch.Stream:
    """Return a stream for good, none that was returned before, unless a device has no other."""
    stream = torch.Stream(device=device)
    for _ in range(POOL_STREAMS):
        if (stream.device, stream.stream_id) not in taken:
            break
        stream = torch.Stream(device=device)
    taken.add((stream.device, stream.stream_id))
    return stream
