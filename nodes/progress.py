"""The progress bar and the Cancel button, in both hosts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["report_progress", "showing_loadings"]

# Telling ComfyUI takes a turn of its event loop, and a file is read in thousands of pieces.
SHOWN_EVERY_S = 0.1


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
def showing_loadings(show_bar: Callable[[int, int], object] = set_progress) -> Iterator[None]:
    """Show on a bar, the node's by default, what is packed, read and loaded meanwhile; Cancel ends it in one block.

    Our own host watches every node itself.
    """
    if "comfy.model_management" not in sys.modules:
        yield
        return
    from ..memory import default_manager

    shown_s = -math.inf

    def show(component: str, done: int, total: int) -> None:
        nonlocal shown_s
        raise_if_cancelled()
        if done >= total or time.monotonic() - shown_s > SHOWN_EVERY_S:
            show_bar(done, total)
            shown_s = time.monotonic()

    end = default_manager().watch_loading(show)
    try:
        yield
    finally:
        end()
