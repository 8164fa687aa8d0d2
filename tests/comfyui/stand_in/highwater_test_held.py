"""What a process holds, counted: objects of the pack, tensors, threads, open files, and its resident memory.

Imports nothing of ours: the process under test counts in itself.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import weakref
from collections import Counter, deque
from typing import Any

import psutil
import torch

__all__ = ["count_held", "resident_bytes", "shorten_record"]

# What the record of what happened is made of (`EventLog`).
HISTORY = ("Event", "Sample", "Point", "NodeReport", "RunReport")


def resident_bytes() -> dict[str, int]:
    """Return the bytes of this process that are in RAM: as they are, and without what glibc's heap can give back.

    The heap keeps freed memory, now more and now less: tens of MiB, by where in it a small piece is still in use.
    """
    before = psutil.Process().memory_info().rss
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
    return {"rss": psutil.Process().memory_info().rss, "untrimmed": before}


def shorten_record(event_log: Any, num_entries: int) -> None:
    """Make the record of what happened end at so few entries that it is full soon: it would grow for 1,000 runs."""
    for name in ("events", "nodes", "runs"):
        setattr(event_log, name, deque(getattr(event_log, name), maxlen=num_entries))
    event_log.timeline.max_points = num_entries


def count_held() -> dict[str, int]:
    """Return how many of each kind of object the process holds, after a collection of cycles.

    Objects of the pack by class, all tensors and modules, callbacks that wait for an object's end, threads, open files.
    """
    gc.collect()
    counts: Counter[str] = Counter()
    for found in gc.get_objects():
        kind = type(found)
        if issubclass(kind, torch.Tensor):
            counts["tensors"] += 1
        elif issubclass(kind, torch.nn.Module):
            counts["modules"] += 1
        elif "highwater" in str(kind.__module__) and kind.__name__ not in HISTORY:
            counts[f"{str(kind.__module__).rpartition('highwater')[2]}.{kind.__qualname__}"] += 1
    counts["finalizers"] = len(weakref.finalize._registry)  # type: ignore[attr-defined]
    counts["threads"] = threading.active_count()
    counts["files"] = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    return dict(counts)
