"""Makes managed models from models of other loaders; the input models stay unchanged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ...memory.errors import InvalidInput
from . import aimdo
from .adopting import adopt, annotate, why_unmanageable
from .core_fields import forget_dynamic, set_clip, set_reload, set_vae, without_dynamic
from .dynamic import steer
from .dynamic_models import is_dynamic
from .engines import choose_engine, text_of_off
from .hosted import DYNAMIC, UNLIMITED_BYTES, Request, patcher_of
from .load_device import placement_without_effect
from .model_names import name_of
from .patcher import HighwaterPatcher
from .tiled_vae import choose_beforehand
from .unmanaged import leave_to_core

__all__ = ["copy_model", "manage_clip", "manage_model", "manage_vae", "read_again", "reload_managed"]


def manage_model(model: ModelPatcher, request: Request) -> ModelPatcher:
    """Return a model of the same weights and patches under management; what came in stays as it is.

    Core and the manager cannot both move one model. So ours is read again from its file, or copied if its loader does
    not say how to read it: this needs the model's bytes in RAM once more, and the node says so.
    """
    return manage_patcher(model, kind="diffusion", request=request)


def manage_clip(clip: Any, request: Request) -> Any:
    """Return a text encoder under management; as `manage_model`. What has no patcher is returned as it is."""
    if patcher_of(clip) is None:
        return clip
    managed = clip.clone()
    set_clip(managed, manage_patcher(clip.patcher, kind="text", request=request))
    return managed


def manage_vae(vae: Any, request: Request) -> Any:
    """Return a VAE under management; as `manage_clip`."""
    if patcher_of(vae) is None:
        return vae
    managed = choose_beforehand(copy.copy(vae))
    set_vae(managed, manage_patcher(vae.patcher, kind="vae", request=request))
    return managed


def manage_patcher(patcher: ModelPatcher, *, kind: str, request: Request) -> ModelPatcher:
    carried = patcher.clone()
    reason = why_unmanageable(patcher)
    source = getattr(patcher, "cached_patcher_init", None)
    name = name_of(patcher.model, kind, source)
    notes: list[str] = []
    if is_dynamic(patcher):
        choice = choose_engine(request, name=name, kind=kind, loaded_on=patcher.load_device)
        if choice.is_dynamic:
            return steer(carried, request, name=name, kind=kind)
        notes += choice.notes
        if reason is None and source is None:
            reason = "its loader does not say how to load it again (cached_patcher_init)"
        if reason is not None:
            without = placement_without_effect(request, patcher.load_device)
            return annotate(carried, "; ".join([*notes, f"not managed: {reason}{without}"]))
    elif reason is not None:
        return leave_to_core(carried, reason, name=name, kind=kind, request=request)
    else:
        notes += why_static(patcher, request)
    if source is not None:
        model, how = read_again(source).model, "read again from its file"
    else:
        comfy.model_management.free_memory(UNLIMITED_BYTES, patcher.load_device)  # unpatched, on the CPU
        try:
            model, how = copy_model(patcher.model), "copied"
        except InvalidInput as error:
            return leave_to_core(carried, str(error), name=name, kind=kind, request=request)
    name = name_of(model, kind, source)
    adopted = adopt(carried, name=name, kind=kind, request=request, model=model, notes=notes)
    if source is not None:
        set_reload(adopted, reload_managed, (source, kind, request))
    adopted.hosted.add_notes(
        [f"{how}: the other loader's copy stays in RAM, too; Highwater's own loaders keep one copy"]
    )
    return adopted


def why_static(patcher: ModelPatcher, request: Request) -> list[str]:
    """Return why a model that its loader made static is not dynamic, where that could be expected."""
    if not aimdo.is_on():
        return [text_of_off()] if request.engine == DYNAMIC else []
    if isinstance(patcher, HighwaterPatcher):
        return []
    return [f"engine blocks: its loader made a {type(patcher).__name__}, which ComfyUI's dynamic VRAM does not move"]


def copy_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model: it takes as many bytes of RAM again.

    Raises:
        InvalidInput: parts of it cannot be copied.
    """
    # Core's config answers None to every unknown name, also to those by which Python asks how to copy it. What dynamic
    # VRAM has hung on the model is memory that each of two copies would free.
    config = getattr(model, "model_config", None)
    try:
        copied = copy.deepcopy(model, without_dynamic(model) | ({} if config is None else {id(config): config}))
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of another pack's code, whatever it is
        raise InvalidInput(
            f"its loader does not say how to load it again, and its {type(model).__name__} cannot be copied: {error}"
        ) from error
    forget_dynamic(copied)
    return copied


def read_again(source: Sequence[Any]) -> ModelPatcher:
    """Return a new static patcher from what core keeps for that: a factory, its arguments, and perhaps an index."""
    made = source[0](*source[1], disable_dynamic=True)
    patcher: ModelPatcher = made[source[2]] if len(source) > 2 else made
    return patcher


def reload_managed(source: Sequence[Any], kind: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    fresh = read_again(source)
    return adopt(fresh, name=name_of(fresh.model, kind, source), kind=kind, request=request)
