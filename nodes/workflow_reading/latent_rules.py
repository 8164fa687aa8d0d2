"""Nodes that make latents or change their size; what a VAE encodes and decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .description import DIFFUSION, OTHER, VAE, Call, Size, Tiling
from .node_values import MAX_NUMBER, NodeReading, Picture, Rule
from .resizing import crop, repeat, resize, same_picture, scale, scaled, stack, take

__all__ = ["LATENT_RULES"]

# -- latents out of nothing


def empty_latents(step: int, length: str | None, node: NodeReading) -> Sequence[Any]:
    return (node.size(length=length, step=step),)


def unmeasured(what: str, node: NodeReading) -> Sequence[Any]:
    """Latents of what is not a picture: sound, or a shape."""
    return (Picture(None, why=f"size: {node.name.label}: makes {what}, which has no width and height"),) * 2


def layered_latents(node: NodeReading) -> Sequence[Any]:
    made, layers = node.size(), node.whole("layers")
    if made.size is None or layers is None:
        return (replace(made, size=None, why=made.why or f"size: {node.name.label}: layers are not known"),)
    return (Picture(replace(made.size, frames=4 * layers + 1)),)


# -- latents of images


def paint_in(node: NodeReading) -> Sequence[Any]:
    """InpaintModelConditioning: the image is encoded twice, with and without what is painted over."""
    picture = in_latents(node.picture("pixels"))
    for _ in range(2):
        node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=picture)
    return node.conditioning("positive"), node.conditioning("negative"), picture


def edit_pixels(node: NodeReading) -> Sequence[Any]:
    """InstructPixToPixConditioning: latents of the image's size."""
    picture = in_latents(node.picture("pixels"))
    node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=picture)
    return node.conditioning("positive"), node.conditioning("negative"), picture


def guided_latents(outputs: str, node: NodeReading) -> Sequence[Any]:
    """Nodes of LTXV and others that write an encoded image into latents that are there."""
    name = "latent" if "latent" in node.inputs else "video_latent"
    latents = node.picture(name)
    size = Picture(latents.size and replace(latents.size, frames=1), why=latents.why)
    if any(node.is_linked(image) for image in ("image", "start_image")) and node.is_linked("vae"):
        node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=size)
    made = {"p": node.conditioning("positive"), "n": node.conditioning("negative"), "l": latents}
    return tuple(made[output] for output in outputs)


# -- latents out of latents


def trim(node: NodeReading) -> Sequence[Any]:
    """TrimVideoLatent: frames of latents, each of which is four of the video."""
    picture, amount = node.picture("samples"), node.whole("trim_amount")
    if picture.size is None or amount is None:
        return (picture,)
    return (replace(picture, size=replace(picture.size, frames=max(1, picture.size.frames - 4 * amount))),)


def upsample(node: NodeReading) -> Sequence[Any]:
    """LTXVLatentUpsampler: twice the width and height, by a model of its own."""
    picture = scaled(node.picture("samples"), 2.0, 8)
    node.use(Call.OTHER, node.held("upscale_model", OTHER), wanted="upscale_model", size=picture)
    return (picture,)


def upsample_to(node: NodeReading) -> Sequence[Any]:
    (picture,) = resize("samples", ("width", "height"), 16, node)
    node.use(Call.OTHER, node.held("model", OTHER), wanted="model", size=picture)
    return (picture,)


