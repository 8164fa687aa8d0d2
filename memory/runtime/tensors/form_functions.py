"""Torch functions by what they do with a weight at rest: use its form or its memory, or write to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["ASKS_FOR_FORM", "CONVERSIONS", "FORM", "GIVES_MEMORY", "LEFT_ALONE", "writes", "writes_first"]

AUGMENTED_ASSIGNMENTS = frozenset(
    f"__i{name}__"
    for name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
)

# Functions and attributes that use only a tensor's form, or create another tensor of the same form.
FORM_FUNCTIONS = """
    size stride dim ndimension numel nelement element_size is_floating_point is_complex is_contiguous is_inference
    is_signed data_ptr detach requires_grad_ __len__ __hash__ storage_offset get_device type_as empty_like zeros_like
    ones_like rand_like randn_like full_like new_empty new_zeros new_ones new_full new_tensor has_names untyped_storage
    is_same_size is_set_to is_pinned is_shared __reduce_ex__
"""
FORM_ATTRIBUTES = """
    shape dtype device layout ndim nbytes itemsize is_meta is_cuda is_cpu is_sparse is_sparse_csr is_quantized is_leaf
    is_nested is_mkldnn is_mps is_xpu is_xla is_ipu is_vulkan is_maia is_mtia is_hpu names name requires_grad grad
    grad_fn retains_grad output_nr _version _base _backward_hooks _cdata
"""
ASKS_FOR_FORM = frozenset(FORM_FUNCTIONS.split())
MAKES_LIKE = """
    type_as empty_like zeros_like ones_like rand_like randn_like full_like new_empty new_zeros new_ones new_full
    new_tensor
"""
# Attributes beside the values, which programs also set: whether gradients are wanted says nothing of the values.
SET_BESIDE = ("requires_grad", "grad")
FORM = frozenset(
    vars(torch._C.TensorBase)[name].__get__ for name in FORM_ATTRIBUTES.split() if name in vars(torch._C.TensorBase)
) | frozenset(vars(torch._C.TensorBase)[name].__set__ for name in SET_BESIDE)

# Calls that ``Module.to`` and similar methods make for each parameter.
CONVERSIONS = frozenset(("to", "cpu", "cuda", "xpu", "npu", "half", "bfloat16", "float", "double", "type"))

# Functions that return the memory of a tensor as something other than a tensor.
GIVES_MEMORY = frozenset(["untyped_storage", "storage", "_typed_storage", "__array__", "__dlpack__", "to_dlpack"])

# Functions that in a backward pass get the weight itself, not a copy on the device.
LEFT_ALONE = (ASKS_FOR_FORM - frozenset(MAKES_LIKE.split())) | GIVES_MEMORY


def writes_first(function: Callable[..., Any]) -> bool:
    """Whether a torch function writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name in AUGMENTED_ASSIGNMENTS or (name.endswith("_") and not name.endswith("__"))


def writes(function: Callable[..., Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether a torch function writes to any argument."""
    return writes_first(function) or bool(kwargs and kwargs.get("out") is not None)
