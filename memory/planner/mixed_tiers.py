"""Which blocks rest in RAM and which in their file: as few as have to be in RAM, and those first that are read most.

[Note: no needless copy] What stays on a device while it computes is read once when it is loaded, so profile ``auto``
leaves it in its file: the system keeps the file's pages as long as nothing else needs that RAM, for all processes
together. Only what streams gets a copy in RAM, page-locked where the machine allows it. If a block streams later that
did not when its component was packed, it gets its copy then (`replanning.py`).

[Note: mixed tiers] Where RAM does not hold all that should be in it, it is given away block by block: first to what
streams of models that make many passes in a run; then component by component, the one first that is read most often,
and of each what streams before what is resident while it computes. What RAM does not hold rests in its file, and is
read from there through buffers, which cost RAM themselves. So a model that is larger than RAM reads in each pass only
what neither the device nor RAM can hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..options.precision import Precision
from ..options.profile import OffloadProfile
from ..units import MIB, format_bytes
from ..weights.form_numbers import rests_of
from .capacity import Machine
from .form_choice import choose_forms
from .host_tiers import NOT_AHEAD, StoreSpec, explain_lacking, may_be_pinned, whose, why_unavailable
from .sizes import Sizes

__all__ = ["share_ram"]

# A copy of less than this costs no more than the buffers through which its file would be read.
LEAST_SPARED_BYTES = 8 * MIB


def share_ram(
    stores: Sequence[StoreSpec], machine: Machine, profile: OffloadProfile, *, spares_ram: bool
) -> list[StoreSpec]:
    """Return the components with the blocks that rest in their files, once it is known which of them stream.

    Those stay as they are that rest somewhere because the user says so, or that no file holds in their form.

    Args:
        spares_ram: whether what is resident while it computes stays in its file ([Note: no needless copy]). Otherwise
            components that all fit into RAM rest there.
    """
    if not spares_ram and not any(part.is_short for part in stores):
        return list(stores)
    open_parts = {index: part for index, part in enumerate(stores) if is_open(part)}
    others = [part for index, part in enumerate(stores) if index not in open_parts and part.has_file]
    # Pages that are read in every pass stay in RAM only while it has room for all of them.
    keeps_pages = spares_ram and not any(part.is_short for part in stores)
    paged = {
        index
        for index, part in open_parts.items()
        if keeps_pages and part.component.can_map and not may_be_pinned(part, profile)
    }
    room = Room(
        open_parts,
        machine.host_bytes - sum(part.host_bytes - (part.ram_bytes - part.unread_bytes) for part in others),
        {
            index: find_staying(part, streams_too=index in paged) if spares_ram else frozenset()
            for index, part in open_parts.items()
        },
    )
    order = sorted(
        (not (streams and part.has_many_passes), part.rank, not streams, index)
        for index, part in open_parts.items()
        for streams in (True, False)
    )
    parts = {index: part.lockable_parts() for index, part in open_parts.items()}
    pieces = [
        (index, name)
        for *_, is_resident, index in order
        for name, _, streams in parts[index]
        if streams is not is_resident
    ]
    by_rank = sorted(open_parts, key=lambda index: open_parts[index].rank)
    # What needs no buffers any more leaves theirs to what comes first.
    while any(room.give(index, name) for index, name in pieces) or any(map(room.give_rest, by_rank)):
        pass
    decided = list(stores)
    for index, part in open_parts.items():
        waiting, staying = frozenset(room.waiting[index]), room.staying[index]
        empty = frozenset(name for name, size, _ in parts[index] if not size)
        names = waiting | staying
        names = part.names if names and names | empty | part.unfiled == part.names else names
        reasons = explain_staying(part, staying, profile, is_paged=index in paged) + (
            explain(part, waiting, staying, machine, room.left_bytes) if waiting else ()
        )
        decided[index] = replace(
            part.resting_in_file(names, (*part.reasons, *reasons)),
            takes_ram_to_stream=spares_ram and bool(names) and index not in paged,
            maps_file=bool(names) and index in paged,
        )
    return [explain_copy(part) for part in decided] if spares_ram else decided


def explain_copy(part: StoreSpec) -> StoreSpec:
    """Return a component with the reason why it has a copy in RAM although all of it is resident while it computes."""
    streams = any(share.streamed for share in part.shares)
    if part.tier is not None or part.on_cpu or part.in_file or streams or part.ram_bytes < LEAST_SPARED_BYTES:
        return part
    if part.can_rest_on_disk and not part.cast:
        reasons = explain_lacking(part)
    elif part.can_rest_on_disk and not part.forms_by_profile:
        reasons = (f"has a copy in RAM {rests_of(part.forms)}: tier 'disk' makes it each time from the file",)
    elif part.forms_by_profile:
        reasons = ()  # that the profile quantizes what is in RAM is told
    else:
        reasons = (f"has a copy in RAM: {why_unavailable(part)}",)
    told = any(why_unavailable(part) in reason for reason in part.reasons)
    return replace(part, reasons=(*part.reasons, *(() if told else reasons)))


def find_staying(part: StoreSpec, *, streams_too: bool) -> frozenset[str]:
    """Return what needs no copy in RAM, by name: its file has it as it is, and it does not stream.

    Args:
        streams_too: what streams counts, too.
    """
    if part.unread_bytes < LEAST_SPARED_BYTES:
        return frozenset()
    unfiled = part.unfiled
    return frozenset(
        name
        for name, size, streams in part.lockable_parts()
        if size and (streams_too or not streams) and name not in unfiled
    )


class Room:
    """The RAM that is left while it is given away, and what waits for it: bytes by name for each component."""

    def __init__(self, parts: Mapping[int, StoreSpec], num_bytes: int, staying: Mapping[int, frozenset[str]]) -> None:
        self.staying = staying
        """What stays in its file however much RAM there is."""
        self.buffers = {index: part.bounce_bytes for index, part in parts.items()}
        self.left_bytes = num_bytes - sum(self.buffers.values())
        self.waiting = {
            index: {name: size for name, size in unread_parts(part) if name not in staying[index]}
            for index, part in parts.items()
        }

    def give(self, index: int, name: str) -> bool:
        """Give a block room if there is enough; else all that waits of its component, if it needs no buffers then.

        Returns whether buffers are free again.
        """
        size = self.waiting[index].get(name, 0)
        if size > self.left_bytes:
            return self.give_rest(index)
        if size:
            self.left_bytes -= size
            del self.waiting[index][name]
        return False

    def give_rest(self, index: int) -> bool:
        """Give all that waits of a component room, if there is enough without its buffers, which it needs no more.

        Returns whether buffers are free again.
        """
        size, buffers = sum(self.waiting[index].values()), 0 if self.staying[index] else self.buffers[index]
        if size > self.left_bytes + buffers:
            return False
        self.left_bytes += buffers - size
        self.buffers[index] -= buffers
        self.waiting[index].clear()
        return buffers > 0


def unread_parts(part: StoreSpec) -> Iterator[tuple[str, int]]:
    """Yield what may rest in its file, by name, and the bytes that it takes in RAM beside those that are there."""
    lacking, unfiled = part.lacking_bytes, part.unfiled
    for name, size, _ in part.lockable_parts():
        if size and name not in unfiled:
            yield name, size - lacking.get(name, 0)


def is_open(part: StoreSpec) -> bool:
    """Whether nothing but RAM decides where it rests."""
    return part.is_short or (part.tier is None and part.can_rest_on_disk and not part.cast)


def explain_staying(
    part: StoreSpec, names: frozenset[str], profile: OffloadProfile, *, is_paged: bool
) -> tuple[str, ...]:
    """Return why weights rest in their file that RAM would hold, and which cannot."""
    if not names:
        return ()
    in_file = part.resting_in_file(names, ())
    what = "stays" if in_file.tier == "disk" else f"{format_bytes(in_file.file_bytes)} of it stay"
    why = "resident while it computes, with no need for a copy in RAM"
    if is_paged and any(share.streamed for share in part.shares):
        why = f"profile {profile.name} page-locks {whose(profile)}, and RAM has room for the file's pages; {NOT_AHEAD}"
    return (f"{what} in its file: {why}", *explain_lacking(part))


def explain(
    part: StoreSpec, waiting: frozenset[str], staying: frozenset[str], machine: Machine, left: int
) -> tuple[str, ...]:
    """Return why RAM does not hold weights that should be in it, and in which form it would."""
    in_file, kept_out = part.resting_in_file(waiting | staying, ()), part.resting_in_file(staying, ())
    have = format_bytes(in_file.resting_host_bytes + part.bounce_bytes + max(0, left))
    reserved = f", {format_bytes(machine.host_kept_bytes)} reserved" if machine.host_kept_bytes else ""
    waiting_bytes = part.resting_in_file(waiting, ()).file_bytes
    what = f"{format_bytes(waiting_bytes)} of it are kept" if in_file.tier != "disk" or staying else "kept"
    needs = "what streams of it needs" if staying else "it needs"
    reason = f"{what} in its file: {needs} {format_bytes(kept_out.resting_host_bytes)} of RAM, {have} available"
    forms = choose_forms(part.component, Precision.ENCODED) if not part.cast else {}
    encoded_bytes = Sizes(part.component, forms).all_resident_bytes if forms else part.ram_bytes
    if encoded_bytes <= in_file.resting_host_bytes + left + part.bounce_bytes:
        form = f"precision {Precision.ENCODED.name!r} would fit in RAM: {format_bytes(encoded_bytes)}"
        return reason + reserved, form
    return (reason + reserved,)
