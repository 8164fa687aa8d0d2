"""The inputs of nodes that sample a pipeline."""

from __future__ import annotations

from comfy_api.latest import io

from .sampling import FRAME_STEP, PIXEL_STEP

__all__ = ["PipelineType", "batch_input", "guidance_input", "size_inputs"]

PipelineType = io.Custom("HIGHWATER_PIPELINE")

MAX_PIXELS, MAX_FRAMES, MAX_BATCH = 16384, 1025, 4096


def size_inputs(default_pixels: int) -> list[io.Input]:
    """Return the inputs for the width, the height and the number of what is made."""
    tooltip = f"Pixels, a multiple of {PIXEL_STEP}."
    sides = [
        io.Int.Input(name, default=default_pixels, min=PIXEL_STEP, max=MAX_PIXELS, step=PIXEL_STEP, tooltip=tooltip)
        for name in ("width", "height")
    ]
    frames = io.Int.Input(
        "frames",
        default=1,
        min=1,
        max=MAX_FRAMES,
        step=FRAME_STEP,
        tooltip="1 for an image; 5, 9, 13, ... (4n + 1) for a video.",
    )
    return [*sides, frames]


def batch_input() -> io.Input:
    return io.Int.Input(
        "batch_size",
        optional=True,
        default=1,
        min=1,
        max=MAX_BATCH,
        tooltip="How many images, or videos, are made at once. Each takes as much memory beside the weights.",
    )


def guidance_input(tooltip: str) -> io.Input:
    return io.Float.Input("guidance", default=4.0, min=0.0, max=100.0, step=0.1, tooltip=tooltip)
