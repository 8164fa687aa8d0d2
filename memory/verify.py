"""`verify`: runs one call managed and unmanaged, compares bit by bit, and names the first module that differs.

[Note: verifying] The call runs three times with the same arguments, random states, buffers and caches. First managed,
with a recording of every module's results. Then managed without a recording, because recording waits for the device
after each module and so hides a copy that comes too late. Then without the engine, recorded as well ([Note: reference]
in `verification/reference.py`). All state is restored after each run, also after errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from .errors import InvalidInput, UnsafeState
from .manager.manager import MemoryManager
from .manager.member import Member
from .runtime.blocks.weight_group import WeightGroup
from .runtime.blocks.weight_store import HostStore
from .verification.argument_copies import copy_arguments
from .verification.comparison import leaves_in, show
from .verification.findings import Difference, Side, Verification, compare_sides, kept_bytes, run_side
from .verification.recording import Recording, places_of
from .verification.reference import Reference, find_changed_weights
from .verification.snapshot import Snapshot, go_through
from .weights.form_numbers import rests_of

__all__ = ["verify"]


def verify(
    manager: MemoryManager,
    members: Sequence[Member],
    call: Callable[..., Any],
    *args: Any,
    objects: Sequence[Any] = (),
    **kwargs: Any,
) -> Verification:
    """Run a call of managed components with and without the engine, and compare the results ([Note: verifying]).

    Costs three runs of the call, the bytes of the weights on their device, and up to 4 GiB of host memory for outputs.
    Also compares weights in host memory with their files.

    Args:
        call: a module, a method, or a function that calls several modules.
        objects: other objects whose state the call changes, such as a pipeline and its scheduler.

    Raises:
        InvalidInput: no component is managed, or a host places it.
        UnsafeState, DoesNotFit, torch.OutOfMemoryError: the managed call was refused.
        Exception: raised by the call without the engine, too.
    """
    members = list(dict.fromkeys([*members, *(lender for member in members for lender in member.lenders)]))
    refuse_unfit(members)
    modules = [member.managed.module for member in members]
    places = find_places(members)
    slots = [slot for member in members for group in member.managed.groups for slot in group.slots]
    room_bytes = kept_bytes()
    tags = {id(group): checksum(group) for member in members for group in member.managed.groups}
    snapshot = Snapshot(modules, slots, objects)

    def run(recording: Recording | None) -> Side:
        arguments = copy_arguments((args, kwargs), [*modules, *objects])
        try:
            side = run_side(lambda: call(*arguments[0], **arguments[1]), recording, room_bytes=room_bytes)
            side.note_arguments([show(leaf, room_bytes=room_bytes) for leaf in leaves_in(arguments)])
            return side
        finally:
            go_through(snapshot.put_back)

    recorders = [Recording(places, room_bytes=room_bytes)]
    references: list[Reference] = []

    def clean_up() -> None:
        """Restore everything once more, because an interrupt may have skipped a restoring step."""
        for recorder in recorders:
            recorder.unhook()
        for one in references:
            one.end()
        snapshot.put_back()

    try:
        managed = run(recorders[0])
        unwatched = run(None)
        changed = [
            f"{member.name}: {group.name or 'non-block weights'}"
            for member in members
            for group in written_since(manager, member, tags)
        ]
        for by_blocks in (False, True):
            references[:] = [Reference(manager, member, by_blocks=by_blocks) for member in members]
            for one in references:
                one.borrow_from(other for other in references if other.member in one.member.lenders)
            recorders.append(Recording(places, room_bytes=room_bytes))
            try:
                with ExitStack() as stack:
                    for one in references:
                        stack.enter_context(one.entered())
                    reference = run(recorders[-1])
                break
            except torch.OutOfMemoryError:
                if by_blocks:
                    raise
        if reference.error is not None:
            raise reference.error
    finally:
        go_through(clean_up)
    return compare_sides(
        ", ".join(member.name for member in members),
        managed=managed,
        unwatched=unwatched,
        reference=reference,
        weights=find_lost_weights(members),
        how=describe_reference(references),
        notes=describe_notes(members, changed),
    )


def refuse_unfit(members: Sequence[Member]) -> None:
    if not members:
        raise InvalidInput("nothing to verify: no component is managed")
    for member in members:
        if not member.managed.is_hooked:
            raise InvalidInput(f"{member.name} cannot be verified: it was released, or is being verified already")
        if member.managed.passes.here is not None and member.managed.passes.is_busy():
            raise UnsafeState(f"{member.id} computes now in this thread: verify it after its forward")
        if member.is_hosted:
            raise InvalidInput(f"{member.id} is ComfyUI's model: use the Verify node")


def find_places(members: Sequence[Member]) -> dict[nn.Module, str]:
    places: dict[nn.Module, str] = {}
    for member in members:
        prefix = f"{member.name}." if len(members) > 1 else ""
        places |= places_of(member.managed.module, member.managed.component, prefix)
    return places


# -- weights


def checksum(group: WeightGroup) -> int:
    """Return the checksum of a group's weights in host memory, in one fast pass; 0 for other groups."""
    if not isinstance(group.at_rest.store, HostStore):
        return 0
    slab = group.at_rest.store.slab
    whole = slab.numel() // 8 * 8
    with torch.no_grad(), torch.inference_mode(False):
        return int(slab[:whole].view(torch.int64).sum()) + int(slab[whole:].sum())


