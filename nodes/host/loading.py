"""Loading files of ComfyUI's models: as core reads them, and as ours."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import comfy.sd
import comfy.utils
import folder_paths
from comfy.model_patcher import ModelPatcher

from ...memory.errors import InvalidInput
from ...memory.hosted_component import refuse_damaged
from .adopting import adopt, adopt_control, adopt_vae, compute_here
from .core_fields import set_clip, set_control, set_device, set_reload, set_vae, set_vision
from .dynamic import steer
from .dynamic_models import is_dynamic
from .engines import choose_engine
from .hosted import PARTS, Request, hosted_of, patcher_of
from .load_device import load_device_for
from .private_weights import record_dtypes_of_vision
from .quantizing import OwnInt8
from .quanto_files import as_own_int8, is_quanto
from .reading import Reading, read_by
from .tiled_vae import choose_beforehand

__all__ = [
    "load_checkpoint",
    "load_clip_vision",
    "load_controlnet",
    "load_diffusion_model",
    "load_text_encoder",
    "load_vae",
    "read_checkpoint",
    "read_diffusion_model",
    "read_text_encoder",
    "read_vae",
    "reload_checkpoint",
    "reload_diffusion_model",
    "reload_text_encoder",
    "reload_vae",
]

# -- what core reads


# Under dynamic VRAM core maps the file, and what it reads for a dynamic patcher rests in that: a model for our block
# mover is read like that, too, because the copies of `own_weights` are then the only ones.


def read_diffusion_model(path: str, reading: Reading | None = None, int8: OwnInt8 | None = None) -> ModelPatcher:
    patcher: ModelPatcher | None = None
    if reading is not None:
        tensors, metadata = reading.state(path)
        if is_quanto(path):
            tensors = as_own_int8(path, tensors, renames=True)
        elif int8 is not None:
            tensors = int8.quantize(path, tensors)
        patcher = comfy.sd.load_diffusion_model_state_dict(tensors, metadata=metadata)
    return patcher or comfy.sd.load_diffusion_model(path)  # which says what it cannot load


def read_text_encoder(
    paths: Sequence[str], clip_type: str, reading: Reading | None = None, *, dynamic: bool = False
) -> Any:
    """Read a text encoder, for a patcher that is not dynamic by default.

    Some loaders keep the dtypes of the file on every host: among static patchers they can be told from the others.
    """
    is_known = "disable_dynamic" in inspect.signature(comfy.sd.load_clip).parameters  # ComfyUI 0.8.0 has none
    how = {
        "embedding_directory": folder_paths.get_folder_paths("embeddings"),
        "clip_type": getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
        **({"disable_dynamic": not dynamic} if is_known else {}),
    }
    if reading is None:
        return comfy.sd.load_clip(ckpt_paths=list(paths), **how)
    states = []
    for path in paths:
        tensors, metadata = reading.state(path, safe_load=True)
        if is_quanto(path):
            tensors = as_own_int8(path, tensors, renames=False)
        states.append(comfy.utils.convert_old_quants(tensors, model_prefix="", metadata=metadata)[0])
    return comfy.sd.load_text_encoder_state_dicts(states, **how)


def read_vae(path: str, reading: Reading | None = None) -> Any:
    if reading is None:
        weights, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    else:
        weights, metadata = reading.state(path)
    vae = comfy.sd.VAE(sd=weights, metadata=metadata)
    vae.throw_exception_if_invalid()
    if hasattr(comfy.sd, "load_vae_patcher"):  # as core's own node says how to load it again
        set_reload(vae.patcher, comfy.sd.load_vae_patcher, (path, metadata, None))
    return vae


def read_checkpoint(path: str, reading: Reading | None = None) -> tuple[ModelPatcher, Any, Any]:
    """Return model, text encoder and VAE; for a text encoder that the file lacks None, for a VAE an empty shell.

    So the nodes that use them say what is missing, in core's own words.
    """
    how = {
        "output_vae": True,
        "output_clip": True,
        "embedding_directory": folder_paths.get_folder_paths("embeddings"),
    }
    parts = None
    if reading is not None:
        tensors, metadata = reading.state(path)
        parts = comfy.sd.load_state_dict_guess_config(tensors, metadata=metadata, **how)
    model, clip, vae, _vision = parts or comfy.sd.load_checkpoint_guess_config(path, **how)
    return model, clip, vae


def read_controlnet(path: str, reading: Reading | None) -> Any:
    """Return a ControlNet; None for a file that has none."""
    import comfy.controlnet

    if reading is None or Path(path).stem.endswith(("_shuffle", "_shuffle_fp16")):  # core tells such by their names
        return comfy.controlnet.load_controlnet(path)
    return comfy.controlnet.load_controlnet_state_dict(reading.state(path, safe_load=True)[0])


def read_clip_vision(path: str, reading: Reading | None) -> Any:
    """Return a CLIP vision model; None for a file that has none."""
    import comfy.clip_vision

    if reading is None:
        return comfy.clip_vision.load(path)
    tensors, _ = reading.state(path)
    if "visual.transformer.resblocks.0.attn.in_proj_weight" in tensors:
        return comfy.clip_vision.load_clipvision_from_sd(tensors, prefix="visual.", convert_keys=True)
    return comfy.clip_vision.load_clipvision_from_sd(tensors)


# -- loading as ours


def load_diffusion_model(path: str, request: Request) -> ModelPatcher:
    """Load a diffusion model file; the weights rest in host memory until core asks for them."""
    check_file(path, takes_quanto=True)
    name = Path(path).stem
    choice = choose_engine(request, name=name, kind="diffusion", reads_itself=not is_quanto(path))
    int8 = OwnInt8(request, name)
    read = partial(read_diffusion_model, path, int8=int8)
    with read_by(read, [path], dynamic=choice.is_dynamic) as (patcher, reading):
        if is_dynamic(patcher) and choice.is_dynamic:
            return steer_new(patcher, request, name=name, kind="diffusion")
        notes = [*choice.notes, *int8.notes]
        adopted = adopt(patcher, name=name, kind="diffusion", request=int8.request, notes=notes, reading=reading)
        set_reload(adopted, reload_diffusion_model, (path, request))
        return adopted


def reload_diffusion_model(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    return load_diffusion_model(path, request)


def load_text_encoder(paths: Sequence[str], clip_type: str, request: Request) -> Any:
    """Load a text encoder from one to four files; ``clip_type`` as core's loaders name it."""
    for path in paths:
        check_file(path, takes_quanto=True)
    name = "+".join(Path(path).stem for path in paths)
    choice = choose_engine(request, name=name, kind="text", reads_itself=not any(map(is_quanto, paths)))
    read = partial(read_text_encoder, paths, clip_type, dynamic=choice.is_dynamic)
    with read_by(read, paths, dynamic=choice.is_dynamic) as (clip, reading):
        if is_dynamic(clip.patcher) and choice.is_dynamic:
            set_clip(clip, steer_new(clip.patcher, request, name=name, kind="text"))
            return clip
        adopted = adopt(clip.patcher, name=name, kind="text", request=request, notes=choice.notes, reading=reading)
        set_clip(clip, adopted)
        set_reload(clip.patcher, reload_text_encoder, (list(paths), clip_type, request))
        return clip


