"""Compiling the repeated blocks of a component, once for all that are alike.

[Note: compiling] Only a block's own ``forward`` is compiled, so the hooks around it, which swap its weights, run as
they do without: no graph break. Dynamo takes parameters as inputs, so weights that show other memory of the same
shape and dtype do not compile again. The compiled function stands in the block's instance dictionary before the
class's own and is deleted with the attachment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["CompiledBlocks"]

# Devices that inductor has a code generator for; elsewhere dynamo's capture runs eagerly.
INDUCTOR_DEVICES = ("cpu", "cuda", "xpu")


class CompiledBlocks:
    """The blocks of one component with compiled forwards, until `release`. Compiling happens in the first passes.

    Args:
        device: where the blocks compute; decides the backend.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        from torch._dynamo import lookup_backend  # takes seconds to import, so only for who compiles

        self.num_compiles = 0
        """How often dynamo handed a graph to the backend: one for each kind of block, shape of inputs and device."""
        self.backend = lookup_backend("inductor" if device.type in INDUCTOR_DEVICES else "eager")
        self.blocks = [block for block in blocks if "forward" not in vars(block)]
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend=self.count)

    def count(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_compiles += 1
        compiled: Callable[..., Any] = self.backend(graph, inputs)
        return compiled

    def release(self) -> None:
        """Let every block run its class's own forward again. Idempotent."""
        for block in self.blocks:
            vars(block).pop("forward", None)
        self.blocks = []
