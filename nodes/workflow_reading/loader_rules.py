"""Nodes that load models, manage those of others, or apply LoRAs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...memory.errors import InvalidInput, quoted
from ..prompts import is_link
from .description import CONTROL, DIFFUSION, OTHER, PIPELINE, TEXT, VAE, VISION, AppliedLora, Asked
from .node_values import MAX_ATTACHED, Held, NodeReading, Rule

if TYPE_CHECKING:
    from ...memory.options.precision import Precisions

__all__ = ["LOADER_RULES"]

CLIP_NAMES = ("clip_name1", "clip_name2", "clip_name3", "clip_name4")
# Of a checkpoint: the part, its kind, in the order of its loader's outputs.
CHECKPOINT = (("model", DIFFUSION), ("clip", TEXT), ("vae", VAE))
UNCLIP = (*CHECKPOINT, ("clip_vision", VISION))
IMAGE_ONLY = (("model", DIFFUSION), ("clip_vision", VISION), ("vae", VAE))


# -- one file, or several of one model


def load_ours(kind: str, folder: str, widgets: Sequence[str], node: NodeReading) -> Sequence[Any]:
    return (node.load(kind, folder, widgets, asked=asked_of(node), is_ours=True),)


def load_cores(kind: str, folder: str, widgets: Sequence[str], node: NodeReading) -> Sequence[Any]:
    asked = Asked(weight_dtype=node.text("weight_dtype"), device=node.text("device"), text_type=node.text("type"))
    return (node.load(kind, folder, widgets, asked=asked),)


def load_parts(parts: Sequence[tuple[str, str]], widget: str, node: NodeReading) -> Sequence[Any]:
    return tuple(node.load(kind, "checkpoints", [widget], part=part) for part, kind in parts)


def load_our_checkpoint(node: NodeReading) -> Sequence[Any]:
    asked = asked_of(node)
    return tuple(
        node.load(kind, "checkpoints", ["ckpt_name"], part=part, asked=asked, is_ours=True) for part, kind in CHECKPOINT
    )


def load_pipeline(node: NodeReading) -> Sequence[Any]:
    return (node.load(PIPELINE, "diffusers", ["pipeline"], asked=asked_of(node), is_ours=True),)


def load_text_encoder_of_two(node: NodeReading) -> Sequence[Any]:
    """LTXAVTextEncoderLoader: a text encoder, and its projections out of a checkpoint."""
    return load_cores(TEXT, "text_encoders", ("text_encoder", "ckpt_name"), node)


def load_control_with(node: NodeReading) -> Sequence[Any]:
    """DiffControlNetLoader: what its file lacks is the diffusion model's."""
    node.held("model", DIFFUSION)
    return load_cores(CONTROL, "controlnet", ("control_net_name",), node)


# -- what is asked of a model


def asked_of(node: NodeReading) -> Asked:
    """Return what the widgets of one of our loaders say. Raises `InvalidInput` for linked Precision nodes that differ
    from what these take."""
    return Asked(
        profile=node.text("profile"),
        precision=precision_of(node),
        placement=node.text("placement"),
        engine=node.text("engine"),
        text_type=node.text("type"),
    )


def precision_of(node: NodeReading) -> str | Precisions | None:
    """Return the precision of a loader: its own words, or those of the Precision nodes that are linked to it."""
    own = node.text("precision")
    if not node.is_linked("precision_options"):
        return own
    from ...memory.options.precision import fill_precisions, parse_precision
    from ...memory.weights.known_forms import FORMS

    linked = node.value("precision_options")
    if not isinstance(linked, Mapping):
        raise InvalidInput(
            f"{node.name.label}: precision_options come from {node.source('precision_options')}; "
            "a plan reads those of a Precision node alone"
        )
    try:
        options = read_options(linked)
        return options if own is None else fill_precisions(options, parse_precision(own, forms=FORMS))
    except InvalidInput as error:
        raise InvalidInput(f"{node.name.label}: {error}") from None


def precision_node(node: NodeReading) -> Sequence[Any]:
    """Return the widgets of a Precision node, with those of the node that is linked to it."""
    widgets = {name: node.value(name) for name in node.inputs if name != "others"}
    for name, value in widgets.items():
        if not isinstance(value, str | int | float):
            raise InvalidInput(f"{node.name.label}: {name} {node.why_unread(name)}; a plan needs a fixed value")
    others = node.value("others")
    return ({"widgets": widgets, "others": others if isinstance(others, Mapping) else None},)


def read_options(linked: Mapping[str, Any]) -> Precisions:
    """Return what a chain of Precision nodes says; as long as it may be, one node at a time."""
    from ..precision import combine
    from ..precision import read_options as read

    chain = []
    rest: Mapping[str, Any] | None = linked
    while rest is not None:
        chain.append(rest["widgets"])
        rest = rest["others"]
    others: Precisions | None = None
    for widgets in reversed(chain):
        try:
            others = combine(read(**widgets), others)
        except TypeError:  # the names of widgets are the workflow's
            names = ", ".join(sorted(widgets))
            raise InvalidInput(f"the widgets {quoted(names)} are not those of a Precision node") from None
    assert others is not None
    return others


