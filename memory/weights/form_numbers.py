"""Storage forms in numbers: how many bytes a weight takes at rest, for plans, which need no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from .component import BITS, TensorSpec

__all__ = ["AS_THEY_CAME", "OWN", "ROW", "FormNumbers", "Forms", "LeafNumbers", "rests_of"]

WIDE_DTYPES = frozenset({"F32", "F16", "BF16"})
ROW = 0
"""As many elements as a row has."""
OWN = 0
"""As many bits as an element of the weight has as it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafNumbers:
    """One of the tensors that an encoded weight rests as: so many bits for each group of elements of a row."""

    bits: int
    group: int = 1
    """How many elements have these bits together: 1 for codes, `ROW` for a scale per row."""

    def num_bytes(self, tensor: TensorSpec) -> int:
        num_groups = tensor.num_elements
        if self.group != 1:
            rows = tensor.shape[0]
            columns = num_groups // max(1, rows)
            num_groups = rows * -(-columns // (self.group or max(1, columns)))
        return -(-num_groups * (self.bits or BITS[tensor.dtype]) // 8)


def every_shape(tensor: TensorSpec) -> bool:
    """Say that a form is defined for weights of every shape."""
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class FormNumbers:
    """A storage form in numbers and words; `known_forms` says which class encodes and decodes it.

    Args:
        name: what a user writes as precision.
        rests: how a weight rests, in a message.
        leaves: in the order of the leaves that the form's class makes.
        suits: whether the form is defined for a weight of this shape, such as rows of whole groups.
        error_limit: weights that lose more, relative to their size, stay as stored unless the user sets another limit.
        is_float8: whether its codes are float8, which not every device can widen.
        in_parts: whether a weight can be measured and encoded part by part, which its file then is read in: it has one
            leaf, of as many elements as the weight.
    """

    name: str
    rests: str
    leaves: tuple[LeafNumbers, ...]
    suits: Callable[[TensorSpec], bool] = every_shape
    error_limit: float = math.inf
    is_float8: bool = False
    in_parts: bool = False

    def takes(self, tensor: TensorSpec) -> bool:
        """Whether a weight can rest in this form."""
        is_cast = tensor.encodable and tensor.dtype in WIDE_DTYPES and tensor.num_elements > 0
        return is_cast and self.suits(tensor)

    def leaf_bytes(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the bytes of each leaf at rest."""
        return tuple(leaf.num_bytes(tensor) for leaf in self.leaves)


Forms: TypeAlias = Mapping[str, FormNumbers]
"""The encoded forms by weight name; all other weights rest as they came."""
AS_THEY_CAME: Forms = MappingProxyType({})


def rests_of(forms: Forms) -> str:
    """Return how the encoded weights rest, in a message; empty where there are none."""
    return " and ".join(dict.fromkeys(numbers.rests for numbers in forms.values()))
