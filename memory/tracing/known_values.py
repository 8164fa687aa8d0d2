"""Values of small tensors that a trace knows, for code that asks: masks, ids, positions and what is computed from them.

[Note: known values] A tensor of the meta device has no values, but those of a few follow from what was given in RAM: a
mask of tokens, a table of positions, constants. They are computed on the CPU beside the trace, operator by operator,
views as views. What is written from a tensor without values has none from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["KnownValues", "give_values", "known_of", "tensors_in"]

KEY = "_known_values"
# Elements of tensors of integers and truth values, and of others.
MOST_INTEGERS, MOST_OTHERS = 1 << 16, 1 << 10


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments or results, which are lists of them at most."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def is_small(tensor: Tensor) -> bool:
    """Whether values of such a tensor are followed."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (MOST_INTEGERS if is_integer else MOST_OTHERS)


def give_values(meta: Tensor, tensor: Tensor) -> Tensor:
    """Note the values of a tensor for its twin on the meta device: of a small plain one in RAM, or what is known."""
    if tensor.is_meta:
        setattr(meta, KEY, getattr(tensor, KEY, None))
    elif type(tensor) is Tensor and tensor.device.type == "cpu" and is_small(tensor):
        setattr(meta, KEY, tensor.detach().clone())
    return meta


def known_of(meta: Tensor) -> Tensor | None:
    """Return what `give_values` gave a tensor, or None."""
    values: Tensor | None = getattr(meta, KEY, None)
    return values


class KnownValues:
    """The values that one trace knows ([Note: known values])."""

    def __init__(self) -> None:
        self.stale: dict[int, torch.UntypedStorage] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, or None. A tensor that is not of the meta device is its own values."""
        if not tensor.is_meta:
            return tensor
        values = known_of(tensor)
        return None if values is None or values.untyped_storage()._cdata in self.stale else values

    def forget(self, tensor: Tensor) -> None:
        """Note that something without values was written to a tensor."""
        values = known_of(tensor)
        if values is not None:
            storage = values.untyped_storage()
            self.stale[storage._cdata] = storage

    def compute(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator returns for the values of its arguments; None where one has none."""
        given = list(tensors_in((args, list(kwargs.values()))))
        if any(self.of(tensor) is None for tensor in given):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
            return None
        kwargs = {name: self.values_of(value) for name, value in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        return function(*map(self.values_of, args), **kwargs)

    def values_of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, list | tuple):
            return type(value)(map(self.values_of, value))
        return value

    def follow(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        result: Any,
        targets: Sequence[Tensor] = (),
    ) -> None:
        """Compute an operator's values beside it, if they are known and few; else those of its targets are lost."""
        results = list(tensors_in(result if isinstance(result, list | tuple) else (result,)))
        found = self.compute(function, args, kwargs) if all(map(is_small, [*results, *targets])) else None
        if found is None:
            for target in targets:
                self.forget(target)
            return
        values = tensors_in(found if isinstance(found, list | tuple) else (found,))
        for tensor, value in zip(results, values, strict=True):
            if not any(tensor is target for target in targets):
                setattr(tensor, KEY, value)
