"""What a process shares: every function that packages lend to each other, and every switch of torch's.

Imports nothing of ours: a process that has not loaded the engine yet takes its first snapshot with it.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import torch

__all__ = ["changes_since", "snapshot"]

# Whose functions and tables a memory manager might be tempted to replace.
PACKAGES = ("torch", "safetensors", "transformers", "accelerate", "diffusers", "optimum")
TABLES = {
    "quanto's layer classes": ("optimum.quanto.nn.qmodule", "_QMODULE_TABLE"),
    "quanto's operations": ("optimum.quanto.tensor.activations.qbytes_ops", "_QBYTESTENSOR_OP_TABLE"),
}
GLOBAL_HOOKS = ("forward_pre", "forward", "backward", "parameter_registration", "module_registration")


def snapshot() -> dict[str, Any]:
    """Return all of it by name; functions and classes as they are, so that none is taken for its replacement."""
    state = {
        "default device": torch.get_default_device(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "random numbers": torch.get_rng_state().numpy().tobytes(),
        "swap parameters": torch.__future__.get_swap_module_params_on_conversion(),
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "thread switches": sys.getswitchinterval(),
    }
    for kind in GLOBAL_HOOKS:
        hooks = getattr(torch.nn.modules.module, f"_global_{kind}_hooks", {})
        state[f"hooks of all modules: {kind}"] = list(hooks.values())
    for name, (module, table) in TABLES.items():
        if module in sys.modules:
            state[name] = dict(getattr(sys.modules[module], table))
    for name in ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config"):
        if name in sys.modules:
            state[name] = sys.modules[name].get_config_copy()
    return state | functions()


def functions() -> dict[str, Any]:
    """Return every function and class that hangs on a module of the packages, or on a class of theirs."""
    found: dict[str, Any] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] not in PACKAGES:
            continue
        for name, value in list(vars(module).items()):
            if issubclass(type(value), type):  # isinstance would ask the value itself, and some warn then
                found |= {
                    f"{module_name}.{name}.{key}": member for key, member in vars(value).items() if callable(member)
                }
            if callable(value):
                found[f"{module_name}.{name}"] = value
    return found


def changes_since(before: dict[str, Any]) -> list[str]:
    """Return what is not as it was; what packages load later is theirs and does not count."""
    now = snapshot()
    return [
        name
        for name, value in before.items()
        if name not in now or not (now[name] is value or (not callable(value) and now[name] == value))
    ]
