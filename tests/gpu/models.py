"""Models for the tests in here: the engine's own toy, in a size that the card notices."""

from __future__ import annotations

import torch

from highwater.tests.engine.conftest import Net, build_net
from highwater.tests.gpu.conftest import Card

__all__ = ["build", "make_inputs", "reference", "weight_bytes"]

NUM_TOKENS = 64


def build(card: Card, *, seed: int = 0, dtype: torch.dtype | None = None) -> Net:
    """Return 16 unequal blocks in plain RAM: about 280 MB for a GPU, 2 MB for a simulated device."""
    return build_net(seed, dtype or card.dtype, dim=card.width, doubles=6, singles=10)


def weight_bytes(net: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in net.parameters())


def make_inputs(card: Card, count: int, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Return different inputs in plain RAM."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, NUM_TOKENS, card.width)
    return [torch.randn(shape, generator=generator).to(dtype or card.dtype) for _ in range(count)]


def reference(net: torch.nn.Module, card: Card, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a module computes wholly on the card, without the engine; it is back in RAM afterwards."""
    net.to(card.torch_device)
    outputs = [net(x.to(card.torch_device)).cpu() for x in inputs]
    net.to("cpu")
    card.device.empty_cache()
    return outputs
