"""A stand-in for Nunchaku's pack: its patcher moves a whole model by itself, and compiled weights are out of sight.

Two kinds, as there: ``python``, whose patcher has a ``load`` and a ``detach`` of its own, and which leaves the model
where it is while its own offloading is on; and ``compiled``, a plain patcher over a module that hands the work to an
object of compiled code, which neither torch nor ``copy.deepcopy`` sees into.
"""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
import comfy.sd
import folder_paths
import torch


class WholePatcher(comfy.model_patcher.ModelPatcher):
    """Says nothing to core of what it has loaded."""

    def load(
        self,
        device_to: Any = None,
        lowvram_model_memory: float = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        with self.use_ejected():
            self.model.diffusion_model.to_safely(device_to)

    def detach(self, unpatch_all: bool = True) -> None:
        self.eject_model()
        self.model.diffusion_model.to_safely(self.offload_device)


def movable_as_a_whole(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Add what such a model has to its class."""

    class WholeModel(kind):  # type: ignore[misc, valid-type]
        offload = False

        def to_safely(self, *args: Any, **kwargs: Any) -> Any:
            return self if self.offload else self.to(*args, **kwargs)

    return WholeModel


class Engine:
    """An object of compiled code: it has the weights, moves them when told, and cannot be copied."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'Engine' object")


class CompiledModel(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.engine = Engine(module)
        self.dtype = module.dtype
        self.head = torch.nn.Linear(8, 8)  # what it keeps in Python

    def _apply(self, function: Any, recurse: bool = True) -> Any:
        self.engine.module._apply(function)
        return super()._apply(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.module(*args, **kwargs)


class TestNunchakuModel:
    """Loads a diffusion model as such a pack does."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {
                "unet_name": (folder_paths.get_filename_list("diffusion_models"),),
                "kind": (["python", "compiled"],),
            }
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, unet_name: str, kind: str) -> tuple[Any]:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        model = comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path))
        if kind == "compiled":
            model.model.diffusion_model = CompiledModel(model.model.diffusion_model)
            return (comfy.model_patcher.ModelPatcher(model.model, model.load_device, model.offload_device),)
        inner = model.model.diffusion_model
        inner.__class__ = movable_as_a_whole(type(inner))
        return (WholePatcher(model.model, load_device=model.load_device, offload_device=model.offload_device),)
