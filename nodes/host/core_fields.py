"""Fields of core's own objects that we set, because core has no call for them; no other file sets any.

Core reads these fields: a patcher's device and how to load it again, the patcher of a text encoder, VAE or ControlNet,
and marks on modules that say how their weights are cast. Nothing of core's code is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from comfy.ldm.modules.diffusionmodules.model import normal_attention, pytorch_attention, xformers_attention
from comfy.model_patcher import ModelPatcher, wipe_lowvram_weight

__all__ = [
    "NOTE",
    "cast_in_forwards",
    "copy_own_state",
    "copy_state",
    "drop_backups",
    "drop_parent",
    "forget_dynamic",
    "hang_on",
    "has_record",
    "mark_module",
    "move_adapter",
    "move_guide",
    "note_on",
    "own_patches",
    "put_parameter",
    "record_dtypes",
    "recorded_dtype",
    "set_class",
    "set_clip",
    "set_control",
    "set_device",
    "set_device_of",
    "set_held_bytes",
    "set_loaded",
    "set_reload",
    "set_vae",
    "set_vae_attention",
    "set_vision",
    "take_off",
    "without_dynamic",
]

# Where a model that is not ours carries what its node has to say.
NOTE = "highwater_note"

# Where core records on a module the dtype that a parameter or buffer was built for: behind its name.
RECORD = "_comfy_model_dtype"

# What a patcher carries beside its model; shared containers are taken over by reference, as core's clone does.
PATCHER_STATE = (
    "patches", "patches_uuid", "object_patches", "weight_wrapper_patches", "model_options", "force_cast_weights",
    "backup", "backup_buffers", "object_patches_backup", "pinned", "attachments", "additional_models", "callbacks",
    "wrappers", "injections", "is_injected", "skip_injection", "hook_patches", "hook_patches_backup", "hook_backup",
    "cached_hook_patches", "current_hooks", "forced_hooks", "is_clip", "hook_mode", "is_multigpu_base_clone",
    "clone_base_uuid", "parent", "cached_patcher_init",
)  # fmt: skip


# -- patchers


def copy_state(patcher: ModelPatcher, other: ModelPatcher) -> None:
    """Give a patcher everything that another one carries beside its model."""
    for attribute in PATCHER_STATE:
        if hasattr(other, attribute):
            setattr(patcher, attribute, getattr(other, attribute))


def copy_own_state(patcher: ModelPatcher, other: ModelPatcher) -> None:
    """Give a patcher what the class of another one adds to core's."""
    for attribute in vars(other).keys() - vars(patcher).keys() - {"highwater_token"}:
        setattr(patcher, attribute, vars(other)[attribute])


def set_class(owner: Any, kind: type) -> None:
    """Make a patcher or a VAE one of another class: ``clone`` and loaders of others return those of their own."""
    owner.__class__ = kind


def drop_backups(patcher: ModelPatcher) -> None:
    """Give a patcher no backups and nothing pinned: those that it carries are of another model's weights."""
    patcher.backup, patcher.backup_buffers, patcher.object_patches_backup = {}, {}, {}
    patcher.hook_backup, patcher.pinned = {}, set()


def drop_parent(patcher: ModelPatcher) -> None:
    """Make a patcher the first of its model: core goes on with the parent when the patcher is gone."""
    patcher.parent = None


def own_patches(patcher: ModelPatcher) -> None:
    """Give a patcher a copy of the patches that it shares: to change them changes no other patcher's."""
    patcher.patches = dict(patcher.patches)


def set_device(patcher: ModelPatcher, device: torch.device) -> None:
    """Set the device on which a model computes; core loads it there."""
    patcher.load_device = device


def set_reload(
    patcher: ModelPatcher, factory: Callable[..., Any], arguments: Sequence[Any], index: int | None = None
) -> None:
    """Tell core how to load a model again; ``index`` where the factory returns several patchers."""
    patcher.cached_patcher_init = (factory, tuple(arguments), *(() if index is None else (index,)))


# -- what holds a patcher


def set_clip(clip: Any, patcher: ModelPatcher) -> None:
    clip.patcher, clip.cond_stage_model = patcher, patcher.model


def set_vae(vae: Any, patcher: ModelPatcher) -> None:
    """Also sets the device to which the VAE sends latents and pixels."""
    vae.patcher, vae.first_stage_model, vae.device = patcher, patcher.model, patcher.load_device


def set_vae_attention(model: torch.nn.Module) -> None:
    """Have a VAE's model, made without memory for traces, compute attention by torch's function."""
    for module in model.modules():
        for name, value in vars(module).items():
            if value in (normal_attention, xformers_attention):
                setattr(module, name, pytorch_attention)


