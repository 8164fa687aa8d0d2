"""The forms `bf16` and `fp16`: float32 weights rest in 16 bits and compute in float32."""

from __future__ import annotations

import torch

from .cast_form import CastForm
from .known_forms import BF16, FP16

__all__ = ["Bf16", "Fp16"]


class Bf16(CastForm):
    """A float32 weight as bfloat16."""

    __slots__ = ()
    numbers = BF16
    stored = torch.bfloat16


class Fp16(CastForm):
    """A float32 weight as float16."""

    __slots__ = ()
    numbers = FP16
    stored = torch.float16
