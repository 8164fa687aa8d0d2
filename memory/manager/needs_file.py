"""The file of learned needs: one SQLite database, which all processes of a user share.

It holds digests, sizes and byte counts: no name, path or prompt. If it cannot be used, only what was learned is lost: a
damaged file in our own folder is replaced; one that is locked, read-only or on a full disk is left unchanged. A file
that the user names may belong to another program: it is changed only if it is ours, and never removed.

[Note: version] A need holds for the code that computed: torch, diffusers, transformers, this engine, which attention
kernels torch may choose, and what a host adds (its own version and attention). Rows of another version are ignored.
What a program sets for one model, such as diffusers' attention backends or tiles, is not part of the version: if a
forward needs more because of that, one run fails and the next fits; if it needs less, what is kept free decays.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import sqlite3
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from ..runtime.forwards.input_size import Size
from ..user_folders import cache_folder
from .needs import Key, Need
from .runs_file import RUNS_FILE_NAME
from .speeds_file import SPEEDS_FILE_NAME

__all__ = ["NeedsFile", "cache_path"]

FILE_NAME = "needs.sqlite3"
# The table gets another name when its columns or their meaning change.
TABLE = "needs_2"
FORMER_TABLES = ("needs_1",)
TABLES_OF_OURS = re.compile(r"needs_\d+")
# How long to wait for another process that writes.
BUSY_S = 0.1
MAX_FILE_BYTES = 16 << 20
MAX_ROWS = 5000
MAX_AGE_S = 180 * 24 * 3600
LARGEST_BYTES = 1 << 50
# How a database of SQLite begins, and the two bytes that follow the page size where no log is written ahead.
MAGIC, NO_LOG = b"SQLite format 3\0", b"\1\1"
DIGEST = re.compile(r"[0-9a-f]{32}")
SIZE = re.compile(r"-?\d{1,4}(?:\.-?\d{1,4}){0,70}")
# Those of SQLite's operational errors that do not mean a damaged file.
PASSING = re.compile(r"locked|busy|read.?only|full|unable to open|disk I/O|interrupted|not authorized", re.IGNORECASE)
SCHEMA = f"""CREATE TABLE IF NOT EXISTS {TABLE} (
    component TEXT NOT NULL, device TEXT NOT NULL, size TEXT NOT NULL, version TEXT NOT NULL,
    seen INTEGER NOT NULL, failed INTEGER NOT NULL, guard INTEGER NOT NULL, futile INTEGER NOT NULL,
    used INTEGER NOT NULL, PRIMARY KEY (component, device, size, version))"""


class Damaged(Exception):
    """The file is not a database, or not one of ours."""


def cache_path() -> Path | None:
    """Return the file in the user's cache folder; None where the user has no home."""
    folder = cache_folder()
    return folder / FILE_NAME if folder is not None else None