def written_since(manager: MemoryManager, member: Member, tags: Mapping[int, int]) -> list[WeightGroup]:
    """Save what was written on devices; returns the groups whose weights at rest have changed since ``tags``."""
    managed_component = member.managed
    with managed_component.passes.held(), manager.exclusive():
        plan = managed_component.plan if managed_component.is_loaded else None
        managed_component.unload()
        managed_component.finish_copies()
        found = [
            group for group in managed_component.groups if group.name and checksum(group) != tags.get(id(group), 0)
        ]
        if plan is not None:
            managed_component.load(plan)
            managed_component.finish_copies()
    return found


def find_lost_weights(members: Sequence[Member]) -> list[Difference]:
    """Return a difference for each weight in host memory that differs from its file."""
    return [
        Difference(
            place=f"{member.name}.{block or weight}" if len(members) > 1 else block or weight,
            what="weights",
            text=f"{weight} in host memory differs from its file; expected if a program changed it",
        )
        for member in members
        for block, weight in find_changed_weights(member.managed)
    ]


def describe_reference(references: Sequence[Reference]) -> str:
    names: dict[str, list[str]] = {}
    for one in references:
        how = "block by block, because not all weights fit at once" if one.by_blocks else "all weights loaded at once"
        names.setdefault(f"on {one.device.name}, {how}", []).append(one.member.name)
    parts = [f"{', '.join(found)} {how}" for how, found in names.items()]
    return "the same modules without Highwater: " + "; ".join(parts)


def describe_notes(members: Sequence[Member], changed: Sequence[str]) -> list[str]:
    notes = []
    encoded: dict[str, list[str]] = {}
    for member in members:
        if rests := rests_of(member.managed.plan.forms):
            encoded.setdefault(rests, []).append(member.name)
    for rests, names in encoded.items():
        notes.append(f"{', '.join(names)}: weights {rests}; the reference decodes the stored values, too")
    compiled = [member.name for member in members if member.managed.compiles]
    if compiled:
        notes.append(f"{', '.join(compiled)}: compiled on both sides")
    if changed:
        notes.append(f"the managed run wrote weights, and the reference uses the written values: {', '.join(changed)}")
    unknown = [member.name for member in members if member.managed.source is None]
    if unknown:
        notes.append(f"{', '.join(unknown)}: no file is known, so the weights in host memory are not compared with one")
    split = [member.name for member in members if len(member.managed.shares) > 1]
    if split:
        notes.append(
            f"{', '.join(split)}: split over devices; the reference runs on the first, so equal bits need equal devices"
        )
    return notes
