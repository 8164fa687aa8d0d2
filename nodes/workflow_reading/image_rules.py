"""Nodes that load images or change their size, and those that look at them with a model."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from .description import DIFFUSION, OTHER, VAE, Call, Size
from .node_values import NodeReading, Picture, Rule
from .resizing import crop, repeat, resize, same_picture, scale, scale_edge, scaled, stack, take

__all__ = ["IMAGE_RULES"]


def load_image(node: NodeReading) -> Sequence[Any]:
    name = node.text("image")
    found = node.reader.image_size(name) if name is not None else None
    size = Size(width=found[0], height=found[1]) if found else None
    why = "" if size else f"size: {node.name.label}: the size of {name!r} is not known" if name else "size: no file"
    return (Picture(size, is_latent=False, why=why, is_single=True), None)


def empty_image(node: NodeReading) -> Sequence[Any]:
    return (replace(node.size(step=1), is_latent=False),)


def image_size(node: NodeReading) -> Sequence[Any]:
    """GetImageSize: width, height and how many there are."""
    size = node.picture("image").size
    return (size.width, size.height, size.batch * size.frames) if size else (None, None, None)


def upscale_image(node: NodeReading) -> Sequence[Any]:
    picture = node.picture("image")
    node.use(Call.OTHER, node.held("upscale_model", OTHER), wanted="upscale_model", size=picture)
    return (Picture(None, is_latent=False, why=f"size: {node.name.label}: the factor of its model is not known"),)


def use_whole_model(call: Call, names: dict[str, str], node: NodeReading) -> Sequence[Any]:
    """Nodes that ask a model for something other than pictures: masks, boxes, sound."""
    for name, kind in names.items():
        if node.is_linked(name):
            node.use(call, node.held(name, kind), wanted=name)
    return (None,) * 3


def scale_to_area(name: str, widget: str, node: NodeReading) -> Sequence[Any]:
    """So many times 1024 x 1024 pixels, in the same shape."""
    picture, wanted = node.picture(name), node.number(widget)
    if picture.size is None or not wanted or wanted < 0:
        return (replace(picture, size=None, why=picture.why or f"size: {node.name.label}: megapixels"),)
    by = math.sqrt(wanted * 1024 * 1024 / (picture.size.width * picture.size.height))
    return (scaled(picture, by, 1),)


def pad(node: NodeReading) -> Sequence[Any]:
    picture = node.picture("image")
    edges = [node.whole(name) for name in ("left", "right", "top", "bottom")]
    if picture.size is None or None in edges:
        return (
            replace(picture, size=None, why=picture.why or f"size: {node.name.label}: its edges are not known"),
        ) * 2
    left, right, top, bottom = (edge or 0 for edge in edges)
    size = replace(picture.size, width=picture.size.width + left + right, height=picture.size.height + top + bottom)
    return (replace(picture, size=size), None)


def resize_typed(node: NodeReading) -> Sequence[Any]:
    """ResizeImageMaskNode: which of its widgets count, the chosen type says."""
    kind = node.text("resize_type")
    rule = RESIZE_TYPES.get(kind or "")
    if rule is None:
        picture = node.picture("input")
        return (replace(picture, size=None, why=f"size: {node.name.label}: resize_type {kind!r} is not read"),)
    return rule(node)


def match_size(node: NodeReading) -> Sequence[Any]:
    picture, other = node.picture("input"), node.picture("resize_type.match")
    if picture.size is None or other.size is None:
        return (picture if picture.size is None else replace(picture, size=None, why=other.why),)
    size = replace(picture.size, width=other.size.width, height=other.size.height)
    return (replace(picture, size=size),)


def scale_kontext(node: NodeReading) -> Sequence[Any]:
    """FluxKontextImageScale: the one of Kontext's resolutions whose shape is nearest."""
    picture = node.picture("image")
    if picture.size is None:
        return (picture,)
    shape = picture.size.width / picture.size.height
    width, height = min(KONTEXT, key=lambda edges: abs(shape - edges[0] / edges[1]))
    return (replace(picture, size=replace(picture.size, width=width, height=height)),)


