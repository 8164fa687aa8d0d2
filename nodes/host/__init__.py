"""The only place that speaks to ``comfy.*``; imported when a node of a ComfyUI model executes, never before."""

from .adopting import notes_for
from .hosted import Request, patcher_of
from .loading import (
    load_checkpoint,
    load_clip_vision,
    load_controlnet,
    load_diffusion_model,
    load_text_encoder,
    load_vae,
)
from .managing import manage_clip, manage_model, manage_vae
from .patcher import HighwaterPatcher
from .verifying import verify_clip, verify_model, verify_vae

__all__ = [
    "HighwaterPatcher",
    "Request",
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
    "patcher_of",
    "verify_clip",
    "verify_model",
    "verify_vae",
]
