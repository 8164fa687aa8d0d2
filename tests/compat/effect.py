"""Which components of a pipeline have weights that its outputs do not depend on.

Of those a row of the table says nothing: they could compute anything. Knows nothing of pytest.
"""

from __future__ import annotations

import torch
from torch import nn

from highwater.memory.weights.module_component import component_from_module
from highwater.tests.compat.modes import EQUAL, Outputs, Recipe, build, compare, modules_of, run

__all__ = ["parts_without_effect"]

NOISE = 0.5
"""By how much of its own size each weight changes: as much as another weight would, so that no rounding hides it."""
SEEDS = range(4, 12)
"""A model whose tokens are sampled may sample those that count again; tried until one has an effect."""


def parts_without_effect(recipe: Recipe) -> list[str]:
    """Return the components that can have other weights in their blocks without any other output, in order.

    Everything is on the CPU and unmanaged. What is zero stays zero: what leaves the blocks out does so here, too.
    A component without blocks, or without a matrix in one, gets all its weights changed.
    """
    run(recipe, build(recipe, with_lora=False))  # LTX 2's first run in a process differs from all that come after it
    want = run(recipe, build(recipe, with_lora=False))
    deaf = []
    for name in modules_of(build(recipe, with_lora=False)):
        tries = (try_noise(recipe, name, seed, want) for seed in SEEDS)
        if all(found == EQUAL for found in tries):  # ends at the first that is not
            deaf.append(name)
    return deaf


def try_noise(recipe: Recipe, name: str, seed: int, want: Outputs) -> str | None:
    """Return how the outputs compare with other weights in a component, as `compare` says it; None if it has none."""
    pipe = build(recipe, with_lora=False)
    if not add_noise(name, modules_of(pipe)[name], seed):
        return None
    found = compare(run(recipe, pipe), want)
    assert found == EQUAL or found.startswith("differs"), f"{recipe.name}: {found}"
    return found


def add_noise(name: str, module: nn.Module, seed: int) -> bool:
    """Change the matrices in the module's blocks; return whether it has weights at all."""
    weights = {key: weight for key, weight in module.named_parameters() if weight.is_floating_point()}
    blocks = component_from_module(module, name=name).blocks
    matrices = [
        weights[tensor.name]
        for block in blocks
        for tensor in block.tensors
        if tensor.name in weights and len(tensor.shape) > 1
    ]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in matrices or weights.values():
            if weight.any():
                noise = torch.randn(weight.shape, generator=generator)
                size = weight.float().square().mean().sqrt()
                weight.add_((noise * size * NOISE).to(weight.dtype))
    return bool(weights)
