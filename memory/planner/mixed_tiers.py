"""Which blocks rest in RAM and which in their file, where RAM does not hold all components.

[Note: mixed tiers] Then RAM is given away block by block: first to what streams of models that make many passes in a
run; then component by component, the one first that is read most often, and of each what streams before what is
resident while it computes. What RAM does not hold rests in its file, and is read from there through buffers, which cost
RAM themselves. So a model that is larger than RAM reads in each pass only what neither the device nor RAM can hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
    room = Room(open_parts, machine.host_bytes - sum(part.host_bytes for part in others))
    pieces = sorted(
        (not (streams and part.has_many_passes), part.rank, not streams, index, number, name)
        for index, part in open_parts.items()
        for number, (name, _, streams) in enumerate(part.lockable_parts())
    )
    num_waiting = -1
    while num_waiting != room.num_waiting:  # what needs no buffers any more leaves theirs to others
        num_waiting = room.num_waiting
        for *_, index, _, name in pieces:
            room.give(index, name)
        for index in sorted(open_parts, key=lambda index: open_parts[index].rank):
            room.give_rest(index)
    decided = list(stores)
    for index, part in open_parts.items():
        waiting = room.waiting[index]
        names = part.names if 0 < sum(waiting.values()) == part.ram_bytes else frozenset(waiting)
        reasons = explain(part, names, machine, room.left_bytes) if names else ()
        decided[index] = part.resting_in_file(names, (*part.reasons, *reasons))
    return decided


class Room:
    """The RAM that is left while it is given away, and what waits for it: bytes by name for each component."""

    def __init__(self, parts: Mapping[int, StoreSpec], num_bytes: int) -> None:
        self.buffers = {index: part.bounce_bytes for index, part in parts.items()}
        self.left_bytes = num_bytes - sum(self.buffers.values())
        self.waiting = {
            index: {name: size for name, size, _ in part.lockable_parts() if size} for index, part in parts.items()
        }

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    def give(self, index: int, name: str) -> None:
        """Give a block room if there is enough; else all that waits of its component, if it needs no buffers then."""
        size = self.waiting[index].get(name, 0)
        if size > self.left_bytes:
            self.give_rest(index)
        elif size:
            self.left_bytes -= size
            del self.waiting[index][name]

    def give_rest(self, index: int) -> None:
        """Give all that waits of a component room, if there is enough without its buffers, which it needs no more."""
        size = sum(self.waiting[index].values())
        if size <= self.left_bytes + self.buffers[index]:
            self.left_bytes += self.buffers[index] - size
            self.buffers[index] = 0
            self.waiting[index].clear()


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
