"""What the processes of one user that use a device tell each other of it: marks, bytes, and what they ask for.

One small file for each device lies in the user's runtime folder ([Note: slots] in `process_slots.py`), named by a
digest of the device's uuid. Containers have runtime folders of their own, and see nothing of each other.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidInput, reason_of
from ...private_folders import make_private_folder, refuse_unprivate
from ...transfer.devices import Card, Device
from .process_slots import SlotFile, slot_file

__all__ = ["NO_UUID", "Neighbours", "ProcessUse", "others_on", "shared_path"]

NO_UUID = "torch reports no uuid of it"
PURPOSE, VARIABLE = "processes share devices here", "XDG_RUNTIME_DIR"
FIELDS = struct.Struct("<8Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessUse:
    """What one process says of a device, in bytes."""

    pid: int
    low_bytes: int
    """The marks that it keeps free, without what it lends."""
    high_bytes: int
    used_bytes: int
    """What it has of the device, with what its allocator caches."""
    idle_bytes: int
    """What of that it would give to one who asks."""
    need_bytes: int = 0
    """What it asks for beyond what it has."""
    request: int = 0
    """Another number for each time that it asks."""
    lent_bytes: int = 0
    """What it lends to another program, and is not taken yet."""

    def to_bytes(self) -> bytes:
        return FIELDS.pack(*(min(max(0, number), (1 << 63) - 1) for number in astuple(self)))

    @classmethod
    def from_bytes(cls, entry: bytes, total_bytes: int) -> ProcessUse | None:
        """Return what an entry says of a device with so many bytes; None if that cannot be."""
        names = cls.__slots__
        use = cls(**dict(zip(names, FIELDS.unpack_from(entry), strict=True)))
        amounts = (use.high_bytes, use.used_bytes, use.idle_bytes, use.need_bytes, use.lent_bytes)
        return use if use.low_bytes <= use.high_bytes and max(amounts) <= total_bytes else None

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "request"}


@dataclass(slots=True)
class Shared:
    """A device that may be shared: its file, this process's slot there, and what the others said last."""

    path: Path
    total_bytes: int
    file: SlotFile | None = None
    slot: int | None = None
    others: tuple[ProcessUse, ...] = field(default=())
    why_not: str | None = None
    """Why others are not seen now."""

    def exchange(self, use: ProcessUse) -> None:
        """Say something, and hear the others; nothing is waited for. What fails is tried again the next time."""
        try:
            self.try_exchange(use)
            self.why_not = None
        except OSError as error:
            self.leave()
            self.why_not = str(error)

    def try_exchange(self, use: ProcessUse) -> None:
        file = slot_file(self.path)
        if file is not self.file or self.slot is None:
            self.file, self.slot = file, file.claim(use.to_bytes())
            if self.slot is None:
                raise OSError("all slots are taken")
        file.write(self.slot, use.to_bytes())
        found = (ProcessUse.from_bytes(entry, self.total_bytes) for entry in file.read())
        self.others = tuple(other for other in found if other is not None)

    def leave(self) -> None:
        if self.file is not None and self.slot is not None:
            self.file.free(self.slot)
        self.file, self.slot, self.others = None, None, ()


class Neighbours:
    """The other processes on each device. Never raises; the caller holds the manager's lock.

    A process in which nothing called `join` has no neighbours, and tells nothing.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Shared] = {}
        self.unshared: dict[str, str] = {}
        """The devices that cannot be shared, and why."""

    def join(self, folder: Path, devices: Mapping[str, Device]) -> None:
        """Share accelerators through files in a folder, which is created. Costs no more than a few calls."""
        accelerators = [device for device in devices.values() if not device.is_cpu]
        try:
            if accelerators:
                make_private_folder(folder, purpose=PURPOSE, variable=VARIABLE)
        except InvalidInput as error:
            self.unshared |= {device.name: str(error) for device in accelerators}
            return
        for device in accelerators:
            try:
                card = card_of(device)
            except InvalidInput as error:
                self.unshared[device.name] = str(error)
            else:
                self.shared[device.name] = Shared(shared_path(folder, card), card.total_bytes)

    def exchange(self, device: str, use: ProcessUse) -> None:
        """Tell the others on a device what this process does there, and hear what they do."""
        shared = self.shared.get(device)
        if shared is not None:
            shared.exchange(use)

    def on(self, device: str) -> tuple[ProcessUse, ...]:
        """Return what the others said last of a device."""
        shared = self.shared.get(device)
        return shared.others if shared is not None else ()

    def marks(self, device: str) -> tuple[int, int]:
        """Return the largest marks that others keep free of a device, low and high; 0 without others."""
        others = self.on(device)
        low = max((other.low_bytes for other in others), default=0)
        return low, max((other.high_bytes for other in others), default=0)

    def used_bytes(self, device: str) -> int:
        """Return what the others use of a device."""
        return sum(other.used_bytes for other in self.on(device))

    def idle_bytes(self, device: str) -> int:
        """Return what the others would give of a device."""
        return sum(other.idle_bytes for other in self.on(device))

    def lent_bytes(self, device: str) -> int:
        """Return what the others lend of a device to programs that have not taken it yet."""
        return sum(other.lent_bytes for other in self.on(device))

    def why_not(self, device: str) -> str | None:
        """Return why other processes on a device are not seen; None where they are, or where nothing is shared."""
        shared = self.shared.get(device)
        return shared.why_not if shared is not None else self.unshared.get(device)

    def leave(self) -> None:
        """Give all slots back, and tell nothing any more. Idempotent."""
        for shared in self.shared.values():
            shared.leave()
        self.shared.clear()


def others_on(folder: Path, device: Device) -> tuple[ProcessUse, ...]:
    """Return what other processes say of a device; creates nothing.

    Raises:
        InvalidInput: the folder is not private, the device has no uuid, or its file cannot be read.
    """
    card = card_of(device)
    if not os.path.lexists(folder):
        return ()
    refuse_unprivate(folder, purpose=PURPOSE, variable=VARIABLE)
    path = shared_path(folder, card)
    if not os.path.lexists(path):
        return ()
    try:
        found = (ProcessUse.from_bytes(entry, card.total_bytes) for entry in slot_file(path).read())
    except OSError as error:
        raise InvalidInput(str(error)) from None
    return tuple(other for other in found if other is not None)


def card_of(device: Device) -> Card:
    """Return which card a device is. Raises `InvalidInput`: torch does not tell, or cannot use it."""
    try:
        card = device.card()
    except RuntimeError as error:
        raise InvalidInput(f"torch cannot use it: {reason_of(error)}") from error
    if card is None:
        raise InvalidInput(NO_UUID)
    return card


def shared_path(folder: Path, card: Card) -> Path:
    """Return the file of a card in a folder."""
    # The size, too: parts of one card may have its uuid.
    named = hashlib.sha256(f"{card.uuid}, {card.total_bytes}".encode()).hexdigest()
    return folder / f"{named[:32]}.slots"
