"""Registering a tiny pipeline of diffusers: its parts, what it is called with, and what it does not have."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import diffusers
import torch

from highwater.tests.compat.modes import Recipe

__all__ = ["IMAGE", "LIMITED", "PROMPT", "RECIPES", "TO_LAYERS", "TO_QKV", "ddim", "flow", "recipe"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the libraries ask the network even for what is there

RECIPES: dict[str, Recipe] = {}
LIMITED: dict[str, tuple[Recipe, str]] = {}
"""What has no row, and why: each is a limit of Highwater."""
TO_LAYERS = ("to_q", "to_k", "to_v", "to_out.0")
TO_QKV = TO_LAYERS[:3]
PROMPT = "a red fox"


def recipe(
    pipeline: str,
    variant: str = "",
    *,
    lora: tuple[str, ...] = (),
    guides: tuple[str, ...] = (),
    before: Callable[[Any], None] | None = None,
    placed: tuple[str, ...] = (),
    limit: str = "",
    method: str = "__call__",
    **call: Any,
) -> Callable[[Callable[[], dict[str, Any]]], Callable[[], dict[str, Any]]]:
    """Register a pipeline: the function below returns its parts; ``call`` is what it is called with.

    ``variant`` tells two rows of one pipeline apart. What is callable in ``call`` is made anew for each run;
    ``before`` gets the pipeline before it is called; tensors in ``placed`` the caller puts on the device.
    ``limit`` says why it has no row: Highwater cannot do all of it yet. ``method`` is what is called of the pipeline.
    """
    title = f"{pipeline}, {variant}" if variant else pipeline

    def register(parts: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        def build() -> Any:
            return getattr(diffusers, pipeline)(**parts())

        def run(pipe: Any) -> Any:
            if before:
                before(pipe)
            arguments = {name: value() if callable(value) else value for name, value in call.items()}
            for name in placed:
                arguments[name] = arguments[name].to(pipe._execution_device)
            called = getattr(pipe, method)
            if "generator" in inspect.signature(called).parameters:
                arguments.setdefault("generator", torch.Generator().manual_seed(3))
            return called(**arguments)

        assert title not in RECIPES, f"{title} has two recipes"
        made = Recipe(name=title, build=build, call=run, lora_targets=lora, guides=guides)
        if limit:
            LIMITED[title] = made, limit
        else:
            RECIPES[title] = made
        return parts

    return register


IMAGE = {"prompt": PROMPT, "num_inference_steps": 2, "output_type": "pt"}


def ddim(**options: Any) -> Any:
    return diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, **options
    )


def flow(**options: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **options)
