"""Others that move a module's weights by hooks of their own: accelerate, diffusers' offloading and casting.

Two cannot have one module. They leave marks in its attributes; nothing of theirs is imported or changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..errors import UnsafeState

__all__ = ["ExecutionMark", "find_rival", "is_scripted"]

# What diffusers calls the hooks that move or convert weights; its caches have hooks, too, which are welcome.
MOVING_HOOKS = {
    "group_offloading": "diffusers' group offloading: load it without",
    "lazy_prefetch_group_offloading": "diffusers' group offloading: load it without",
    "layerwise_casting": "diffusers' layerwise casting: load it without, precision='fp8 scaled' does it",
}


class ExecutionMark:
    """Tells a diffusers pipeline where a managed module computes, in the attribute that accelerate uses.

    Args:
        bring_up: loads the component, unless a pass of it is open.
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
        """Refuse what accelerate does before it puts hooks of its own in place, or removes them all."""
        raise UnsafeState(
            f"{self.owner} is managed, which moves its weights: release it before others add or remove offloading hooks"
        )


def find_rival(modules: Iterable[nn.Module]) -> str | None:
    """Return, for people, who else moves the weights of any of these modules, and how to end that."""
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
    """Whether a module was made by TorchScript, which reads no weights that are given to it from outside."""
    return isinstance(module, torch.jit.ScriptModule)
