"""Loading ComfyUI's models as ours, and making ours what another loader made."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...memory.errors import InvalidInput
from ...memory.hosted_component import refuse_damaged
from ...memory.options.placement import AUTO_PLACEMENT
from ...memory.options.precision import Precision
from ...memory.options.profile import covers
from .guides import bring_guides
from .hosted import UNLIMITED_BYTES, Hosted, Request, is_cpu
from .patcher import HighwaterPatcher, load_device_for

__all__ = [
    "load_checkpoint",
    "load_clip_vision",
    "load_controlnet",
    "load_diffusion_model",
    "load_text_encoder",
    "load_vae",
    "manage_clip",
    "manage_model",
    "manage_vae",
    "notes_for",
]

# Where a model that is not ours carries what its node has to say.
NOTE = "highwater_note"

# Those whose ways we know; ComfyUI 0.8.0 has no dynamic one.
KNOWN_PATCHERS = {ModelPatcher, getattr(comfy.model_patcher, "ModelPatcherDynamic", ModelPatcher), HighwaterPatcher}

# What a patcher carries beside its model; shared containers are taken over by reference, as core's clone does.
PATCHER_STATE = (
    "patches", "patches_uuid", "object_patches", "weight_wrapper_patches", "model_options", "force_cast_weights",
    "backup", "backup_buffers", "object_patches_backup", "pinned", "attachments", "additional_models", "callbacks",
    "wrappers", "injections", "is_injected", "skip_injection", "hook_patches", "hook_patches_backup", "hook_backup",
    "cached_hook_patches", "current_hooks", "forced_hooks", "is_clip", "hook_mode", "is_multigpu_base_clone",
    "clone_base_uuid", "parent", "cached_patcher_init",
)  # fmt: skip


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
        patcher.load_device = device
        return annotate(patcher, f"not managed: {reason}")
    if is_cpu(device) and precision is Precision.FP8_SCALED:
        notes.append("fp8 scaled needs an accelerator; on the CPU the weights stay as stored")
    if is_cpu(device) and precision is None and covers(profile.quantize, name, kind):
        notes.append(f"profile {profile.name}: eight bits need an accelerator; on the CPU the weights stay as stored")
    hosted = Hosted(name, kind, request)
    hosted.notes = notes
    if not is_cpu(device):
        hosted.planned_bytes(model or patcher.model, device)  # refuses a budget that no form of this model meets
    (model or patcher.model).highwater = hosted
    adopted = HighwaterPatcher(model or patcher.model, device, patcher.offload_device, 0, patcher.weight_inplace_update)
    for attribute in PATCHER_STATE:
        if hasattr(patcher, attribute):
            setattr(adopted, attribute, getattr(patcher, attribute))
    if kind == "diffusion":
        bring_guides(adopted)
        if device != patcher.load_device:
            compute_here(adopted, device)
    if model is not None:
        adopted.parent = None  # core would go on with that one, of another model, when ours is gone
        adopted.backup, adopted.backup_buffers, adopted.object_patches_backup = {}, {}, {}
        adopted.hook_backup, adopted.pinned = {}, set()
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
    hosted = getattr(getattr(patcher, "model", None), "highwater", None)
    note = patcher.get_attachment(NOTE) if isinstance(patcher, ModelPatcher) else getattr(managed, NOTE, None)
    return [*(hosted.notes if hosted is not None else []), *([note] if note else [])]


# -- what core reads


def load_static(load: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a loader of core's for patchers that are not dynamic; ComfyUI 0.8.0 knows no other kind."""
    if "disable_dynamic" in inspect.signature(load).parameters:
        options["disable_dynamic"] = True
    return load(*args, **options)


def read_diffusion_model(path: str) -> ModelPatcher:
    patcher: ModelPatcher = load_static(comfy.sd.load_diffusion_model, path)
    return patcher


