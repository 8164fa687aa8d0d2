"""Traces of the calls that other code makes of several modules, such as a pipeline of its parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import reason_of
from .entries import follow_entries
from .forward_trace import follow_blocks, tensors_of
from .meta_twin import make_twin
from .recorder import Recorder
from .trace import Kernel, Trace, Untraceable

__all__ = ["CallTrace", "trace_calls"]

# What pipelines call of their parts beside their forwards.
METHODS = ("encode", "decode")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallTrace:
    """One call of one part."""

    part: str
    method: str
    held_bytes: int
    """What the caller holds on the device as the call begins: the inputs, and results that it needs later."""
    trace: Trace
    inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    """Shape and dtype of the tensors that it is called with, in order."""
    following: tuple[Kernel, ...] = ()
    """What the caller computes behind it, before the next call."""

    @property
    def peak_bytes(self) -> int:
        """The most that is held while the part computes, beside weights."""
        return self.held_bytes + self.trace.peak_bytes


def trace_calls(
    parts: Mapping[str, nn.Module],
    run: Callable[[Mapping[str, nn.Module]], Any],
    *,
    blocks: Mapping[str, Collection[str]] | None = None,
) -> list[CallTrace]:
    """Return the calls that ``run`` makes of the parts, in order; it gets their twins, which lie on the meta device.

    All that it does with tensors on that device counts. Costs what `trace_forward` costs, for each call.

    Args:
        blocks: by part, the paths of the modules to tell apart; of others the blocks that an engine would move.

    Raises:
        Untraceable: what it does depends on the values of tensors that are not known, or it failed.
    """
    recorder = Recorder()
    twins = {name: make_twin(part) for name, part in parts.items()}
    calls = Calls(recorder)
    for name, twin in twins.items():
        follow_blocks(recorder, twin, (blocks or {}).get(name))
        calls.follow(name, twin)
        follow_entries(recorder, twin)
    try:
        with torch.inference_mode(), recorder:
            run(twins)
    except Untraceable as error:
        raise Untraceable(f"{calls.running or 'what lies between the parts'} cannot be traced: {error}") from None
    except Exception as error:  # whatever code of models raises where tensors have no values
        where = calls.running or "what lies between the parts"
        raise Untraceable(f"{where} cannot be traced: {reason_of(error)}") from error
    finally:
        for twin in twins.values():
            for part in list(twin.modules()):
                vars(part).clear()  # a cache of its class may keep it
    return calls.found


class Calls:
    """Notes the calls of parts; one inside of another belongs to the outer one."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.found: list[CallTrace] = []
        self.running = ""
        self.inputs: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
        self.num_before = self.num_after = self.held_bytes = 0

    def follow(self, name: str, twin: nn.Module) -> None:
        """Note each call of a part's twin."""
        twin.register_forward_pre_hook(lambda _module, args: self.begin(name, "forward", args))
        twin.register_forward_hook(lambda _module, _args, output: self.end(name, "forward", output))
        for method in METHODS:
            if callable(getattr(type(twin), method, None)):
                vars(twin)[method] = partial(self.call, name, method, getattr(twin, method))

    def call(self, name: str, method: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.begin(name, method, args)
        output = function(*args, **kwargs)
        self.end(name, method, output)
        return output

    def begin(self, name: str, method: str, args: Sequence[Any]) -> None:
        if self.running:
            return
        self.inputs = tuple((tuple(value.shape), value.dtype) for value in args if isinstance(value, torch.Tensor))
        self.running = f"{name}.{method}"
        self.recorder.end_segment("")
        if self.found:
            between = self.recorder.segments[self.num_after :]
            kernels = tuple(kernel for segment in between for kernel in segment.kernels)
            self.found[-1] = replace(self.found[-1], following=kernels)
        self.num_before, self.held_bytes = len(self.recorder.segments), self.recorder.held_bytes

    def end(self, name: str, method: str, output: Any) -> None:
        if self.running != f"{name}.{method}":
            return
        self.running = ""
        self.recorder.end_segment("")
        self.num_after = len(self.recorder.segments)
        trace = self.recorder.trace_since(self.num_before, self.held_bytes, tensors_of(output))
        self.found.append(
            CallTrace(part=name, method=method, held_bytes=self.held_bytes, trace=trace, inputs=self.inputs)
        )
