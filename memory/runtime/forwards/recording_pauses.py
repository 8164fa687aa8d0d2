"""Keeps memory of ours out of a host's recordings of allocations.

[Note: recordings] ComfyUI's compiler (from 0.35 on) records which memory of a device a forward allocates and frees in
each block, and gives it the same addresses in every step. What a block allocates it has to free: memory that a hook of
ours allocates there and keeps ends the process when another block frees it. The host has a pause for that. Rules:

1. What outlives a call of ours is allocated in a pause. What is freed before the call returns may be recorded, and what
   a block returns is its caller's to free: it is recorded as in a module that is not managed.
2. In a pause nothing is freed that was recorded. So the forward's tensors are dropped outside of pauses.
3. Pauses of the host do not nest: the end of an inner one ends all. So ours are few: a steady forward on one device has
   one at most, before its first layer, for what a second try would need ([Note: second try] in
   `memory/repeated_call.py`). A host that loads or unloads components itself has paused where it has to.
4. The recording is of one device, the pause of one thread. What computes on another device of a split is in a pause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import get_ident
from typing import Any, TypeAlias

__all__ = ["Pause", "host_recordings"]

HostPause: TypeAlias = Callable[[], AbstractContextManager[Any]]


class Pause:
    """One pause of a thread; of nested ones only the outermost is the host's. Ends once, in any thread."""

    def __init__(self, recordings: HostRecordings) -> None:
        self.recordings = recordings
        self.thread_id = get_ident()
        self.is_open = True

    def end(self) -> None:
        """End it. Idempotent."""
        if self.is_open:
            self.is_open = False
            self.recordings.end(self)


class HostRecordings:
    """The recordings of the process's host: how to pause them, and which pauses of ours are open."""

    def __init__(self) -> None:
        self.host_pause: HostPause | None = None
        """What the host gave to pause its recording in this thread; None: it makes none."""
        self.open: dict[int, tuple[int, AbstractContextManager[Any]]] = {}
        """By thread, the number of open pauses, and the host's."""

    def pause_with(self, host_pause: HostPause | None) -> None:
        """Pause the host's recordings with this from now on; None: there are none."""
        self.host_pause = host_pause

    def begin(self) -> Pause | None:
        """Pause the recording of this thread until `Pause.end`; None if the host makes none."""
        if self.host_pause is None:
            return None
        thread_id = get_ident()
        num_open, paused = self.open.get(thread_id, (0, None))
        if paused is None:
            paused = self.host_pause()
            paused.__enter__()
        self.open[thread_id] = num_open + 1, paused
        return Pause(self)

    def end(self, pause: Pause) -> None:
        """End one pause of its thread. In another thread the host is not told: its recording there is over."""
        num_open, paused = self.open.pop(pause.thread_id)
        if num_open > 1:
            self.open[pause.thread_id] = num_open - 1, paused
        elif pause.thread_id == get_ident():
            paused.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In the body, keep what this thread allocates and frees out of the host's recording."""
        pause = self.begin()
        try:
            yield
        finally:
            if pause is not None:
                pause.end()


host_recordings = HostRecordings()