def manage(name: str, kind: str, node: NodeReading) -> Sequence[Any]:
    held = node.held(name, kind)
    return (node.manage(held, asked_of(node)) if held else None,)


def choose_device(name: str, kind: str, node: NodeReading) -> Sequence[Any]:
    """SelectModelDevice and its like: the model computes elsewhere, as the one that its loader gives does not."""
    held, device = node.held(name, kind), node.text("device")
    if held is None:
        return (None,)
    model = node.reader.models[held.model]
    return (replace(held, model=node.reader.add_model(replace(model, asked=replace(model.asked, device=device)))),)


# -- LoRAs


def apply_lora(node: NodeReading) -> Sequence[Any]:
    """Return the model, and the text encoder where the node has one, with the LoRA at their strengths."""
    model, clip = node.held("model", DIFFUSION), node.held("clip", TEXT) if node.is_linked("clip") else None
    return tuple(
        with_lora(node, held, strength) for held, strength in ((model, "strength_model"), (clip, "strength_clip"))
    )


def with_lora(node: NodeReading, held: Held | None, strength_name: str) -> Held | None:
    strength = node.number(strength_name, 1.0)
    if held is None or strength == 0:  # ComfyUI leaves those out
        return held
    lora = AppliedLora(node=node.name, file=node.text("lora_name"), strength=strength)
    return replace(held, loras=(*held.loras, lora)[:MAX_ATTACHED])


def apply_hypernetwork(node: NodeReading) -> Sequence[Any]:
    return (node.held("model", DIFFUSION),)


# -- nodes that pass on what they are given


def pass_held(*inputs: tuple[str, str]) -> Rule:
    """Return the rule of a node whose outputs are these inputs: what it changes takes no memory of its own."""
    return lambda node: tuple(node.held(name, kind) for name, kind in inputs)


def pass_any(*names: str) -> Rule:
    """Return the rule of a node that passes on whatever these inputs are."""
    return lambda node: tuple(node.value(name) for name in names)


def pass_merged(node: NodeReading) -> Sequence[Any]:
    """A merged model is the first one; weights of the others are read where they rest, in RAM."""
    for name, kind in (("model1", DIFFUSION), ("clip1", TEXT)):
        if is_link(node.inputs.get(name), node.reader.graph.nodes):
            return (node.held(name, kind),)
    return (None,)


# ComfyUI's nodes that change how a diffusion model is called, and no memory that a plan counts.
PASS_MODEL = """
    LatentApplyOperationCFG HypernetworkLoader TomePatchModel FreeU FreeU_V2 CFGOverride HyperTile
    ModelSamplingDiscrete ModelSamplingContinuousEDM ModelSamplingContinuousV ModelSamplingStableCascade
    ModelSamplingSD3 ModelSamplingAuraFlow ModelSamplingFlux ModelSamplingLTXV ModelNoiseScale RescaleCFG
    ModelComputeDtype ModelAttentionBackend PatchModelAddDownscale VideoLinearCFGGuidance VideoTriangleCFGGuidance
    SelfAttentionGuidance PerpNeg DifferentialDiffusion PerturbedAttentionGuidance UNetSelfAttentionMultiply
    UNetCrossAttentionMultiply UNetTemporalAttentionMultiply SkipLayerGuidanceSD3 SkipLayerGuidanceDiT
    SkipLayerGuidanceDiTSimple Epsilon Scaling TemporalScoreRescaling FluxKVCache TorchCompileModel Mahiro
    MiniMaxH3SigmaShift LTXVModalityGuidance LTXVSpatioTemporalGuidance RenormCFG WanAnimate2Cache CFGZeroStar CFGNorm
    FreSca APG TCFG ContextWindowsManual WanContextWindowsManual LTXVContextWindows ChromaRadianceOptions EasyCache
    LazyCache ScaleROPE wanBlockSwap NAGuidance HiDreamO1PatchSeamSmoothing TripoSplatSamplingPreview
    MultiGPU_WorkUnits LoraModelLoader
"""
PASS_CLIP = "CLIPSetLastLayer T5TokenizerOptions CLIPAttentionMultiply SetClipHooks"
MERGES = """
    ModelMergeSimple ModelMergeBlocks ModelMergeSubtract ModelMergeAdd ModelMergeSD1 ModelMergeSD2 ModelMergeSDXL
    ModelMergeSD3_2B ModelMergeAuraflow ModelMergeFlux1 ModelMergeSD35_Large ModelMergeMochiPreview ModelMergeLTXV
    ModelMergeCosmos7B ModelMergeCosmos14B ModelMergeWAN2_1 ModelMergeCosmosPredict2_2B ModelMergeCosmosPredict2_14B
    ModelMergeQwenImage ModelMergeKrea2 CLIPMergeSimple CLIPMergeSubtract CLIPMergeAdd
"""
# Small models of other kinds: the class, the host's folder, the widget with the file.
OTHER_LOADERS = {
    "UpscaleModelLoader": ("upscale_models", "model_name"),
    "LatentUpscaleModelLoader": ("latent_upscale_models", "model_name"),
    "StyleModelLoader": ("style_models", "style_model_name"),
    "ModelPatchLoader": ("model_patches", "name"),
    "AudioEncoderLoader": ("audio_encoders", "audio_encoder_name"),
    "GLIGENLoader": ("gligen", "gligen_name"),
    "PhotoMakerLoader": ("photomaker", "photomaker_model_name"),
    "FrameInterpolationModelLoader": ("frame_interpolation", "model_name"),
}

