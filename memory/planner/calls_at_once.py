"""Whether the devices of a split compute the calls of a forward at the same time, and why not."""

from __future__ import annotations

from collections.abc import Sequence

from .device_plan import DevicePlan
from .pipeline import NUM_CALLS
from .run import Use

__all__ = ["WHY_ONE_SCRATCH", "WHY_STREAMS", "compute_at_once", "devices_by_block", "why_in_turn"]

# Why calls are made one after the other, in a plan as in a step.
WHY_STREAMS = "blocks stream, and a second call would fetch them once more"
WHY_ONE_SCRATCH = (
    "weights are decoded into one scratch memory: a placement with groups, such as gpu:0&gpu:1/auto, has two"
)


def compute_at_once(shares: Sequence[DevicePlan], use: Use) -> bool:
    """Whether devices of a split compute the calls of a forward at the same time."""
    return len(shares) > 1 and not why_in_turn(shares, use)


def why_in_turn(shares: Sequence[DevicePlan], use: Use | None) -> str:
    """Return why devices of a split compute one call of a forward after the other; empty where they need not.

    Args:
        use: what is computed; None where that is not known.
    """
    if use is not None and use.one_by_one:
        return use.one_by_one
    if use is not None and use.num_calls == 1:
        return "a forward is one call: a split buys memory, not speed"
    if any(share.streamed for share in shares):
        return WHY_STREAMS
    if any(share.scratch_bytes and share.decodes < NUM_CALLS for share in shares):
        return WHY_ONE_SCRATCH
    return ""


def devices_by_block(shares: Sequence[DevicePlan]) -> list[int]:
    """Return of each block, in order, the number of the share that has it."""
    found = {number: index for index, share in enumerate(shares) for number in share.blocks}
    return [found[number] for number in sorted(found)]
