"""`verify`: one call managed beside one unmanaged, compared bit by bit, with the first part that differs by name.

[Note: verifying] The call is made three times with the same arguments, random states, buffers and caches. First managed
and recorded part by part, with what is on the devices by then. Then managed and watched by nothing: reading outputs in
the middle waits for the device, and so for a copy that comes late. Then without the engine, recorded as well ([Note:
reference] in `reference.py`). All is put back after each of them, whatever happens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import psutil
import torch
from torch import nn

from .comparison import Gap, Shown, compare_leaves, leaves_in, show
from .errors import DoesNotFit, InvalidInput, UnsafeState
from .manager import MemoryManager
from .masters import HostMaster
from .membership import Member
from .recording import Call, Recording, places_of
from .reference import Reference, find_changed_masters
from .residency import Unit
from .snapshot import Snapshot
from .units import GIB, format_bytes

__all__ = ["Difference", "Verification", "compare_calls", "verify"]

# What is kept of outputs in host memory, to say by how much they differ.
KEPT_SHARE = 8
MAX_KEPT_BYTES = 4 * GIB
# What a text lists of what is found.
NUM_LISTED = 3
REFUSALS = (DoesNotFit, InvalidInput, UnsafeState, torch.OutOfMemoryError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One thing that is not the same; ``place`` is a part's path, with its component's name where there are several."""

    place: str
    text: str
    number: int = 1
    """The how manieth call of the part."""
    what: str = "output"
    """``output``, ``argument`` (what the call wrote into it), ``weights``, or ``error``."""
    max_abs: float | None = None
    relative: float | None = None
    cosine: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What a comparison found; ``differences`` in the order of execution."""

    subject: str
    differences: tuple[Difference, ...]
    num_calls: int
    """How many calls of parts were compared."""
    reference: str
    """How the other side was computed."""
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """Where it begins to differ."""
        return self.differences[0] if self.differences else None

    def text(self) -> str:
        """Return it for people: the verdict in the first line."""
        if self.first is None:
            verdict = f"{self.subject}: equal, bit for bit ({self.num_calls} outputs compared)"
        else:
            verdict = f"{self.subject}: DIFFERS first at {describe(self.first)}"
        others = [f"  then {describe(found)}" for found in self.differences[1:NUM_LISTED]]
        left = len(self.differences) - NUM_LISTED
        others += [f"  and {left} more"] if left > 0 else []
        return "\n".join([verdict, *others, f"  reference: {self.reference}", *(f"  {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON, which knows no infinite numbers."""
        told = asdict(self)
        for found in told["differences"]:
            for name in ("max_abs", "relative", "cosine"):
                if found[name] is not None and not math.isfinite(found[name]):
                    found[name] = None
        return {**told, "is_equal": self.is_equal}

    def assert_equal(self) -> None:
        """For tests. Raises `AssertionError` with the text where anything differs."""
        if not self.is_equal:
            raise AssertionError(self.text())


def describe(found: Difference) -> str:
    again = f", call {found.number}" if found.number > 1 else ""
    return f"{found.place}{again}: {found.text}"


@dataclass(slots=True)
class Side:
    """What one run gave."""

    outputs: list[Shown] = field(default_factory=list)
    arguments: list[Shown] = field(default_factory=list)
    error: Exception | None = None
    recording: Recording | None = None


