"""Loading files of ComfyUI's models: as core reads them, and as ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.sd
import comfy.utils
import folder_paths
from comfy.model_patcher import ModelPatcher

from ...memory.errors import InvalidInput
from ...memory.hosted_component import refuse_damaged
from .adopting import adopt, adopt_control, adopt_vae
from .core_fields import set_clip, set_reload, set_vision
from .hosted import Request, patcher_of

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
    """Return model, text encoder and VAE; for a text encoder that the file lacks None, for a VAE an empty shell.

    So the nodes that use them say what is missing, in core's own words.
    """
    model, clip, vae, _vision = load_static(
        comfy.sd.load_checkpoint_guess_config,
        path,
        output_vae=True,
        output_clip=True,
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
    )
    return model, clip, vae


# -- loading as ours


def load_diffusion_model(path: str, request: Request) -> ModelPatcher:
    """Load a diffusion model file; the weights rest in host memory until core asks for them."""
    check_file(path)
    patcher = read_diffusion_model(path)
    adopted = adopt(patcher, name=Path(path).stem, kind="diffusion", request=request)
    set_reload(adopted, reload_diffusion_model, (path, request))
    return adopted


def reload_diffusion_model(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    return load_diffusion_model(path, request)


def load_text_encoder(paths: Sequence[str], clip_type: str, request: Request) -> Any:
    """Load a text encoder from one to four files; ``clip_type`` as core's loaders name it."""
    for path in paths:
        check_file(path)
    clip = read_text_encoder(paths, clip_type)
    name = "+".join(Path(path).stem for path in paths)
    set_clip(clip, adopt(clip.patcher, name=name, kind="text", request=request))
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
    vae = read_vae(path)
    adopt_vae(vae, Path(path).stem, request)
    set_reload(vae.patcher, reload_vae, (path, request))
    return vae


def reload_vae(path: str, request: Request, disable_dynamic: bool = True) -> ModelPatcher:
    patcher: ModelPatcher = load_vae(path, request).patcher
    return patcher


def load_checkpoint(path: str, request: Request) -> tuple[ModelPatcher, Any, Any]:
    """Load a checkpoint file: model, text encoder and VAE; what it lacks is as `read_checkpoint` returns it."""
    check_file(path)
    model, clip, vae = read_checkpoint(path)
    name = Path(path).stem
    refused: list[str] = []
    with collecting(refused):
        model = adopt(model, name=f"{name}/model", kind="diffusion", request=request)
        set_reload(model, reload_checkpoint, (path, request), 0)
    if patcher_of(clip) is not None:
        with collecting(refused):
            set_clip(clip, adopt(clip.patcher, name=f"{name}/clip", kind="text", request=request))
            set_reload(clip.patcher, reload_checkpoint, (path, request), 1)
    if patcher_of(vae) is not None:
        with collecting(refused):
            adopt_vae(vae, f"{name}/vae", request)
            set_reload(vae.patcher, reload_checkpoint, (path, request), 2)
    if refused:
        raise InvalidInput("; ".join(dict.fromkeys(refused)))
    return model, clip, vae


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
    import comfy.controlnet

    check_file(path)
    control = comfy.controlnet.load_controlnet(path)
    if control is None:
        raise InvalidInput(f"{path}: is not a ControlNet that ComfyUI can load")
    return adopt_control(control, Path(path).stem, request)


def load_clip_vision(path: str, request: Request) -> Any:
    """Load a CLIP vision model."""
    import comfy.clip_vision

    check_file(path)
    vision = comfy.clip_vision.load(path)
    if vision is None:
        raise InvalidInput(f"{path}: is not a CLIP vision model that ComfyUI can load")
    set_vision(vision, adopt(vision.patcher, name=Path(path).stem, kind="vision", request=request))
    return vision


def check_file(path: str) -> None:
    """Refuse a damaged safetensors file before core reads it. Raises `InvalidInput`."""
    if path.lower().endswith((".safetensors", ".sft")):
        refuse_damaged(path)
