"""A trace tells what a forward takes on a device: compared with simulated devices, for models of real libraries."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from highwater.memory import manage
from highwater.memory.tracing import Activations, Untraceable, meta_like, seconds_of, trace_forward
from highwater.memory.tracing.trace import Kernel, Segment, Trace, Work
from highwater.nodes.pipelines.tiny_pipelines import build_clip, build_vae, t5_config
from highwater.tests.engine import diffusers_models
from highwater.tests.engine.diffusers_models import MODELS, ModelAndInputs

GIB = 1 << 30
UNTRACEABLE = {"hidream"}  # which of its experts compute depends on the values of activations
RATES = {"flops_per_s": 1e13, "memory_bytes_per_s": 1e12, "launch_s": 5e-6}
# The same model bound by flops and traffic instead of launches.
SLOW = {"flops_per_s": 1e9, "memory_bytes_per_s": 1e8, "launch_s": 1e-9}
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    peak_bytes: int
    seconds: float
    num_kernels: int
    output_bytes: int


def measure(
    sim: ModuleType, module: nn.Module, kwargs: Mapping[str, Any], method: str = "forward", **rates: float
) -> Measured:
    """Run a module that a simulated device has, with its inputs; return what that took beyond both."""
    sim.configure([sim.SimDeviceSpec(total_bytes=64 * GIB, **rates)])
    placed = copy.deepcopy(module).to("sim:0")
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to("sim:0"), dict(kwargs))
    torch.accelerator.synchronize("sim:0")
    sim.reset_clock()
    sim.reset_stats()
    before = sim.stats(0).used_bytes
    with torch.inference_mode():
        output = getattr(placed, "__call__" if method == "forward" else method)(**inputs)
        torch.accelerator.synchronize("sim:0")
    stats = sim.stats(0)
    measured = Measured(
        peak_bytes=stats.peak_bytes - before,
        seconds=sim.clock_s(),
        num_kernels=stats.num_kernels,
        output_bytes=stats.used_bytes - before,
    )
    assert output is not None
    del output
    for part in placed.modules():  # caches of classes would keep tensors on the device
        for value in vars(type(part)).values():
            getattr(value, "cache_clear", int)()
    return measured


def assert_as_measured(
    sim: ModuleType, module: nn.Module, kwargs: Mapping[str, Any], method: str = "forward", launches: float = 0.02
) -> Trace:
    trace = trace_forward(module, (), kwargs, method=method)
    for rates in (RATES, SLOW):
        measured = measure(sim, module, kwargs, method, **rates)
        assert measured.peak_bytes == pytest.approx(trace.peak_bytes, rel=0.01)
        assert measured.seconds == pytest.approx(seconds_of(trace, **rates).total_s, rel=launches)
        assert measured.num_kernels == pytest.approx(trace.num_kernels, rel=launches)
    assert trace.output_bytes <= measured.output_bytes  # caches that the module keeps come on top
    return trace


def in_dtype(module: nn.Module, kwargs: Mapping[str, Any], dtype: torch.dtype) -> ModelAndInputs:
    def changed(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return module.to(dtype), tree_map_only(Tensor, changed, dict(kwargs))


@pytest.mark.parametrize("name", sorted(MODELS.keys() - UNTRACEABLE))
def test_a_trace_of_a_model_is_what_a_device_measures(sim, name: str) -> None:
    module, kwargs = MODELS[name]()
    assert_as_measured(sim, module.eval(), kwargs)


# Each example runs a model three times: none is made smaller.
FEW = settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
FLUX, UNET, SD3, WAN = (getattr(diffusers_models, name)()[0].eval() for name in ("flux", "unet", "sd3", "wan"))


@given(
    batch=st.integers(1, 3),
    tokens=st.integers(4, 80),
    text=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
)
@FEW
def test_flux_of_any_size(sim, batch: int, tokens: int, text: int, dtype: torch.dtype) -> None:
    inputs = {
        "hidden_states": torch.randn(batch, tokens, 4),
        "encoder_hidden_states": torch.randn(batch, text, 32),
        "pooled_projections": torch.randn(batch, 32),
        "timestep": torch.rand(batch),
        "guidance": torch.rand(batch),
        "img_ids": torch.randn(tokens, 3).round(),
        "txt_ids": torch.zeros(text, 3),
    }
    assert_as_measured(sim, *in_dtype(copy.deepcopy(FLUX), inputs, dtype))


@given(batch=st.integers(1, 3), height=st.integers(2, 12), width=st.integers(2, 12), dtype=st.sampled_from(DTYPES))
@FEW
def test_a_unet_of_any_size(sim, batch: int, height: int, width: int, dtype: torch.dtype) -> None:
    inputs = {
        "sample": torch.randn(batch, 4, 4 * height, 4 * width),
        "timestep": torch.tensor([300]),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
    }
    assert_as_measured(sim, *in_dtype(copy.deepcopy(UNET), inputs, dtype))


@given(batch=st.integers(1, 3), height=st.integers(1, 16), width=st.integers(1, 16), dtype=st.sampled_from(DTYPES))
@FEW
def test_sd3_of_any_size(sim, batch: int, height: int, width: int, dtype: torch.dtype) -> None:
    inputs = {
        "hidden_states": torch.randn(batch, 4, height, width),
        "encoder_hidden_states": torch.randn(batch, 6, 32),
        "pooled_projections": torch.randn(batch, 64),
        "timestep": torch.full((batch,), 300),
    }
    assert_as_measured(sim, *in_dtype(copy.deepcopy(SD3), inputs, dtype))


@given(
    batch=st.integers(1, 2),
    frames=st.integers(1, 4),
    height=st.integers(1, 8),
    width=st.integers(1, 8),
    dtype=st.sampled_from(DTYPES),
)
@FEW
def test_wan_of_any_size(sim, batch: int, frames: int, height: int, width: int, dtype: torch.dtype) -> None:
    inputs = {
        "hidden_states": torch.randn(batch, 4, frames, 2 * height, 2 * width),
        "timestep": torch.full((batch,), 3),
        "encoder_hidden_states": torch.randn(batch, 6, 16),
    }
    assert_as_measured(sim, *in_dtype(copy.deepcopy(WAN), inputs, dtype))


def image_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return build_vae(AutoencoderKL, latent_channels=4).eval()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", ["whole", "enable_tiling", "enable_slicing"])
def test_decoding_by_a_vae(sim, way: str, dtype: torch.dtype) -> None:
    vae = image_vae().to(dtype)
    if way != "whole":
        getattr(vae, way)()
    # A simulated device normalises groups in the layout that it is given, as a CPU does; a trace copies, as a GPU does.
    trace = assert_as_measured(sim, vae, {"z": torch.randn(2, 4, 10, 14, dtype=dtype)}, "decode", launches=0.04)
    assert "decoder.up_blocks.0" in "".join(trace.blocks)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_frames(sim, dtype: torch.dtype) -> None:
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval().to(dtype)
    assert_as_measured(sim, vae, {"z": torch.randn(1, 16, 3, 6, 4, dtype=dtype)}, "decode")


def t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(t5_config(T5Config)).eval()


def umt5() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(t5_config(UMT5Config)).eval()


@pytest.mark.parametrize("masked", [0, 9])
@pytest.mark.parametrize("build", [build_clip, t5, umt5])
def test_text_encoders_with_masks_that_their_code_reads(sim, build: Callable[[], nn.Module], masked: int) -> None:
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, 40 - masked :] = 0
    assert_as_measured(sim, build().eval(), {"input_ids": torch.randint(0, 90, (2, 40)), "attention_mask": mask})


# -- what a trace leaves alone


class Unreadable(Tensor):
    """A weight of which only the form may be used."""

    FORM = ("stride", "size", "dim", "element_size", "numel", "is_floating_point", "is_complex", "__get__")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function.__name__ in cls.FORM, f"{function} read a weight"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_neither_reads_nor_changes_the_module() -> None:
    module, kwargs = MODELS["flux"]()
    module.requires_grad_(False)
    wanted = trace_forward(module, (), kwargs)
    for part in module.modules():
        for name, weight in part._parameters.items():
            part._parameters[name] = None if weight is None else weight.detach().as_subclass(Unreadable)
    before = [(path, dict(vars(part)), dict(part._parameters)) for path, part in module.named_modules()]
    assert trace_forward(module, (), kwargs) == wanted
    for (path, held, weights), (path_now, part) in zip(before, module.named_modules(), strict=True):
        assert path == path_now
        assert held.keys() == vars(part).keys()
        assert all(vars(part)[name] is value for name, value in held.items())
        assert all(part._parameters[name] is weight for name, weight in weights.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_a_module_without_weights_in_memory_is_traced() -> None:
    module, kwargs = MODELS["sd3"]()
    assert trace_forward(copy.deepcopy(module).to("meta"), (), kwargs) == trace_forward(module, (), kwargs)


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("way", ["at rest", "used"])
def test_a_managed_module_is_traced_without_loading_it(toys, machine, sim, way: str, precision: str) -> None:
    x = torch.randn(2, 5, 64)
    net = toys.build_net()
    wanted = trace_forward(net, (x,))
    with machine(8) as manager, manage(net, profile="0.45MiB", placement="gpu:0", precision=precision, manager=manager):
        if way == "used":
            with torch.inference_mode():
                net(x)
        before = sim.stats(0)
        assert trace_forward(net, (x,)).segments == wanted.segments
        assert sim.stats(0) == before
        manager.ledger.check()


@pytest.mark.parametrize("profile", ["auto", "0.25MiB"])
def test_the_engine_learns_what_was_traced(machine, profile: str) -> None:
    """Activations are the same whether weights are resident or stream."""
    module, kwargs = MODELS["flux"]()
    kwargs = kwargs | {"hidden_states": torch.randn(1, 600, 4), "img_ids": torch.randn(600, 3).round()}
    trace = trace_forward(module.eval(), (), kwargs)
    with machine(64) as manager, torch.inference_mode():
        inputs = tree_map_only(Tensor, lambda tensor: tensor.to("sim:0"), kwargs)
        with manage(module, profile=profile, placement="gpu:0", manager=manager) as managed:
            for _ in range(2):
                module(**inputs)
            assert managed.members[0].activation_bytes["gpu:0"] == pytest.approx(trace.peak_bytes, rel=0.03)
        del inputs


def test_traces_leave_random_numbers_alone() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, 0.5, training=True) + torch.randn_like(x)

    state = torch.get_rng_state()
    trace_forward(Noisy(), (torch.zeros(3),))
    assert torch.equal(torch.get_rng_state(), state)


# -- what counts


class Computes(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def traced(function: Callable[[Tensor], Any], *shape: int, dtype: torch.dtype = torch.float32) -> Trace:
    return trace_forward(Computes(function), (torch.empty(*shape, dtype=dtype, device="meta"),))


def in_steps(x: Tensor) -> Tensor:
    for _ in range(10):
        x = x + 1
    return x


def keeps_a_view(x: Tensor) -> Tensor:
    view = torch.cat([x, x])[:1]
    return view + (x + 1)[:1]


@pytest.mark.parametrize(
    ("function", "peak_bytes", "output_bytes", "num_kernels"),
    [
        (lambda x: x.view(-1)[3:].unsqueeze(0), 0, 0, 0),
        (lambda x: x.mul_(2).add_(1), 0, 0, 2),
        (lambda x: x + 1, 4096, 4096, 1),
        (in_steps, 8192, 4096, 10),
        (keeps_a_view, 8192 + 4096 + 128, 128, 3),
        (lambda x: x.to(torch.float32), 0, 0, 0),
        (lambda x: x.to(torch.float16), 2048, 2048, 1),
        (lambda x: torch.empty_like(x), 4096, 4096, 0),
        (lambda x: [x.t().contiguous(), x], 4096, 4096, 1),
    ],
)
def test_views_and_changes_in_place_take_nothing_and_the_dead_give_back(
    function: Callable[[Tensor], Any], peak_bytes: int, output_bytes: int, num_kernels: int
) -> None:
    trace = traced(function, 32, 32)
    assert (trace.peak_bytes, trace.output_bytes, trace.num_kernels) == (peak_bytes, output_bytes, num_kernels)


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 4),
    tokens=st.integers(1, 50),
    keys=st.integers(1, 50),
    width=st.integers(1, 16),
)
def test_attention_is_one_kernel_without_scores(batch: int, heads: int, tokens: int, keys: int, width: int) -> None:
    q, k = (torch.empty(batch, heads, length, width, device="meta") for length in (tokens, keys))
    trace = trace_forward(Computes(lambda q: F.scaled_dot_product_attention(q, k, k)), (q,))
    assert trace.peak_bytes == trace.output_bytes == q.nbytes
    assert trace.num_kernels == 1
    assert trace.flops == 4 * batch * heads * tokens * keys * width
    assert trace.traffic_bytes == 2 * q.nbytes + 2 * k.nbytes


def test_flops_are_those_of_torchs_counter() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("flux", "unet", "wan"):
        module, kwargs = MODELS[name]()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            copy.deepcopy(module).to("meta")(**tree_map_only(Tensor, meta_like, kwargs))
        assert trace_forward(module, (), kwargs).flops == counter.get_total_flops()


def test_blocks_and_what_lies_between_are_all_there_is() -> None:
    module, kwargs = MODELS["flux"]()
    trace = trace_forward(module, (), kwargs)
    assert [segment.block for segment in trace.segments if "transformer" in segment.block] == [
        *(f"transformer_blocks.{index}" for index in range(2)),
        *(f"single_transformer_blocks.{index}" for index in range(4)),
    ]
    assert sum(block.flops for block in trace.blocks.values()) == trace.flops
    assert sum(block.num_kernels for block in trace.blocks.values()) == trace.num_kernels
    assert max(block.peak_bytes for block in trace.blocks.values()) == trace.peak_bytes
    assert len({id(segment.kernels) for segment in trace.segments if "single" in segment.block}) == 1
    chosen = trace_forward(module, (), kwargs, blocks=["transformer_blocks.1"])
    assert list(chosen.blocks) == ["", "transformer_blocks.1"]
    assert chosen.blocks["transformer_blocks.1"] == trace.blocks["transformer_blocks.1"]


@given(
    flops_per_s=st.floats(1e6, 1e15),
    memory_bytes_per_s=st.floats(1e6, 1e13),
    launch_s=st.floats(0, 1e-3),
    faster=st.floats(1, 100),
)
def test_seconds_lie_between_the_busy_time_and_one_thing_at_a_time(
    flops_per_s: float, memory_bytes_per_s: float, launch_s: float, faster: float
) -> None:
    rates = {"flops_per_s": flops_per_s, "memory_bytes_per_s": memory_bytes_per_s, "launch_s": launch_s}
    seconds = seconds_of(FLUX_TRACE, **rates)
    busy_s = sum(segment.busy_s for segment in seconds.segments)
    launched_s = FLUX_TRACE.num_kernels * launch_s
    assert max(busy_s, launched_s) <= seconds.total_s * (1 + 1e-9)
    assert seconds.total_s <= (busy_s + launched_s) * (1 + 1e-9)
    assert sum(seconds.blocks.values()) == pytest.approx(seconds.total_s)
    quicker = seconds_of(FLUX_TRACE, **rates | {"memory_bytes_per_s": memory_bytes_per_s * faster})
    assert quicker.total_s <= seconds.total_s * (1 + 1e-9)


FLUX_TRACE = trace_forward(*(lambda module, kwargs: (module, (), kwargs))(*MODELS["flux"]()))


@pytest.mark.parametrize("bad", [{"flops_per_s": 0}, {"memory_bytes_per_s": -1}, {"launch_s": -1}])
def test_rates_that_no_device_has_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        seconds_of(FLUX_TRACE, **RATES | bad)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "source",
    [
        lambda x: x,
        lambda x: x[:, :3],
        lambda x: x.transpose(0, 1),
        lambda x: x[:, :1].expand(-1, 4, -1),
        lambda x: x[:, :3, None],
        lambda x: x[:, 0],
        lambda x: x[0, 0],
    ],
)
def test_linear_layers_of_all_layouts(sim, source: Callable[[Tensor], Tensor], bias: bool, is_trained: bool) -> None:
    layer = nn.Linear(32, 16, bias=bias).requires_grad_(is_trained)
    net = nn.Sequential(Computes(source), layer)
    assert_exact(sim, net, torch.randn(2, 5, 32))


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "arange": lambda x: torch.arange(0, 8, 2, dtype=torch.float64, device=x.device),
    "ones": lambda x: torch.ones(3, device=x.device),
    "a number to the device": lambda x: torch.tensor(1.0, device=x.device),
    "numbers to the device": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "zeros to the device": lambda x: torch.zeros(3).to(x.device),
    "reversed subtraction": lambda x: 1 - x,
    "a power": lambda x: 2.0**x,
    "a remainder": lambda x: x % 2,
    "in place": lambda x: x.add_(x).mul_(2.0).clamp_(0, 1),
    "a mask": lambda x: x.masked_fill(x > 0, 2.0),
    "rms norm": lambda x: F.rms_norm(x, (8,)),
    "layer norm": lambda x: F.layer_norm(x, (8,)),
    "group norm": lambda x: F.group_norm(x, 2),
    "softmax in float32": lambda x: torch.softmax(x.half(), -1, dtype=torch.float32),
    "repeated": lambda x: torch.cos(x).repeat_interleave(2, dim=1, output_size=8).repeat(2, 1, 1),
    "joined": lambda x: torch.stack([x, x], -1).flatten(1),
    "padded": lambda x: F.pad(x, (0, 1, 0, 1)),
    "larger": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="nearest"),
    "larger by lines": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="bilinear"),
    "embedding": lambda x: F.embedding(torch.zeros(5, dtype=torch.long, device=x.device), x[0]),
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "variance": lambda x: x.var(-1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "set": lambda x: (x.__setitem__((slice(None), 0), x[:, 1]), x),
    "expanded": lambda x: x[:, :1].expand(2, 4, 8) + x,
    "flipped": lambda x: x.flip(1).roll(1, 1),
    "pooled": lambda x: F.avg_pool1d(x, 2),
    "unfolded": lambda x: F.unfold(x[None], 2),
    "chosen": lambda x: x.gather(1, torch.zeros(2, 1, 8, dtype=torch.long, device=x.device)),
    "sorted": lambda x: x.topk(2),
    "joined scalars": lambda x: x * torch.tensor(2.0),
    "nothing": lambda x: x[:0] + 1,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_counted_as_devices_count_them(sim, name: str) -> None:
    assert_exact(sim, Computes(OPERATORS[name]), torch.ones(2, 4, 8))


def assert_exact(sim: ModuleType, net: nn.Module, x: Tensor) -> None:
    trace = trace_forward(net, (x,))
    for rates in (RATES, SLOW):
        measured = measure(sim, Computes(net), {"x": x}, **rates)
        assert measured.peak_bytes == trace.peak_bytes
        assert measured.output_bytes == trace.output_bytes
        assert measured.num_kernels == trace.num_kernels
        assert measured.seconds == pytest.approx(seconds_of(trace, **rates).total_s, rel=1e-6)


# -- what cannot be traced, and what is known


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x + 1 if (x > 0).all() else x,
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x @ torch.empty(3, 5, 4),
    ],
)
def test_what_depends_on_values_or_fails_is_one_line(function: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Untraceable, match=r"^Computes\.forward cannot be traced: .+$") as caught:
        traced(function, 4, 4)
    assert "\n" not in str(caught.value)


def test_a_model_that_chooses_by_activations_is_untraceable() -> None:
    module, kwargs = MODELS["hidream"]()
    with pytest.raises(Untraceable):
        trace_forward(module, (), kwargs)


@given(st.lists(st.booleans(), min_size=1, max_size=20))
@settings(max_examples=20)
def test_masks_that_are_given_are_known(mask: list[bool]) -> None:
    given = torch.tensor(mask)

    def function(mask: Tensor) -> Tensor:
        places = mask.to(torch.int32).cumsum(0) * 2
        chosen = torch.ones(len(mask), 7, device=mask.device)[mask]
        assert chosen.shape[0] == int(places[-1]) // 2 == sum(mask.tolist())
        return chosen * 2 if mask.all() else chosen

    trace = trace_forward(Computes(function), (given,))
    assert trace.output_bytes == given.sum() * 28


def test_what_is_written_over_a_known_value_is_not_known_any_more() -> None:
    def function(x: Tensor) -> Tensor:
        known = torch.zeros(4, dtype=torch.long, device=x.device)
        assert known[1:].sum().item() == 0
        known[1:3].copy_(x[:2])
        return known[:1] if known[2].item() else x

    with pytest.raises(Untraceable, match="reads the values"):
        trace_forward(Computes(function), (torch.empty(4, dtype=torch.long, device="meta"),))


# -- activations by shape


def test_activations_are_traced_once_for_each_form() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    activations = Activations(net)
    x = torch.randn(3, 8)
    assert activations(x) == 2 * 3 * 64 * 4
    assert activations.trace(torch.zeros(3, 8)) is activations.trace(x)
    assert activations(torch.empty(6, 8, device="meta")) == 2 * activations(x)
    assert activations(x.double().float()) == trace_forward(net, (x,)).peak_bytes


def test_activations_depend_on_masks_that_are_read() -> None:
    def function(mask: Tensor) -> Tensor:
        return mask.new_zeros(int(mask.sum()))

    activations = Activations(Computes(function))
    assert [activations(torch.tensor(mask)) for mask in ([1, 1, 0], [1, 1, 1], [1, 1, 0])] == [16, 24, 16]


def test_activations_keep_no_module_alive_and_say_again_what_cannot_be_traced() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Computes(lambda x: x * x.sum().item()))
    activations, held = Activations(net), weakref.ref(net)
    for _ in range(2):
        with pytest.raises(Untraceable, match="reads the values"):
            activations(torch.zeros(1, 8))
    del net
    gc.collect()
    assert held() is None


def test_results_may_be_brought_back_where_that_is_said() -> None:
    """As text encoders of ComfyUI do."""

    class BringsBack(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).cpu()

    inputs = torch.zeros(2, 8)
    with pytest.raises(Untraceable, match="copied to the host"):
        trace_forward(BringsBack(8, 4), (inputs,))
    trace = trace_forward(BringsBack(8, 4), (inputs,), brings_back=True)
    assert trace.output_shapes == ((2, 4),) and trace.flops == 2 * 2 * 8 * 4
    assert sum(kernel.link_bytes for segment in trace.segments for kernel in segment.kernels) == 2 * 4 * 4


def test_kernels_are_summed_once_however_often_they_are_asked_for() -> None:
    class Counted(tuple[Kernel, ...]):
        num_reads = 0

        def __iter__(self) -> Iterator[Kernel]:
            Counted.num_reads += 1
            return super().__iter__()

    kernels = Counted([Kernel(4, 2), Kernel(0, 0, 1)])
    trace = Trace(
        segments=(Segment(block="a", kernels=kernels, entry_bytes=0, peak_bytes=0),), peak_bytes=0, output_bytes=0
    )
    for _ in range(3):
        assert (trace.flops, trace.traffic_bytes, trace.num_kernels) == trace.work == Work(4, 2, 1)
    assert Counted.num_reads == 1
    (block,) = trace.blocks.values()
    assert (block.flops, block.traffic_bytes, block.num_kernels) == trace.work
    assert Counted.num_reads == 2
