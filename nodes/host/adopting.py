"""Making a model ours that core has loaded: our patcher over it, with everything that core's own carried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.model_patcher import ModelPatcher
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...memory.options.placement import AUTO_PLACEMENT
from ...memory.options.precision import Precision
from ...memory.options.profile import covers
from .core_fields import NOTE, copy_state, drop_backups, drop_parent, hang_on, note_on, set_control, set_device, set_vae
from .guides import bring_guides
from .hosted import Hosted, Request, hosted_of, is_cpu
from .load_device import load_device_for
from .patcher import HighwaterPatcher

__all__ = ["adopt", "adopt_control", "adopt_vae", "annotate", "notes_for", "why_unmanageable"]

# Those whose ways we know; ComfyUI 0.8.0 has no dynamic one.
KNOWN_PATCHERS = {ModelPatcher, getattr(comfy.model_patcher, "ModelPatcherDynamic", ModelPatcher), HighwaterPatcher}


def adopt(
    patcher: ModelPatcher, *, name: str, kind: str, request: Request, model: torch.nn.Module | None = None
) -> ModelPatcher:
    """Return our patcher over a model, with everything the other one carries.

    A model that we cannot move stays core's, on the device that was asked for, and the note says why.

    Args:
        model: one of the same weights that was never loaded; by default the other's own, which must not be used on.

    Raises:
        InvalidInput: the request cannot be met here.
    """
    notes: list[str] = []
    device = load_device_for(request, notes)
    profile, precision = request.profile, request.precision
    reason = why_unmanageable(patcher)
    if reason is not None:
        set_device(patcher, device)
        return annotate(patcher, f"not managed: {reason}")
    by_profile = precision is None and covers(profile.quantize, name, kind)
    wanted = Precision.ENCODED if by_profile else precision or Precision.AS_STORED
    if is_cpu(device) and wanted != Precision.AS_STORED:
        asked = f"profile {profile.name}: " if by_profile else ""
        notes.append(f"{asked}{wanted.name} needs an accelerator; on the CPU the weights stay as stored")
    if covers(profile.on_demand, name, kind):
        notes.append(f"profile {profile.name}: disk is ignored for {name}: ComfyUI keeps its own models in RAM")
    hosted = Hosted(name, kind, request, notes)
    if not is_cpu(device):
        hosted.planned_bytes(model or patcher.model, device)  # refuses a budget that no form of this model meets
    hang_on(model or patcher.model, hosted)
    adopted = HighwaterPatcher(model or patcher.model, device, patcher.offload_device, 0, patcher.weight_inplace_update)
    copy_state(adopted, patcher)
    if kind == "diffusion":
        bring_guides(adopted)
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
    """Return why a model's weights cannot be moved as bytes, None if they can."""
    if type(patcher) not in KNOWN_PATCHERS:
        return f"another pack loads it with its own {type(patcher).__name__}"
    for parameter in patcher.model.parameters():
        kind = type(parameter.data)
        if kind is not torch.Tensor and not is_traceable_wrapper_subclass(parameter.data):
            return f"its weights have the class {kind.__name__}, which does not expose its inner tensors"
    return None


def notes_for(managed: Any) -> list[str]:
    """Return what a node should tell its user about a managed model: fallbacks, and what is not in effect."""
    patcher = getattr(managed, "patcher", None) or getattr(managed, "control_model_wrapped", None) or managed
    hosted = hosted_of(getattr(patcher, "model", None))
    note = patcher.get_attachment(NOTE) if isinstance(patcher, ModelPatcher) else getattr(managed, NOTE, None)
    return [*(hosted.notes if hosted is not None else []), *([note] if note else [])]


def adopt_vae(vae: Any, name: str, request: Request) -> None:
    set_vae(vae, adopt(vae.patcher, name=name, kind="vae", request=request))


def adopt_control(control: Any, name: str, request: Request) -> Any:
    """Take a ControlNet under management as it was loaded; returns it."""
    wrapped = getattr(control, "control_model_wrapped", None)
    if wrapped is None:
        note_on(control, "not managed: ComfyUI gives this kind of ControlNet no model patcher")
        return control
    notes = []
    if request.devices == ("cpu",) and not is_cpu(comfy.model_management.get_torch_device()):
        notes.append("placement cpu is ignored: a ControlNet computes on the device of the model that it guides")
        request = replace(request, placement=AUTO_PLACEMENT)
    adopted = adopt(wrapped, name=name, kind="control", request=request)
    if isinstance(adopted, HighwaterPatcher):
        adopted.hosted.add_notes(notes)
    set_control(control, adopted)
    return control


def annotate(patcher: ModelPatcher, note: str) -> ModelPatcher:
    patcher.set_attachments(NOTE, note)
    return patcher
