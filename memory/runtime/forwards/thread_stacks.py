"""What the threads of the process do now, read from their stacks: calls of modules, waits for other threads."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from threading import get_ident
from types import CodeType, FrameType

from torch import nn

__all__ = ["CALL_OF_A_MODULE", "find_unseen", "is_waiting", "modules_called_in", "waits_at"]

CALL_OF_A_MODULE = nn.Module._wrapped_call_impl.__code__
# Modules in whose functions a thread waits for another one; and the engine, which waits for a forward only in `begin`.
WAITS, OURS = ("threading", "concurrent.futures", "queue", "multiprocessing.pool"), __name__.rsplit(".", 3)[0]


def modules_called_in(thread_id: int) -> Iterator[nn.Module]:
    """Yield the modules whose calls are under way in a thread, the innermost first."""
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        # Reading a frame's variables keeps them alive, so only those of module calls are read.
        if frame.f_code is CALL_OF_A_MODULE and "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def waits_at(thread_id: int) -> tuple[int, int] | None:
    """Return where a thread waits for another thread, outside of the engine; equal values mean the same wait."""
    frame = sys._current_frames().get(thread_id)
    inner = (frame, frame.f_lasti) if frame is not None else None
    while frame is not None and frame.f_globals.get("__name__", "").startswith(WAITS):
        frame = frame.f_back
    if inner is None or frame is None or frame is inner[0] or frame.f_globals.get("__name__", "").startswith(OURS):
        return None
    return id(inner[0]), inner[1]


def is_waiting(thread_id: int) -> bool:
    """Whether a thread waits for another one, or for a lock of the engine. False for a thread that has ended."""
    frame = sys._current_frames().get(thread_id)
    return frame is not None and frame.f_globals.get("__name__", "").startswith((*WAITS, OURS))


def find_unseen(modules: Collection[nn.Module], hooks: Collection[CodeType]) -> set[int]:
    """Return the ids of the threads in which a call of one of these modules is under way that is not inside a hook.

    Args:
        hooks: the code of the hooks on these modules; a call that one of them delays is not returned.
    """
    frames = sys._current_frames()
    frames[get_ident()] = sys._getframe(1)  # our own frame would refer to itself, and keep all callers' values alive
    found = set()
    for thread_id, innermost in frames.items():
        frame: FrameType | None = innermost
        is_in_hook = False
        while frame is not None:
            if frame.f_code in hooks:
                is_in_hook = True
            elif frame.f_code is CALL_OF_A_MODULE:
                if not is_in_hook and frame.f_locals.get("self") in modules:
                    found.add(thread_id)
                    break
                is_in_hook = False
            frame = frame.f_back
    return found
