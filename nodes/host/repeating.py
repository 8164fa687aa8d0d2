"""Repeats a call of a diffusion model of ours once if it runs out of memory, through core's own wrapper.

[Note: who takes part] The second try has to compute what the first would have. Core's own code keeps nothing between
calls but what is put back; other packs' code may count calls, or keep results of steps. So a call is not repeated
where others wrap it from inside, have put functions, hooks or modules of their own into the model, patch it, or wrap it
by the one function that core has for step caches. The host's own exception then goes on.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any

import comfy
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...memory.hosted_component import has_hooks_of_others, repeat_if_short
from .guides import KEY
from .hosted import Hosted

__all__ = ["repeat_calls", "why_not_repeated"]

CORES_FOLDER = os.path.join(os.path.dirname(os.path.abspath(next(iter(comfy.__path__)))), "")
CORES_PARTS = ("comfy", "comfy_extras", "comfy_api", "comfy_execution")
LIBRARIES = frozenset(("builtins", "torch", "uuid", "collections", "functools", "enum", "numpy", "einops"))
# What of core's options for a model are functions or objects of others that its blocks call.
PATCHES = ("patches", "patches_replace", "optimized_attention_override", "model_patches")
MAX_DEPTH = 6


def repeat_calls(patcher: ModelPatcher) -> None:
    """Make the calls of a diffusion model be repeated once if they run out of memory. Idempotent."""
    if not patcher.get_wrappers(WrappersMP.DIFFUSION_MODEL, KEY):
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, repeat_once)


def repeat_once(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """A DIFFUSION_MODEL wrapper of core's."""
    module = executor.class_obj
    # A compiled call has no place to stop at, and what others wrap from inside sees both tries.
    if torch.compiler.is_compiling() or module is None or executor.idx + 1 < len(executor.wrappers):
        return executor(*args, **kwargs)

    def why_not(root: torch.nn.Module) -> str | None:
        reason = why_not_repeated(root, module, (args, kwargs))
        what = "it is repeated once if there can be more room" if reason is None else f"it is not repeated: {reason}"
        logging.warning("highwater: a call of %s ran out of memory; %s", type(module).__name__, what)
        return reason

    return repeat_if_short(module, lambda: executor(*args, **kwargs), (args, kwargs), why_not=why_not)


def why_not_repeated(root: torch.nn.Module, module: torch.nn.Module, given: Any) -> str | None:
    """Return whose code takes part in a call so that it cannot be repeated; None if it is all core's and ours.

    Args:
        root: core's model; module: what of it is called.
    """
    patcher = getattr(root, "current_patcher", None)
    if patcher is not None and "model_function_wrapper" in patcher.model_options:
        return "another node wraps its calls"
    if has_hooks_of_others(module):
        return "another node has hooks on its layers"
    for part in module.modules():
        replaced = [name for name, value in vars(part).items() if callable(value) and hasattr(type(part), name)]
        if replaced:
            return f"another node has replaced {type(part).__name__}.{replaced[0]}"
        if part._modules and not is_cores(type(part)):
            return f"its {type(part).__name__} is not ComfyUI's own"
    for options in options_in(given):
        stranger = find_stranger([options[name] for name in PATCHES if name in options])
        if stranger is not None:
            return f"another node patches it with {stranger}"
    return None


def options_in(given: tuple[Iterable[Any], Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return core's options of a call, wherever they stand among its arguments."""
    args, kwargs = given
    found = [value for value in args if isinstance(value, dict)]
    return [*found, *(value for name, value in kwargs.items() if name == "transformer_options")]


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
        return find_stranger(value.__self__, depth + 1)
    kind = value if hasattr(value, "__module__") and hasattr(value, "__qualname__") else type(value)
    return None if is_cores(kind) else str(kind.__qualname__)


def is_cores(kind: Any) -> bool:
    """Whether a class or function is core's, of a library that keeps nothing between calls, or ours."""
    name = str(kind.__module__)
    if name.partition(".")[0] in LIBRARIES or name.startswith(__name__.rpartition(".")[0]):
        return True
    file = os.path.abspath(getattr(sys.modules.get(name), "__file__", None) or "")
    inside = os.path.relpath(file, CORES_FOLDER) if file.startswith(CORES_FOLDER) else ""
    return inside.partition(os.sep)[0] in CORES_PARTS
