"""The memory engine. Never imports ComfyUI. Read `memory/README.md` first.

Most public names import torch only when they are first used; error classes and headers of files do not need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import DoesNotFit, InvalidInput
from .lazy_names import lazy_names
from .manager.default import default_manager, existing_manager

if TYPE_CHECKING:
    from .api import Managed, manage
    from .kept_quantized import load_quantized
    from .manager.manager import MemoryManager
    from .manager.watermark import Watermark
    from .model_loading import load_model, load_weights
    from .options.budget import BudgetItem
    from .options.precision import Precision
    from .options.profile import OffloadProfile
    from .outside_caches import Registration, register_component
    from .quantizing import QuantizedFile, quantize_file
    from .verification.findings import Verification
    from .weights.discovery import discover_components

__all__ = [
    "BudgetItem",
    "DoesNotFit",
    "InvalidInput",
    "Managed",
    "MemoryManager",
    "OffloadProfile",
    "Precision",
    "QuantizedFile",
    "Registration",
    "Verification",
    "Watermark",
    "default_manager",
    "discover_components",
    "existing_manager",
    "load_model",
    "load_quantized",
    "load_weights",
    "manage",
    "quantize_file",
    "register_component",
]

_, __getattr__ = lazy_names(
    __name__,
    {
        "api": ["Managed", "manage"],
        "manager.manager": ["MemoryManager"],
        "manager.watermark": ["Watermark"],
        "kept_quantized": ["load_quantized"],
        "model_loading": ["load_model", "load_weights"],
        "options.budget": ["BudgetItem"],
        "options.precision": ["Precision"],
        "options.profile": ["OffloadProfile"],
        "outside_caches": ["Registration", "register_component"],
        "quantizing": ["QuantizedFile", "quantize_file"],
        "verification.findings": ["Verification"],
        "weights.discovery": ["discover_components"],
    },
)
