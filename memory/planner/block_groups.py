"""Groups of blocks in turn: how a split is cut so that its devices compute micro-batches at the same time.

[Note: groups in turn] With one run of blocks per device the second device waits for the first one's half of the first
micro-batch, and the first one has nothing to do for the second half of the second: two equal devices reach 4/3 of one.
With ``n`` groups in turn, two micro-batches take ``n + 1`` groups' times of the ``2 n`` that one device takes: 1.71 of
one with six, 1.82 with ten. Each border between two groups costs a hop, and so does each output that a device other
than the first one sends home. What that is beside a block's time depends on inputs that a plan does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Pipeline", "balance", "best_number", "devices_in_turn", "predict"]

# Two calls: the conditional and the unconditional half of a step.
NUM_CALLS = 2
# More groups gain a hundredth at most, and each costs a hop.
MOST_GROUPS = 32
# A hop's part of what one device takes for a call: about Flux's at 1024x1024 on an RTX 4090 over 25 GB/s.
HOP_PART = 0.002
# A number of groups has to gain so much on a smaller one.
WORTH_MORE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """What micro-batches take on alternating devices, in seconds or in any other unit of time.

    Args:
        speeds: of each device, in the order of the split; ``block_s`` is what a block takes at speed 1.
        hop_s: what a hop of the hidden states takes.
    """

    block_s: tuple[float, ...]
    speeds: tuple[float, ...]
    hop_s: float
    num_calls: int = NUM_CALLS

    @property
    def alone_s(self) -> float:
        """What all calls take on the fastest device alone."""
        return self.num_calls * sum(self.block_s) / max(self.speeds)


def devices_in_turn(num_groups: int, num_devices: int) -> list[int]:
    """Return of each group the number of its device: each in turn, the first one first."""
    return [number % num_devices for number in range(num_groups)]


def balance(speeds: Sequence[float], most: Sequence[float]) -> list[float]:
    """Return each device's part of the blocks: by speed, but at most so much; the faster ones take what is left.

    Where all of them together may take less than everything, the parts are of that.
    """
    parts = [0.0] * len(speeds)
    open_devices = [number for number, limit in enumerate(most) if limit > 0]
    left = 1.0
    while open_devices and left > 1e-12:
        total = sum(speeds[number] for number in open_devices)
        full = [number for number in open_devices if left * speeds[number] / total >= most[number]]
        if not full:
            for number in open_devices:
                parts[number] = left * speeds[number] / total
            return parts
        for number in full:
            parts[number] = most[number]
            left -= most[number]
            open_devices.remove(number)
    whole = sum(parts)
    return [part / whole for part in parts] if whole else [1 / len(speeds)] * len(speeds)


def predict(pipeline: Pipeline, runs: Sequence[Sequence[int]]) -> float:
    """Return how many times as fast as the fastest device alone the calls are, over groups in turn.

    Each device computes in the order of groups, and of calls in each.
    """
    num_devices = len(pipeline.speeds)
    free = [0.0] * num_devices
    ends = [0.0] * pipeline.num_calls
    for run, device in zip(runs, devices_in_turn(len(runs), num_devices), strict=True):
        run_s = sum(pipeline.block_s[number] for number in run) / pipeline.speeds[device]
        home_s = pipeline.hop_s * len(run) if device else 0.0  # each output of another device comes home
        for call in range(pipeline.num_calls):
            begin = max(ends[call], free[device])
            free[device] = begin + run_s
            ends[call] = begin + run_s + home_s + pipeline.hop_s
    longest = max(ends)
    return pipeline.alone_s / longest if longest else 1.0


def best_number(gains: dict[int, float]) -> int:
    """Return the smallest number of groups that no larger one gains much on, by their predicted gains."""
    best = max(gains.values())
    return min(number for number, gain in gains.items() if gain >= best * (1 - WORTH_MORE))