LOADER_RULES: dict[str, Rule] = {
    "HighwaterLoadPipeline": load_pipeline,
    "HighwaterLoadDiffusionModel": partial(load_ours, DIFFUSION, "diffusion_models", ("unet_name",)),
    "HighwaterLoadTextEncoder": partial(load_ours, TEXT, "text_encoders", CLIP_NAMES),
    "HighwaterLoadVAE": partial(load_ours, VAE, "vae", ("vae_name",)),
    "HighwaterLoadCheckpoint": load_our_checkpoint,
    "HighwaterLoadControlNet": partial(load_ours, CONTROL, "controlnet", ("control_net_name",)),
    "HighwaterLoadCLIPVision": partial(load_ours, VISION, "clip_vision", ("clip_name",)),
    "HighwaterManageModel": partial(manage, "model", DIFFUSION),
    "HighwaterManageCLIP": partial(manage, "clip", TEXT),
    "HighwaterManageVAE": partial(manage, "vae", VAE),
    "HighwaterPrecision": precision_node,
    "HighwaterKeep": pass_any("model"),
    "HighwaterRelease": pass_any("model", "after"),
    "UNETLoader": partial(load_cores, DIFFUSION, "diffusion_models", ("unet_name",)),
    "CLIPLoader": partial(load_cores, TEXT, "text_encoders", ("clip_name",)),
    "DualCLIPLoader": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES[:2]),
    "TripleCLIPLoader": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES[:3]),
    "QuadrupleCLIPLoader": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES),
    "LTXAVTextEncoderLoader": load_text_encoder_of_two,
    "VAELoader": partial(load_cores, VAE, "vae", ("vae_name",)),
    "LTXVAudioVAELoader": lambda node: load_parts((("audio_vae", VAE),), "ckpt_name", node),
    "ControlNetLoader": partial(load_cores, CONTROL, "controlnet", ("control_net_name",)),
    "DiffControlNetLoader": load_control_with,
    "CLIPVisionLoader": partial(load_cores, VISION, "clip_vision", ("clip_name",)),
    "CheckpointLoaderSimple": partial(load_parts, CHECKPOINT, "ckpt_name"),
    "CheckpointLoader": partial(load_parts, CHECKPOINT, "ckpt_name"),
    "unCLIPCheckpointLoader": partial(load_parts, UNCLIP, "ckpt_name"),
    "ImageOnlyCheckpointLoader": partial(load_parts, IMAGE_ONLY, "ckpt_name"),
    # Of the pack ComfyUI-GGUF.
    "UnetLoaderGGUF": partial(load_cores, DIFFUSION, "diffusion_models", ("unet_name",)),
    "UnetLoaderGGUFAdvanced": partial(load_cores, DIFFUSION, "diffusion_models", ("unet_name",)),
    "CLIPLoaderGGUF": partial(load_cores, TEXT, "text_encoders", ("clip_name",)),
    "DualCLIPLoaderGGUF": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES[:2]),
    "TripleCLIPLoaderGGUF": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES[:3]),
    "QuadrupleCLIPLoaderGGUF": partial(load_cores, TEXT, "text_encoders", CLIP_NAMES),
    **dict.fromkeys(("LoraLoader", "LoraLoaderModelOnly", "LoraLoaderBypass", "LoraLoaderBypassModelOnly"), apply_lora),
    "SelectModelDevice": partial(choose_device, "model", DIFFUSION),
    "SelectCLIPDevice": partial(choose_device, "clip", TEXT),
    "SelectVAEDevice": partial(choose_device, "vae", VAE),
    "SetUnionControlNetType": pass_held(("control_net", CONTROL)),
    **dict.fromkeys(PASS_MODEL.split(), pass_held(("model", DIFFUSION))),
    **dict.fromkeys(PASS_CLIP.split(), pass_held(("clip", TEXT))),
    **dict.fromkeys(MERGES.split(), pass_merged),
    **{name: partial(load_cores, OTHER, folder, (widget,)) for name, (folder, widget) in OTHER_LOADERS.items()},
}
