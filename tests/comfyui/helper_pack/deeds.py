"""Uses of a model's module beside forwards, as other packs make them, and what each of them said."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import comfy.model_management as model_management
import torch
from safetensors import safe_open

__all__ = ["TestDeeds"]


def deep_copy(module: torch.nn.Module) -> bool:
    copied, own = copy.deepcopy(module).state_dict(), module.state_dict()
    return all(torch.equal(weight.cpu(), own[name].cpu()) for name, weight in copied.items())


def shallow_copy(module: torch.nn.Module) -> bool:
    shallow = copy.copy(module)
    return shallow is not module and dict(shallow.named_parameters()).keys() == dict(module.named_parameters()).keys()


def set_modes(module: torch.nn.Module) -> list[bool]:
    modes = []
    for training in (True, False):
        module.train(training)
        modes.append(all(part.training is training for part in module.modules()))
    module.requires_grad_(False)
    return [*modes, not any(weight.requires_grad for weight in module.parameters())]


def describe(module: torch.nn.Module) -> list[Any]:
    weight = next(module.parameters())
    is_one = isinstance(module, torch.nn.Module) and isinstance(weight, torch.nn.Parameter)
    return [is_one, hasattr(module, "forward"), hasattr(module, "no_such"), list(weight.shape), str(weight.dtype)]


def num_of_file(module: torch.nn.Module, path: str) -> list[int]:
    """Return how many entries the state has, and how many of them are what the file has by their names there."""
    state = {name.removeprefix("diffusion_model."): weight for name, weight in module.state_dict().items()}
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        same = [torch.equal(state[name].cpu(), file.get_tensor(name)) for name in state if name in names]
    return [len(state), sum(same)]


class TestDeeds:
    """Does them with a model, or with its largest part, where it is: on its device, or (``unloads``) at rest."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "model": ("MODEL",),
                "after": ("*",),
                "path": ("STRING", {"default": ""}),
                "unloads": ("BOOLEAN", {"default": False}),
                "part": ("STRING", {"default": ""}),
            }
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "do"
    CATEGORY = "test"
    OUTPUT_NODE = True

    def do(self, model: Any, after: Any, path: str, unloads: bool, part: str) -> dict[str, Any]:
        if unloads:
            model_management.unload_all_models()
        module = model.model.get_submodule(part)
        deeds: dict[str, Callable[[], Any]] = {
            "describe": lambda: describe(module),
            "modes": lambda: set_modes(module),
            "to cpu": lambda: module.to("cpu") is module,
            "to device": lambda: module.to(model.load_device) is module,
            "copy": lambda: shallow_copy(module),
            "deepcopy": lambda: deep_copy(module),
            "pickle": lambda: pickle.dump(module, io.BytesIO()),
            "state": lambda: num_of_file(module, path),
        }
        told: dict[str, Any] = {}
        for name, deed in deeds.items():
            try:
                told[name] = deed()
            except Exception as error:
                told[name] = f"{type(error).__name__}: {error}"
        return {"ui": {"deeds": [told]}, "result": (model,)}
