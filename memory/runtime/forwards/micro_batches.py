"""The micro-batches of one step: calls of a split module whose devices compute at the same time.

A split alone lets one device compute at a time. Micro-batches are independent calls of the same module, such as the
conditional and the unconditional half of a sampling step: while the second device computes one, the first device
computes the next one. Each result is what the call gives alone, to the bit, because each call is launched as it is,
only on streams of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import torch

from ...planner.calls_at_once import WHY_ONE_SCRATCH, WHY_STREAMS
from ...transfer.micro_streams import MicroStreams
from ..devices.device_share import DeviceShare
from ..tensors.nested_tensors import find_tensors
from .device_hops import DeviceHops, version_of

__all__ = ["MicroBatches", "note_pass_beside", "open_steps", "why_one_by_one"]


open_steps: dict[int, MicroBatches] = {}
"""The step that each thread makes now, by the thread's id."""


def note_pass_beside(hops: DeviceHops) -> None:
    """Note that a component begins a pass: if another one makes micro-batches in this thread, its next call waits.

    Only the calls of the component that was split are ordered on the streams of each call.
    """
    step = open_steps.get(get_ident())
    if step is not None and step.hops is not hops:
        step.note_other()


class MicroBatches:
    """The micro-batches of a step of this thread, as the forwards of a component tell of them.

    Args:
        hops: keeps its copies until the end of the step: what several calls take is copied once.
    """

    def __init__(self, shares: Sequence[DeviceShare], hops: DeviceHops) -> None:
        self.thread_id = get_ident()
        self.hops = hops
        for share in shares:
            if share.copies is not None:
                share.copies.begin_step()
        self.streams = MicroStreams([share.device.torch_device for share in shares])
        self.given: list[tuple[torch.Tensor, int | None]] = []
        """The tensors that the calls so far took, with their versions when they took them."""
        self.is_beside = True
        """Whether the last call can compute beside the next one."""
        self.calls_others = False
        """Whether the last call makes other components compute, too."""
        open_steps[self.thread_id] = self

    def begin_call(self) -> None:
        """Launch what follows on the streams of the next call."""
        has_written = any(version_of(tensor) != version for tensor, version in self.given)
        self.given.clear()
        self.streams.next(follows=self.is_beside and not has_written and not self.calls_others)
        self.calls_others = False
        self.hops.begin_call(self.streams.number, self.streams.note_use)

    def take(self, inputs: Any) -> None:
        """Note what a call takes: if it writes to that, the next call computes behind it."""
        self.given += [(tensor, version_of(tensor)) for tensor in find_tensors(inputs)]

    def begin_pass(self, *, can_be_beside: bool) -> bool:
        """Note a pass of the component; returns whether it may compute beside the one before."""
        is_beside = self.is_beside and can_be_beside and self.streams.number > 0
        self.is_beside = can_be_beside
        return is_beside

    def note_other(self) -> None:
        """The call that runs also makes another component compute: the next call waits for it."""
        self.calls_others = True

    def end(self, results: Any) -> None:
        """Go on with the caller's streams; ``results`` are what the calls returned so far."""
        open_steps.pop(self.thread_id, None)
        self.hops.begin_call(0, None)
        self.streams.end(find_tensors(results))


def why_one_by_one(shares: Sequence[DeviceShare]) -> str:
    """Return why calls of a component cannot compute beside one another now; empty where they can."""
    if len(shares) < 2:
        return "it computes on one device"
    if any(share.streamer is not None for share in shares):
        return WHY_STREAMS
    if any(share.copies is None for share in shares):
        return "some blocks compute on the CPU"
    if any(share.decodes_one_by_one for share in shares):
        return WHY_ONE_SCRATCH
    if torch.is_grad_enabled():
        return "gradients are recorded"
    return ""
