"""Making a model ours that core has loaded: our patcher over it, with everything that core's own carried."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ...memory.hosted_component import why_not_movable
from ...memory.options.placement import AUTO_PLACEMENT
from ...memory.options.precision import Precision, precision_for
from ...memory.options.profile import covers
from .core_fields import (
    NOTE,
    copy_own_state,
    copy_state,
    drop_backups,
    drop_parent,
    hang_on,
    note_on,
    set_control,
    set_device,
    set_vae,
)
from .core_loading import unload
from .dynamic import stop_steering
from .dynamic_models import is_dynamic
from .foreign import class_beside, why_not_joined
from .guides import bring_guides
from .hosted import Hosted, Request, hosted_of, is_cpu
from .load_device import load_device_for
from .micro_batches import compute_halves_at_once
from .patcher import HighwaterPatcher
from .private_weights import own_weights
from .reading import Reading
from .repeating import repeat_calls
from .unmanaged import leave_to_core

__all__ = ["adopt", "adopt_control", "adopt_vae", "annotate", "compute_here", "notes_for", "why_unmanageable"]


def adopt(
    patcher: ModelPatcher,
    *,
    name: str,
    kind: str,
    request: Request,
    model: torch.nn.Module | None = None,
    notes: Iterable[str] = (),
    reading: Reading | None = None,
) -> ModelPatcher:
    """Return our patcher over a model, with everything the other one carries.

    A model that we cannot move stays core's, on the device that was asked for, and the note says why.

    Args:
        model: one of the same weights that was never loaded; by default the other's own, which must not be used on.
        notes: what its node has to say of it already.
        reading: what is known of the files that it was read from just now.

    Raises:
        InvalidInput: the request cannot be met here.
    """
    notes = [*notes]
    device = load_device_for(request, notes)
    profile, precision = request.profile, precision_for(request.precision, name, kind)
    reason = why_unmanageable(patcher)
    if reason is not None:
        set_device(patcher, device)
        if is_dynamic(patcher):
            patcher.register_load_device(device)
        return leave_to_core(patcher, reason, name=name, kind=kind, request=request, notes=notes)
    by_profile = precision is None and covers(profile.quantize, name, kind)
    wanted = Precision(profile.form) if by_profile else precision or Precision.AS_STORED
    if is_cpu(device) and not wanted.is_as_stored:
        asked = f"profile {profile.name}: " if by_profile else ""
        notes.append(f"{asked}{wanted.name} needs an accelerator; on the CPU the weights stay as stored")
    if model is None:
        unload(patcher.model)  # core loads text encoders as it makes them where they need not move, such as on the CPU
    hosted = Hosted(name, kind, request, notes)
    joined = class_beside(type(patcher))
    origins = {} if reading is None else reading.origins(patcher.model)
    if joined is HighwaterPatcher:  # other packs' weights stay in the dtypes in which they compute without us
        # What is read again is static, but for a VAE.
        is_assigned = kind == "vae" or (model is None and is_dynamic(patcher))
        own_weights(model or patcher.model, kind, is_assigned=is_assigned, reading=None if model else reading)
    if reading is not None:
        hosted.came_from(reading.origins_after(patcher.model, origins))
    if not is_cpu(device):
        hosted.planned_bytes(model or patcher.model, device)  # refuses a budget that no form of this model meets
    hang_on(model or patcher.model, hosted)
    adopted = joined(model or patcher.model, device, patcher.offload_device, 0, patcher.weight_inplace_update)
    copy_state(adopted, patcher)
    stop_steering(adopted)
    copy_own_state(adopted, patcher)
    if kind == "diffusion":
        bring_guides(adopted)
        compute_halves_at_once(adopted)
        repeat_calls(adopted)
        if device != patcher.load_device:
            compute_here(adopted, device)
    if model is not None:
        drop_parent(adopted)  # it is of another model
        drop_backups(adopted)
    return adopted


def compute_here(patcher: ModelPatcher, device: torch.device) -> None:
    """Choose the dtype in which a model computes by its device, as core's Select Model Device does."""
    compute_dtype = comfy.model_management.unet_manual_cast(patcher.model_dtype(), device)
    if compute_dtype is not None:
        patcher.set_model_compute_dtype(compute_dtype)


def why_unmanageable(patcher: ModelPatcher) -> str | None:
    """Return why we cannot move a model in another patcher's place, None if we can."""
    return why_not_joined(patcher) or why_not_movable(patcher.model)


def notes_for(managed: Any) -> list[str]:
    """Return what a node should tell its user about a managed model: fallbacks, and what is not in effect."""
    patcher = getattr(managed, "patcher", None) or getattr(managed, "control_model_wrapped", None) or managed
    hosted = hosted_of(getattr(patcher, "model", None))
    note = patcher.get_attachment(NOTE) if isinstance(patcher, ModelPatcher) else getattr(managed, NOTE, None)
    return [*(hosted.notes if hosted is not None else []), *([note] if note else [])]


def adopt_vae(
    vae: Any, name: str, request: Request, notes: Iterable[str] = (), *, reading: Reading | None = None
) -> None:
    set_vae(vae, adopt(vae.patcher, name=name, kind="vae", request=request, notes=notes, reading=reading))


def adopt_control(
    control: Any, name: str, request: Request, notes: Iterable[str] = (), *, reading: Reading | None = None
) -> Any:
    """Take a ControlNet under management as it was loaded; returns it."""
    wrapped = getattr(control, "control_model_wrapped", None)
    if wrapped is None:
        note_on(control, "not managed: ComfyUI gives this kind of ControlNet no model patcher")
        return control
    notes = [*notes]
    if request.devices == ("cpu",) and not is_cpu(comfy.model_management.get_torch_device()):
        notes.append("placement cpu is ignored: a ControlNet computes on the device of the model that it guides")
        request = replace(request, placement=AUTO_PLACEMENT)
    adopted = adopt(wrapped, name=name, kind="control", request=request, notes=notes, reading=reading)
    set_control(control, adopted)
    return control


def annotate(patcher: ModelPatcher, note: str) -> ModelPatcher:
    patcher.set_attachments(NOTE, note)
    return patcher
