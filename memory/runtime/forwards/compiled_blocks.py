"""Compiles the repeated blocks of a component; equal blocks share one compiled graph.

[Note: compiling] Only a block's own ``forward`` is compiled. The hooks around it, which swap its weights, run
uncompiled and cause no graph break. Dynamo treats parameters as inputs, so weights in other memory of the same shape
and dtype need no new compilation. Other differences between blocks do (an ``int`` attribute, for example). Dynamo
limits the number of compilations of one function: the remaining blocks run uncompiled, and the report says how many.
The compiled function stands in the block's instance dictionary, where it hides the class's ``forward``, and is deleted
with the managed component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["CompiledBlocks", "untraced"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Devices for which inductor generates code; on others dynamo's graphs run eagerly.
INDUCTOR_DEVICES = ("cpu", "cuda", "xpu")
# Skip the function and all functions that it calls.
LEFT_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
OWN_FORWARD = "the block's forward is not that of its class"


def untraced(function: Function) -> Function:
    """Mark a function that ``torch.compile`` must not trace in a module that calls it; returns the function.

    Has the effect of `torch.compiler.disable`, without its import (seconds) and its wrapper (four microseconds per
    call): dynamo itself skips the function and the functions that it calls.
    """
    marked: Any = function
    set_code_exec_strategy(marked.__code__, LEFT_ALONE)
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    marked._torchdynamo_disable_msg = (
        "Highwater moves weights here: to export the module, release it first; to compile it, use a profile with "
        "compile=True, or call torch.compile without fullgraph=True"
    )
    return function


class CompiledBlocks:
    """The blocks of one component with compiled forwards, until `release`. Compilation happens in the first passes.

    Args:
        device: where the blocks compute; decides the backend.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        from torch._dynamo import lookup_backend  # takes seconds to import

        self.num_compiles = 0
        """The number of graphs that were compiled: one for each kind of block, shape of inputs and device."""
        self.backend = lookup_backend("inductor" if device.type in INDUCTOR_DEVICES else "eager")
        self.blocks = [block for block in blocks if "forward" not in vars(block)]
        self.num_own = len(blocks) - len(self.blocks)
        self.num_runs = 0
        """The number of runs of compiled graphs."""
        self.uncompiled: set[nn.Module] = set()
        """The blocks whose last run used no compiled graph."""
        for block in self.blocks:
            block.forward = self.watched(block, torch.compile(block.forward, backend=self.count))

    def watched(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's compiled forward, which also notes whether a graph ran. Costs one Python call."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self.num_runs
            output = forward(*args, **kwargs)
            if self.num_runs == before:
                self.uncompiled.add(block)
            else:
                self.uncompiled.discard(block)
            return output

        return run

    def count(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.num_compiles += 1
        compiled: Callable[..., Any] = self.backend(graph, inputs)

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return compiled(*args)

        return run

    def why_uncompiled(self) -> dict[str, int]:
        """Return the reasons why blocks run uncompiled, with the number of blocks. Covers only blocks that have run."""
        limit = torch._dynamo.config.recompile_limit
        left = f"torch._dynamo cannot compile it, or has compiled it {limit} times (recompile_limit)"
        counts = {OWN_FORWARD: self.num_own, left: len(self.uncompiled)}
        return {reason: num_blocks for reason, num_blocks in counts.items() if num_blocks}

    def release(self) -> None:
        """Restore every block's own forward. Idempotent."""
        for block in self.blocks:
            vars(block).pop("forward", None)
        self.blocks = []
        self.uncompiled.clear()
