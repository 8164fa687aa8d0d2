"""The forms of what operators return, computed once for each form of arguments: equal blocks ask for the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .known_values import tensors_in

__all__ = ["ResultForms"]

Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a result that has memory of its own, without gaps at its ends."""


class ResultForms:
    """Calls operators that write to no argument, on the meta device.

    Torch computes the form of a result there in Python, which takes a millisecond for each operator of a model; a form
    that is known takes a tenth of that.
    """

    def __init__(self) -> None:
        self.known: dict[Any, tuple[type | None, tuple[Form, ...]]] = {}

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what an operator returns: tensors of the meta device that are equal to its own results in form."""
        try:
            key = function, key_of(args), key_of(tuple(kwargs.items()))
            found = self.known.get(key)
        except TypeError:  # an argument cannot be a key
            return function(*args, **kwargs)
        if found is not None:
            kind, forms = found
            tensors = [
                torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in forms
            ]
            return tensors[0] if kind is None else kind(tensors)
        result = function(*args, **kwargs)
        results = result if type(result) in (list, tuple) else (result,)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, list(kwargs.values())))}
        own = {tensor.untyped_storage()._cdata for tensor in results if is_whole(tensor)} - given
        if len(own) == len(results):
            forms = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in results)
            self.known[key] = (None if isinstance(result, Tensor) else type(result)), forms
        return result


def is_whole(value: Any) -> bool:
    """Whether a result is a plain tensor of which shape, strides and dtype tell all."""
    if type(value) is not Tensor or not value.is_meta or value.storage_offset() or value.requires_grad:
        return False
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    num_bytes = reach * value.element_size() if value.numel() else 0
    return value.untyped_storage().nbytes() == num_bytes and not (value.is_conj() or value.is_neg())


def key_of(value: Any) -> Any:
    """Return what of an argument decides the forms of results."""
    if isinstance(value, Tensor):
        signs = value.is_conj(), value.is_neg(), value.requires_grad
        return value.device.type, tuple(value.shape), value.stride(), value.dtype, signs
    if isinstance(value, list | tuple):
        return type(value), *map(key_of, value)
    return type(value), value
