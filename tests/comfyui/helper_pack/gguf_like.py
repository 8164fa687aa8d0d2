"""A stand-in for packs that load GGUF files: their classes have these methods and attributes, the code is our own.

A weight is a tensor of bytes whose attributes say what they mean. Its layers unpack it in every call, and apply the
patches that its patcher has hung on the tensor. The patcher is a plain ``ModelPatcher`` for core, so it stays static.
"""

from __future__ import annotations

import collections
from typing import Any, ClassVar

import comfy.float
import comfy.lora
import comfy.model_management as model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
import torch

GROUP = 32  # elements that share a scale
PLAIN_TYPES = (None, "half", "single")
EIGHT_BITS = "eight bits"


class BlockTensor(torch.Tensor):
    """Bytes, with the type of the numbers in them and the shape of the weight that they stand for."""

    def __new__(cls, *args: Any, tensor_type: Any, tensor_shape: Any, patches: Any = (), **kwargs: Any) -> Any:
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, tensor_type: Any, tensor_shape: Any, patches: Any = (), **kwargs: Any) -> None:
        super().__init__()
        self.tensor_type, self.tensor_shape, self.patches = tensor_type, tensor_shape, list(patches)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        moved = super().to(*args, **kwargs)
        moved.tensor_type = getattr(self, "tensor_type", None)
        moved.tensor_shape = getattr(self, "tensor_shape", moved.data.shape)
        moved.patches = list(getattr(self, "patches", ()))
        return moved

    def clone(self, *_: Any, **__: Any) -> Any:
        return self

    def detach(self, *_: Any, **__: Any) -> Any:
        return self

    def new_empty(self, size: Any, *args: Any, **kwargs: Any) -> Any:
        empty = super().new_empty(size, *args, **kwargs)
        return BlockTensor(empty, tensor_type=getattr(self, "tensor_type", None), tensor_shape=size)

    @property
    def shape(self) -> Any:
        if not hasattr(self, "tensor_shape"):
            self.tensor_shape = self.size()
        return self.tensor_shape


def is_packed(tensor: Any) -> bool:
    return tensor is not None and getattr(tensor, "tensor_type", None) not in PLAIN_TYPES


def pack(weight: torch.Tensor) -> BlockTensor:
    groups = weight.float().reshape(-1, GROUP)
    scale = (groups.abs().amax(1, keepdim=True) / 127).clamp_min(1e-7).half()
    numbers = (groups / scale.float()).round().clamp(-127, 127).to(torch.int8)
    rows = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1).reshape(weight.shape[0], -1)
    return BlockTensor(rows, tensor_type=EIGHT_BITS, tensor_shape=weight.shape)


def unpack(tensor: Any, dtype: Any) -> torch.Tensor:
    if not is_packed(tensor):
        return tensor.to(dtype)
    groups = tensor.data.reshape(-1, tensor.data.shape[-1]).view(torch.uint8).reshape(-1, GROUP + 2)
    scale, numbers = torch.split(groups, [2, GROUP], 1)
    return (numbers.view(torch.int8) * scale.view(torch.float16)).reshape(tensor.shape).to(dtype)


def moved(patch: Any, device: Any) -> Any:
    if isinstance(patch, torch.Tensor):
        return patch.to(device)
    return type(patch)(moved(each, device) for each in patch) if isinstance(patch, tuple | list) else patch


class BlockLayer(torch.nn.Module):
    comfy_cast_weights = True
    largest_layer = False

    def holds_packed(self) -> bool:
        return is_packed(self.weight) or is_packed(self.bias)

    def _load_from_state_dict(self, state: Any, prefix: str, local: Any, strict: Any, missing: Any, *_: Any) -> None:
        for name in ("weight", "bias"):
            value = state.get(prefix + name)
            if value is not None:
                setattr(self, name, torch.nn.Parameter(value, requires_grad=False))
        if self.weight is None:
            self.weight = torch.nn.Parameter(torch.zeros(self.in_features, self.out_features), requires_grad=False)
            missing.append(f"{prefix}weight")

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: Any) -> None:
        """Only the sizes are right: core asks for those."""
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                destination[prefix + name] = torch.zeros_like(getattr(self, name), device="meta")

    def get_weight(self, tensor: Any, dtype: Any) -> Any:
        patches, key = [], ""
        for several, key in getattr(tensor, "patches", ()):  # noqa: B007 - the last
            patches += moved(several, tensor.device)
        weight = unpack(tensor, dtype)
        if isinstance(weight, BlockTensor):
            weight = torch.Tensor(weight)
        return comfy.lora.calculate_weight(patches, weight, key) if patches else weight

    def forward_comfy_cast_weights(self, given: torch.Tensor) -> torch.Tensor:
        if not self.holds_packed():
            out = super().forward_comfy_cast_weights(given)
            return torch.Tensor(out) if isinstance(out, BlockTensor) else out
        here = [None if each is None else each.to(given.device) for each in (self.weight, self.bias)]
        wide = [None if each is None else self.get_weight(each, given.dtype) for each in here]
        return torch.nn.functional.linear(given, *wide)


class BlockOps(comfy.ops.manual_cast):
    class Linear(BlockLayer, comfy.ops.manual_cast.Linear):
        def __init__(self, num_in: int, num_out: int, bias: bool = True, device: Any = None, dtype: Any = None) -> None:
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = num_in, num_out, None, None


