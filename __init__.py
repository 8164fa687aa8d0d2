"""Highwater: a memory layer for ComfyUI.

ComfyUI imports this file from ``custom_nodes`` and calls `comfy_entrypoint`; Python programs import `manage`.
Nothing heavy is imported before it is asked for. There is no ``NODE_CLASS_MAPPINGS`` on purpose: its mere
presence makes ComfyUI ignore the entry point.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .memory import (
        BudgetItem,
        Managed,
        MemoryManager,
        OffloadProfile,
        Precision,
        default_manager,
        discover_components,
        load_model,
        load_quantized,
        load_weights,
        manage,
        quantize_file,
        register_component,
    )
    from .nodes.extension import HighwaterExtension

__version__ = "0.1.0"
__all__ = [
    "BudgetItem",
    "Managed",
    "MemoryManager",
    "OffloadProfile",
    "Precision",
    "default_manager",
    "discover_components",
    "load_model",
    "load_quantized",
    "load_weights",
    "manage",
    "quantize_file",
    "register_component",
]

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> HighwaterExtension:
    """Return the extension that lists the nodes; imports torch-free node schemas only."""
    from .nodes.extension import HighwaterExtension

    return HighwaterExtension()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import memory

        return getattr(memory, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
