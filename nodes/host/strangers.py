"""Whose code takes part in a diffusion model's calls: core's and ours, or that of other packs.

Core's own code keeps nothing between calls that a later one needs earlier than it was left; other packs' code may.
"""

from __future__ import annotations

import functools
import os
import sys
from types import MethodType
from typing import Any

import comfy
import torch

from ...memory.hosted_component import has_hooks_of_others
from .hosted import Hosted

__all__ = ["PATCHES", "find_in_module", "find_stranger"]

CORES_FOLDER = os.path.join(os.path.dirname(os.path.abspath(next(iter(comfy.__path__)))), "")
CORES_PARTS = ("comfy", "comfy_extras", "comfy_api", "comfy_execution")
LIBRARIES = frozenset(("builtins", "torch", "uuid", "collections", "functools", "enum", "numpy", "einops"))
# What of core's options for a model are functions or objects of others that its blocks call.
PATCHES = ("patches", "patches_replace", "optimized_attention_override", "model_patches")
MAX_DEPTH = 6


def find_in_module(module: torch.nn.Module) -> str | None:
    """Return what other packs have put into a model; None if all of it is core's and ours. Looks at every module."""
    if has_hooks_of_others(module):
        return "another node has hooks on its layers"
    for part in module.modules():
        replaced = [name for name, value in vars(part).items() if callable(value) and hasattr(type(part), name)]
        if replaced:
            return f"another node has replaced {type(part).__name__}.{replaced[0]}"
        if part._modules and not is_cores(type(part)):
            return f"its {type(part).__name__} is not ComfyUI's own"
    return None


def find_stranger(value: Any, depth: int = 0) -> str | None:
    """Return the name of a function or object in nested containers that is neither core's nor a library's."""
    if depth > MAX_DEPTH or isinstance(value, torch.Tensor | Hosted):
        return None
    if isinstance(value, dict | list | tuple | set):
        inside = value.values() if isinstance(value, dict) else value
        return next((found for part in inside if (found := find_stranger(part, depth + 1)) is not None), None)
    if isinstance(value, functools.partial):
        return find_stranger([value.func, value.args, value.keywords], depth + 1)
    if isinstance(value, MethodType):
        return find_stranger([value.__self__, value.__func__], depth + 1)
    kind = value if hasattr(value, "__module__") and hasattr(value, "__qualname__") else type(value)
    return None if is_cores(kind) else str(kind.__qualname__)


def is_cores(kind: Any) -> bool:
    """Whether a class or function is core's, of a library that keeps nothing between calls, or ours."""
    return is_cores_module(str(kind.__module__))


@functools.cache
def is_cores_module(name: str) -> bool:
    if name.partition(".")[0] in LIBRARIES or name.startswith(__name__.rpartition(".")[0]):
        return True
    file = os.path.abspath(getattr(sys.modules.get(name), "__file__", None) or "")
    inside = os.path.relpath(file, CORES_FOLDER) if file.startswith(CORES_FOLDER) else ""
    return inside.partition(os.sep)[0] in CORES_PARTS