class BlockPatcher(comfy.model_patcher.ModelPatcher):
    patch_on_device = False
    mmap_released = False
    modules_in_file: ClassVar[dict[str, Any]] = {}

    def patch_weight_to_device(self, key: str, device_to: Any = None, inplace_update: bool = False) -> None:
        if key not in self.patches:
            return
        weight, patches = comfy.utils.get_attr(self.model, key), self.patches[key]
        if is_packed(weight):
            patched = weight.to(device_to)
            patched.patches = [(moved(patches, self.load_device if self.patch_on_device else self.offload_device), key)]
        else:
            inplace_update = self.weight_inplace_update or inplace_update
            if key not in self.backup:
                kept = collections.namedtuple("Dimension", ["weight", "inplace_update"])
                self.backup[key] = kept(weight.to(device=self.offload_device, copy=inplace_update), inplace_update)
            if device_to is None:
                wide = weight.to(torch.float32, copy=True)
            else:
                wide = model_management.cast_to_device(weight, device_to, torch.float32, copy=True)
            patched = comfy.float.stochastic_rounding(comfy.lora.calculate_weight(patches, wide, key), weight.dtype)
        put = comfy.utils.copy_to_param if inplace_update else comfy.utils.set_attr_param
        put(self.model, key, patched)

    def unpatch_model(self, device_to: Any = None, unpatch_weights: bool = True) -> Any:
        for parameter in self.model.parameters() if unpatch_weights else ():
            if is_packed(parameter) and getattr(parameter, "patches", ()):
                parameter.patches = []
        return super().unpatch_model(device_to=device_to, unpatch_weights=unpatch_weights)

    def pin_weight_to_device(self, key: str) -> None:
        module = key.rpartition(".")[0]
        if not self.mmap_released and module in self.modules_in_file:
            self.modules_in_file.pop(module).to(self.load_device).to(self.offload_device)
        super().pin_weight_to_device(key)

    def load(self, *args: Any, force_patch_weights: bool = False, **kwargs: Any) -> None:
        if not self.mmap_released:
            self.modules_in_file = dict(self.model.named_modules())
        super().load(*args, force_patch_weights=True, **kwargs)
        if not self.mmap_released:
            self.mmap_released, self.modules_in_file = True, {}

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        """As such packs do it: core makes a clone of its caller's class."""
        own = self.__class__
        self.__class__ = BlockPatcher
        clone = super().clone(*args, **kwargs)
        clone.__class__ = BlockPatcher
        self.__class__ = own
        clone.patch_on_device = getattr(self, "patch_on_device", False)
        clone.mmap_released = getattr(self, "mmap_released", False)
        if own is not BlockPatcher:
            clone.size = 0
        return clone


def packed_state(path: str) -> dict[str, Any]:
    """Return what such a pack reads: matrices packed, vectors in a float type, all of the pack's tensor class."""
    state = {}
    for name, weight in comfy.utils.load_torch_file(path, safe_load=True).items():
        if weight.ndim == 2 and not weight.shape[1] % GROUP and "embedding" not in name:
            state[name] = pack(weight)
        else:
            kind, dtype = ("half", torch.float16) if name.endswith("bias") else ("single", torch.float32)
            state[name] = BlockTensor(weight.to(dtype), tensor_type=kind, tensor_shape=weight.shape)
    return state


class TestGGUFModel:
    """Loads a diffusion model as such a pack does."""

    INPUT_TYPES = classmethod(
        lambda cls: {
            "required": {"unet_name": (folder_paths.get_filename_list("diffusion_models"),)},
            "optional": {"patch_on_device": ("BOOLEAN", {"default": False}), "broken": ("BOOLEAN", {"default": False})},
        }
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, unet_name: str, patch_on_device: bool = False, broken: bool = False) -> tuple[Any]:
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        model = comfy.sd.load_diffusion_model_state_dict(
            packed_state(path), model_options={"custom_operations": BrokenOps if broken else BlockOps}
        )
        model = BlockPatcher.clone(model)
        model.patch_on_device = patch_on_device
        return (model,)


class BrokenOps(BlockOps):
    """Layers that know a weight by its object: no copy of it can compute."""

    class Linear(BlockOps.Linear):
        known: int | None = None

        def get_weight(self, tensor: Any, dtype: Any) -> Any:
            self.known = self.known or id(self.weight)
            weight = super().get_weight(tensor, dtype)
            return weight if self.known == id(self.weight) else weight + 1


class TestGGUFText:
    """Loads a text encoder as such a pack does."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"clip_name": (folder_paths.get_filename_list("text_encoders"),)}}
    )
    RETURN_TYPES = ("CLIP",)
    FUNCTION = "load"
    CATEGORY = "test"

    def load(self, clip_name: str) -> tuple[Any]:
        clip = comfy.sd.load_text_encoder_state_dicts(
            state_dicts=[packed_state(folder_paths.get_full_path_or_raise("text_encoders", clip_name))],
            clip_type=comfy.sd.CLIPType.STABLE_DIFFUSION,
            model_options={
                "custom_operations": BlockOps,
                "initial_device": model_management.text_encoder_offload_device(),
            },
        )
        clip.patcher = BlockPatcher.clone(clip.patcher)
        return (clip,)
