"""The manager that all workflows of a process share. Loads torch only when the manager is made."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from ..user_folders import runtime_folder

if TYPE_CHECKING:
    from .manager import MemoryManager

__all__ = [
    "default_manager",
    "existing_manager",
    "keep_out_of_user_cache",
    "needs_path",
    "remember_needs_in",
    "share_devices_in",
    "shared_folder",
]

lock = threading.Lock()
made: list[MemoryManager] = []
needs_folder: list[tuple[Path | None, str]] = []
"""The folder of what is learned and the host that it holds for, if set; else the user's cache folder is used."""

shared_folders: list[Path | None] = []
"""The folder through which processes share devices, if set; else the user's runtime folder is used."""


def remember_needs_in(folder: str | Path | None, *, host: str = "") -> None:
    """Store learned needs and link speeds in a folder, or in this process only; call it before the manager is made.

    Args:
        host: what of the host affects what forwards need, such as its version; learned needs hold for that only.
    """
    needs_folder[:] = [(None if folder is None else Path(folder), host)]


def share_devices_in(folder: str | Path | None) -> None:
    """Share devices with other processes through a folder, or not at all; call it before the manager is made."""
    shared_folders[:] = [None if folder is None else Path(folder)]


def shared_folder() -> Path | None:
    """Return the folder through which processes share devices; it need not exist. None: nothing is shared."""
    return shared_folders[0] if shared_folders else runtime_folder()


def keep_out_of_user_cache() -> None:
    """Keep what is learned and measured in this process, and share no device; folders that were named are still used.

    For a process with simulated devices: what they need is of no use to other runs, and no other process has them.
    """
    from ..transfer.link_speed import remember_links_in
    from ..weights.known_errors import remember_errors_in

    if not needs_folder:
        remember_needs_in(None)
    if not shared_folders:
        share_devices_in(None)
    remember_links_in(None)
    remember_errors_in(None)


def needs_path() -> Path | None:
    """Return the file of what forwards need; it need not exist. None if it is stored in this process only."""
    from .needs_file import FILE_NAME, cache_path

    if not needs_folder:
        return cache_path()
    folder, _ = needs_folder[0]
    return None if folder is None else folder / FILE_NAME


def default_manager() -> MemoryManager:
    """Return the process-wide manager that every workflow shares; made at first use."""
    with lock:
        if not made:
            from ..transfer.link_speed import remember_links_in
            from .manager import MemoryManager
            from .needs_file import NeedsFile

            host = ""
            if needs_folder:
                folder, host = needs_folder[0]
                remember_links_in(None if folder is None else folder / "links", keep=True)
            path = needs_path()
            needs_file = NeedsFile(path, host=host) if path is not None else None
            made.append(MemoryManager(needs_file=needs_file, shared_folder=shared_folder()))
        return made[0]


def existing_manager() -> MemoryManager | None:
    """Return the process-wide manager if it was made; makes and loads nothing."""
    return made[0] if made else None
