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
from ..options.precision import Precision, precision_names
from .form_numbers import FormNumbers, LeafNumbers

if TYPE_CHECKING:
    from .storage_form import EncodedForm

__all__ = ["FORMS", "SCALED_FP8", "encoded_form", "numbers_of"]


def in_file(file: str, name: str) -> Callable[[], type[EncodedForm]]:
    """Return a function that imports a class from a file of this folder."""
    _, find = lazy_names(__package__, {file: [name]})
    return partial(find, name)


SCALED_FP8 = FormNumbers(
    name="fp8 scaled",
    rests="in eight bits",
    effect=(
        "keeps block weights in eight bits with a scale per tensor, which halves 16-bit weights and is slightly lossy"
    ),
    leaves=(LeafNumbers(bits=8),),
    in_parts=True,
)

FORMS: dict[str, tuple[FormNumbers, Callable[[], type[EncodedForm]]]] = {
    SCALED_FP8.name: (SCALED_FP8, in_file("fp8", "ScaledFp8")),
}
"""By name, as the user writes it: the numbers, and what returns the class that encodes and decodes."""


def numbers_of(precision: Precision) -> FormNumbers | None:
    """Return the form of a precision in numbers; None for `AS_STORED`.

    Raises:
        InvalidInput: no form has this name.
    """
    if precision == Precision.AS_STORED:
        return None
    if precision.name not in FORMS:
        allowed = allowed_values(precision.name, precision_names(FORMS))
        raise InvalidInput(f"precision {precision.name!r} is unknown; {allowed}")
    return FORMS[precision.name][0]


def encoded_form(numbers: FormNumbers) -> type[EncodedForm]:
    """Return the class that encodes and decodes a form that a plan has in numbers."""
    return FORMS[numbers.name][1]()
