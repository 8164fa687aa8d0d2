"""Traces of forwards, or of other methods, of a module on the meta device; and activations by the shapes of inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import reason_of
from ..weights.module_component import component_from_module
from .entries import follow_entries
from .known_values import known_of
from .meta_twin import make_twin, with_values
from .recorder import Recorder
from .trace import Trace, Untraceable

__all__ = ["Activations", "trace_forward"]

# How many traces are kept of one module; the oldest goes first.
MOST_TRACES = 64


def trace_forward(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    method: str = "forward",
    blocks: Collection[str] | None = None,
    brings_back: bool = False,
) -> Trace:
    """Return what a call of a module takes, as `torch.inference_mode` would run it with the weights on its device.

    The module is neither changed nor read: a twin of it runs on the meta device, without hooks, wherever the weights
    are. Tensors among the arguments count as inputs that the device has; only their forms matter (`meta_like`), but for
    the values of few integers or truth values in RAM, such as ids and masks, of which models ask. Costs a second or
    two for a large model, whatever the sizes.

    Args:
        method: what is called, such as ``decode`` of a VAE.
        blocks: the paths of the modules to tell apart; by default the blocks that an engine would move.
        brings_back: whether its results may be copied to the host, as by `Recorder`.

    Raises:
        Untraceable: what the call does depends on the values of tensors, or it failed.
    """
    return trace_twin(make_twin(module), args, kwargs or {}, method=method, blocks=blocks, brings_back=brings_back)


def trace_twin(
    twin: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    method: str,
    blocks: Collection[str] | None,
    brings_back: bool = False,
) -> Trace:
    recorder = Recorder(brings_back=brings_back)
    follow_blocks(recorder, twin, blocks)
    follow_entries(recorder, twin)
    call = twin if method == "forward" else getattr(twin, method)
    args, kwargs = tree_map_only(torch.Tensor, with_values, (tuple(args), dict(kwargs)))
    try:
        with torch.inference_mode(), recorder:
            output = call(*args, **kwargs)
    except Untraceable as error:
        raise Untraceable(f"{type(twin).__name__}.{method} cannot be traced: {error}") from None
    except Exception as error:  # whatever code of models raises where tensors have no values
        raise Untraceable(f"{type(twin).__name__}.{method} cannot be traced: {reason_of(error)}") from error
    finally:
        for part in list(twin.modules()):
            vars(part).clear()  # a cache of its class may keep it
    recorder.end_segment("")
    return recorder.trace_since(0, 0, tensors_of(output))


def follow_blocks(recorder: Recorder, twin: nn.Module, blocks: Collection[str] | None) -> None:
    """Tell a recorder of the calls of a twin's blocks; None: of those that an engine would move."""
    if blocks is None:
        blocks = [block.name for block in component_from_module(twin, name=type(twin).__name__).blocks]
    for name in blocks:
        part = twin.get_submodule(name)
        part.register_forward_pre_hook(partial(entered, recorder, name))
        part.register_forward_hook(partial(left, recorder))


def tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of an output: models return mappings and objects of their own."""
    if isinstance(output, Mapping):
        output = list(output.values())
    elif not isinstance(output, torch.Tensor | list | tuple):
        output = list(getattr(output, "__dict__", {}).values())
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def entered(recorder: Recorder, name: str, *_: Any) -> None:
    recorder.enter(name)


def left(recorder: Recorder, _module: nn.Module, _args: Any, output: Any) -> None:
    recorder.leave(tensors_of(output))


class Activations:
    """How many bytes a module's forward takes beyond its weights and inputs: call it with inputs, real or meta ones.

    Traces once for each form of the inputs. Holds no weights and does not keep the module alive.

    Args:
        method: as for `trace_forward`.
    """

    def __init__(self, module: nn.Module, *, method: str = "forward") -> None:
        self.template = make_twin(module)
        self.method = method
        self.blocks = [block.name for block in component_from_module(self.template, name="module").blocks]
        self.traces: dict[Any, Trace | Untraceable] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        """Return the peak in bytes. Raises `Untraceable`."""
        return self.trace(*args, **kwargs).peak_bytes

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Return the trace. Raises `Untraceable`, at once where it did so before."""
        key = form_of((args, kwargs))
        if key not in self.traces:
            if len(self.traces) >= MOST_TRACES:
                del self.traces[next(iter(self.traces))]
            try:
                twin = make_twin(self.template)
                self.traces[key] = trace_twin(twin, args, kwargs, method=self.method, blocks=self.blocks)
            except Untraceable as error:
                self.traces[key] = error
        found = self.traces[key]
        if isinstance(found, Untraceable):
            raise Untraceable(str(found))
        return found


def form_of(value: Any) -> Any:
    """Return what a trace depends on: the forms of tensors, values that it knows, and all that is no tensor as text."""
    if isinstance(value, torch.Tensor):
        form = tuple(value.shape), tuple(value.stride()), value.dtype
        values = known_of(with_values(value))
        return form if values is None else (*form, *values.flatten().tolist())
    if isinstance(value, Mapping):
        return tuple((key, form_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(form_of, value)
    return repr(value)
