"""The forms of optimum-quanto and of ComfyUI's int8, beside what these libraries make of the same weight."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimum import quanto
from torch import nn

from highwater.memory.weights.component import TensorSpec
from highwater.memory.weights.known_forms import FORMS
from highwater.memory.weights.quantized_leaves import leaves_of
from highwater.memory.weights.storage_form import EncodedForm

QTYPES = {"qint8": quanto.qint8, "qint4": quanto.qint4, "qfloat8": quanto.qfloat8}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def rested(name: str, weight: torch.Tensor) -> tuple[EncodedForm, list[torch.Tensor]]:
    form = FORMS[name][1]().measure(weight, name="w")
    return form, form.encode(weight)


def quantized(layer: nn.Module, name: str) -> Any:
    """Return the weight that optimum-quanto's own module of a layer would have, without a layout of one device."""
    net = nn.Sequential(layer)
    quanto.quantize(net, weights=QTYPES[name])
    own: Any = net[0]
    optimizer = quanto.MaxOptimizer() if name == "qint4" else quanto.AbsmaxOptimizer()
    if name == "qint4":
        group = own.weight_group_size
        scale, shift = optimizer(own.weight, qtype=own.weight_qtype, axis=0, group_size=group)
        return quanto.quantize_weight(
            own.weight, own.weight_qtype, 0, scale, shift, group_size=group, optimized=False
        ).detach()  # fmt: skip
    scale = optimizer(own.weight, qtype=own.weight_qtype, axis=0)
    return quanto.quantize_weight(own.weight, own.weight_qtype, 0, scale, optimized=False).detach()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QTYPES)
@given(rows=st.integers(2, 40), columns=st.sampled_from([3, 32, 100, 128, 160, 192, 200, 256, 384, 416]),
       seed=st.integers(0, 99))  # fmt: skip
def test_codes_and_values_are_those_of_optimum_quanto(
    name: str, dtype: torch.dtype, rows: int, columns: int, seed: int
) -> None:
    layer = nn.Linear(columns, rows, dtype=dtype)
    with torch.no_grad():
        layer.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
    weight = layer.weight.detach().clone()
    theirs = quantized(layer, name)
    form, leaves = rested(name, weight)
    assert [leaf.dtype for leaf in leaves] == [leaf.dtype for leaf in leaves_of(theirs)]
    for own, other in zip(leaves, leaves_of(theirs), strict=True):
        assert torch.equal(own.flatten().float(), other.flatten().float())
    with torch.no_grad():
        want = theirs.dequantize()
    assert torch.equal(form.decode(leaves, dtype).view(weight.shape), want)
    wide = torch.empty_like(weight)
    form.decode_into(wide, leaves)
    assert torch.equal(wide, want)


@pytest.mark.parametrize("name", QTYPES)
def test_a_convolution_is_encoded_as_optimum_quanto_does(name: str) -> None:
    layer = nn.Conv2d(32, 6, 3)
    weight = layer.weight.detach().clone()
    form, leaves = rested(name, weight)
    theirs = quantized(layer, name).dequantize().detach()
    assert torch.equal(form.decode(leaves, torch.float32).view(weight.shape), theirs)
    for layout in (torch.contiguous_format, torch.channels_last):
        form, leaves = rested(name, weight.to(memory_format=layout))
        wide = torch.empty_like(weight, memory_format=layout)
        form.decode_into(wide, leaves)
        assert torch.equal(wide, theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8", "qint8", "qint4", "qfloat8"])
def test_rows_of_equal_elements_stay_what_they_are(name: str, dtype: torch.dtype) -> None:
    weight = torch.tensor([0.0, 0.5, -0.25, 0.0])[:, None].expand(4, 64).contiguous().to(dtype)
    form, leaves = rested(name, weight)
    got = form.decode(leaves, dtype).view(weight.shape)
    # A scale of 16 bits times 127 is off by half of its last bit.
    assert got.isfinite().all() and torch.allclose(got, weight, rtol=1e-2, atol=0)
    assert torch.equal(got[0], weight[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_is_at_most_half_a_step_from_its_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(33, 70, generator=torch.Generator().manual_seed(3)).mul(0.02).to(dtype)
    form, (codes, scales) = rested("int8", weight)
    assert scales.dtype is torch.float32 and torch.equal(scales, weight.float().abs().amax(1) / 127)
    got = form.decode([codes, scales], torch.float32)
    assert ((got - weight.float()).abs() <= scales[:, None] * 0.5001).all()
    assert int(codes.min()) == -127 or int(codes.max()) == 127


@given(rows=st.integers(1, 9), columns=st.integers(1, 400))
def test_a_weight_takes_as_much_as_its_numbers_say(rows: int, columns: int) -> None:
    weight = torch.randn(rows, columns)
    spec = TensorSpec(name="w", dtype="F32", shape=(rows, columns), encodable=True)
    numbers, load = FORMS["qint4"]
    is_taken = numbers.takes(spec)
    assert is_taken == (rows > 1 or (columns > 128 and columns % 32 == 0))
    if is_taken:
        leaves = load().measure(weight, name="w").encode(weight)
        assert numbers.leaf_bytes(spec) == tuple(leaf.nbytes for leaf in leaves)
        assert math.prod(leaves[0].shape) * 2 >= rows * columns


def test_nothing_is_compiled_and_the_library_is_not_imported() -> None:
    """In a process where any build of an extension is an error."""
    script = """
import sys
import torch
from torch import nn
import torch.utils.cpp_extension as cpp_extension
def refuse(*_, **__): raise AssertionError("compiles an extension")
cpp_extension.load = cpp_extension.load_inline = refuse
from highwater.memory import manage
net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))).bfloat16()
for form in ("qint8", "qint4", "qfloat8"):
    with torch.inference_mode(), manage({"diffusion": net}, precision=form, placement="cpu") as managed:
        assert f"in {form}" in managed.plan.text(), managed.plan.text()
        assert net(torch.ones(7, 256, dtype=torch.bfloat16)).isfinite().all()
assert not {"optimum", "optimum.quanto"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
