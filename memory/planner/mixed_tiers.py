"""Which blocks rest in RAM and which in their file, where RAM does not hold all components.

[Note: mixed tiers] Then RAM is given away block by block: first to what streams of models that make many passes in a
run; then component by component, the one first that is read most often, and of each what streams before what is
resident while it computes. What RAM does not hold rests in its file, and is read from there through buffers, which cost
RAM themselves. So a model that is larger than RAM reads in each pass only what neither the device nor RAM can hold.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..options.precision import Precision
from ..units import format_bytes
from .capacity import Machine
from .form_choice import choose_forms
from .host_tiers import StoreSpec
from .sizes import Sizes

__all__ = ["share_ram"]


def share_ram(stores: Sequence[StoreSpec], machine: Machine) -> list[StoreSpec]:
    """Return the components with the blocks that rest in their files, once it is known which of them stream.

    Those stay as they are that rest somewhere because the user says so, that no file holds in their form, or that all
    fit into RAM.
    """
    if not any(part.is_short for part in stores):
        return list(stores)
    open_parts = {index: part for index, part in enumerate(stores) if is_open(part)}
    others = [part for index, part in enumerate(stores) if index not in open_parts and part.has_file]
    room_bytes = machine.host_bytes - sum(part.host_bytes for part in others)
    left = room_bytes - sum(part.bounce_bytes for part in open_parts.values())
    waiting = {index: {name: size for name, size, _ in part.lockable_parts()} for index, part in open_parts.items()}
    pieces = [
        (not (streams and part.has_many_passes), part.rank, not streams, index, number, name, size)
        for index, part in open_parts.items()
        for number, (name, size, streams) in enumerate(part.lockable_parts())
    ]
    for *_, index, _, name, size in sorted(pieces):
        # With the last of it in RAM a component needs no buffers.
        refund = open_parts[index].bounce_bytes if waiting[index].keys() == {name} else 0
        if size <= left + refund:
            left += refund - size
            del waiting[index][name]
    decided = list(stores)
    for index, part in open_parts.items():
        names = frozenset(waiting[index])
        reasons = explain(part, names, machine, left) if names else ()
        decided[index] = part.resting_in_file(names, (*part.reasons, *reasons))
    return decided


def is_open(part: StoreSpec) -> bool:
    """Whether nothing but RAM decides where it rests."""
    return part.is_short or (part.tier is None and part.can_rest_on_disk and not part.forms)


def explain(part: StoreSpec, names: frozenset[str], machine: Machine, left: int) -> tuple[str, ...]:
    """Return why weights rest in their file, and in which form they would not have to."""
    in_file = part.resting_in_file(names, ())
    have = format_bytes(in_file.host_bytes + max(0, left))
    kept = f", {format_bytes(machine.host_kept_bytes)} reserved" if machine.host_kept_bytes else ""
    what = f"{format_bytes(in_file.file_bytes)} of it are kept" if names != part.names else "kept"
    reason = f"{what} in its file: it needs {format_bytes(part.ram_bytes)} of RAM, {have} available{kept}"
    forms = choose_forms(part.component, Precision.ENCODED) if not part.forms else {}
    encoded_bytes = Sizes(part.component, forms).all_resident_bytes if forms else part.ram_bytes
    if encoded_bytes <= in_file.resting_host_bytes + left + part.bounce_bytes:
        return reason, f"precision {Precision.ENCODED.name!r} would fit in RAM: {format_bytes(encoded_bytes)}"
    return (reason,)
