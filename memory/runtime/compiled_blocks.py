"""Compiling the repeated blocks of a component, once for all that are alike.

[Note: compiling] Only a block's own ``forward`` is compiled, so the hooks around it, which swap its weights, run as
they do without: no graph break. Dynamo takes parameters as inputs, so weights that show other memory of the same
shape and dtype do not compile again. What else differs between blocks does (an ``int`` attribute, say), and dynamo
compiles one function only so many times: the other blocks run as they are, and the report says how many. The compiled
function stands in the block's instance dictionary before the class's own and is deleted with the managed component.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

__all__ = ["CompiledBlocks", "untraced"]

Function = TypeVar("Function", bound=Callable[..., Any])

# Devices that inductor has a code generator for; elsewhere dynamo's capture runs eagerly.
INDUCTOR_DEVICES = ("cpu", "cuda", "xpu")
# Of a function, and of all that it calls.
LEFT_ALONE = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
OWN_FORWARD = "the block has a forward of its own, which is not its class's"


def untraced(function: Function) -> Function:
    """Mark a function that a module under ``torch.compile`` calls as it is, between two graphs; returns it.

    What `torch.compiler.disable` does, without its import, which takes seconds, and without its wrapper, which takes
    four microseconds of each call: dynamo itself leaves the function and what that calls alone.
    """
    marked: Any = function
    set_code_exec_strategy(marked.__code__, LEFT_ALONE)
    marked._torchdynamo_disable = marked._torchdynamo_disable_recursive = True
    marked._torchdynamo_disable_msg = (
        "Highwater moves weights here: let it compile the blocks (profile with compile=True), or compile without "
        "fullgraph=True"
    )
    return function


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
        self.num_own = len(blocks) - len(self.blocks)
        self.num_runs = 0
        """How often a graph was run."""
        self.uncompiled: set[nn.Module] = set()
        """The blocks that ran no graph when they ran last."""
        for block in self.blocks:
            block.forward = self.watched(block, torch.compile(block.forward, backend=self.count))

    def watched(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's compiled forward, which also sees whether a graph ran; costs a call."""

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
        """Return why blocks run uncompiled, and how many for each reason; only those that have run by now tell."""
        limit = torch._dynamo.config.recompile_limit
        left = f"torch._dynamo left it as it is: it cannot compile it, or has done so {limit} times (recompile_limit)"
        counts = {OWN_FORWARD: self.num_own, left: len(self.uncompiled)}
        return {reason: num_blocks for reason, num_blocks in counts.items() if num_blocks}

    def release(self) -> None:
        """Give every block its class's own forward back. Idempotent."""
        for block in self.blocks:
            vars(block).pop("forward", None)
        self.blocks = []
        self.uncompiled.clear()
