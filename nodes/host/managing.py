"""Makes managed models from models of other loaders; the input models stay unchanged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from .adopting import adopt, annotate, why_unmanageable
from .core_fields import set_clip, set_reload, set_vae
from .hosted import UNLIMITED_BYTES, Request, patcher_of

__all__ = ["manage_clip", "manage_model", "manage_vae", "read_again", "reload_managed"]

# What the parts of a checkpoint are called, by their kinds.
PARTS = {"diffusion": "model", "text": "clip", "vae": "vae"}


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
    managed = copy.copy(vae)
    set_vae(managed, manage_patcher(vae.patcher, kind="vae", request=request))
    return managed


def manage_patcher(patcher: ModelPatcher, *, kind: str, request: Request) -> ModelPatcher:
    carried = patcher.clone()
    reason = why_unmanageable(patcher)
    source = getattr(patcher, "cached_patcher_init", None)
    if reason is None and source is None and is_dynamic(patcher):
        reason = "its loader does not say how to load it again (cached_patcher_init)"
    if reason is not None:
        return annotate(carried, f"not managed: {reason}")
    if source is not None:
        model, how = read_again(source).model, "read again from its file"
    else:
        comfy.model_management.free_memory(UNLIMITED_BYTES, patcher.load_device)  # unpatched, on the CPU
        model, how = copy.deepcopy(patcher.model), "copied"
    adopted = adopt(carried, name=name_of(model, kind, source), kind=kind, request=request, model=model)
    if source is not None:
        set_reload(adopted, reload_managed, (source, kind, request))
    adopted.hosted.add_notes(
        [f"{how}: the other loader's copy stays in RAM, too; Highwater's own loaders keep one copy"]
    )
    return adopted


def read_again(source: Sequence[Any]) -> ModelPatcher:
    """Return a new static patcher from what core keeps for that: a factory, its arguments, and perhaps an index."""
    made = source[0](*source[1], disable_dynamic=True)
    patcher: ModelPatcher = made[source[2]] if len(source) > 2 else made
    return patcher


def reload_managed(source: Sequence[Any], kind: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    fresh = read_again(source)
    return adopt(fresh, name=name_of(fresh.model, kind, source), kind=kind, request=request)


def name_of(model: torch.nn.Module, kind: str, source: Sequence[Any] | None) -> str:
    """Return what our own loaders would call a model: by its files, where its loader names them, else its class."""
    first = source[1][0] if source is not None and source[1] else None
    paths = [first] if isinstance(first, str) else first
    if source is None or not paths or not all(isinstance(path, str) for path in paths):
        return type(model).__name__
    name = "+".join(Path(path).stem for path in paths)
    is_checkpoint = "checkpoint" in getattr(source[0], "__name__", "")
    return f"{name}/{PARTS[kind]}" if is_checkpoint else name


def is_dynamic(patcher: ModelPatcher) -> bool:
    return hasattr(patcher, "is_dynamic") and patcher.is_dynamic()
