"""Core's compiler, from 0.35 on: the engine pauses its recording of allocations while it allocates in a forward.

Loading and unloading for core pause nothing: code that makes core load a model inside a block has paused the compiler,
since core's own models need that, too, and pauses do not nest.
"""

from __future__ import annotations

from ...memory.hosted_component import pause_recordings_with

try:
    import comfy.model_prefetch as model_prefetch
except ImportError:  # ComfyUI 0.8.0
    model_prefetch = None

__all__ = ["attach_to_compiler"]


def attach_to_compiler() -> None:
    """Make the engine pause core's compiler, where there is one. Idempotent."""
    pause_recordings_with(getattr(model_prefetch, "pause_malloc_graph", None))