def set_vision(vision: Any, patcher: ModelPatcher) -> None:
    vision.patcher, vision.load_device = patcher, patcher.load_device


def set_control(control: Any, patcher: ModelPatcher) -> None:
    control.control_model_wrapped, control.load_device = patcher, patcher.load_device


def note_on(owner: Any, note: str) -> None:
    """Hang a note on what core gives no patcher."""
    setattr(owner, NOTE, note)


# -- ControlNets


def move_adapter(guide: Any, device: torch.device) -> None:
    """Move a T2I adapter: core itself moves it to the device that is written on it, and makes its features again."""
    guide.device, guide.cond_hint = device, None


def move_guide(guide: Any, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give a ControlNet a patcher for another device, where it computes in a dtype of that device."""
    patcher = guide.control_model_wrapped.clone()
    set_device(patcher, device)
    if hasattr(patcher, "register_load_device"):  # a dynamic one
        patcher.register_load_device(device)
    patcher.force_cast_weights = dtype is not None
    set_control(guide, patcher)
    guide.manual_cast_dtype, guide.cond_hint = dtype, None


# -- modules


def cast_in_forwards(model: torch.nn.Module) -> None:
    """Make core cast every weight of a model to its input, wherever it rests."""
    for module in model.modules():
        if hasattr(module, "comfy_cast_weights"):
            module.comfy_cast_weights = True


def mark_module(module: torch.nn.Module, functions: Mapping[str, Sequence[Any]]) -> None:
    """Say that a module's parameters contain their patches, and make core's casting stand by.

    Args:
        functions: what core calls with the weight and with the bias as it casts them.
    """
    module.comfy_patched_weights = True
    if hasattr(module, "comfy_cast_weights"):
        wipe_lowvram_weight(module)
        module.prev_comfy_cast_weights = module.comfy_cast_weights
        module.comfy_cast_weights = True
        for attribute, called in functions.items():
            setattr(module, f"{attribute}_function", list(called))


def has_record(module: torch.nn.Module, name: str) -> bool:
    """Whether core knows for which dtype a tensor of a module was built, or that it was built without one."""
    return hasattr(module, name + RECORD)


def recorded_dtype(module: torch.nn.Module, name: str) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(module, name + RECORD, None)
    return dtype


def record_dtypes(module: torch.nn.Module, built: torch.nn.Module) -> None:
    """Record the dtypes of a module that was built alike, and into which nothing was read; no record is replaced."""
    for name, tensor in (*built._parameters.items(), *built._buffers.items()):
        if tensor is not None and not has_record(module, name):
            setattr(module, name + RECORD, tensor.dtype)


def put_parameter(model: torch.nn.Module, key: str, weight: torch.Tensor) -> None:
    """Put a tensor in the place of a model's weight."""
    module, _, name = key.rpartition(".")
    model.get_submodule(module).register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))


# -- models


def hang_on(model: torch.nn.Module, hosted: Any) -> None:
    """Hang on a model what all patchers of it share."""
    model.highwater = hosted


def take_off(model: torch.nn.Module) -> None:
    """Make a copy of a model of ours core's alone."""
    vars(model).pop("highwater", None)


DYNAMIC_STATE = ("dynamic_vbars", "dynamic_pins", "dynamic_patchers")


def forget_dynamic(model: torch.nn.Module) -> None:
    """Take off what core's dynamic patcher hung on a model that was never loaded; it then ends without touching it."""
    for name in DYNAMIC_STATE:
        vars(model).pop(name, None)


def without_dynamic(model: torch.nn.Module) -> dict[int, Any]:
    """Return what `copy.deepcopy` puts in the place of what core's dynamic patcher hung on a model, by its ids."""
    hung = (vars(model).get(name) for name in DYNAMIC_STATE)
    return {id(state): type(state)() for state in hung if state is not None}


def set_loaded(model: torch.nn.Module, device: torch.device, patches_uuid: Any) -> None:
    """Set the numbers on a model that core's arithmetic reads, after it was loaded with a state of patches."""
    model.model_lowvram = True  # core then asks again before every run, and `load` is cheap
    model.lowvram_patch_counter = 0
    model.device = torch.device(device)
    model.current_weight_patches_uuid = patches_uuid


def set_device_of(model: torch.nn.Module, device: torch.device) -> None:
    """Set the device on which core believes a model to be."""
    model.device = device  # type: ignore[assignment]


def set_held_bytes(model: torch.nn.Module, num_bytes: int) -> None:
    """Set the bytes that core takes a model to have on its device."""
    model.model_loaded_weight_memory = num_bytes
