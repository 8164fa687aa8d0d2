"""How long calls of components took to compute on devices of this machine: measured in passes, asked for by plans.

[Note: speeds] A call is a pass through one entry of a component's module, with inputs of certain shapes. Its seconds
are those in which the device computed: where blocks stream, the sum of what these compute, without waits for copies,
which plans add. A trace of the same call tells its work: then its seconds give rates of the device for such weights,
by which other calls are predicted. Nothing else gives a rate. What a split computes is not measured.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch

from ..tracing.call_shapes import Shapes
from ..tracing.trace import Work
from ..transfer.devices import Device
from ..transfer.link_speed import describe_link
from ..weights.component import Component

__all__ = ["CallKey", "MeasuredCall", "Speeds", "digest_speed", "main_dtype"]

# What is measured anew counts so much: one call may be slower for what else the machine does.
NEW_SHARE = 0.5
MAX_CALLS = 2000
# Writing the file takes some 15 us for each of its calls. So what moves by less is not written again, except once a
# while: of a full file those go that were written longest ago.
LEAST_MOVED = 0.02
WRITTEN_EACH_S = 24 * 3600
# What a call can have taken: no device computes one in less, and no one waits for more.
LEAST_S, MOST_S = 1e-7, 1e5
# What of some work takes time, in numbers of `Work`: its operations, and with them launches, or traffic, or both.
PARTS = ((0,), (2,), (0, 2), (0, 1), (0, 1, 2))
# Rates of more parts have to fit by so much better: mean squares of relative errors.
LEAST_BETTER = 1e-4

Rates: TypeAlias = tuple[float, ...]
"""The seconds for one of each number of `Work`."""


class CallKey(NamedTuple):
    """What a call computes, and where."""

    component: str
    """The digest of its content, as of learned needs."""
    device: str
    """The digest of the device and its driver."""
    dtype: str
    """The dtype of most of its weights, and what they rest in if that is another form."""
    entry: int
    """0 for the component's module, 1 and up for its children."""
    shapes: Shapes


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCall:
    """What was measured of equal calls."""

    seconds: float
    of_blocks: bool = False
    """Whether only what its blocks compute is in it: they streamed."""
    work: Work | None = None
    """What takes these seconds; None until a trace told it."""
    used_s: int = 0
    """When it was measured last, in seconds since 1970."""


def can_take(seconds: float) -> bool:
    """Whether so many seconds can be those of a call; others break the arithmetic of rates."""
    return LEAST_S <= seconds <= MOST_S


def main_dtype(component: Component, precision: str = "") -> str:
    """Return the dtype of most weights of a component, with the precision if they rest in another form."""
    taken: dict[str, int] = {}
    for block in (*component.blocks, component.non_block):
        for tensor in block.tensors:
            taken[tensor.dtype] = taken.get(tensor.dtype, 0) + tensor.weight_bytes
    return f"{max(taken, key=lambda dtype: taken[dtype], default='')} {precision}".strip()


def digest_speed(device: Device) -> str:
    """Return a digest of a device and its driver: equal cards with the same one have equal ones."""
    told = {} if device.is_cpu else describe_link(device)
    text = f"{told.get('name', '')} {told.get('driver', '')} {device.total_bytes()}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def seconds_at(rates: Rates, work: Work) -> float:
    """Return what some work takes at these rates."""
    return sum(rate * number for rate, number in zip(rates, work, strict=True))


def fit_rates(calls: Sequence[tuple[float, Work]]) -> Rates | None:
    """Return the rates that fit measured calls best, relative to their seconds; None without any.

    Of one call all seconds are its operations'. Of several, what else fits better takes a part: a call that is mostly
    launches of small kernels tells nothing of the rate of large ones. No rate is negative.
    """
    best: tuple[float, int, Rates] | None = None
    for used in PARTS[: 1 if len(calls) == 1 else None]:
        if not calls or len(used) > len(calls):
            continue
        matrix = torch.tensor([[work[part] / seconds for part in used] for seconds, work in calls], dtype=torch.float64)
        scale = matrix.abs().amax(0).clamp(min=1e-300)
        ones = torch.ones(len(calls), 1, dtype=torch.float64)
        solved = (torch.linalg.lstsq(matrix / scale, ones, driver="gelsd").solution[:, 0] / scale).tolist()
        if min(solved) < 0 or not any(solved):
            continue
        rates = tuple(solved[used.index(part)] if part in used else 0.0 for part in range(len(Work._fields)))
        error = sum((seconds_at(rates, work) / seconds - 1) ** 2 for seconds, work in calls) / len(calls)
        if best is None or error < best[0] - LEAST_BETTER:
            best = error, len(used), rates
    return best[-1] if best is not None else None


