"""All recipes of diffusers' pipelines, by the pipeline's name."""

from highwater.tests.compat import (  # noqa: F401  # each registers its own
    audio,
    audio_dits,
    cosmos,
    dits,
    flux,
    images,
    kandinsky6,
    ltx2,
    more_images,
    more_videos,
    no_images,
    other_images,
    qwen,
    qwen3_images,
    unets,
    unets_cascade,
    unets_control,
    unets_kandinsky,
    unets_kolors,
    unets_old,
    unets_pixel,
    unets_sd,
    unets_sdxl,
    unets_video,
    versatile,
    videos,
    wan,
    wan_kin,
)
from highwater.tests.compat.recipes import RECIPES

__all__ = ["RECIPES"]
