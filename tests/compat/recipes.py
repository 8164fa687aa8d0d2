"""Registering a tiny pipeline of diffusers: its parts, what it is called with, and what it does not have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from highwater.tests.compat.modes import Recipe

__all__ = ["IMAGE", "PROMPT", "RECIPES", "TO_LAYERS", "TO_QKV", "ddim", "flow", "recipe"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the libraries ask the network even for what is there

RECIPES: dict[str, Recipe] = {}
TO_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
TO_QKV = TO_LAYERS[:3]
PROMPT = "a red fox"


def recipe(
    pipeline: str, *, lora: tuple[str, ...] = (), guides: tuple[str, ...] = (), **call: Any
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Register a pipeline: the function below returns its parts; ``call`` is what it is called with."""

    def register(parts: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def build() -> Any:
            return getattr(diffusers, pipeline)(**parts())

        def run(pipe: Any) -> Any:
            arguments = {name: value() if callable(value) else value for name, value in call.items()}
            return pipe(**arguments, generator=torch.Generator().manual_seed(3))

        RECIPES[pipeline] = Recipe(name=pipeline, build=build, call=run, lora_targets=lora, guides=guides)
        return parts

    return register


IMAGE = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "pt"}


def ddim(**options: Any) -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, **options
    )


def flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **options)