@cache
def installed_versions() -> str:
    found = [f"highwater {sys.modules[__package__.rsplit('.', 2)[0]].__version__}", f"torch {torch.__version__}"]
    for name in ("diffusers", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def attention_kernels() -> str:
    """Return the attention kernels that torch may choose; those that store the whole matrix need far more memory."""
    kernels: Any = torch.backends.cuda
    enabled = {
        "flash": kernels.flash_sdp_enabled(),
        "efficient": kernels.mem_efficient_sdp_enabled(),
        "cudnn": kernels.cudnn_sdp_enabled(),
        "math": kernels.math_sdp_enabled(),
    }
    return " ".join(name for name, is_enabled in enabled.items() if is_enabled)


class NeedsFile:
    """Reads and writes one file; only `listed` and `reset` raise.

    Args:
        is_named: the user named the file, so it may belong to another program.
        host: the host's part of the version, see [Note: version].
    """

    def __init__(self, path: Path, *, is_named: bool = False, host: str = "") -> None:
        self.path = path
        self.host = host
        self.begins_anew = not is_named and path.name == FILE_NAME
        """Whether a damaged file is removed and replaced: only one in our own folder is."""

    @property
    def version(self) -> str:
        """The version of the needs, see [Note: version]."""
        return f"{installed_versions()}, {attention_kernels()}, {self.host}"

    def versions(self) -> dict[str, str]:
        """Return the parts of `version` that an update changes, by name."""
        found = dict(each.split(" ", 1) for each in installed_versions().split(", "))
        return found | ({"host": self.host} if self.host else {})

    def read(self) -> list[tuple[Key, Size, Need]]:
        """Return the needs of this version, the last used first; none if the file cannot be read."""
        try:
            return self.look(self.version)
        except Damaged:
            self.remove()
        except (OSError, sqlite3.Error):
            pass
        return []

    def listed(self) -> list[tuple[Key, Size, Need]]:
        """Return the needs of all versions; never changes the file.

        Raises:
            InvalidInput: the user named a file that is not ours or cannot be read.
        """
        try:
            return self.look()
        except FileNotFoundError:
            return []
        except Damaged as error:
            if not self.begins_anew:
                raise self.not_ours(error) from None
        except (OSError, sqlite3.Error) as error:
            if not self.begins_anew:
                raise InvalidInput(f"{self.path}: the learned needs cannot be read: {error}") from None
        return []

    def look(self, version: str | None = None) -> list[tuple[Key, Size, Need]]:
        """Return the needs of one version, or of all. Raises as `opened`."""
        with self.opened(writes=False) as database:
            tables = [str(name) for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type != 'index'")]
            if TABLE not in tables:
                if tables and not self.begins_anew and not any(map(TABLES_OF_OURS.fullmatch, tables)):
                    raise Damaged("the database of another program")
                return []
            rows = database.execute(
                f"SELECT component, device, size, seen, failed, guard, futile, used FROM {TABLE} "
                "WHERE ? IN (version, '') ORDER BY used DESC LIMIT ?",
                (version or "", MAX_ROWS),
            ).fetchall()
        return [entry for row in rows if (entry := read_row(row)) is not None]

    def write(self, entries: Iterable[tuple[Key, Size, Need]]) -> bool:
        """Write needs in one step, replacing earlier ones of the same key; returns whether that succeeded."""
        rows = [
            (*key, size_text(size), self.version, *(min(LARGEST_BYTES, number) for number in numbers_of(need)))
            for key, size, need in entries
        ]
        for _ in range(2):
            try:
                if not self.begins_anew and os.path.lexists(self.path):
                    self.look()
                with self.opened(writes=True) as database:
                    database.execute("BEGIN IMMEDIATE")
                    for former in FORMER_TABLES if self.begins_anew else ():
                        database.execute(f"DROP TABLE IF EXISTS {former}")
                    database.execute(SCHEMA)
                    database.executemany(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
                    database.execute(
                        f"DELETE FROM {TABLE} WHERE used < ? OR rowid NOT IN "
                        f"(SELECT rowid FROM {TABLE} ORDER BY used DESC LIMIT ?)",
                        (int(time.time()) - MAX_AGE_S, MAX_ROWS),
                    )
                    database.execute("COMMIT")
                return True
            except Damaged:
                self.remove()
            except (OSError, sqlite3.Error):
                return False
        return False

    def reset(self) -> int:
        """Delete all learned needs, in our own folder also runs and times; returns how many needs there were.

        Raises:
            InvalidInput: the file cannot be changed, or the user named a file that is not ours.
        """
        num_needs = 0
        try:
            if self.begins_anew:
                for name in (RUNS_FILE_NAME, SPEEDS_FILE_NAME):
                    (self.path.parent / name).unlink(missing_ok=True)
            if os.path.lexists(self.path):
                num_needs = len(self.look())
                with self.opened(writes=True) as database:
                    for table in (TABLE, *(FORMER_TABLES if self.begins_anew else ())):
                        database.execute(f"DROP TABLE IF EXISTS {table}")
        except Damaged as error:
            if not self.begins_anew:
                raise self.not_ours(error) from None
            self.remove()
        except (OSError, sqlite3.Error) as error:
            raise InvalidInput(f"{self.path}: the learned needs cannot be deleted: {error}") from None
        return num_needs

    def not_ours(self, error: Damaged) -> InvalidInput:
        return InvalidInput(f"{self.path}: is not a file of learned needs and was left unchanged: {error}")

    @contextlib.contextmanager
    def opened(self, *, writes: bool) -> Iterator[sqlite3.Connection]:
        """Hold the file open. Raises `Damaged`, OSError, or what SQLite says of one that cannot be had now."""
        if writes:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.refuse_unsafe(creates=writes)
        database = None
        try:
            uri = f"{self.path.absolute().as_uri()}?mode={'rw' if writes else 'ro'}"
            # By its class: ComfyUI's registry takes a call of the usual function for that of a socket.
            database = sqlite3.Connection(uri, uri=True, timeout=BUSY_S, isolation_level=None)
            database.execute("PRAGMA trusted_schema = OFF")
            database.execute("PRAGMA synchronous = NORMAL")
            yield database
        except sqlite3.OperationalError as error:
            if PASSING.search(str(error)):
                raise
            raise Damaged(str(error)) from error
        except (sqlite3.Error, ValueError) as error:  # a ValueError if a message or a text is not UTF-8
            raise Damaged(str(error)) from error
        finally:
            if database is not None:
                database.close()

    def refuse_unsafe(self, *, creates: bool) -> None:
        """Refuse anything but a plain file of a sensible size; a link may lead to a file of another program.

        Raises:
            Damaged: too large to be ours, or named by the user and not a database that we could have made.
            OSError: a link, a folder, or no file where none is to be created.
        """
        flags = os.O_RDWR | os.O_CREAT if creates else os.O_RDONLY
        opened = os.open(self.path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o600)
        try:
            found = os.fstat(opened)
            begin = os.read(opened, 20) if stat.S_ISREG(found.st_mode) and not self.begins_anew else b""
        finally:
            os.close(opened)
        if not stat.S_ISREG(found.st_mode) or self.path.is_symlink():
            raise OSError(f"{self.path}: is no plain file")
        if found.st_size > MAX_FILE_BYTES:
            raise Damaged(f"is larger than {MAX_FILE_BYTES} bytes")
        # Checked before SQLite opens it, which may write files beside another program's database.
        if begin and not (begin.startswith(MAGIC) and begin.endswith(NO_LOG)):
            raise Damaged("not a database, or that of another program")

    def remove(self) -> None:
        """Remove a damaged file of our own and what SQLite left beside it; a file that the user named stays."""
        if not self.begins_anew:
            return
        for suffix in ("", "-journal", "-wal", "-shm"):
            with contextlib.suppress(OSError):
                os.unlink(f"{self.path}{suffix}")


def numbers_of(need: Need) -> tuple[int, ...]:
    return need.seen_bytes, need.failed_bytes, need.guard_bytes, need.futile_bytes, need.used_s


def size_text(size: Size) -> str:
    return ".".join(map(str, size))


def read_row(row: tuple[object, ...]) -> tuple[Key, Size, Need] | None:
    """Return the need in a row; None for a row that this program does not write."""
    component, device, size, *numbers = row
    if not all(isinstance(text, str) for text in (component, device, size)):
        return None
    if not (DIGEST.fullmatch(str(component)) and DIGEST.fullmatch(str(device)) and SIZE.fullmatch(str(size))):
        return None
    checked = [number for number in numbers if isinstance(number, int) and 0 <= number <= LARGEST_BYTES]
    if len(checked) != len(numbers):
        return None
    seen, failed, guard, futile, used = checked
    need = Need(seen_bytes=seen, failed_bytes=failed, guard_bytes=guard, futile_bytes=futile, used_s=used)
    return (str(component), str(device)), tuple(int(part) for part in str(size).split(".")), need