def select_resolution(node: NodeReading) -> Sequence[Any]:
    """ResolutionSelector: width and height of so many megapixels in a shape such as ``16:9 (Widescreen)``."""
    shape = re.match(r"(\d{1,4}):(\d{1,4})", node.text("aspect_ratio") or "")
    wanted, multiple = node.number("megapixels"), node.whole("multiple", 8)
    if shape is None or not wanted or wanted < 0 or not multiple or not int(shape[1]) or not int(shape[2]):
        return (None, None)
    scale = math.sqrt(wanted * 1024 * 1024 / (int(shape[1]) * int(shape[2])))
    return tuple(round(int(edge) * scale / multiple) * multiple for edge in shape.groups())


INPUT, TYPE = "input", "resize_type."
RESIZE_TYPES: dict[str, Rule] = {
    "scale dimensions": partial(resize, INPUT, (f"{TYPE}width", f"{TYPE}height"), 1),
    "scale by multiplier": partial(scale, INPUT, f"{TYPE}multiplier", 1),
    "scale longer dimension": partial(scale_edge, max, f"{TYPE}longer_size", INPUT),
    "scale shorter dimension": partial(scale_edge, min, f"{TYPE}shorter_size", INPUT),
    "scale width": partial(scale_edge, lambda width, height: width, f"{TYPE}width", INPUT),
    "scale height": partial(scale_edge, lambda width, height: height, f"{TYPE}height", INPUT),
    "scale total pixels": partial(scale_to_area, INPUT, f"{TYPE}megapixels"),
    "match size": match_size,
}
# Those that FLUX.1 Kontext was trained at, and the same turned by 90 degrees.
WIDE_KONTEXT = ((1568, 672), (1504, 688), (1456, 720), (1392, 752), (1328, 800), (1248, 832), (1184, 880), (1104, 944))
KONTEXT = (*WIDE_KONTEXT, (1024, 1024), *((height, width) for width, height in WIDE_KONTEXT))

SAME_IMAGE = """
    ImageInvert ImageBlend ImageBlur ImageQuantize ImageSharpen Canny ImageAddNoise ImageFlip LTXVPreprocess
    NormalizeImages AdjustBrightness AdjustContrast Morphology TextOverlay SplitImageWithAlpha JoinImageWithAlpha
    SeedVR2Preprocess
"""

IMAGE_RULES: dict[str, Rule] = {
    "LoadImage": load_image,
    "LoadImageOutput": load_image,
    "EmptyImage": empty_image,
    "GetImageSize": image_size,
    **dict.fromkeys(SAME_IMAGE.split(), partial(same_picture, "image")),
    **dict.fromkeys(("PreviewImage", "SaveImage"), partial(same_picture, "images")),
    "ImageCompositeMasked": partial(same_picture, "destination"),
    "ImageScale": partial(resize, "image", ("width", "height"), 1),
    "ResizeAndPadImage": partial(resize, "image", ("target_width", "target_height"), 1),
    "ImageScaleBy": partial(scale, "image", "scale_by", 1),
    "ImageScaleToTotalPixels": partial(scale_to_area, "image", "megapixels"),
    "ResizeImageMaskNode": resize_typed,
    "FluxKontextImageScale": scale_kontext,
    "ResolutionSelector": select_resolution,
    "ImageScaleToMaxDimension": partial(scale_edge, max, "largest_size", "image"),
    "ResizeImagesByLongerEdge": partial(scale_edge, max, "longer_edge", "images"),
    "ResizeImagesByShorterEdge": partial(scale_edge, min, "shorter_edge", "images"),
    "ImageCrop": partial(crop, "image", 1),
    "ImagePadForOutpaint": pad,
    "ImageBatch": partial(stack, "image1", "image2"),
    "ImageFromBatch": partial(take, "image"),
    "RepeatImageBatch": partial(repeat, "image"),
    "ImageUpscaleWithModel": upscale_image,
    **dict.fromkeys(
        ("SDPoseKeypointExtractor", "RTDETR_detect", "SAM3_Detect", "SAM3_VideoTrack"),
        partial(use_whole_model, Call.OTHER, {"model": DIFFUSION, "vae": VAE}),
    ),
    "AudioEncoderEncode": partial(use_whole_model, Call.OTHER, {"audio_encoder": OTHER}),
    "FrameInterpolate": partial(use_whole_model, Call.OTHER, {"interp_model": OTHER}),
}