def reload_text_encoder(
    paths: Sequence[str], clip_type: str, request: Request, disable_dynamic: bool = True
) -> ModelPatcher:
    patcher: ModelPatcher = load_text_encoder(paths, clip_type, request).patcher
    return patcher


def load_vae(path: str, request: Request) -> Any:
    """Load a VAE file."""
    check_file(path)
    name = Path(path).stem
    choice = choose_engine(request, name=name, kind="vae")
    with read_by(partial(read_vae, path), [path], dynamic=choice.is_dynamic) as (vae, reading):
        if is_dynamic(vae.patcher) and choice.is_dynamic:
            set_vae(vae, steer_new(vae.patcher, request, name=name, kind="vae"))
            return choose_beforehand(vae)
        adopt_vae(vae, name, request, notes=choice.notes, reading=reading)
        set_reload(vae.patcher, reload_vae, (path, request))
        return choose_beforehand(vae)


def reload_vae(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    patcher: ModelPatcher = load_vae(path, request).patcher
    return patcher


def load_checkpoint(path: str, request: Request) -> tuple[ModelPatcher, Any, Any]:
    """Load a checkpoint file: model, text encoder and VAE; what it lacks is as `read_checkpoint` returns it."""
    check_file(path)
    name = Path(path).stem
    own = {kind: request.of_part(kind) for kind in PARTS}
    choices = [choose_engine(own[kind], name=f"{name}/{part}", kind=kind) for kind, part in PARTS.items()]
    choice = next((each for each in choices if not each.is_dynamic), choices[0])  # core loads all parts alike
    with read_by(partial(read_checkpoint, path), [path], dynamic=choice.is_dynamic) as ((model, clip, vae), reading):
        if is_dynamic(model) and choice.is_dynamic:
            model = steer_new(model, own["diffusion"], name=f"{name}/model", kind="diffusion")
            if patcher_of(clip) is not None:
                set_clip(clip, steer_new(clip.patcher, own["text"], name=f"{name}/clip", kind="text"))
            if patcher_of(vae) is not None:
                set_vae(vae, steer_new(vae.patcher, own["vae"], name=f"{name}/vae", kind="vae"))
            return model, clip, choose_beforehand(vae)
        refused: list[str] = []
        how: dict[str, Any] = {"notes": choice.notes, "reading": reading}
        with collecting(refused):
            model = adopt(model, name=f"{name}/model", kind="diffusion", request=own["diffusion"], **how)
            set_reload(model, reload_checkpoint, (path, request), 0)
        if patcher_of(clip) is not None:
            with collecting(refused):
                set_clip(clip, adopt(clip.patcher, name=f"{name}/clip", kind="text", request=own["text"], **how))
                set_reload(clip.patcher, reload_checkpoint, (path, request), 1)
        if patcher_of(vae) is not None:
            with collecting(refused):
                adopt_vae(vae, f"{name}/vae", own["vae"], **how)
                set_reload(vae.patcher, reload_checkpoint, (path, request), 2)
        if refused:
            raise InvalidInput("; ".join(dict.fromkeys(refused)))
        found = (hosted_of(getattr(part, "model", None)) for part in (model, patcher_of(clip), patcher_of(vae)))
        together = WeakSet(hosted for hosted in found if hosted is not None)
        for hosted in together:
            hosted.come_with(together)
        return model, clip, choose_beforehand(vae)


@contextmanager
def collecting(refused: list[str]) -> Iterator[None]:
    """Keep what the body refuses, so that all parts of a checkpoint are told of at once."""
    try:
        yield
    except InvalidInput as error:
        refused.append(str(error))


def reload_checkpoint(path: str, request: Request, disable_dynamic: bool = True) -> tuple[Any, Any, Any]:
    """Return the three patchers of a checkpoint, as core's factories with an index do."""
    model, clip, vae = load_checkpoint(path, request)
    return model, patcher_of(clip), patcher_of(vae)


def load_controlnet(path: str, request: Request) -> Any:
    """Load a ControlNet; kinds without a patcher of their own (T2I adapters) are left to core, and the note says so."""
    check_file(path)
    name = Path(path).stem
    choice = choose_engine(request, name=name, kind="control")
    with read_by(partial(read_controlnet, path), [path], dynamic=choice.is_dynamic) as (control, reading):
        if control is None:
            raise InvalidInput(f"{path}: is not a ControlNet that ComfyUI can load")
        wrapped = getattr(control, "control_model_wrapped", None)
        if is_dynamic(wrapped) and choice.is_dynamic:
            set_control(control, steer_new(wrapped, request, name=name, kind="control"))
            return control
        return adopt_control(control, name, request, notes=choice.notes, reading=reading)


def load_clip_vision(path: str, request: Request) -> Any:
    """Load a CLIP vision model."""
    check_file(path)
    name = Path(path).stem
    choice = choose_engine(request, name=name, kind="vision")
    with read_by(partial(read_clip_vision, path), [path], dynamic=choice.is_dynamic) as (vision, reading):
        if vision is None:
            raise InvalidInput(f"{path}: is not a CLIP vision model that ComfyUI can load")
        if is_dynamic(vision.patcher) and choice.is_dynamic:
            set_vision(vision, steer_new(vision.patcher, request, name=name, kind="vision"))
            return vision
        record_dtypes_of_vision(vision)
        how = {"request": request, "notes": choice.notes, "reading": reading}
        set_vision(vision, adopt(vision.patcher, name=name, kind="vision", **how))
        return vision


def steer_new(patcher: ModelPatcher, request: Request, *, name: str, kind: str) -> ModelPatcher:
    """Steer a dynamic model that was just loaded, on the device that was asked for; returns its patcher."""
    notes: list[str] = []
    device = load_device_for(request, notes)
    if device != patcher.load_device:
        set_device(patcher, device)
        patcher.register_load_device(device)
        if kind == "diffusion":
            compute_here(patcher, device)
    return steer(patcher, request, name=name, kind=kind, notes=notes)


def check_file(path: str, *, takes_quanto: bool = False) -> None:
    """Refuse a damaged safetensors file before core reads it. Raises `InvalidInput`."""
    if path.lower().endswith((".safetensors", ".sft")):
        refuse_damaged(path, takes_quanto=takes_quanto)
