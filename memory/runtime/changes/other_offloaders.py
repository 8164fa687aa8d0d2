"""Detects other libraries that move a module's weights with hooks: accelerate, diffusers' offloading and casting.

Two libraries cannot move the weights of one module. The others leave marks in its attributes; this file only reads
these and imports nothing of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...errors import UnsafeState
from ...options.precision import Precision

__all__ = ["ExecutionMark", "find_rival", "is_scripted"]

# Diffusers' names of its hooks that move or convert weights. Hooks of its caches are allowed.
MOVING_HOOKS = {
    "group_offloading": "diffusers' group offloading: load it without",
    "lazy_prefetch_group_offloading": "diffusers' group offloading: load it without",
    "layerwise_casting": (
        f"diffusers' layerwise casting: load it without and use precision={Precision.ENCODED.name!r}"
    ),
}


class ExecutionMark:
    """Tells a diffusers pipeline where a managed module computes. Stands in the attribute that accelerate uses.

    Args:
        load_for: loads the component, unless a pass of it is open.
    """

    def __init__(self, owner: str, execution_device: torch.device, load_for: Callable[[], None]) -> None:
        self.owner = owner
        self.execution_device = execution_device
        self.load_for = load_for

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Load the module's weights, which one of its methods is about to use.

        Diffusers calls this in ``encode``, ``decode`` and similar methods, for which torch calls no forward hooks.
        """
        self.load_for()

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Refuse: accelerate calls this before it adds its own hooks or removes all hooks."""
        raise UnsafeState(
            f"{self.owner} is managed: release it before another library adds or removes offloading hooks"
        )


def find_rival(modules: Iterable[nn.Module]) -> str | None:
    """Return, for a message, which other library moves the weights of these modules, and how to stop it."""
    for module in modules:
        own = vars(module)
        hook = own.get("_hf_hook")
        if hook is not None and not isinstance(hook, ExecutionMark):
            return "accelerate's hooks: remove them first, as with pipe.remove_all_hooks()"
        registry = own.get("_diffusers_hook")
        hooks: Any = getattr(registry, "hooks", None) or ()
        for name in MOVING_HOOKS.keys() & set(hooks):
            return MOVING_HOOKS[name]
    return None


def is_scripted(module: nn.Module) -> bool:
    """Whether TorchScript made a module. Such a module does not use weights that Python code puts into it."""
    return isinstance(module, torch.jit.ScriptModule)
