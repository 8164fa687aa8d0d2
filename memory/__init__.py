"""The engine: decide, record, move. Never imports ComfyUI. Read `memory/README.md` first."""

from .errors import DoesNotFit, InvalidInput
from .manage import Managed, default_manager, discover_components, manage
from .manager import MemoryManager, Watermark

__all__ = [
    "DoesNotFit",
    "InvalidInput",
    "Managed",
    "MemoryManager",
    "Watermark",
    "default_manager",
    "discover_components",
    "manage",
]
