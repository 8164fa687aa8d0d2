"""Nodes that encode prompts, and attach ControlNets, references and patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .description import CONTROL, DIFFUSION, OTHER, TEXT, VAE, VISION, Call, Size
from .node_values import MAX_ATTACHED, Conditioning, NodeReading, Picture, Rule

__all__ = ["PROMPT_RULES", "encode_text"]

# -- prompts


def encode_text(texts: Sequence[str], node: NodeReading) -> Sequence[Any]:
    """Note the call of the text encoder. The output is repeated for nodes that give a negative prompt, too."""
    clip = node.held("clip", TEXT)
    prompts = [node.text(name) for name in texts if name in node.inputs]
    unknown = [
        f"prompt: {node.name.label}: {name} {node.why_unread(name)}"
        for name, prompt in zip([name for name in texts if name in node.inputs], prompts, strict=True)
        if prompt is None
    ]
    known = list(dict.fromkeys(prompt for prompt in prompts if prompt))
    node.use(Call.ENCODE_TEXT, clip, wanted="clip", prompt=None if unknown else "\n".join(known), unknown=unknown)
    return (Conditioning(), Conditioning())


def encode_edit(node: NodeReading) -> Sequence[Any]:
    """Encode a prompt with images, and the images as references, where a VAE is linked."""
    encode_text(("prompt", "negative_prompt"), node)
    references = []
    for name in node.inputs:
        if name.startswith("image") and node.is_linked(name):
            picture = about_a_megapixel(node.picture(name))
            references.append((f"{node.id} {name}", picture.size))
            if node.is_linked("vae"):
                node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=picture)
    made = Conditioning(references=tuple(references) if node.is_linked("vae") else ())
    return (made, made, sized_or_like(node, [size for _, size in references]))


def sized_or_like(node: NodeReading, references: Sequence[Size | None]) -> Picture:
    """Return the latents of TextEncodeMageFlowEdit: of its own size, or of its first image's."""
    if node.whole("width", 0) and node.whole("height", 0):
        return node.size()
    found = references[0] if references else None
    return Picture(found, why="" if found else f"size: {node.name.label}: that of its first image is not known")


def about_a_megapixel(picture: Picture) -> Picture:
    """Return the size to which editing nodes scale: 1024 x 1024 pixels in the same shape, in whole cells of 8."""
    if picture.size is None:
        return picture
    scale = (1024 * 1024 / (picture.size.width * picture.size.height)) ** 0.5
    width, height = (max(8, round(edge * scale / 8) * 8) for edge in (picture.size.width, picture.size.height))
    return Picture(Size(width=width, height=height), is_latent=False)


def encode_vision(node: NodeReading) -> Sequence[Any]:
    node.use(Call.ENCODE_VISION, node.held("clip_vision", VISION), wanted="clip_vision", size=node.picture("image"))
    return (None,)


# -- what is attached to prompts


def join(names: Sequence[Sequence[str]], node: NodeReading) -> Sequence[Any]:
    """Return for each output the conditioning of some inputs, with the hooks that the node attaches."""
    added = Conditioning(has_hooks=node.is_linked("hooks"))
    return tuple(node.conditioning(*inputs).joined(added) for inputs in names)


def apply_control(names: Sequence[str], node: NodeReading) -> Sequence[Any]:
    """Attach a ControlNet, which computes in each step; one at strength 0 is left out."""
    control = node.held("control_net", CONTROL)
    if node.is_linked("vae"):
        node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=node.picture("image"))
    added = Conditioning((control.model,)) if control and node.number("strength", 1.0) != 0 else Conditioning()
    return tuple(node.conditioning(name).joined(added) for name in names)


def apply_reference(node: NodeReading) -> Sequence[Any]:
    found = node.conditioning("conditioning")
    if not node.is_linked("latent"):
        return (found,)
    return (found.joined(Conditioning(references=((node.id, node.picture("latent").size),))),)


def apply_style(node: NodeReading) -> Sequence[Any]:
    node.use(Call.OTHER, node.held("style_model", OTHER), wanted="style_model")
    return (node.conditioning("conditioning"),)


def apply_patch(node: NodeReading) -> Sequence[Any]:
    """Attach a model that computes within the diffusion model."""
    model = node.held("model", DIFFUSION)
    patch = node.held("model_patch", OTHER)
    if node.is_linked("vae"):
        images = [name for name in ("image", "inpaint_image", "render_video") if node.is_linked(name)]
        for name in images:
            node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=node.picture(name))
    if model and patch:
        patches = tuple(dict.fromkeys((*model.patches, patch.model)))
        model = replace(model, patches=patches[:MAX_ATTACHED])
    return (model,)


