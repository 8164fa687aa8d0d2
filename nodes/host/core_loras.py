"""What core makes of a LoRA's file for one of its models: it knows the names of the same layers in other libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.lora
import comfy.lora_convert

from ...memory.errors import InvalidInput, reason_of
from .core_needs import on_meta
from .side_factors import rank_of

__all__ = ["changes_in_core"]


def changes_in_core(path: str, model: Any, *, is_text: bool) -> Mapping[str, list[int | None]]:
    """Return the weights of a model that a LoRA changes, by core's keys: for each change its rank, None for others.

    Reads the header, and single numbers.

    Args:
        model: core's, without memory: a diffusion model, or a text encoder's ``cond_stage_model``.

    Raises:
        InvalidInput: no safetensors file, or none that core can read as a LoRA.
    """
    tensors, _ = on_meta(path)
    list_keys = comfy.lora.model_lora_keys_clip if is_text else comfy.lora.model_lora_keys_unet
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    try:
        loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(tensors), list_keys(model, {}), log_missing=False)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput(f"{path}: ComfyUI cannot read it as a LoRA ({reason_of(error)})") from error
    found: dict[str, list[int | None]] = {}
    for key, adapter in loaded.items():
        # As `ModelPatcher.add_patches` takes them.
        name, *rest = (key,) if isinstance(key, str) else key
        offset, function = rest[0] if rest else None, rest[1] if len(rest) > 1 else None
        if name in shapes:
            found.setdefault(name, []).append(rank_of(adapter, shapes[name], offset=offset, function=function))
    return found
