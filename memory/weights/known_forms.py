"""The forms in which weights can be encoded: each has its numbers here, and its class in a file of its own.

A new form is one file with its class, and here its numbers and its entry in `FORMS`. Plans are made from the numbers,
so the file of a form is imported only when weights are encoded or decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..errors import InvalidInput, allowed_values
from ..lazy_names import lazy_names
from ..options.precision import Precision, precision_names, why_refused
from .component import Component, TensorSpec
from .form_numbers import AS_THEY_CAME, OWN, ROW, FormNumbers, Forms, LeafNumbers

if TYPE_CHECKING:
    from .storage_form import EncodedForm

__all__ = [
    "BF16",
    "FORMS",
    "FP16",
    "INT8",
    "PLAIN_E5M2",
    "PLAIN_FP8",
    "QFLOAT8",
    "QINT4",
    "QINT8",
    "ROW_E5M2",
    "ROW_FP8",
    "SCALED_E5M2",
    "SCALED_FP8",
    "encoded_form",
    "forms_in_file",
    "numbers_of",
]


def in_file(file: str, name: str) -> Callable[[], type[EncodedForm]]:
    """Return a function that imports a class from a file of this folder."""
    _, find = lazy_names(__package__, {file: [name]})
    return partial(find, name)


# About twice what normal weights lose with a scale: 0.026 in float8_e4m3fn, 0.053 in float8_e5m2, 0.002 in bfloat16.
E4M3_LIMIT, E5M2_LIMIT, SIXTEEN_BITS_LIMIT = 0.06, 0.12, 0.01
# And 0.009 in 255 steps per row, 0.1 in 16 steps per 128 elements.
INT8_LIMIT, INT4_LIMIT = 0.02, 0.2
CODES, ROW_SCALES = LeafNumbers(bits=8), LeafNumbers(bits=32, group=ROW)
OWN_SCALES = LeafNumbers(bits=OWN, group=ROW)


def quanto_group(tensor: TensorSpec) -> int:
    """Return how many elements of a row share scale and shift in optimum-quanto's four bits; `ROW`: all of them.

    As its modules choose it: 128, or 96, 64 or 32 where only these divide a row.
    """
    columns = tensor.num_elements // max(1, tensor.shape[0])
    return next((size for size in (128, 96, 64, 32) if columns > 128 and columns % size == 0), ROW)


def has_groups(tensor: TensorSpec) -> bool:
    """Whether a weight has more than one group: of one alone optimum-quanto takes each element for a group."""
    return tensor.num_elements > (quanto_group(tensor) or tensor.num_elements // max(1, tensor.shape[0]))


class GroupNumbers(LeafNumbers):
    """So many bits for each of optimum-quanto's groups."""

    def num_bytes(self, tensor: TensorSpec) -> int:
        return LeafNumbers(bits=self.bits, group=quanto_group(tensor)).num_bytes(tensor)


class PairedNumbers(LeafNumbers):
    """So many bits for two elements of four bits: one of a group, or row, and one of its pair."""

    def num_bytes(self, tensor: TensorSpec) -> int:
        width = quanto_group(tensor) or max(1, tensor.num_elements // max(1, tensor.shape[0]))
        num_groups = tensor.num_elements // width
        return -(-num_groups // 2) * width * self.bits // 8


def is_float32(tensor: TensorSpec) -> bool:
    """Whether 16 bits are fewer than a weight has."""
    return tensor.dtype == "F32"


def eight_bits(name: str, error_limit: float, *, per_row: bool = False) -> FormNumbers:
    """Return the numbers of a form in float8."""
    return FormNumbers(
        name=name,
        rests="in eight bits",
        error_limit=error_limit,
        is_float8=True,
        leaves=(CODES, ROW_SCALES) if per_row else (CODES,),
        in_parts=not per_row,
    )


def sixteen_bits(name: str) -> FormNumbers:
    """Return the numbers of a form that only float32 weights can have."""
    return FormNumbers(
        name=name,
        rests=f"in {name}",
        error_limit=SIXTEEN_BITS_LIMIT,
        leaves=(LeafNumbers(bits=16),),
        suits=is_float32,
        in_parts=True,
    )


SCALED_FP8 = eight_bits("fp8 scaled", E4M3_LIMIT)
PLAIN_FP8 = eight_bits("fp8 plain", E4M3_LIMIT)
ROW_FP8 = eight_bits("fp8 per row", E4M3_LIMIT, per_row=True)
SCALED_E5M2 = eight_bits("e5m2 scaled", E5M2_LIMIT)
PLAIN_E5M2 = eight_bits("e5m2 plain", E5M2_LIMIT)
ROW_E5M2 = eight_bits("e5m2 per row", E5M2_LIMIT, per_row=True)
BF16, FP16 = sixteen_bits("bf16"), sixteen_bits("fp16")
INT8 = FormNumbers(name="int8", rests="in int8", error_limit=INT8_LIMIT, leaves=(CODES, ROW_SCALES))
QINT8 = FormNumbers(name="qint8", rests="in qint8", error_limit=INT8_LIMIT, leaves=(CODES, OWN_SCALES))
QFLOAT8 = FormNumbers(
    name="qfloat8", rests="in qfloat8", error_limit=E4M3_LIMIT, is_float8=True, leaves=(CODES, OWN_SCALES)
)
QINT4 = FormNumbers(
    name="qint4",
    rests="in qint4",
    error_limit=INT4_LIMIT,
    leaves=(PairedNumbers(bits=8), GroupNumbers(bits=OWN), GroupNumbers(bits=OWN)),
    suits=has_groups,
)

FORMS: dict[str, tuple[FormNumbers, Callable[[], type[EncodedForm]]]] = {
    numbers.name: (numbers, in_file(file, name))
    for numbers, file, name in (
        (SCALED_FP8, "fp8", "ScaledFp8"),
        (PLAIN_FP8, "fp8", "PlainFp8"),
        (ROW_FP8, "row_scales", "RowFp8"),
        (BF16, "sixteen_bits", "Bf16"),
        (FP16, "sixteen_bits", "Fp16"),
        (SCALED_E5M2, "e5m2", "ScaledE5m2"),
        (PLAIN_E5M2, "e5m2", "PlainE5m2"),
        (ROW_E5M2, "row_scales", "RowE5m2"),
        (INT8, "row_scales", "Int8"),
        (QINT8, "quanto", "QInt8"),
        (QINT4, "quanto", "QInt4"),
        (QFLOAT8, "quanto", "QFloat8"),
    )
}
"""By name, as the user writes it: the numbers, and what returns the class that encodes and decodes."""


def forms_in_file(component: Component) -> Forms:
    """Return the forms in which a file has weights of a component already, by their names."""
    return {name: FORMS[form][0] for name, form in component.encoded_as} if component.encoded_as else AS_THEY_CAME


def numbers_of(precision: Precision) -> FormNumbers | None:
    """Return the form of a precision in numbers; None for `AS_STORED`.

    Raises:
        InvalidInput: no form has this name.
    """
    if precision.is_as_stored:
        return None
    if precision.name not in FORMS:
        allowed = allowed_values(precision.name, precision_names(FORMS))
        raise InvalidInput(f"precision {precision.name!r} {why_refused(precision.name)}; {allowed}")
    return FORMS[precision.name][0]


def encoded_form(numbers: FormNumbers) -> type[EncodedForm]:
    """Return the class that encodes and decodes a form that a plan has in numbers."""
    return FORMS[numbers.name][1]()
