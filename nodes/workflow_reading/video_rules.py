"""Nodes that make latents of a video beside its prompts, and let the VAE encode what it begins with or follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .description import DIFFUSION, TEXT, VAE, VISION, Call
from .node_values import Conditioning, NodeReading, Picture, Rule
from .prompt_rules import apply_patch

__all__ = ["VIDEO_RULES"]

WHOLE, OWN, ONE = "whole", "own", "one"
"""Filled up to the length of the video before it is encoded; with as many frames as it has; its first image alone."""
ALWAYS = ""
"""In place of an input: what is encoded without one, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoNode:
    """What one class of nodes makes and encodes.

    Args:
        encodes: an input and how its images are encoded, in the order of the calls.
        outputs: a letter for each: p(ositive), n(egative), c for a prompt of its own, l(atents), e for what it encoded,
            i(nteger).
        step: the pixels in a cell of its latents.
        frames_by: the input that makes the latents longer by one image.
    """

    encodes: tuple[tuple[str, str], ...] = (("start_image", WHOLE),)
    outputs: str = "pnl"
    step: int = 8
    frames_by: str = ""


def make_video(video: VideoNode, node: NodeReading) -> Sequence[Any]:
    length = next((name for name in ("length", "video_frames") if name in node.inputs), None)
    latents = node.size(length=length, step=video.step)
    encoded: Picture | None = None
    for name, how in video.encodes:
        if name == ALWAYS or node.is_linked(name):
            size = replace(latents, size=latents.size and replace(latents.size, batch=1))
            if size.size is not None and how != WHOLE:
                num_frames = 1 if how == ONE else min(size.size.frames, num_images(name, node))
                size = replace(size, size=replace(size.size, frames=num_frames))
            node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=size)
            encoded = size
    if latents.size is not None and video.frames_by and node.is_linked(video.frames_by):
        latents = replace(latents, size=replace(latents.size, frames=latents.size.frames + 4))
    made = {
        "p": node.conditioning("positive") if "p" in video.outputs else None,
        "n": node.conditioning("negative") if "n" in video.outputs else None,
        "c": Conditioning(),
        "l": latents,
        "e": encoded,
        "i": None,
    }
    return tuple(made[output] for output in video.outputs)


def num_images(name: str, node: NodeReading) -> int:
    """Return how many images an input has. If that is unknown: 1 for an image, more than any has for a video."""
    size = node.picture(name).size
    if size is not None:
        return max(1, size.batch * size.frames)
    return 1 if "image" in name else 1 << 24


def make_from_vision(node: NodeReading) -> Sequence[Any]:
    """Older nodes that encode an image with both a vision model and a VAE."""
    picture = node.picture("init_image")
    node.use(Call.ENCODE_VISION, node.held("clip_vision", VISION), wanted="clip_vision", size=picture)
    return make_video(VideoNode(encodes=(("init_image", OWN),), outputs="ccl"), node)


def make_prompted(node: NodeReading) -> Sequence[Any]:
    """MiniMaxH3ImageToVideo and its like: the prompt, the images and the latents in one node."""
    node.use(Call.ENCODE_TEXT, node.held("clip", TEXT), wanted="clip", prompt=node.text("prompt"))
    images = (("first_frame", OWN), ("last_frame", OWN))
    return make_video(VideoNode(encodes=images, outputs="cl", step=16), node)


def make_speaking(node: NodeReading) -> Sequence[Any]:
    """WanInfiniteTalkToVideo: a video after a voice, by a model that is part of the diffusion model."""
    (model,) = apply_patch(node)
    return (model, *make_video(VideoNode(outputs="pnli"), node))


def extend_by_sound(node: NodeReading) -> Sequence[Any]:
    """WanSoundImageToVideoExtend: as many frames more as it says, of a video that is there."""
    latents, length = node.picture("video_latent"), node.whole("length")
    if latents.size is not None and length:
        latents = Picture(replace(latents.size, frames=length))
    for name in ("ref_image", "control_video"):
        if node.is_linked(name):
            node.use(Call.ENCODE, node.held("vae", VAE), wanted="vae", size=latents)
    return node.conditioning("positive"), node.conditioning("negative"), latents


