"""What models are made of, in the order in which they run: bytes and flops of every layer, without a single weight.

A model of the real configuration is built on torch's meta device and its forward runs there once, so bytes, flops
and order are those of the code that people run. Flops are those of matrix products, convolutions and attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from highwater.memory.weights.module_component import component_from_module

__all__ = [
    "SDXL_UNET",
    "SHAPES",
    "Layer",
    "Shape",
    "Stretch",
    "child_of_stack",
    "on_meta",
    "outermost_number",
    "record_shape",
]

NUMBERED = re.compile(r"(.*?\.\d+)(?:\.|$)")
CHILD_OF_STACK = re.compile(r"([^.]+\.\d+)(?:\.|$)")
SDXL_UNET: Mapping[str, Any] = {
    "sample_size": 128,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What one module does by itself; ``weight_bytes`` is 0 where weights of others meet, as in attention."""

    path: str
    weight_bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Layers that run one after another and whose weights move as one; ``name`` is empty for what never moves."""

    name: str
    weight_bytes: int
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model's layers as they run, and its blocks as the engine finds them, in the engine's order."""

    name: str
    layers: tuple[Layer, ...]
    block_names: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    def block_of(self, path: str) -> str | None:
        """Return the block that a module belongs to; None for the rest."""
        return next((name for name in self.block_names if f"{path}.".startswith(f"{name}.")), None)

    def stretches(self, group_of: Callable[[str], str | None]) -> tuple[list[Stretch], int]:
        """Join the layers by a group for each path, None for the rest; returns them and the bytes of the rest.

        Layers of the rest compute where they stand, with no bytes of their own.
        """
        joined: list[Stretch] = []
        rest_bytes = 0
        for layer in self.layers:
            name = group_of(layer.path) or ""
            rest_bytes += 0 if name else layer.weight_bytes
            weight_bytes = layer.weight_bytes if name else 0
            if joined and joined[-1].name == name:
                last = joined.pop()
                weight_bytes, flops = last.weight_bytes + weight_bytes, last.flops + layer.flops
            else:
                flops = layer.flops
            joined.append(Stretch(name=name, weight_bytes=weight_bytes, flops=flops))
        return joined, rest_bytes

    def thinned(self, every: int) -> Shape:
        """Return a model with one block of so many, and that part of the rest: small enough to search."""
        kept = frozenset(self.block_names[::every])
        share = len(kept) / len(self.block_names)
        layers = []
        for layer in self.layers:
            block = self.block_of(layer.path)
            if block is None:
                layers.append(
                    replace(layer, weight_bytes=int(layer.weight_bytes * share), flops=int(layer.flops * share))
                )
            elif block in kept:
                layers.append(layer)
        names = tuple(name for name in self.block_names if name in kept)
        return Shape(name=f"{self.name}, every {every}th block", layers=tuple(layers), block_names=names)


def outermost_number(path: str) -> str | None:
    """Return the path to the outermost numbered part, whatever is inside: what mmgp slices by."""
    match = NUMBERED.match(path)
    return match[1] if match else None


def child_of_stack(path: str) -> str | None:
    """Return the path to a numbered child of a child of the root: what diffusers groups by."""
    match = CHILD_OF_STACK.match(path)
    return match[1] if match else None


def record_shape(name: str, model: nn.Module, inputs: Mapping[str, Any]) -> Shape:
    """Run a model's forward on the meta device and note its layers; a second or two, no memory."""
    layers: list[Layer] = []
    running = [""]
    counted = 0
    counter = FlopCounterMode(display=False)

    def settle() -> None:
        """Give the flops since the last event to the innermost module that runs."""
        nonlocal counted
        total = counter.get_total_flops()
        if total == counted:
            return
        flops, counted = total - counted, total
        if layers and layers[-1].path == running[-1]:
            layers[-1] = replace(layers[-1], flops=layers[-1].flops + flops)
        else:
            layers.append(Layer(path=running[-1], weight_bytes=0, flops=flops))

    def before(path: str, weight_bytes: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            settle()
            running.append(path)
            if weight_bytes:
                layers.append(Layer(path=path, weight_bytes=weight_bytes, flops=0))

        return enter

    def leave(*_: Any) -> None:
        settle()
        running.pop()

    for path, module in model.named_modules():
        weight_bytes = sum(weight.numel() * weight.element_size() for weight in module.parameters(recurse=False))
        module.register_forward_pre_hook(before(path, weight_bytes))
        module.register_forward_hook(leave)
    with torch.no_grad(), counter:
        model(**inputs)
    component = component_from_module(model, name="transformer")
    shape = Shape(name=name, layers=tuple(layers), block_names=tuple(block.name for block in component.blocks))
    assert shape.weight_bytes == component.weight_bytes, "a layer did not run once"
    return shape


def empty(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, device="meta", dtype=torch.bfloat16)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model in bf16 without memory for its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return build()
    finally:
        torch.set_default_dtype(before)


def flux() -> Shape:
    """Flux.1 at 1024x1024: 4096 image tokens and 512 of text; 19 double and 38 single blocks."""
    from diffusers import FluxTransformer2DModel

    inputs = {
        "hidden_states": empty(1, 4096, 64),
        "encoder_hidden_states": empty(1, 512, 4096),
        "pooled_projections": empty(1, 768),
        "timestep": empty(1),
        "guidance": empty(1),
        "img_ids": empty(4096, 3),
        "txt_ids": empty(512, 3),
    }
    return record_shape("Flux", on_meta(lambda: FluxTransformer2DModel(guidance_embeds=True)), inputs)


def wan() -> Shape:
    """Wan 2.1 14B at 832x480, 33 frames: 14,040 tokens; 40 equal blocks."""
    from diffusers import WanTransformer3DModel

    inputs = {
        "hidden_states": empty(1, 16, 9, 60, 104),
        "timestep": empty(1),
        "encoder_hidden_states": empty(1, 512, 4096),
    }
    return record_shape("Wan 14B", on_meta(WanTransformer3DModel), inputs)


def sdxl() -> Shape:
    """The UNet of Stable Diffusion XL at 1024x1024, with and without prompt in one batch; unequal blocks."""
    from diffusers import UNet2DConditionModel

    inputs = {
        "sample": empty(2, 4, 128, 128),
        "timestep": empty(1),
        "encoder_hidden_states": empty(2, 77, 2048),
        "added_cond_kwargs": {"text_embeds": empty(2, 1280), "time_ids": empty(2, 6)},
    }
    return record_shape("SDXL UNet", on_meta(lambda: UNet2DConditionModel(**SDXL_UNET)), inputs)


SHAPES: Iterable[Callable[[], Shape]] = (flux, wan, sdxl)
