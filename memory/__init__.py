"""The engine: decide, record, move. Never imports ComfyUI. Read `memory/README.md` first.

The public names load torch when they are first used: reading a header or an error class does not need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import DoesNotFit, InvalidInput
from .manager.default import default_manager, existing_manager

if TYPE_CHECKING:
    from .api import Managed, manage
    from .manager.manager import MemoryManager
    from .manager.watermark import Watermark
    from .model_loading import load_model, load_weights
    from .options.budget import BudgetItem
    from .options.profile import OffloadProfile
    from .verification.findings import Verification
    from .weights.discovery import discover_components

__all__ = [
    "BudgetItem",
    "DoesNotFit",
    "InvalidInput",
    "Managed",
    "MemoryManager",
    "OffloadProfile",
    "Verification",
    "Watermark",
    "default_manager",
    "discover_components",
    "existing_manager",
    "load_model",
    "load_weights",
    "manage",
]

LAZY = {
    "BudgetItem": "options.budget",
    "MemoryManager": "manager.manager",
    "OffloadProfile": "options.profile",
    "Verification": "verification.findings",
    "Watermark": "manager.watermark",
    "discover_components": "weights.discovery",
    "load_model": "model_loading",
    "load_weights": "model_loading",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{LAZY.get(name, 'api')}", __name__), name)
    globals()[name] = value
    return value
