"""The forms `e5m2 scaled` and `e5m2 plain`: weights rest in float8_e5m2, with a scale per tensor or without.

Two bits of mantissa instead of the three of float8_e4m3fn: twice the error, and 2 ** 18 times the range.
"""

from __future__ import annotations

import torch

from .cast_form import CastForm
from .known_forms import PLAIN_E5M2, SCALED_E5M2

__all__ = ["PlainE5m2", "ScaledE5m2"]


class PlainE5m2(CastForm):
    """A weight as float8_e5m2."""

    __slots__ = ()
    numbers = PLAIN_E5M2
    stored = torch.float8_e5m2


class ScaledE5m2(PlainE5m2):
    """A weight as float8_e5m2, times a power of two."""

    __slots__ = ()
    numbers = SCALED_E5M2
    is_scaled = True
