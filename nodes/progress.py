"""The progress bar and the Cancel button, in both hosts: for the steps of a node, and for what is loaded in it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = ["on_bar", "report_progress", "showing_loadings"]

Watcher = Callable[[str, int, int], None]
# Telling ComfyUI takes a turn of its event loop, and a file is read in thousands of pieces.
SHOWN_EVERY_S = 0.1

is_shown: ContextVar[bool] = ContextVar("is_shown", default=False)


def report_progress(done: int, total: int) -> None:
    """Move the node's progress bar; raises the host's own exception when the user pressed Cancel.

    ComfyUI's ``set_progress`` does not look at the Cancel button (0.33), its samplers do: so do we, as they do.
    """
    set_progress(done, total)
    raise_if_cancelled()


def set_progress(done: int, total: int) -> None:
    from comfy_api.latest import ComfyAPISync

    ComfyAPISync().execution.set_progress(done, total)


def raise_if_cancelled() -> None:
    model_management = sys.modules.get("comfy.model_management")
    if model_management is not None:
        model_management.throw_exception_if_processing_interrupted()


@contextmanager
def showing_loadings(show: Watcher | None = None, manager: MemoryManager | None = None) -> Iterator[None]:
    """Call ``show`` with component, bytes done and bytes in all as something is packed, read or loaded meanwhile.

    By default it is shown on the node's bar. What ``show`` raises (Cancel) ends the loading in one block. Does nothing
    within another such context: our own host shows the loadings of every node.
    """
    if is_shown.get():
        yield
        return
    from ..memory import default_manager

    end = (manager or default_manager()).watch_loading(show or on_bar(set_progress))
    token = is_shown.set(True)
    try:
        yield
    finally:
        is_shown.reset(token)
        end()


def on_bar(move: Callable[[int, int], object]) -> Watcher:
    """Return what shows loadings on one of the host's bars and looks at its Cancel button each time."""
    shown_s = -math.inf

    def show(component: str, done: int, total: int) -> None:
        nonlocal shown_s
        raise_if_cancelled()
        if done >= total or time.monotonic() - shown_s > SHOWN_EVERY_S:
            move(done, total)
            shown_s = time.monotonic()

    return show