def cut(node: NodeReading) -> Sequence[Any]:
    """LatentCut and LatentCutToBatch: cells of one dimension; the latter puts all such pieces into one batch."""
    picture, dim = node.picture("samples"), node.text("dim")
    in_batch = node.name.class_type == "LatentCutToBatch"
    amount = node.whole("slice_size" if in_batch else "amount")
    name = EDGES.get(dim or "")
    if picture.size is None or not amount or name is None:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: dim, amount"),)
    cells = num_cells(picture.size, name)
    kept = min(amount, cells)
    size = with_cells(picture.size, name, kept)
    return (replace(picture, size=replace(size, batch=size.batch * (cells // kept if in_batch else 1))),)


def join(node: NodeReading) -> Sequence[Any]:
    """LatentConcat: two latents along one dimension."""
    picture, other = node.picture("samples1"), node.picture("samples2")
    name = EDGES.get((node.text("dim") or "").removeprefix("-"))
    if picture.size is None or other.size is None or name is None:
        why = picture.why or other.why or f"size: {node.name.label}: dim"
        return (replace(picture, size=None, why=why),)
    cells = num_cells(picture.size, name) + num_cells(other.size, name)
    return (replace(picture, size=with_cells(picture.size, name, min(cells, MAX_NUMBER))),)


def num_cells(size: Size, name: str) -> int:
    """Return how many cells of 8 pixels, or 4 frames after the first, latents have."""
    return (size.frames + 3) // 4 if name == "frames" else max(1, getattr(size, name) // 8)


def with_cells(size: Size, name: str, cells: int) -> Size:
    return replace(size, **{name: 4 * cells - 3 if name == "frames" else 8 * cells})


EDGES = {"x": "width", "y": "height", "t": "frames"}


# -- with other models


def refer_to_sound(node: NodeReading) -> Sequence[Any]:
    """LTXVReferenceAudio: a voice that the model attends to."""
    code_sound(Call.ENCODE, "audio_vae", node)
    return node.held("model", DIFFUSION), node.conditioning("positive"), node.conditioning("negative")


def camera_size(node: NodeReading) -> Sequence[Any]:
    """WanCameraEmbedding: the path of a camera, then its width, height and length."""
    return (None, node.whole("width"), node.whole("height"), node.whole("length"))


# -- VAEs


def in_latents(picture: Picture) -> Picture:
    """Return images as latents: whole cells of 8 pixels."""
    return replace(scaled(picture, 1.0, 8), is_latent=True)


def encode(node: NodeReading) -> Sequence[Any]:
    picture = in_latents(node.picture("pixels"))
    node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=picture, tiling=tiling_of(node))
    return (picture,)


def decode(node: NodeReading) -> Sequence[Any]:
    picture = node.picture("samples")
    node.use(Call.DECODE, node.held("vae", VAE), wanted="vae", size=picture, tiling=tiling_of(node))
    return (replace(picture, is_latent=False),)


def tiling_of(node: NodeReading) -> Tiling | None:
    """Return the tiles of a node that has them; None where a number is not known, or for one without."""
    if not node.name.class_type.endswith("Tiled"):
        return None
    numbers = {name: node.whole(name) for name in ("tile_size", "overlap")}
    numbers |= {name: node.whole(name, 0) for name in ("temporal_size", "temporal_overlap")}
    known = {name: number for name, number in numbers.items() if number is not None}
    return Tiling(**known) if len(known) == len(numbers) else None


def code_sound(call: Call, vae: str, node: NodeReading) -> Sequence[Any]:
    why = f"size: {node.name.label}: sound has no width and height"
    node.use(call, node.held(vae, VAE), wanted=vae, size=Picture(None, why=why))
    return (Picture(None, is_latent=call is Call.ENCODE, why=why),)


SAME_LATENT = """
    SetLatentNoiseMask LatentFlip LatentMultiply LatentBatchSeedBehavior LatentApplyOperation SaveLatent RebatchLatents
"""

LATENT_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ["EmptyLatentImage", "EmptySD3LatentImage", "EmptyHunyuanImageLatent", "EmptyChromaRadianceLatentImage"],
        partial(empty_latents, 8, None),
    ),
    "EmptyFlux2LatentImage": partial(empty_latents, 16, None),
    "EmptyHiDreamO1LatentImage": partial(empty_latents, 32, None),
    **dict.fromkeys(
        ["EmptyHunyuanLatentVideo", "EmptyMochiLatentVideo", "EmptyCosmosLatentVideo", "EmptyARVideoLatent"],
        partial(empty_latents, 8, "length"),
    ),
    **dict.fromkeys(("EmptyHunyuanVideo15Latent", "EmptyMiniMaxH3LatentAV"), partial(empty_latents, 16, "length")),
    "EmptyLTXVLatentVideo": partial(empty_latents, 32, "length"),
    "EmptyQwenImageLayeredLatentImage": layered_latents,
    **dict.fromkeys(
        [
            "EmptyLatentAudio",
            "EmptyAceStepLatentAudio",
            "EmptyAceStep1.5LatentAudio",
            "EmptyMiniMaxMusic3LatentAudio",
            "LTXVEmptyLatentAudio",
        ],
        partial(unmeasured, "sound"),
    ),
    "EmptyLatentHunyuan3Dv2": partial(unmeasured, "a shape"),
    "InpaintModelConditioning": paint_in,
    "InstructPixToPixConditioning": edit_pixels,
    "LTXVImgToVideoInplace": partial(guided_latents, "l"),
    "LTXVAddGuide": partial(guided_latents, "pnl"),
    "LTXVCropGuides": partial(guided_latents, "pnl"),
    "HunyuanRefinerLatent": partial(guided_latents, "pnl"),
    "HunyuanVideo15SuperResolution": partial(guided_latents, "pnl"),
    "LTXVConcatAVLatent": partial(same_picture, "video_latent"),
    "LTXVSeparateAVLatent": partial(same_picture, "av_latent"),
    **dict.fromkeys(SAME_LATENT.split(), partial(same_picture, "samples")),
    **dict.fromkeys(
        ("LatentAdd", "LatentSubtract", "LatentInterpolate", "LatentBlend"), partial(same_picture, "samples1")
    ),
    **dict.fromkeys(("LatentCompositeMasked", "ReplaceVideoLatentFrames"), partial(same_picture, "destination")),
    "NormalizeVideoLatentStart": partial(same_picture, "latent"),
    "LatentComposite": partial(same_picture, "samples_to"),
    "AddNoise": partial(same_picture, "latent_image"),
    "LatentUpscale": partial(resize, "samples", ("width", "height"), 8, smallest=64),
    "LatentUpscaleBy": partial(scale, "samples", "scale_by", 8),
    "LatentCrop": partial(crop, "samples", 8),
    "LatentFromBatch": partial(take, "samples"),
    "LatentBatch": partial(stack, "samples1", "samples2"),
    "RepeatLatentBatch": partial(repeat, "samples"),
    "TrimVideoLatent": trim,
    "LatentCut": cut,
    "LatentCutToBatch": cut,
    "LatentConcat": join,
    "WanCameraEmbedding": camera_size,
    "LTXVReferenceAudio": refer_to_sound,
    "LTXVLatentUpsampler": upsample,
    "HunyuanVideo15LatentUpscaleWithModel": upsample_to,
    **dict.fromkeys(("VAEEncode", "VAEEncodeForInpaint", "VAEEncodeTiled"), encode),
    **dict.fromkeys(("VAEDecode", "VAEDecodeTiled"), decode),
    "VAEEncodeAudio": partial(code_sound, Call.ENCODE, "vae"),
    "LTXVAudioVAEEncode": partial(code_sound, Call.ENCODE, "audio_vae"),
    **dict.fromkeys(("VAEDecodeAudio", "VAEDecodeAudioTiled"), partial(code_sound, Call.DECODE, "vae")),
    "LTXVAudioVAEDecode": partial(code_sound, Call.DECODE, "audio_vae"),
    **dict.fromkeys(("VAEDecodeHunyuan3D", "VAEDecodeTripoSplat"), partial(code_sound, Call.DECODE, "vae")),
}
