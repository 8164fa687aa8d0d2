"""Forms that cast: their errors by the size of the weights, their range, and rows of very different size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.memory.weights.component import TensorSpec
from highwater.memory.weights.known_forms import FORMS

WIDE = [torch.float32, torch.bfloat16, torch.float16]
DEVIATIONS = [0.05, 0.02, 0.01, 0.005, 0.002]


def round_trip(name: str, weight: torch.Tensor) -> torch.Tensor:
    form = FORMS[name][1]().measure(weight, name="w")
    return form.decode(form.encode(weight), weight.dtype)


def error(name: str, weight: torch.Tensor) -> float:
    return float((round_trip(name, weight).double() - weight.double()).norm() / weight.double().norm())


def suits(name: str, dtype: torch.dtype) -> bool:
    return dtype is torch.float32 or FORMS[name][0].leaves[0].bits == 8


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_scales_keep_the_error_where_plain_casts_lose_small_weights(deviation: float) -> None:
    weight = normal(256, 512) * deviation
    assert error("fp8 scaled", weight) <= 0.027
    assert error("fp8 per row", weight) <= 0.027
    assert error("e5m2 scaled", weight) <= 0.054
    assert error("e5m2 per row", weight) <= 0.054
    assert error("bf16", weight) <= 0.0018
    if deviation <= 0.005:
        assert error("fp8 plain", weight) > 3 * error("fp8 scaled", weight)


@pytest.mark.parametrize(("scaled", "per_row"), [("fp8 scaled", "fp8 per row"), ("e5m2 scaled", "e5m2 per row")])
def test_a_large_row_costs_the_small_ones_nothing_where_each_has_its_scale(scaled: str, per_row: str) -> None:
    weight = normal(64, 256) * 1e-4
    weight[7] *= 1e10 if scaled.startswith("e5m2") else 1e5
    others = [row for row in range(64) if row != 7]
    for name, least, most in ((scaled, 0.08, 1.0), (per_row, 0.0, 0.06)):
        lost = (round_trip(name, weight) - weight)[others].norm() / weight[others].norm()
        assert least <= lost <= most, name


@pytest.mark.parametrize("name", FORMS)
@given(
    seed=st.integers(0, 99),
    exponent=st.integers(-40, 30),
    dtype=st.sampled_from(WIDE),
    shape=st.sampled_from([(5, 7), (1, 1), (3, 0), (0, 3), (2, 3, 4, 2)]),
)
def test_every_weight_comes_back_finite_and_near(name: str, seed: int, exponent: int, dtype, shape) -> None:
    dtype = dtype if suits(name, dtype) else torch.float32
    weight = (normal(*shape, seed=seed).double() * 2.0**exponent).clamp(-6.5e4, 6.5e4).to(dtype)
    if not FORMS[name][0].suits(TensorSpec(name="w", dtype="F32", shape=shape)):
        return
    if name.startswith("q") and dtype is torch.float16 and abs(exponent) > 10:
        return  # their scales, which are float16 then, are too small for it, or what they span is too large
    got = round_trip(name, weight)
    assert got.shape == weight.shape and got.dtype is dtype and torch.isfinite(got).all()
    far = (got.double() - weight.double()).abs() - weight.double().abs() / 8
    least = 2.0**-9 if name == "fp8 plain" else 2.0**-16 if name == "e5m2 plain" else 2.0**-24
    clamped = (weight.double().abs() - 448).clamp(min=0) if name == "fp8 plain" else torch.zeros(())
    scale = weight.double().abs().amax() if weight.numel() else 1.0
    step = {"int8": 2.0**-7, "qint8": 2.0**-7, "qint4": 2.0**-3}.get(name, 2.0**-17)
    assert (far <= least + clamped + scale * step + 8e3 * (scale > 5e4)).all()


@pytest.mark.parametrize("name", ["fp8 plain", "e5m2 plain", "fp16"])
def test_what_does_not_fit_is_clamped(name: str) -> None:
    _, load = FORMS[name]
    limit = torch.finfo(load().stored).max
    weight = torch.tensor([[1e6, -1e6, 1.0, limit]])
    assert round_trip(name, weight).tolist() == [[limit, -limit, 1.0, limit]]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("name", FORMS)
def test_the_largest_finite_weight_stays_finite(name: str, dtype: torch.dtype) -> None:
    dtype = dtype if suits(name, dtype) else torch.float32
    weight = torch.tensor([[torch.finfo(dtype).max, 1.0], [-torch.finfo(dtype).max, torch.finfo(dtype).tiny]]).to(dtype)
    assert torch.isfinite(round_trip(name, weight)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_finite_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=r"weight 'layer\.weight' holds NaN or infinity"):
        FORMS[name][1]().measure(torch.tensor([[1.0, value]]), name="layer.weight")


@pytest.mark.parametrize("name", [name for name, (numbers, _) in FORMS.items() if numbers.in_parts])
@given(cuts=st.lists(st.integers(0, 600), max_size=4), dtype=st.sampled_from(WIDE), exponent=st.integers(-20, 20))
def test_parts_give_the_bits_of_the_whole(name: str, cuts: list[int], dtype: torch.dtype, exponent: int) -> None:
    weight = (normal(600) * 2.0**exponent).clamp(-6e4, 6e4).to(dtype)
    kind = FORMS[name][1]()
    parts = torch.tensor_split(weight, sorted(cuts))
    form = kind.measure_parts(parts, name="w")
    (whole,) = form.encode(weight)
    leaf = torch.empty_like(whole)
    for part, room in zip(parts, torch.tensor_split(leaf, sorted(cuts)), strict=True):
        form.encode_part(part.clone(), room)
    assert form == kind.measure(weight, name="w")
    assert torch.equal(leaf.float(), whole.float())
