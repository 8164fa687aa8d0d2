"""What a precision does to a component, by class of layer: what is cast, what is not and why, and what that loses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from ..options.precision import Precision
from ..units import format_bytes
from ..weights.component import Component, TensorSpec
from ..weights.form_numbers import FormNumbers
from ..weights.known_forms import numbers_of
from .form_choice import sort_weights

__all__ = ["PrecisionRow", "tabulate_precision"]

# What a layer is where only its file is known.
NO_CLASS = "weights"
OTHERS = "other layers"
OUTSIDE = "in no block"
# Vectors are few bytes and cost the most quality, as norms and biases; what is not of one of the layers that compute
# with it alone, such as an attention's own matrices, is read from elsewhere.
NOT_OF_A_LAYER = "no weight of a linear layer, convolution or embedding"
OTHER_DTYPE = "of another dtype"


@dataclass(kw_only=True, slots=True)
class PrecisionRow:
    """The weights of one class of layers."""

    layer: str
    num_cast: int = 0
    cast_bytes: int = 0
    """What these have as they compute."""
    resting_bytes: int = 0
    """What they take at rest."""
    num_kept: int = 0
    kept_bytes: int = 0
    why_kept: Counter[str] = field(default_factory=Counter)
    """Bytes by reason."""
    error: float | None = None
    """The most that one of them loses, relative to its size; None where that was not measured."""

    @property
    def saved_bytes(self) -> int:
        return self.cast_bytes - self.resting_bytes

    def cast(self, tensor: TensorSpec, numbers: FormNumbers, error: float | None) -> None:
        """Count a weight that rests in the form."""
        self.num_cast += 1
        self.cast_bytes += tensor.weight_bytes
        self.resting_bytes += sum(numbers.leaf_bytes(tensor))
        if error is not None:
            self.error = max(error, self.error or 0.0)

    def keep(self, tensor: TensorSpec, reason: str) -> None:
        """Count a weight that stays as stored."""
        self.num_kept += 1
        self.kept_bytes += tensor.weight_bytes
        self.why_kept[reason] += tensor.weight_bytes

    def text(self, rests: str) -> str:
        """Return what is cast as a line of a plan."""
        lost = "" if self.error is None else f", error at most {self.error:.2g}"
        sizes = f"{format_bytes(self.cast_bytes)} -> {format_bytes(self.resting_bytes)}"
        return f"{self.layer}: {self.num_cast} of {self.num_cast + self.num_kept} weights {rests}, {sizes}{lost}"

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "num_cast": self.num_cast,
            "cast_bytes": self.cast_bytes,
            "resting_bytes": self.resting_bytes,
            "saved_bytes": self.saved_bytes,
            "error": self.error,
            "num_kept": self.num_kept,
            "kept_bytes": self.kept_bytes,
            "why_kept": dict(self.why_kept),
        }


def tabulate_precision(component: Component, precision: Precision) -> tuple[PrecisionRow, ...]:
    """Return a row for each class of layers of which a weight is cast, the largest first, and one for all others.

    Nothing where no weight is cast.
    """
    numbers = numbers_of(precision)
    if numbers is None:
        return ()
    reasons = {tensor.name: reason for tensor, reason in sort_weights(component, precision, numbers)}
    errors = component.errors_in(numbers.name)
    rows: dict[str, PrecisionRow] = {}

    def row_of(tensor: TensorSpec) -> PrecisionRow:
        layer = tensor.layer_classes[0] if tensor.layer_classes else NO_CLASS
        return rows.setdefault(layer, PrecisionRow(layer=layer))

    outside = {tensor.name for tensor in component.non_block.tensors}
    for tensor in weights_of(component):
        reason = reasons.get(tensor.name)
        if reason == "":
            row_of(tensor).cast(tensor, numbers, errors.get(tensor.name))
        else:
            row_of(tensor).keep(tensor, reason or why_never(tensor, outside))
    never = [row for row in rows.values() if not row.num_cast]
    together = PrecisionRow(layer=OTHERS)
    for row in never:
        together.num_kept += row.num_kept
        together.kept_bytes += row.kept_bytes
        together.why_kept.update(row.why_kept)
    cast = sorted((row for row in rows.values() if row.num_cast), key=lambda row: -row.cast_bytes)
    return (*cast, together) if never and cast else tuple(cast)


def weights_of(component: Component) -> Iterable[TensorSpec]:
    for block in (*component.blocks, component.non_block):
        yield from block.tensors


def why_never(tensor: TensorSpec, outside: Collection[str]) -> str:
    """Return why no precision casts a weight; ``outside``: the names of those in no block."""
    if tensor.name in outside:
        return OUTSIDE
    return OTHER_DTYPE if tensor.encodable else NOT_OF_A_LAYER
