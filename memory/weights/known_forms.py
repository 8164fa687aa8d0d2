"""The forms in which weights can be encoded, by their names."""

from __future__ import annotations

from .form_numbers import FormNumbers
from .fp8 import ScaledFp8
from .storage_form import EncodedForm

__all__ = ["FORMS", "encoded_form"]

FORMS: dict[str, type[EncodedForm]] = {form.numbers.name: form for form in (ScaledFp8,)}


def encoded_form(numbers: FormNumbers) -> type[EncodedForm]:
    """Return the class that encodes and decodes a form that a plan has in numbers."""
    return FORMS[numbers.name]
