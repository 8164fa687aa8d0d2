"""Whether the weights of a module that another library made can be moved as bytes; tried where it cannot be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .quantized_leaves import PackedForm, Wrapper, leaves_of

__all__ = ["has_packed_weights", "is_packed", "why_not_movable"]


def why_not_movable(module: nn.Module) -> str | None:
    """Return why the weights of a module cannot be moved as bytes, None if they can.

    Of packed weights the smallest is tried: its layer computes twice, from the weight and from a copy of it.
    """
    for parameter in module.parameters():
        kind = type(parameter.data)
        if kind is torch.Tensor or is_traceable_wrapper_subclass(parameter.data) or Wrapper.of(parameter):
            continue
        return f"its weights have the class {kind.__name__}, which does not expose its inner tensors"
    return why_not_copied(module)


def has_packed_weights(module: nn.Module) -> bool:
    """Whether any of its layers computes from a packed weight."""
    return any(map(is_packed, module.parameters()))


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a weight's bytes mean nothing without the attributes of its tensor."""
    return isinstance(Wrapper.of(weight), PackedForm) and not weight.is_floating_point()


def why_not_copied(module: nn.Module) -> str | None:
    """Return how a layer computes otherwise from a copy of its packed weight; None if it does not."""
    layers = [
        (layer.weight.nbytes, path, layer)
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and layer.weight is not None and is_packed(layer.weight)
    ]
    if not layers:
        return None
    _, path, layer = min(layers, key=lambda found: found[:2])
    own: Any = layer.weight
    form = PackedForm(type(own), (), dict(vars(own)), own.size(), own.stride())
    with torch.no_grad(), torch.inference_mode(False):
        (leaf,) = leaves_of(own)
        copied: Any = form.assemble(iter([leaf.clone()]))
        copied._is_param = True
        given = torch.linspace(-1, 1, layer.in_features, device=leaf.device)[None]
        try:
            wanted = layer(given)
            layer._parameters["weight"] = copied
            found = layer(given)
        except Exception as error:  # of another library's code, whatever it is
            return f"its layer {path} cannot be tried alone ({type(error).__name__}: {error})"
        finally:
            layer._parameters["weight"] = own
    if not torch.equal(wanted, found):
        return f"its layer {path} computes otherwise from a copy of its weight, a {type(own).__name__}"
    return None
