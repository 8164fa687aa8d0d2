"""A file of slots that the processes of one user share: each writes one, and reads those of the others that live.

[Note: slots] A process holds its slot by two byte locks of the kernel, far behind the content. A crash frees them, too.
The process locks the first byte, writes its entry, and then locks the second byte: this says that the entry is its own,
and not what a process that died has left. A reader tries to lock the second byte, shared and for a moment. If it gets
the lock, the slot belongs to no process. Every lock is tried once; no process waits for one. Each entry has a digest
over itself and its place: a torn entry, or one that another program wrote, counts as none.

The locks of POSIX belong to the process, and all of a file go when it closes any descriptor of the file: so a process
opens a file once, and never closes it while it has a slot. They are not inherited: a forked child has no slot.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import threading
from pathlib import Path

__all__ = ["ENTRY_BYTES", "NUM_SLOTS", "SlotFile", "slot_file"]

NUM_SLOTS = 64
ENTRY_BYTES = 112
DIGEST_BYTES = 16
SLOT_BYTES = DIGEST_BYTES + ENTRY_BYTES
# Windows keeps others from reading what is locked, so the locks are where nothing is read.
LOCKS_AT = 1 << 30
# Changed when the content of entries changes: processes of other versions then see nothing of each other.
CONTENT = b"highwater 1"

if sys.platform == "win32":
    import msvcrt

    def try_lock(file: int, offset: int, *, shared: bool = False) -> bool:
        """Lock one byte if no other process has; returns whether that succeeded. There are no shared locks."""
        os.lseek(file, offset, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except PermissionError:
            return False
        return True

    def unlock(file: int, offset: int) -> None:
        os.lseek(file, offset, os.SEEK_SET)
        msvcrt.locking(file, msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def try_lock(file: int, offset: int, *, shared: bool = False) -> bool:
        """Lock one byte if no other process has; returns whether that succeeded. Raises `OSError`."""
        try:
            fcntl.lockf(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB, 1, offset)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(file: int, offset: int) -> None:
        fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)


class SlotFile:
    """One open file of slots; `slot_file` returns the only one of a path in this process.

    Raises:
        OSError: the file cannot be opened, or is a link, another user's, or nothing that this made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.process_id = os.getpid()
        self.mine: dict[int, bool] = {}
        """The slots of this process, and whether their second lock is held."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        self.file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        try:
            self.refuse_foreign()
        except BaseException:
            os.close(self.file)
            raise

    def refuse_foreign(self) -> None:
        found = os.fstat(self.file)
        self.identity = found.st_dev, found.st_ino
        if not stat.S_ISREG(found.st_mode) or self.path.is_symlink() or found.st_nlink != 1:
            raise OSError(f"{self.path} is no plain file")
        if hasattr(os, "getuid"):
            if found.st_uid != os.getuid():
                raise OSError(f"{self.path} belongs to user {found.st_uid}")
            if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise OSError(f"{self.path} has the mode {stat.S_IMODE(found.st_mode):04o}; allowed: 0600")

    @property
    def is_here(self) -> bool:
        """Whether this process opened it; a forked child did not."""
        return self.process_id == os.getpid()

    def is_lost(self) -> bool:
        """Whether its path does not lead to it any more: something removed the file, or its folder."""
        try:
            found = self.path.lstat()
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self.identity

    def claim(self, entry: bytes) -> int | None:
        """Take a slot and write its first entry; None where others have all of them. Raises `OSError`."""
        with self.lock:
            for slot in range(NUM_SLOTS) if self.is_here else ():
                if slot not in self.mine and try_lock(self.file, claim_at(slot)):
                    self.mine[slot] = False
                    self.put(slot, entry)
                    return slot
        return None

    def write(self, slot: int, entry: bytes) -> None:
        """Write the entry of a slot of this process. Raises `OSError`."""
        with self.lock:
            if self.is_here and slot in self.mine:
                self.put(slot, entry)

    def put(self, slot: int, entry: bytes) -> None:
        assert len(entry) <= ENTRY_BYTES
        padded = entry.ljust(ENTRY_BYTES, b"\0")
        os.lseek(self.file, slot * SLOT_BYTES, os.SEEK_SET)
        os.write(self.file, digest_of(slot, padded) + padded)
        # One that reads may hold the second byte for a moment: then the next write takes it.
        self.mine[slot] = self.mine[slot] or try_lock(self.file, live_at(slot))

    def free(self, slot: int) -> None:
        """Give a slot back. Idempotent; never raises."""
        with self.lock:
            if self.is_here and self.mine.pop(slot, None) is not None:
                with contextlib.suppress(OSError):
                    unlock(self.file, live_at(slot))
                with contextlib.suppress(OSError):
                    unlock(self.file, claim_at(slot))

    def read(self) -> list[bytes]:
        """Return the entries of other processes that live, of `ENTRY_BYTES` each. Raises `OSError`.

        Costs one read of at most 8 KiB, and four calls of the system for each slot with a good entry.
        """
        with self.lock:
            if not self.is_here:
                return []
            content = self.get(0, NUM_SLOTS * SLOT_BYTES)
            found = []
            for slot in range(len(content) // SLOT_BYTES):
                begin = slot * SLOT_BYTES
                if slot in self.mine or entry_of(slot, content[begin : begin + SLOT_BYTES]) is None:
                    continue
                # Read once more: what was read before the lock was tried may be of one that died meanwhile.
                if self.is_held(slot) and (entry := entry_of(slot, self.get(begin, SLOT_BYTES))) is not None:
                    found.append(entry)
            return found

    def get(self, begin: int, num_bytes: int) -> bytes:
        os.lseek(self.file, begin, os.SEEK_SET)
        return os.read(self.file, num_bytes)

    def is_held(self, slot: int) -> bool:
        """Whether another process holds a slot that is none of this process's."""
        if try_lock(self.file, live_at(slot), shared=True):
            unlock(self.file, live_at(slot))
            return False
        return True


def claim_at(slot: int) -> int:
    return LOCKS_AT + 2 * slot


def live_at(slot: int) -> int:
    return LOCKS_AT + 2 * slot + 1


def entry_of(slot: int, content: bytes) -> bytes | None:
    """Return the entry in the content of a slot; None for anything that was not written there, whole, by this code."""
    digest, entry = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    return entry if len(entry) == ENTRY_BYTES and digest == digest_of(slot, entry) else None


def digest_of(slot: int, entry: bytes) -> bytes:
    return hashlib.blake2b(entry, digest_size=DIGEST_BYTES, person=CONTENT, salt=bytes([slot])).digest()


opened: dict[Path, SlotFile] = {}
opening = threading.Lock()


def slot_file(path: Path) -> SlotFile:
    """Return the open file of a path, which is opened, and created, if it is not yet or was removed. Raises `OSError`.

    A removed file stays open: others who still have it know of each other through it.
    """
    with opening:
        found = opened.get(path)
        if found is None or not found.is_here or found.is_lost():
            found = opened[path] = SlotFile(path)
        return found
