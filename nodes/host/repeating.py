"""Repeats a call of a diffusion model of ours once if it runs out of memory, through core's own wrapper.

[Note: who takes part] The second try has to compute what the first would have. Core's own code keeps nothing between
calls but what is put back; other packs' code may count calls, or keep results of steps. So a call is not repeated
where others wrap it from inside, have put functions, hooks or modules of their own into the model, patch it, or wrap it
by the one function that core has for step caches. The host's own exception then goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...memory.hosted_component import repeat_if_short
from .guides import KEY
from .strangers import PATCHES, find_in_module, find_stranger

__all__ = ["repeat_calls", "why_not_repeated"]


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
    others = find_in_module(module)
    if others is not None:
        return others
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
