"""The result of a comparison of two runs: the differences in the order of execution, and their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..errors import DoesNotFit, InvalidInput, UnsafeState, reason_of
from ..transfer.devices import HostMemory
from ..units import GIB
from .comparison import Gap, Shown, compare_leaves, leaves_in, show
from .recording import Call, Recording

__all__ = ["NUM_LISTED", "Difference", "Side", "Verification", "compare_sides", "kept_bytes", "run_side"]

# Outputs are kept in host memory to measure differences: up to an eighth of the available RAM, at most 4 GiB.
KEPT_SHARE = 8
MAX_KEPT_BYTES = 4 * GIB
# The number of differences that a text lists.
NUM_LISTED = 3
REFUSALS = (DoesNotFit, InvalidInput, UnsafeState, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One difference. ``place`` is a module's path, after the component's name if there are several components."""

    place: str
    text: str
    number: int = 1
    """The number of this call of the module, from 1."""
    what: str = "output"
    """``output``, ``argument`` (the call wrote other values into it), ``weights``, or ``error``."""
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The result of a comparison; ``differences`` are in the order of execution."""

    subject: str
    differences: tuple[Difference, ...]
    num_calls: int
    """The number of compared module calls."""
    reference: str
    """How the reference was computed."""
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of execution."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the result as text, with the verdict in the first line."""
        if self.first is None:
            verdict = f"{self.subject}: equal, bit for bit ({self.num_calls} outputs compared)"
        else:
            verdict = f"{self.subject}: DIFFERS, first at {describe(self.first)}"
        others = [f"  then {describe(found)}" for found in self.differences[1:NUM_LISTED]]
        left = len(self.differences) - NUM_LISTED
        others += [f"  and {left} more"] if left > 0 else []
        return "\n".join([verdict, *others, f"  reference: {self.reference}", *(f"  {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return the result for JSON. Infinite and NaN numbers become None."""
        told = asdict(self)
        for found in told["differences"]:
            for name in ("max_abs", "relative", "cosine"):
                if found[name] is not None and not math.isfinite(found[name]):
                    found[name] = None
        return {**told, "is_equal": self.is_equal}

    def assert_equal(self) -> None:
        """Raise `AssertionError` with the text if anything differs. For tests."""
        if not self.is_equal:
            raise AssertionError(self.text())


def describe(found: Difference) -> str:
    again = f", call {found.number}" if found.number > 1 else ""
    return f"{found.place}{again}: {found.text}"


@dataclass(slots=True)
class Side:
    """The results of one run."""

    outputs: list[Shown] = field(default_factory=list)
    arguments: list[Shown] = field(default_factory=list)
    error: Exception | None = None
    recording: Recording | None = None

    def note_arguments(self, shown: list[Shown]) -> None:
        """Note what the call left in its arguments."""
        self.arguments = shown


def run_side(call: Callable[[], Any], recording: Recording | None, *, room_bytes: int) -> Side:
    """Make one call. An exception is its result, except for refusals, interrupts and out of memory."""
    side = Side(recording=recording)
    try:
        with recording or nullcontext():
            output = call()
        side.outputs = [show(leaf, room_bytes=room_bytes) for leaf in leaves_in(output)]
    except Exception as error:
        if is_refusal(error):
            raise
        side.error = error
    return side


def kept_bytes() -> int:
    """Return how many bytes of outputs may be kept in host memory."""
    return min(MAX_KEPT_BYTES, HostMemory.now().free_bytes // KEPT_SHARE)


def compare_sides(
    subject: str,
    *,
    managed: Side,
    unwatched: Side,
    reference: Side,
    how: str,
    weights: Sequence[Difference] = (),
    notes: Sequence[str] = (),
) -> Verification:
    """Return the differences between the recorded run, the unwatched run and the reference.

    Raises the reference's exception, if it has one.

    Args:
        how: how the reference was computed.
        weights: differences of the weights themselves.
    """
    if reference.error is not None:
        raise reference.error
    told = list(notes)
    if managed.recording is not None and managed.recording.num_dropped:
        told.append(f"{managed.recording.num_dropped} outputs did not fit in memory and were compared by digest only")
    return Verification(
        subject=subject,
        differences=(
            *weights,
            *compare_calls(managed, reference),
            *compare_ends(unwatched, managed, reference),
        ),
        num_calls=len(reference.recording.calls) if reference.recording else 0,
        reference=how,
        notes=tuple(told),
    )


def is_refusal(error: BaseException) -> bool:
    """Whether an error or one of its causes is a refusal, which is no result to compare."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, REFUSALS):
            return True
        cause = cause.__cause__
    return False


# -- comparing


def compare_calls(ours: Side, theirs: Side) -> list[Difference]:
    """Return the differences between module calls of two runs, in the order of the reference."""
    if ours.recording is None or theirs.recording is None:
        return []
    own = {call.key: call for call in ours.recording.calls}
    found = []
    for call in theirs.recording.calls:
        mine = own.pop(call.key, None)
        if mine is not None:
            found += differences_of(mine, call)
        elif ours.error is None:
            found.append(Difference(place=call.place, number=call.number, text="was not called", what="error"))
    if ours.error is None:
        found += [
            Difference(place=call.place, number=call.number, text="was called, but not in the reference", what="error")
            for call in own.values()
        ]
    else:
        stuck = ours.recording.begun[-1] if ours.recording.begun else None
        text = f"fails, but not in the reference: {one_line(ours.error)}"
        place, number = (stuck.place, stuck.number) if stuck else ("the call", 1)
        found.append(Difference(place=place, number=number, text=text, what="error"))
    return found


def differences_of(ours: Call, theirs: Call) -> list[Difference]:
    gap = compare_leaves(ours.outputs, theirs.outputs)
    if gap is None:
        return []
    came = compare_leaves(ours.inputs, theirs.inputs)
    where = f"output{gap.path} " if gap.path else ""
    why = "from equal inputs" if came is None else "its inputs differ already"
    return [from_gap(gap, ours.place, f"{where}{gap.text}; {why}", number=ours.number)]


def from_gap(gap: Gap, place: str, text: str, *, number: int = 1, what: str = "output") -> Difference:
    return Difference(
        place=place,
        text=text,
        number=number,
        what=what,
        max_abs=gap.max_abs,
        relative=gap.relative,
        cosine=gap.cosine,
    )


def compare_ends(unwatched: Side, managed: Side, reference: Side) -> list[Difference]:
    """Return the differences of the calls' results, and of what the calls wrote into their arguments."""
    found = []
    for what, ours, alone, theirs in (
        ("output", managed.outputs, unwatched.outputs, reference.outputs),
        ("argument", managed.arguments, unwatched.arguments, reference.arguments),
    ):
        gap = compare_leaves(ours, theirs) if managed.error is None else None
        if gap is not None:
            place = "the result" if what == "output" else "what the call wrote into its arguments"
            found.append(from_gap(gap, place, f"{gap.path} {gap.text}".strip(), what=what))
        elif managed.error is None and unwatched.error is None:
            gap = compare_leaves(alone, theirs)
            if gap is not None:
                text = (
                    f"{gap.path} {gap.text}; differs only when nothing is recorded: probably a missing wait for a copy"
                )
                found.append(from_gap(gap, f"the {what}", text.strip(), what=what))
    if unwatched.error is not None and managed.error is None:
        text = f"fails only when nothing is recorded: {one_line(unwatched.error)}"
        found.append(Difference(place="the call", text=text, what="error"))
    return found


def one_line(error: BaseException) -> str:
    return reason_of(f"{type(error).__name__}: {error}")
