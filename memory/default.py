"""The one manager that every workflow of a process shares. Loads torch when the manager is made, not before."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .manager import MemoryManager

__all__ = ["default_manager", "existing_manager"]

lock = threading.Lock()
made: list[MemoryManager] = []


def default_manager() -> MemoryManager:
    """Return the process-wide manager that every workflow shares; made at first use."""
    with lock:
        if not made:
            from .manager import MemoryManager

            made.append(MemoryManager())
        return made[0]


def existing_manager() -> MemoryManager | None:
    """Return the process-wide manager if something has asked for it; makes and loads nothing."""
    return made[0] if made else None
