"""Blocks as small as one layer: what granularity ``layer`` widens at once.

A layer is a module that is called and holds a weight that may rest encoded. Torch's attention never calls the layer
inside it, and reads its weight, so the attention is one layer; so is what adapts one, such as a LoRA. What else a
block has, such as norms, stays on its device with the non-block weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from .component import Block, Component, TensorSpec
from .module_component import is_callable

__all__ = ["cut_into_layers"]

# What peft calls the layer that one of its own adapts, whose weight that reads as it merges.
ADAPTED = "base_layer"


def cut_into_layers(component: Component, module: nn.Module) -> Component:
    """Return a component whose blocks are the layers of its blocks, in the same order.

    Where it has no blocks, all of its layers are: then none has to be called in a row.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    layers: dict[str, list[TensorSpec]] = {}
    left: list[TensorSpec] = []
    for block in component.blocks or (component.non_block,):
        paths = {layer_of(tensor, block.name, modules) for tensor in block.tensors if tensor.encodable} - {None}
        for tensor in block.tensors:
            path = path_inside(tensor, paths)
            (left if path is None else layers.setdefault(path, [])).append(tensor)
    if not layers:
        return component
    fixed = (*component.non_block.tensors, *left) if component.blocks else tuple(left)
    return replace(
        component,
        blocks=tuple(Block(name=path, tensors=tuple(tensors)) for path, tensors in layers.items()),
        non_block=Block(name="", tensors=fixed),
        is_in_layers=True,
    )


def layer_of(tensor: TensorSpec, block: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the layer of a weight; None where nothing that is called holds it."""
    words = tensor.name.split(".")[:-1]
    for depth in range(len(block.split(".")) if block else 1, len(words) + 1):
        path = ".".join(words[:depth])
        if (layer := modules.get(path)) is not None and reads_inside(layer):
            return path
    path = ".".join(words)
    return path if path and is_callable(modules.get(path)) else None


def reads_inside(module: nn.Module) -> bool:
    """Whether a module reads weights of the layers inside it without calling them."""
    return isinstance(module, nn.MultiheadAttention) or ADAPTED in module._modules


def path_inside(tensor: TensorSpec, paths: set[str | None]) -> str | None:
    """Return which of these paths a weight is below, the outermost."""
    words = tensor.name.split(".")
    return next((path for depth in range(1, len(words)) if (path := ".".join(words[:depth])) in paths), None)