def verify(
    manager: MemoryManager,
    members: Sequence[Member],
    call: Callable[..., Any],
    *args: Any,
    objects: Sequence[Any] = (),
    **kwargs: Any,
) -> Verification:
    """Make a call of managed components once with the engine and once without, and compare ([Note: verifying]).

    Costs three runs of the call, the weights once on their device, and up to 4 GiB of host memory for outputs. Weights
    that a file has are read from it and compared, too.

    Args:
        call: what to call; it may be a module, a method, or a function that calls several modules.
        objects: what else has state that the call changes, such as a pipeline and its scheduler.

    Raises:
        InvalidInput: nothing is managed here, or a host decides where it is.
        UnsafeState, DoesNotFit, torch.OutOfMemoryError: the managed call was refused.
        Exception: what the call raises in both ways.
    """
    refuse_unfit(members)
    modules = [member.attachment.module for member in members]
    places = find_places(members)
    entries = [entry for member in members for unit in member.attachment.units for entry in unit.entries]
    room_bytes = min(MAX_KEPT_BYTES, psutil.virtual_memory().available // KEPT_SHARE)
    tags = {id(unit): checksum(unit) for member in members for unit in member.attachment.units}
    snapshot = Snapshot(modules, entries, objects)
    kept = kept_objects(args, kwargs, [*modules, *objects])

    def run(recording: Recording | None) -> Side:
        arguments = copy_arguments((args, kwargs), kept)
        side = Side(recording=recording)
        try:
            with ExitStack() as stack:
                if recording is not None:
                    stack.enter_context(recording)
                output = call(*arguments[0], **arguments[1])
                side.outputs = [show(leaf, room_bytes=room_bytes) for leaf in leaves_in(output)]
                side.arguments = [show(leaf, room_bytes=room_bytes) for leaf in leaves_in(arguments)]
        except Exception as error:
            if is_refusal(error):
                raise
            side.error = error
        finally:
            snapshot.put_back()
        return side

    managed = run(Recording(places, room_bytes=room_bytes))
    unwatched = run(None)
    changed = [
        f"{member.name}: {unit.name or 'what is outside the blocks'}"
        for member in members
        for unit in written_since(manager, member, tags)
    ]
    for by_blocks in (False, True):
        references = [Reference(manager, member, by_blocks=by_blocks) for member in members]
        try:
            with ExitStack() as stack:
                for one in references:
                    stack.enter_context(one.entered())
                reference = run(Recording(places, room_bytes=room_bytes))
            break
        except torch.OutOfMemoryError:
            if by_blocks:
                raise
    if reference.error is not None:
        raise reference.error
    differences = [
        *(find_lost_weights(members)),
        *compare_calls(managed, reference),
        *compare_ends(unwatched, managed, reference),
    ]
    return Verification(
        subject=", ".join(member.name for member in members),
        differences=tuple(differences),
        num_calls=len(reference.recording.calls) if reference.recording else 0,
        reference=describe_reference(references),
        notes=tuple(describe_notes(members, managed, changed)),
    )


def refuse_unfit(members: Sequence[Member]) -> None:
    if not members:
        raise InvalidInput("nothing to verify: no component is managed")
    for member in members:
        if member.attachment.hooks.target is not member.attachment.forwards:
            raise InvalidInput(f"{member.name} is not managed any more: it was released, or is being verified")
        if member.attachment.passes.here is not None and member.attachment.passes.is_busy():
            raise UnsafeState(f"{member.id} computes now, in this very thread: verify it after that")
        if member.is_hosted:
            raise InvalidInput(f"{member.id} is ComfyUI's model: use the Verify node")


def is_refusal(error: BaseException) -> bool:
    """Whether an error, or what it came from, says that something cannot be done here: no result to compare."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, REFUSALS):
            return True
        cause = cause.__cause__
    return False


def find_places(members: Sequence[Member]) -> dict[nn.Module, str]:
    places: dict[nn.Module, str] = {}
    for member in members:
        prefix = f"{member.name}." if len(members) > 1 else ""
        places |= places_of(member.attachment.module, member.attachment.component, prefix)
    return places


# -- arguments


def kept_objects(args: Any, kwargs: Any, known: Sequence[Any]) -> dict[Any, Any]:
    """Return what a copy of the arguments has in common with them, by id."""
    return {id(thing): thing for thing in known}


def copy_arguments(value: Any, memo: dict[Any, Any]) -> Any:
    """Return a copy of arguments that a call may write into: of tensors, generators, and what holds them.

    Modules, functions and what cannot be copied are shared with the original.
    """
    return copy_value(value, dict(memo))


def copy_value(value: Any, memo: dict[Any, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module | FunctionType | BuiltinFunctionType | MethodType | type):
        return value
    copied: Any
    if isinstance(value, torch.Generator):
        copied = value.clone_state()
    elif isinstance(value, torch.Tensor):
        copied = copy_tensor(value, memo)
    elif type(value) in (list, tuple, set):
        copied = type(value)(copy_value(item, memo) for item in value)
    elif type(value) is dict:
        copied = {key: copy_value(item, memo) for key, item in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        copied = type(value)(*(copy_value(item, memo) for item in value))
    elif is_dataclass(value) and not isinstance(value, Mapping):
        copied = copy.copy(value)
        for part in fields(value):
            object.__setattr__(copied, part.name, copy_value(getattr(value, part.name, None), memo))
    else:
        try:
            copied = copy.deepcopy(value, {**memo})
        except (TypeError, RuntimeError, ValueError, AttributeError, NotImplementedError, UnsafeState):
            copied = value
    memo[id(value)] = copied
    memo[-id(value)] = value  # holds it: its id is not given to another while the memo lives
    return copied


def copy_tensor(tensor: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
    """Return a copy with the same strides; views of one memory stay that."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        storage = tensor.untyped_storage()
        key = "storage", storage._cdata
        if key not in memo:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memo[key] = whole.clone()
        copied = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        copied.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return copied.requires_grad_(tensor.requires_grad) if tensor.is_leaf and not tensor.is_inference() else copied


# -- weights


def checksum(unit: Unit) -> int:
    """Return a sum over a unit's weights in host memory, in one quick pass; 0 for those that rest elsewhere."""
    if not isinstance(unit.master, HostMaster):
        return 0
    slab = unit.master.slab
    whole = slab.numel() // 8 * 8
    with torch.no_grad(), torch.inference_mode(False):
        return int(slab[:whole].view(torch.int64).sum()) + int(slab[whole:].sum())


def written_since(manager: MemoryManager, member: Member, tags: Mapping[int, int]) -> list[Unit]:
    """Return the units whose masters have become others, after what was written on a device is saved."""
    attachment = member.attachment
    plan = attachment.plan if attachment.is_loaded else None
    with manager.exclusive():
        attachment.unload()
        attachment.finish_copies()
        found = [unit for unit in attachment.units if unit.name and checksum(unit) != tags.get(id(unit), 0)]
        if plan is not None:
            attachment.load(plan)
            attachment.finish_copies()
    return found


def find_lost_weights(members: Sequence[Member]) -> list[Difference]:
    """Return a difference for each weight in host memory that is not what its file has."""
    return [
        Difference(
            place=f"{member.name}.{block or weight}" if len(members) > 1 else block or weight,
            what="weights",
            text=f"{weight} in host memory is not what its file has; no fault if a program changed it on purpose",
        )
        for member in members
        for block, weight in find_changed_masters(member.attachment)
    ]


# -- comparing


def compare_calls(ours: Side, theirs: Side) -> list[Difference]:
    """Return where the parts of two runs differ, in the order in which the reference ran them."""
    if ours.recording is None or theirs.recording is None:
        return []
    own = {call.key: call for call in ours.recording.calls}
    found = []
    for call in theirs.recording.calls:
        mine = own.pop(call.key, None)
        if mine is not None:
            found += differences_of(mine, call)
        elif ours.error is None:
            found.append(Difference(place=call.place, number=call.number, text="was not run", what="error"))
    if ours.error is None:
        found += [
            Difference(place=call.place, number=call.number, text="was run, not so in the reference", what="error")
            for call in own.values()
        ]
    else:
        stuck = ours.recording.begun[-1] if ours.recording.begun else None
        text = f"fails, the reference does not: {one_line(ours.error)}"
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
    """Return how the results of the calls differ, and what they wrote into their arguments."""
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
                text = f"{gap.path} {gap.text}; only while nothing watches, so it depends on time: a copy comes late"
                found.append(from_gap(gap, f"the {what}", text.strip(), what=what))
    if unwatched.error is not None and managed.error is None:
        text = f"fails while nothing watches: {one_line(unwatched.error)}"
        found.append(Difference(place="the call", text=text, what="error"))
    return found


def one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."


def describe_reference(references: Sequence[Reference]) -> str:
    names: dict[str, list[str]] = {}
    for one in references:
        how = "block by block, as all of it does not fit" if one.by_blocks else "all weights there at once"
        names.setdefault(f"on {one.device.name}, {how}", []).append(one.member.name)
    parts = [f"{', '.join(found)} {how}" for how, found in names.items()]
    return "the same modules without the engine: " + "; ".join(parts)


def describe_notes(members: Sequence[Member], managed: Side, changed: Sequence[str]) -> list[str]:
    notes = []
    cast = [member.name for member in members if member.attachment.plan.cast]
    if cast:
        notes.append(f"{', '.join(cast)}: eight-bit weights, widened in the reference as they are stored")
    compiled = [member.name for member in members if member.attachment.compiles]
    if compiled:
        notes.append(f"{', '.join(compiled)}: compiled on both sides")
    if changed:
        notes.append(f"written to on a device; the reference has what was written: {', '.join(changed)}")
    unknown = [member.name for member in members if member.attachment.source is None]
    if unknown:
        notes.append(f"no file is known of {', '.join(unknown)}: the weights in host memory are taken as they are")
    split = [member.name for member in members if len(member.attachment.shares) > 1]
    if split:
        notes.append(f"{', '.join(split)}: split over devices; the reference is on the first, so both must be alike")
    if managed.recording is not None and managed.recording.num_dropped:
        kept = format_bytes(min(MAX_KEPT_BYTES, psutil.virtual_memory().available // KEPT_SHARE))
        notes.append(f"{managed.recording.num_dropped} outputs compared by digest only: more than {kept} of them")
    return notes