PROMPTS = {
    "CLIPTextEncode": ("text",),
    "CLIPTextEncodeSDXL": ("text_g", "text_l"),
    "CLIPTextEncodeSDXLRefiner": ("text",),
    "CLIPTextEncodeSD3": ("clip_l", "clip_g", "t5xxl"),
    "CLIPTextEncodeFlux": ("clip_l", "t5xxl"),
    "CLIPTextEncodeHunyuanDiT": ("bert", "mt5xl"),
    "CLIPTextEncodeHiDream": ("clip_l", "clip_g", "t5xxl", "llama"),
    "CLIPTextEncodeKandinsky5": ("clip_l", "qwen25_7b"),
    "CLIPTextEncodeLumina2": ("user_prompt",),
    "CLIPTextEncodePixArtAlpha": ("text",),
    "CLIPTextEncodeControlnet": ("text",),
    "TextEncodeHunyuanVideo_ImageToVideo": ("prompt",),
    "TextEncodeAceStepAudio": ("tags", "lyrics"),
    "TextEncodeAceStepAudio1.5": ("tags", "lyrics"),
    "MiniMaxMusic3TextEncode": ("caption", "lyrics"),
    "TextGenerate": ("prompt",),
    "TextGenerateLTX2Prompt": ("prompt",),
    "GLIGENTextBoxApply": ("text",),
    "PhotoMakerEncode": ("text",),
}
EDITS = """
    TextEncodeQwenImageEdit TextEncodeQwenImageEditPlus TextEncodeJoyImageEdit TextEncodeBooguEdit
    TextEncodeMageFlowEdit TextEncodeZImageOmni
"""
ONE, PAIR = (("conditioning",),), (("positive",), ("negative",))
JOINS: dict[str, Sequence[Sequence[str]]] = {
    "ConditioningAverage": (("conditioning_to", "conditioning_from"),),
    "ConditioningConcat": (("conditioning_to", "conditioning_from"),),
    "ConditioningCombine": (("conditioning_1", "conditioning_2"),),
    "ConditioningSetProperties": (("cond_NEW",),),
    "ConditioningSetPropertiesAndCombine": (("cond", "cond_NEW"),),
    "ConditioningSetDefaultCombine": (("cond", "cond_DEFAULT"),),
    "PairConditioningSetProperties": (("positive_NEW",), ("negative_NEW",)),
    "PairConditioningSetPropertiesAndCombine": (("positive", "positive_NEW"), ("negative", "negative_NEW")),
    "PairConditioningSetDefaultCombine": (("positive", "positive_DEFAULT"), ("negative", "negative_DEFAULT")),
    "PairConditioningCombine": (("positive_A", "positive_B"), ("negative_A", "negative_B")),
    **dict.fromkeys(
        [
            "ConditioningMultiply",
            "ConditioningSetArea",
            "ConditioningSetAreaPercentage",
            "ConditioningSetAreaStrength",
            "ConditioningSetMask",
            "unCLIPConditioning",
            "ConditioningZeroOut",
            "ConditioningSetTimestepRange",
            "ConditioningSetAreaPercentageVideo",
            "StableCascade_StageB_Conditioning",
            "FluxGuidance",
            "FluxDisableGuidance",
            "FluxKontextMultiReferenceLatentMethod",
            "ReferenceTimbreAudio",
        ],
        ONE,
    ),
    **dict.fromkeys(["ConditioningStableAudio", "LTXVConditioning", "HiDreamO1ReferenceImages"], PAIR),
    "PiDConditioning": (("positive",),),
    "LotusConditioning": ((),),
    "Hunyuan3Dv2Conditioning": ((), ()),
    "Hunyuan3Dv2ConditioningMultiView": ((), ()),
    "SeedVR2Conditioning": ((), ()),
}
PROMPT_RULES: dict[str, Rule] = {
    **{name: partial(encode_text, texts) for name, texts in PROMPTS.items()},
    **dict.fromkeys(EDITS.split(), encode_edit),
    "CLIPVisionEncode": encode_vision,
    **{name: partial(join, names) for name, names in JOINS.items()},
    "ControlNetApply": partial(apply_control, ("conditioning",)),
    **dict.fromkeys(
        ("ControlNetApplyAdvanced", "ControlNetApplySD3", "ControlNetInpaintingAliMamaApply"),
        partial(apply_control, ("positive", "negative")),
    ),
    "ReferenceLatent": apply_reference,
    "StyleModelApply": apply_style,
    **dict.fromkeys(
        [
            "QwenImageDiffsynthControlnet",
            "ZImageFunControlnet",
            "WanUni3CControlnetApply",
            "USOStyleReference",
            "SUPIRApply",
            "AnimaLLLiteApply",
        ],
        apply_patch,
    ),
}
