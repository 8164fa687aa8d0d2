"""Eight-bit storage: exact scales, small error where a plain cast fails, norms and embedders untouched."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import choose_forms, explain_wide
from highwater.memory.weights.cast_form import code_limit, find_scale
from highwater.memory.weights.fp8 import ScaledFp8, decode_fp8_into, encode_fp8
from highwater.memory.weights.module_component import component_from_module


@given(st.integers(0, 2**31), st.floats(1e-6, 1e4), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_scales_are_powers_of_two_and_use_the_range(seed: int, deviation: float, dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) * deviation).to(dtype)
    scale = find_scale(weight, name="w")
    stored = encode_fp8(weight, scale)
    assert math.frexp(scale)[0] == 0.5
    assert torch.isfinite(stored.float()).all()
    if weight.abs().amax() > 0 and not (dtype is torch.float16 and scale == 2.0**-24):  # the least that it holds
        assert 224 < float(weight.float().abs().amax()) / scale <= 448 * (1 + 2**-4)


@pytest.mark.parametrize("deviation", [0.05, 0.02, 0.01, 0.005, 0.002])
def test_scaled_error_does_not_grow_as_weights_get_small(deviation: float) -> None:
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * deviation
    scale = find_scale(weight, name="w")
    stored = encode_fp8(weight, scale)
    wide = torch.empty_like(weight, dtype=torch.bfloat16)
    decode_fp8_into(wide, stored, scale)
    error = float((wide.float() - weight).norm() / weight.norm())
    assert error < 0.03
    plain = float((weight.to(torch.float8_e4m3fn).float() - weight).norm() / weight.norm())
    if deviation <= 0.005:
        assert plain > 4 * error


@pytest.fixture(params=["few", "many"])
def codes(request: pytest.FixtureRequest) -> torch.Tensor:
    """Return every finite eight-bit float, once, or often enough to be widened by integers."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    every = every[torch.isfinite(every.float())]
    return every if request.param == "few" else every.view(torch.uint8).repeat(100).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_decoding_is_exact(codes: torch.Tensor, dtype: torch.dtype) -> None:
    for exponent in range(-40, 20):
        wide = torch.empty(codes.shape, dtype=dtype)
        decode_fp8_into(wide, codes, 2.0**exponent)
        assert torch.equal(wide, (codes.double() * 2.0**exponent).to(dtype)), exponent
        assert torch.equal(torch.signbit(wide), torch.signbit(codes.float()))


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("num_codes", [1, 1 << 14, (1 << 14) + 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_is_widened_to_nan(dtype: torch.dtype, num_codes: int, code: int) -> None:
    codes = torch.full((num_codes,), 0xBC, dtype=torch.uint8)
    codes[-1] = code
    wide = torch.empty(codes.shape, dtype=dtype)
    decode_fp8_into(wide, codes.view(torch.float8_e4m3fn), 0.5)
    assert wide[-1].isnan()
    assert (wide[:-1] == -0.75).all()


def test_a_block_is_decoded_to_the_bits_of_each_weight(machine) -> None:
    """All codes, NaN too, with all scales, results subnormal or infinite, and few weights or many."""

    @given(
        st.lists(st.tuples(st.integers(-126, 119), st.integers(1, 400), st.integers(0, 255)), min_size=1, max_size=5),
        st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
        st.sampled_from(["cpu", "sim:0"]),
    )
    def check(weights: list[tuple[int, int, int]], dtype: torch.dtype, device: str) -> None:
        # A simulated device multiplies by a scalar of the tensor's dtype.
        least, most = (-24, 15) if dtype is torch.float16 and device != "cpu" else (-126, 119)
        forms = [ScaledFp8(2.0 ** min(max(exponent, least), most)) for exponent, _, _ in weights]
        codes = [
            (torch.arange(64 * rows) + first).to(torch.uint8).view(rows, 64).view(torch.float8_e4m3fn)
            for _, rows, first in weights
        ]
        wide = [torch.full(one.shape, 9.0, dtype=dtype, device=device) for one in codes]
        ScaledFp8.decode_all(forms, wide, [[one.to(device)] for one in codes])
        for form, one, got in zip(forms, codes, wide, strict=True):
            got, want = got.cpu(), form.decode([one], dtype)
            assert torch.equal(got.isnan(), want.isnan())
            bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
            assert torch.equal(got[~got.isnan()].view(bits), want[~want.isnan()].view(bits)), form

    with machine(64):
        check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponent", [-149, -140, -133, -126, -120, -100, 0, 100, 126])
@pytest.mark.parametrize("num_columns", [4, 1 << 14])
def test_weights_of_any_size_are_widened_to_nearly_what_they_were(dtype, exponent: int, num_columns: int) -> None:
    weight = (torch.linspace(-1, 1, num_columns, dtype=torch.float64) * 2.0**exponent).to(dtype)
    scale = find_scale(weight, name="w")
    wide = torch.empty_like(weight)
    decode_fp8_into(wide, encode_fp8(weight, scale), scale)
    error = (wide.double() - weight.double()).abs().max().item()
    assert error <= max(2.0 ** (exponent - 4), torch.finfo(dtype).tiny), (scale, wide[:2])


def test_decoding_is_exact_where_subnormal_numbers_are_zero(codes: torch.Tensor) -> None:
    wide = torch.empty(codes.shape, dtype=torch.bfloat16)
    torch.set_flush_denormal(True)
    try:
        decode_fp8_into(wide, codes, 0.5)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(wide.double(), codes.double() * 0.5)


@given(st.integers(0, 2**31), st.floats(1e-6, 6e4), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_quantizing_rounds_as_in_double(seed: int, deviation: float, dtype: torch.dtype) -> None:
    weight = (torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) * deviation).to(dtype)
    weight = weight.nan_to_num(posinf=0.0, neginf=0.0)
    scale = find_scale(weight, name="w")
    limit = code_limit(dtype, torch.float8_e4m3fn, scale)
    exact = (weight.double() / scale).clamp(-limit, limit).to(torch.float8_e4m3fn)
    assert torch.equal(encode_fp8(weight, scale).view(torch.uint8), exact.view(torch.uint8))
    assert torch.isfinite(exact.to(dtype) * scale).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_is_quantized_as_in_double(dtype: torch.dtype) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[torch.isfinite(every)]
    for exponent in range(-126, 121):
        fitting = every[every.double().abs() <= 448 * 2.0**exponent]
        limit = code_limit(dtype, torch.float8_e4m3fn, 2.0**exponent)
        exact = (fitting.double() / 2.0**exponent).clamp(-limit, limit).to(torch.float8_e4m3fn)
        stored = encode_fp8(fitting, 2.0**exponent)
        assert torch.equal(stored.view(torch.uint8), exact.view(torch.uint8)), exponent


def test_the_weights_at_rest_are_never_rewritten(toys, machine) -> None:
    x = torch.ones(1, 3, 64, dtype=torch.bfloat16)
    with machine(4) as manager, torch.no_grad():
        net = toys.build_net(dtype=torch.bfloat16)
        with manage(net, profile="0.4MiB", placement="gpu:0", precision="fp8 scaled", manager=manager) as managed:
            groups = [group for share in managed.members[0].managed.shares for group in share.groups]
            before = [group.host_slab.clone() for group in groups]
            for _ in range(3):
                net(x)
            assert all(torch.equal(group.host_slab, slab) for group, slab in zip(groups, before, strict=True))


def test_only_matrices_of_blocks_are_cast(toys) -> None:
    net = toys.build_net()
    cast = choose_forms(component_from_module(net, name="net"), Precision.ENCODED)
    blocks = [f"doubles.{n}" for n in range(3)] + [f"singles.{n}" for n in range(5)]
    assert set(cast) == {f"{block}.{matrix}.weight" for block in blocks for matrix in ("up", "down")}


def test_parts_that_a_class_wants_kept_are_kept(toys) -> None:
    net = toys.build_net()
    net._keep_in_fp32_modules = ["down"]
    cast = choose_forms(component_from_module(net, name="net"), Precision.ENCODED)
    assert cast and not any("down" in name for name in cast)


def test_classes_declare_by_patterns_wherever_they_are(toys) -> None:
    """Each pattern is searched in the paths below the module whose class declares it, as diffusers searches them."""
    net = toys.build_net()
    net._skip_layerwise_casting_patterns = ["^singles$", r"doubles\.0\.d"]
    net.doubles[1]._keep_in_fp32_modules_strict = {"^up$", "["}
    specs = component_from_module(nn.ModuleDict({"inner": net}), name="net")
    cast = choose_forms(specs, Precision.ENCODED)
    assert set(cast) == {
        "inner.doubles.0.up.weight",
        "inner.doubles.1.down.weight",
        "inner.doubles.2.up.weight",
        "inner.doubles.2.down.weight",
    }
    line = explain_wide(specs, Precision.ENCODED)
    assert "of the blocks stay as stored: '^singles$' of Net " in line and "'^up$' of Block" in line, line


def test_what_a_model_of_16_bits_has_in_32_stays_so(toys) -> None:
    net = toys.build_net(dtype=torch.bfloat16)
    net.doubles[1].up.float()
    component = component_from_module(net, name="net")
    assert "doubles.1.up.weight" not in choose_forms(component, Precision.ENCODED)
    assert "stored in F32 beside BF16" in explain_wide(component, Precision.ENCODED)
    assert explain_wide(component_from_module(net.float(), name="net"), Precision.ENCODED) == ""


def test_release_gives_back_widened_weights_of_the_old_dtype(toys) -> None:
    net, original = toys.build_net(dtype=torch.bfloat16), toys.build_net(dtype=torch.bfloat16)
    manage(net, placement="cpu", precision="fp8 scaled", manager=MemoryManager()).release()
    for (name, got), want in zip(net.named_parameters(), original.parameters(), strict=True):
        assert got.dtype == torch.bfloat16
        if name.startswith(("doubles", "singles")) and name.endswith(("up.weight", "down.weight")):
            assert torch.allclose(got.float(), want.float(), rtol=2**-4 + 1e-3, atol=1e-4)
        else:
            assert torch.equal(got, want)
