"""Calls of core's own models for traces: its classes compute without memory, in the shapes that its nodes give them.

Core's own functions make the conditioning that a model takes of what a text encoder gives. A ControlNet, and what other
nodes patch into a model, is not in it. Attention is traced as one kernel of torch's: of core's functions some ask how
much memory is free, which a trace has no answer to, and all compute the same products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import comfy.model_base
import torch
from comfy.ldm.modules.attention import attention_pytorch

from ...memory.errors import InvalidInput, reason_of
from .core_fields import set_vae_attention

if TYPE_CHECKING:
    from .core_needs import CodingNeeds, SamplingNeeds

__all__ = [
    "CoreCall",
    "Prompted",
    "coding_call",
    "paths_of_modules",
    "prompted_of",
    "step_call",
    "text_call",
    "usual_prompt",
]

# The layer of a diffusion model that takes in a text encoder's output, by its path in models of several families.
CONTEXT_LAYERS = (
    "txt_in", "txt_in.input_embedder", "context_embedder", "text_embedding.0", "cap_embedder.1",
    "caption_projection.linear_1", "y_embedder.y_proj.fc1", "text_embeddings.in_layer",
)  # fmt: skip
UNET_TOKENS, OTHER_TOKENS = 77, 256
"""How many tokens a prompt has where no text encoder tells: CLIP pads to 77, T5 of most models to 256 or more."""
GUIDANCE = 3.5


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreCall:
    """What is called of a model, with tensors that have no memory."""

    model: torch.nn.Module
    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """The shapes of what a text encoder makes of a prompt."""

    num_tokens: int
    width: int
    pooled_width: int


def usual_prompt(needs: SamplingNeeds) -> Prompted | None:
    """Return the shapes that a diffusion model takes of a prompt, as its own layers say; None where they do not."""
    model = needs.model
    config = model.model_config.unet_config
    width = config.get("context_dim")
    is_unet = width is not None
    modules = dict(model.diffusion_model.named_modules())
    for path in CONTEXT_LAYERS if width is None else ():
        width = getattr(modules.get(path), "in_features", None)
        if width is not None:
            break
    if not isinstance(width, int):
        return None
    pooled = config.get("vec_in_dim") or config.get("adm_in_channels") or width
    sizes = 256 * (5 if isinstance(model, comfy.model_base.SDXLRefiner) else 6)
    if isinstance(model, comfy.model_base.SDXL | comfy.model_base.SDXLRefiner):  # beside it come sizes of the picture
        pooled -= sizes
    return Prompted(num_tokens=UNET_TOKENS if is_unet else OTHER_TOKENS, width=width, pooled_width=pooled)


def step_call(needs: SamplingNeeds, latent_shape: Sequence[int], prompted: Prompted) -> CoreCall:
    """Return one call of a diffusion model.

    Args:
        latent_shape: of all latents that it computes at once.

    Raises:
        InvalidInput: the model takes more than a prompt.
    """
    model = needs.model
    batch, *rest = latent_shape
    latents = torch.empty(tuple(latent_shape), device="meta")
    try:
        with torch.device("meta"):
            conds = model.extra_conds(
                noise=latents,
                device=latents.device,
                latent_image=latents,
                cross_attn=torch.empty(1, prompted.num_tokens, prompted.width),
                pooled_output=torch.empty(1, prompted.pooled_width),
                attention_mask=None,
                guidance=GUIDANCE,
                width=rest[-1] * 8,
                height=rest[-2] * 8,
            )
            given = {name: cond.process_cond(batch_size=batch).cond for name, cond in conds.items()}
    except Exception as error:  # whatever core's classes raise for what their nodes give them beside a prompt
        raise InvalidInput(f"{type(model).__name__}: {reason_of(error)}") from error
    given["transformer_options"] = {"optimized_attention_override": in_one_kernel}
    sigmas = torch.ones(batch, device="meta")
    return CoreCall(model=model, method="apply_model", args=(latents, sigmas), kwargs=given)


def in_one_kernel(_chosen: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute attention by torch's function in place of that which core chose for this machine."""
    return attention_pytorch(*args, **kwargs)


def coding_call(needs: CodingNeeds, shape: Sequence[int], *, decodes: bool) -> CoreCall:
    """Return a VAE's decode of latents, or encode of pictures, of a shape."""
    vae = needs.vae
    set_vae_attention(vae.first_stage_model)
    source = torch.empty(tuple(shape), dtype=vae.vae_dtype, device="meta")
    return CoreCall(model=vae.first_stage_model, method="decode" if decodes else "encode", args=(source,))


def text_call(clip: Any, prompt: str) -> CoreCall:
    """Return what a text encoder computes for a prompt. Raises `InvalidInput` where its tokenizer cannot read one."""
    try:
        tokens = clip.tokenize(prompt)
    except Exception as error:  # whatever tokenizers of libraries raise
        raise InvalidInput(f"{type(clip.tokenizer).__name__}: {reason_of(error)}") from error
    return CoreCall(model=clip.cond_stage_model, method="encode_token_weights", args=(tokens,))


def prompted_of(shapes: Sequence[Sequence[int]]) -> Prompted | None:
    """Return what a text encoder made of a prompt, from the shapes of its outputs; None where they are others."""
    first, *others = shapes or ((),)
    if len(first) != 3:
        return None
    pooled = next((shape[1] for shape in others if len(shape) == 2 and shape[0] == 1), first[2])
    return Prompted(num_tokens=first[1], width=first[2], pooled_width=pooled)


def paths_of_modules(module: torch.nn.Module, names: Sequence[str]) -> list[str] | None:
    """Return the paths in a model of blocks that its file calls so; None where one of them is not there.

    Core puts models into others, and drops what a checkpoint writes before their names.
    """
    by_end: dict[str, str] = {}
    for path, _ in module.named_modules():
        parts = path.split(".")
        for begin in range(len(parts)):
            by_end.setdefault(".".join(parts[begin:]), path)
    found = []
    for name in names:
        parts = name.split(".")
        ends = (".".join(parts[begin:]) for begin in range(len(parts)))
        # The rest of a name without a module's number fits anything.
        path = next(
            (by_end[end] for end in ends if end in by_end and any(part.isdigit() for part in end.split("."))), None
        )
        if path is None:
            return None
        found.append(path)
    return found if len(set(found)) == len(found) else None