def is_news(call: MeasuredCall, written: MeasuredCall | None) -> bool:
    """Whether a call is to be written to the file again."""
    return (
        written is None
        or (call.work, call.of_blocks) != (written.work, written.of_blocks)
        or abs(call.seconds / written.seconds - 1) > LEAST_MOVED
        or call.used_s - written.used_s > WRITTEN_EACH_S
    )


class Speeds:
    """All measured calls, and which of them are not written to their file yet."""

    def __init__(self) -> None:
        self.known: dict[CallKey, MeasuredCall] = {}
        self.changed: set[CallKey] = set()
        self.written: dict[CallKey, MeasuredCall] = {}
        """The calls as their file has them."""
        self.left: dict[tuple[str, str], dict[Hashable, int]] = {}
        """By component and device, which of its calls are timed next: objects of one file come and go."""
        self.problem = ""
        """Why the file of earlier ones cannot be read; empty where it can, or there is none."""

    def calls(self) -> list[tuple[CallKey, MeasuredCall]]:
        """Return all calls with their keys, to be read while other threads note some."""
        return list(self.known.items())

    def calls_left(self, component: str, device: str) -> dict[Hashable, int]:
        """Return in which a component's calls are counted (`CallTimes`), by its id in the books."""
        if len(self.left) >= MAX_CALLS:
            self.left.clear()
        return self.left.setdefault((component, device), {})

    def note(self, key: CallKey, seconds: float, *, of_blocks: bool) -> None:
        """Add what was measured: of a whole call it counts more than of its blocks alone."""
        before = self.known.get(key)
        if not can_take(seconds) or (before is not None and of_blocks and not before.of_blocks):
            return
        if before is not None and before.of_blocks == of_blocks:
            seconds = NEW_SHARE * seconds + (1 - NEW_SHARE) * before.seconds
            found = replace(before, seconds=seconds, used_s=int(time.time()))
        else:
            found = MeasuredCall(seconds=seconds, of_blocks=of_blocks, used_s=int(time.time()))
        self.set(key, found)

    def note_work(self, key: CallKey, work: Work) -> None:
        """Note what the measured seconds of a call are for, as its trace says."""
        found = self.known.get(key)
        if found is not None and min(work) > 0 and found.work != work:
            self.set(key, replace(found, work=work))

    def set(self, key: CallKey, call: MeasuredCall) -> None:
        while key not in self.known and len(self.known) >= MAX_CALLS:
            oldest, _ = min(self.calls(), key=lambda found: found[1].used_s)
            self.known.pop(oldest, None)
            self.changed.discard(oldest)
            self.written.pop(oldest, None)
        is_new = key not in self.known
        self.known[key] = call
        if is_new or is_news(call, self.written.get(key)):
            self.changed.add(key)

    def predict(self, device: str, dtype: str, component: str, work: Work) -> float | None:
        """Return what a device takes for some work with such weights, by calls that were measured; None without any.

        Those of this component count alone where there are two of them; one of it alone corrects what others say.
        """
        calls = [
            (key.component == component, call.seconds, call.work)
            for key, call in self.calls()
            if key.device == device and key.dtype == dtype and call.work is not None
        ]
        own = [(seconds, done) for is_own, seconds, done in calls if is_own]
        others = [(seconds, done) for is_own, seconds, done in calls if not is_own]
        rates = fit_rates(own if len(own) > 1 else [*own, *others])
        if rates is None:
            return None
        correction = own[0][0] / seconds_at(rates, own[0][1]) if len(own) == 1 else 1.0
        return correction * seconds_at(rates, work) or None

    def note_problem(self, problem: str) -> None:
        """Note why the file of earlier calls could not be read."""
        self.problem = problem

    def restore(self, calls: Iterable[tuple[CallKey, MeasuredCall]]) -> None:
        """Take over what was read from the file."""
        for key, call in calls:
            self.written[key] = call
            self.known.setdefault(key, call)

    def take_changed(self) -> dict[CallKey, MeasuredCall]:
        """Return what is to be written to the file, and count it as written."""
        changed = set(self.changed)
        self.changed -= changed  # another thread may add some meanwhile
        taken = {key: call for key in changed if (call := self.known.get(key)) is not None}
        self.written |= taken
        return taken

    def keep_changed(self, which: Iterable[CallKey]) -> None:
        """Count these as not written: writing them failed."""
        self.changed |= set(which)
