"""Which components of a pipeline have weights that its outputs do not depend on.

Of those a row of the table says nothing: they could compute anything. Knows nothing of pytest.
"""

from __future__ import annotations

import torch
from torch import nn

from highwater.memory.weights.module_component import component_from_module
from highwater.tests.compat.modes import EQUAL, Recipe, build, compare, modules_of, run

__all__ = ["parts_without_effect"]

NOISE = 0.5
"""By how much of its own size each weight changes: as much as another weight would, so that no rounding hides it."""


def parts_without_effect(recipe: Recipe) -> list[str]:
    """Return the components that can have other weights in their blocks without any other output, in order.

    Everything is on the CPU and unmanaged. What is zero stays zero: what leaves the blocks out does so here, too.
    A component without blocks, or without a matrix in one, gets all its weights changed.
    """
    want = run(recipe, build(recipe, with_lora=False))
    deaf = []
    for name in modules_of(build(recipe, with_lora=False)):
        pipe = build(recipe, with_lora=False)
        if not add_noise(name, modules_of(pipe)[name]):
            continue
        found = compare(run(recipe, pipe), want)
        if found == EQUAL:
            deaf.append(name)
        elif not found.startswith("differs"):
            raise AssertionError(f"{recipe.name}: {found}")
    return deaf


def add_noise(name: str, module: nn.Module) -> bool:
    """Change the matrices in the module's blocks; return whether it has weights at all."""
    weights = {key: weight for key, weight in module.named_parameters() if weight.is_floating_point()}
    blocks = component_from_module(module, name=name).blocks
    matrices = [
        weights[tensor.name]
        for block in blocks
        for tensor in block.tensors
        if tensor.name in weights and len(tensor.shape) > 1
    ]
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in matrices or weights.values():
            if weight.any():
                noise = torch.randn(weight.shape, generator=generator)
                size = weight.float().square().mean().sqrt()
                weight.add_((noise * size * NOISE).to(weight.dtype))
    return bool(weights)
