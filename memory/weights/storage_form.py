"""Storage forms: how a weight rests, and how it is decoded to compute.

A weight rests as leaves: plain tensors in the slab of its block. As stored it is its own only leaf, and computes as it
is. A quantized weight is a wrapper around its leaves (`quantized_leaves.Wrapper`). A weight in an encoded form is
decoded from its leaves into scratch, as a wide copy, each time before it computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, TypeVar

import torch

from .form_numbers import FormNumbers

__all__ = ["AS_STORED", "EncodedForm", "StorageForm", "empty_codes"]

Own = TypeVar("Own", bound="EncodedForm")


class StorageForm:
    """The form of one weight. This one: as stored."""

    __slots__ = ()

    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves of a weight."""
        return [weight]

    def assemble(self, leaves: Iterator[torch.Tensor]) -> torch.Tensor:
        """Return what a module holds for the next leaves; copies nothing."""
        return next(leaves)


AS_STORED = StorageForm()


def empty_codes(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor without memory that is laid out as a weight.

    The first `torch.empty_like` of a tensor without memory imports sympy, which takes half a second.
    """
    if weight.is_contiguous():
        return torch.empty(weight.shape, dtype=dtype, device="meta")
    return torch.empty_like(weight, dtype=dtype, device="meta")


class EncodedForm(StorageForm, ABC):
    """The form of one weight that is encoded, in another dtype or other tensors than those that compute.

    Its numbers say how many bytes the leaves take. A form without state of its own has one instance for all weights;
    one with a scale has one instance per weight, and a new one when the weight changes.
    """

    __slots__ = ()
    numbers: ClassVar[FormNumbers]

    @property
    def factor(self) -> float | None:
        """The factor by which the only leaf is multiplied to give the weight; None where decoding is not just that."""
        return None

    @classmethod
    @abstractmethod
    def empty_leaves(cls, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves of a weight, all without memory."""

    @classmethod
    @abstractmethod
    def measure(cls: type[Own], weight: torch.Tensor, *, name: str) -> Own:
        """Return the form for this weight; changes nothing.

        Raises:
            InvalidInput: the weight holds NaN or infinity.
        """

    @classmethod
    @abstractmethod
    def of_stored(cls: type[Own], shape: torch.Size, scale: float) -> Own:
        """Return the form of a weight whose leaves a file has; ``scale``: what it has beside them, else 1."""

    @classmethod
    def measure_parts(cls: type[Own], parts: Iterable[torch.Tensor], *, name: str) -> Own:
        """Do the same for a weight that comes in parts; only of a form whose numbers say ``in_parts``."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, weight: torch.Tensor) -> list[torch.Tensor]:
        """Return the leaves of the weight for which the form was measured."""

    def encoded_parts(self, weight: torch.Tensor, most: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield what `encode` gives, a few rows at a time: which leaf, from which of its elements on, and these.

        Args:
            most: how many elements of the weight are encoded at once, if a row has no more.
        """
        num_rows = max(1, most // max(1, weight[0].numel()))
        begins = [0] * len(self.numbers.leaves)
        for rows in torch.split(weight, num_rows):
            for number, leaf in enumerate(self.encode(rows)):
                yield number, begins[number], leaf
                begins[number] += leaf.numel()

    def encode_part(self, part: torch.Tensor, leaf: torch.Tensor) -> None:
        """Fill a part of the only leaf with a part of the weight, which it may overwrite; only ``in_parts``."""
        raise NotImplementedError

    @abstractmethod
    def decode(self, leaves: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as it computes: the definition of the form."""

    @abstractmethod
    def decode_into(self, wide: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
        """Write the weight, bit-equal to `decode`, over a tensor on the same device; allocates nothing."""

    @classmethod
    def decode_all(
        cls: type[Own], forms: list[Own], wide: list[torch.Tensor], leaves: list[list[torch.Tensor]]
    ) -> None:
        """Do the same for all weights of a block that compute in one dtype, on one device."""
        for form, target, own in zip(forms, wide, leaves, strict=True):
            form.decode_into(target, own)
