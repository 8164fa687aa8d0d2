"""The progress bar and the Cancel button, in both hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["report_progress", "showing_loadings"]


def report_progress(done: int, total: int) -> None:
    """Move the node's progress bar; raises the host's own exception when the user pressed Cancel.

    ComfyUI's ``set_progress`` does not look at the Cancel button (0.33), its samplers do: so do we, as they do.
    """
    from comfy_api.latest import ComfyAPISync

    ComfyAPISync().execution.set_progress(done, total)
    model_management = sys.modules.get("comfy.model_management")
    if model_management is not None:
        model_management.throw_exception_if_processing_interrupted()


@contextmanager
def showing_loadings() -> Iterator[None]:
    """Show on the node's bar what is packed, read and loaded meanwhile; Cancel ends it within one block.

    Our own host watches every node itself.
    """
    if "comfy.model_management" not in sys.modules:
        yield
        return
    from ..memory import default_manager

    end = default_manager().watch_loading(lambda component, done, total: report_progress(done, total))
    try:
        yield
    finally:
        end()