def read_text_encoder(paths: Sequence[str], clip_type: str) -> Any:
    return load_static(
        comfy.sd.load_clip,
        ckpt_paths=list(paths),
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
    )


def read_vae(path: str) -> Any:
    weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    return vae


def read_checkpoint(path: str) -> tuple[ModelPatcher, Any, Any]:
    """Return model, text encoder and VAE; None for those that the file lacks."""
    model, clip, vae, _vision = load_static(
        comfy.sd.load_checkpoint_guess_config,
        path,
        output_vae=True,
        output_clip=True,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
    )
    # Of a file without a VAE core makes an empty shell.
    return model, clip, vae if getattr(vae, "patcher", None) is not None else None


# -- loading as ours


def load_diffusion_model(path: str, request: Request) -> ModelPatcher:
    """Load a diffusion model file; the weights rest in host memory until core asks for them."""
    check_file(path)
    patcher = read_diffusion_model(path)
    adopted = adopt(patcher, name=Path(path).stem, kind="diffusion", request=request)
    adopted.cached_patcher_init = (reload_diffusion_model, (path, request))
    return adopted


def reload_diffusion_model(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    return load_diffusion_model(path, request)


def load_text_encoder(paths: Sequence[str], clip_type: str, request: Request) -> Any:
    """Load a text encoder from one to four files; ``clip_type`` as core's loaders name it."""
    for path in paths:
        check_file(path)
    clip = read_text_encoder(paths, clip_type)
    name = "+".join(Path(path).stem for path in paths)
    clip.patcher = adopt(clip.patcher, name=name, kind="text", request=request)
    clip.patcher.cached_patcher_init = (reload_text_encoder, (list(paths), clip_type, request))
    return clip


def reload_text_encoder(
    paths: Sequence[str], clip_type: str, request: Request, disable_dynamic: bool = True
) -> ModelPatcher:
    patcher: ModelPatcher = load_text_encoder(paths, clip_type, request).patcher
    return patcher


def load_vae(path: str, request: Request) -> Any:
    """Load a VAE file."""
    check_file(path)
    vae = read_vae(path)
    adopt_vae(vae, Path(path).stem, request)
    vae.patcher.cached_patcher_init = (reload_vae, (path, request))
    return vae


def adopt_vae(vae: Any, name: str, request: Request) -> None:
    vae.patcher = adopt(vae.patcher, name=name, kind="vae", request=request)
    vae.device = vae.patcher.load_device  # where it sends latents and pixels


def reload_vae(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    patcher: ModelPatcher = load_vae(path, request).patcher
    return patcher


def load_checkpoint(path: str, request: Request) -> tuple[ModelPatcher, Any, Any]:
    """Load a checkpoint file: model, text encoder and VAE; None for those that it lacks."""
    check_file(path)
    model, clip, vae = read_checkpoint(path)
    name = Path(path).stem
    model = adopt(model, name=name, kind="diffusion", request=request)
    model.cached_patcher_init = (reload_checkpoint, (path, request), 0)
    if clip is not None:
        clip.patcher = adopt(clip.patcher, name=f"{name}/clip", kind="text", request=request)
        clip.patcher.cached_patcher_init = (reload_checkpoint, (path, request), 1)
    if vae is not None:
        adopt_vae(vae, f"{name}/vae", request)
        vae.patcher.cached_patcher_init = (reload_checkpoint, (path, request), 2)
    return model, clip, vae


def reload_checkpoint(path: str, request: Request, disable_dynamic: bool = True) -> tuple[Any, Any, Any]:
    """Return the three patchers of a checkpoint, as core's factories with an index do."""
    model, clip, vae = load_checkpoint(path, request)
    return model, clip.patcher if clip is not None else None, vae.patcher if vae is not None else None


def load_controlnet(path: str, request: Request) -> Any:
    """Load a ControlNet; kinds without a patcher of their own (T2I adapters) are left to core, and the note says so."""
    import comfy.controlnet

    check_file(path)
    control = comfy.controlnet.load_controlnet(path)
    if control is None:
        raise InvalidInput(f"{path}: is not a ControlNet that ComfyUI can load")
    return adopt_control(control, Path(path).stem, request)


def adopt_control(control: Any, name: str, request: Request) -> Any:
    """Take a ControlNet under management as it was loaded; returns it."""
    wrapped = getattr(control, "control_model_wrapped", None)
    if wrapped is None:
        setattr(control, NOTE, "not managed: ComfyUI gives this kind of ControlNet no model patcher")
        return control
    notes = []
    if request.devices == ("cpu",) and not is_cpu(comfy.model_management.get_torch_device()):
        notes.append("placement cpu is ignored: a ControlNet computes on the device of the model that it guides")
        request = replace(request, placement=AUTO_PLACEMENT)
    adopted = adopt(wrapped, name=name, kind="control", request=request)
    if isinstance(adopted, HighwaterPatcher):
        adopted.hosted.notes += notes
    control.control_model_wrapped = adopted
    control.load_device = adopted.load_device
    return control


def load_clip_vision(path: str, request: Request) -> Any:
    """Load a CLIP vision model."""
    import comfy.clip_vision

    check_file(path)
    vision = comfy.clip_vision.load(path)
    if vision is None:
        raise InvalidInput(f"{path}: is not a CLIP vision model that ComfyUI can load")
    vision.patcher = adopt(vision.patcher, name=Path(path).stem, kind="vision", request=request)
    vision.load_device = vision.patcher.load_device
    return vision


# -- managing what another loader made


def manage_model(model: ModelPatcher, request: Request) -> ModelPatcher:
    """Return a model of the same weights and patches under management; what came in stays as it is.

    Core and the manager cannot both keep house in one model, so ours is read again from its file, or copied where its
    loader does not say how to: that costs the model's bytes of RAM once more, and the node says so.
    """
    return manage_patcher(model, kind="diffusion", request=request)


def manage_clip(clip: Any, request: Request) -> Any:
    """Return a text encoder under management; as `manage_model`."""
    managed = clip.clone()
    managed.patcher = manage_patcher(clip.patcher, kind="text", request=request)
    managed.cond_stage_model = managed.patcher.model
    return managed


def manage_vae(vae: Any, request: Request) -> Any:
    """Return a VAE under management; as `manage_model`."""
    managed = copy.copy(vae)
    managed.patcher = manage_patcher(vae.patcher, kind="vae", request=request)
    managed.first_stage_model = managed.patcher.model
    managed.device = managed.patcher.load_device
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
    adopted = adopt(carried, name=type(model).__name__, kind=kind, request=request, model=model)
    if source is not None:
        adopted.cached_patcher_init = (reload_managed, (source, kind, request))
    adopted.hosted.notes.append(
        f"{how}: the other loader's copy stays in RAM, too; Highwater's own loaders keep one copy"
    )
    return adopted


def read_again(source: Sequence[Any]) -> ModelPatcher:
    """Return a new static patcher from what core keeps for that: a factory, its arguments, and perhaps an index."""
    made = source[0](*source[1], disable_dynamic=True)
    patcher: ModelPatcher = made[source[2]] if len(source) > 2 else made
    return patcher


def reload_managed(source: Sequence[Any], kind: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    fresh = read_again(source)
    return adopt(fresh, name=type(fresh.model).__name__, kind=kind, request=request)


def is_dynamic(patcher: ModelPatcher) -> bool:
    return hasattr(patcher, "is_dynamic") and patcher.is_dynamic()


def annotate(patcher: ModelPatcher, note: str) -> ModelPatcher:
    patcher.set_attachments(NOTE, note)
    return patcher


def check_file(path: str) -> None:
    """Refuse a damaged safetensors file before core reads it. Raises `InvalidInput`."""
    if path.lower().endswith((".safetensors", ".sft")):
        refuse_damaged(path)
