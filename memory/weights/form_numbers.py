"""Storage forms in numbers: how many bytes a weight takes at rest, for plans, which need no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from ..options.precision import Precision
from .component import TensorSpec

__all__ = ["AS_THEY_CAME", "NUMBERS", "SCALED_FP8", "FormNumbers", "Forms"]

WIDE_DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FormNumbers:
    """A storage form in numbers: one leaf of so many bits per element. A form with other leaves has a subclass.

    Args:
        name: that of the form in `known_forms`, which encodes and decodes.
        rests: how a weight rests, in a message.
    """

    name: str
    rests: str
    element_bits: int

    def takes(self, tensor: TensorSpec) -> bool:
        """Whether a weight can rest in this form."""
        return tensor.castable and tensor.dtype in WIDE_DTYPES

    def leaf_bytes(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the bytes of each leaf at rest."""
        return (-(-tensor.num_elements * self.element_bits // 8),)


SCALED_FP8 = FormNumbers(name="scaled fp8", rests="in eight bits", element_bits=8)
NUMBERS = {Precision.FP8_SCALED: SCALED_FP8}
"""By the precision that a user names, the form in which weights of blocks rest."""

Forms: TypeAlias = Mapping[str, FormNumbers]
"""The encoded forms by weight name; all other weights rest as they came."""
AS_THEY_CAME: Forms = MappingProxyType({})