def continue_image(node: NodeReading) -> Sequence[Any]:
    """ARVideoI2V: a model that goes on from an image, and its latents."""
    video = VideoNode(encodes=(("start_image", OWN),), outputs="l")
    return (node.held("model", DIFFUSION), *make_video(video, node))


START, REFERENCE = (("start_image", OWN),), (("reference_image", ONE),)
BOTH_ENDS = (("start_image", OWN), ("end_image", OWN))
ANIMATED = VideoNode(
    encodes=(*REFERENCE, (ALWAYS, WHOLE), ("pose_video", OWN)), outputs="pnliii", frames_by="reference_image"
)
VIDEOS = {
    "WanImageToVideo": VideoNode(),
    "WanTrackToVideo": VideoNode(),
    "WanMoveTrackToVideo": VideoNode(),
    "WanDancerVideo": VideoNode(),
    "WanFunControlToVideo": VideoNode(encodes=(*START, ("control_video", OWN))),
    "Wan22FunControlToVideo": VideoNode(encodes=(("ref_image", ONE), ("control_video", OWN))),
    "WanCameraImageToVideo": VideoNode(encodes=START),
    "WanFunInpaintToVideo": VideoNode(encodes=((ALWAYS, WHOLE),)),
    "WanFirstLastFrameToVideo": VideoNode(encodes=((ALWAYS, WHOLE),)),
    "WanVaceToVideo": VideoNode(
        encodes=(*REFERENCE, (ALWAYS, WHOLE), (ALWAYS, WHOLE)), outputs="pnli", frames_by="reference_image"
    ),
    "WanPhantomSubjectToVideo": VideoNode(encodes=(("images", OWN),), outputs="pnnl"),
    "WanSoundImageToVideo": VideoNode(encodes=(("ref_image", ONE), ("ref_motion", OWN), ("control_video", OWN))),
    "WanHuMoImageToVideo": VideoNode(encodes=(("ref_image", ONE),)),
    "WanAnimateToVideo": ANIMATED,
    "WanAnimate2ToVideo": ANIMATED,
    "WanSCAILToVideo": VideoNode(
        encodes=(*REFERENCE, ("pose_video", OWN), ("previous_frames", OWN)), outputs="pnli", frames_by="reference_image"
    ),
    "BerniniConditioning": VideoNode(encodes=(("source_video", OWN), ("reference_video", OWN))),
    "VOIDInpaintConditioning": VideoNode(encodes=(("video", WHOLE), ("quadmask", WHOLE))),
    "Wan22ImageToVideoLatent": VideoNode(encodes=START, outputs="l", step=16),
    "CosmosImageToVideoLatent": VideoNode(encodes=BOTH_ENDS, outputs="l"),
    "CosmosPredict2ImageToVideoLatent": VideoNode(encodes=BOTH_ENDS, outputs="l"),
    "HunyuanImageToVideo": VideoNode(encodes=START, outputs="pl"),
    "HunyuanVideo15ImageToVideo": VideoNode(encodes=START, step=16),
    "Kandinsky5ImageToVideo": VideoNode(encodes=START, outputs="pnle"),
    "LTXVImgToVideo": VideoNode(encodes=(("image", OWN),), step=32),
}

VIDEO_RULES: dict[str, Rule] = {
    **{name: partial(make_video, video) for name, video in VIDEOS.items()},
    **dict.fromkeys(("SVD_img2vid_Conditioning", "SV3D_Conditioning", "StableZero123_Conditioning"), make_from_vision),
    "MiniMaxH3ImageToVideo": make_prompted,
    "MiniMaxH3ReferenceToVideo": make_prompted,
    "WanInfiniteTalkToVideo": make_speaking,
    "WanSoundImageToVideoExtend": extend_by_sound,
    "ARVideoI2V": continue_image,
}
