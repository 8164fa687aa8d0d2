"""Gradient checkpointing inside of managed blocks: what the backward pass computes again gets the block's weights."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from highwater.memory import manage
from highwater.tests.engine import diffusers_models

DIM = 64
X = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(1))
SPLIT = "gpu:0&gpu:1@0.5"
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": 0.5},
    "pageable": {"placement": "gpu:0", "profile": 0.5, "pinned": "none"},
    "on disk": {"placement": "gpu:0:disk", "profile": 0.5},
    "split": {"placement": SPLIT},
    "split and streamed": {"placement": SPLIT, "profile": 0.35},
    "fp8": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "fp8 streamed": {"placement": "gpu:0", "precision": "fp8 scaled", "profile": 0.24},
    "fp8 on the CPU": {"placement": "cpu", "precision": "fp8 scaled"},
}


class Layer(nn.Module):
    """Checkpoints its inside, as transformers' layers do, which uses weights of its own in many ways."""

    def __init__(self, dim: int, reentrant: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)
        self.shift, self.gain = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))
        self.register_buffer("middle", torch.full((dim,), 0.5))
        self.reentrant = reentrant

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.to(self.gain.device, self.gain.dtype)) * (1 + self.gain.double()).to(x.dtype)
        y = self.down(torch.nn.functional.gelu(self.up(y))).type_as(x)
        y.add_(self.shift)
        with torch.no_grad():
            factor = x * self.gain
        rows = torch.stack([*self.gain.view(4, -1)]).flatten() + self.gain.detach() + self.gain.data[None, :]
        y = y * factor + torch.ones_like(self.gain) + self.gain.new_zeros(DIM) + rows
        return y * self.middle + torch.cat([self.shift, self.gain])[:DIM]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.inside(x)
        y: torch.Tensor = checkpoint(self.inside, x, use_reentrant=self.reentrant)
        return y


class Parted(nn.Module):
    """Checkpoints single layers of itself, as the blocks of diffusers' UNets do."""

    def __init__(self, dim: int, reentrant: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(dim, 2 * dim), nn.GroupNorm(5, 5)
        self.second, self.attention = nn.Linear(2 * dim, dim), nn.MultiheadAttention(dim, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def call(part: Callable[..., Any], *args: Any) -> Any:
            return checkpoint(part, *args, use_reentrant=self.reentrant) if self.training else part(*args)

        x = call(self.norm, call(self.first, x))
        x = call(self.second, x)
        return x + call(lambda y: self.attention(y, y, y)[0], x)


def build(kind: type[nn.Module], *, reentrant: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(DIM, reentrant) for _ in range(6))).eval().requires_grad_(False)


def gradient(net: nn.Module, device: str | None = None) -> torch.Tensor:
    x = X.clone().to(device or "cpu").requires_grad_()
    net(x).square().mean().backward()
    assert x.grad is not None
    return x.grad.cpu()


def options_of(way: str, net: nn.Module, folder: Path, more: float = 1) -> dict[str, Any]:
    options = dict(WAYS[way])
    if "profile" in options:
        mib = sum(weight.nbytes for weight in net.parameters()) * options["profile"] * more / (1 << 20)
        budget = f"gpu:0={mib:.3f}MiB,gpu:1={mib:.3f}MiB" if "split" in way else f"{mib:.3f}MiB"
        options["profile"] = budget + (f",pinned={options.pop('pinned')}" if "pinned" in options else "")
    if way == "on disk":
        save_file(net.state_dict(), folder / "net.safetensors")
        options["files"] = {"model": folder / "net.safetensors"}
    return options


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("kind", [Layer, Parted])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_unmanaged_module(
    machine, tmp_path: Path, way: str, kind: type[nn.Module], reentrant: bool
) -> None:
    with machine(8, 8) as manager:
        net = build(kind, reentrant=reentrant)
        with manage(net, manager=manager, **options_of(way, net, tmp_path)) as managed:
            shares = managed.plan.components[0].shares
            assert any(share.streamed for share in shares) == (way.endswith(("streamed", "disk")) or way == "pageable")
            plain = gradient(net)
            held = manager.ledger.bytes_by_place("model")
            net.train()
            got = [gradient(net) for _ in range(3)]
            manager.ledger.check()
            assert manager.ledger.bytes_by_place("model") == held
        device = "cpu" if "CPU" in way else "sim:0"
        want = gradient(net.to(device), device)  # eight bits come back widened
        net.to("cpu")
        assert all(torch.equal(each, want) for each in got)
        assert torch.equal(plain, want)


def llama() -> tuple[nn.Module, dict[str, Any], str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=99, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config), {"inputs_embeds": torch.randn(1, 5, 64), "use_cache": False}, "inputs_embeds"


def t5() -> tuple[nn.Module, dict[str, Any], str]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=128, num_layers=6, num_heads=4, dropout_rate=0.0)
    return T5EncoderModel(config), {"inputs_embeds": torch.randn(1, 5, 64)}, "inputs_embeds"


def unet() -> tuple[nn.Module, dict[str, Any], str]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=2, sample_size=16, norm_num_groups=8, cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    inputs = {"sample": torch.randn(1, 4, 16, 16), "timestep": 10, "encoder_hidden_states": torch.randn(1, 7, 32)}
    return model, inputs, "sample"


def flux() -> tuple[nn.Module, dict[str, Any], str]:
    return *diffusers_models.flux(), "hidden_states"


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", ["streamed", "split and streamed", "fp8 streamed"])
@pytest.mark.parametrize("model", [llama, t5, unet, flux])
def test_models_of_libraries_may_checkpoint(machine, tmp_path: Path, model: Any, way: str, reentrant: bool) -> None:
    torch.manual_seed(0)
    net, inputs, name = model()
    net.requires_grad_(False).train()
    if hasattr(net, "gradient_checkpointing_enable"):
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    else:
        net.enable_gradient_checkpointing(lambda *given: checkpoint(*given, use_reentrant=reentrant))

    def gradient_of(device: str) -> torch.Tensor:
        given = {key: v.clone().to(device) if torch.is_tensor(v) else v for key, v in inputs.items()}
        given[name].requires_grad_()
        next(iter(net(**given).values())).square().mean().backward()
        gradient: torch.Tensor = given[name].grad.cpu()
        return gradient

    with machine(32, 32) as manager:
        options = options_of(way, net, tmp_path, 1.4)
        with manage(net, manager=manager, **options) as managed:
            assert any(share.streamed for share in managed.plan.components[0].shares)
            got = [gradient_of("cpu") for _ in range(2)]
            manager.ledger.check()
        net.to("sim:0")
        want = gradient_of("sim:0")
        net.to("cpu")
        assert all(torch.equal(each, want) for each in got)


class Failing(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: type[BaseException]) -> torch.Tensor:
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise ctx.kind("stop")


def used_bytes(sim: Any, expected: list[int]) -> list[int]:
    """Return the bytes of both devices; waits a while for those expected: threads of autograd free theirs later."""
    for _ in range(100):
        gc.collect()
        used = [sim.stats(index).used_bytes for index in range(2)]
        if used == expected:
            break
        time.sleep(0.02)
    return used


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["streamed", "on disk", "split and streamed", "fp8 streamed"])
def test_an_exception_in_the_backward_pass_leaves_nothing(
    machine, sim, tmp_path: Path, way: str, kind: type[BaseException]
) -> None:
    with machine(8, 8) as manager:
        net = build(Layer).train()
        with manage(net, manager=manager, **options_of(way, net, tmp_path)):
            want = gradient(net)
            places = manager.ledger.bytes_by_place("model")
            before = used_bytes(sim, [places.get(f"gpu:{index}", 0) for index in range(2)])
            for number in (1, 4):
                handle = net[number].norm.register_forward_hook(lambda m, a, y: Failing.apply(y, kind))
                with pytest.raises(kind, match="stop"):
                    gradient(net)
                handle.remove()
                calls = iter([False, True])  # in the forward, when computed again

                def fail(*_: Any, calls: Any = calls) -> None:
                    if next(calls):
                        raise kind("again")

                handle = net[number].up.register_forward_pre_hook(fail)
                with pytest.raises(kind, match="again"):
                    gradient(net)
                handle.remove()
                manager.ledger.check()
                assert manager.ledger.bytes_by_place("model") == places
                assert used_bytes(sim, before) == before
            assert torch.equal(gradient(net), want)


def test_a_component_that_left_its_device_before_the_backward_pass_is_right(machine) -> None:
    with machine(8) as manager:
        net = build(Parted).train()
        with manage(net, manager=manager, **options_of("streamed", net, Path())) as managed:
            x = X.clone().requires_grad_()
            loss = net(x).square().mean()
            managed.members[0].managed.unload()
            assert not manager.ledger.held("model", "gpu:0")
            loss.backward()
            got = x.grad
            del loss
        want = gradient(net.to("sim:0"), "sim:0")
        net.to("cpu")
        assert got is not None and torch.equal(got, want)


def test_weights_stay_where_they_are_for_all_else_in_a_backward_pass(machine) -> None:
    """A hook looks at weights, and a loss is computed from some of them on the CPU."""
    seen: list[Any] = []

    def look(gradient: torch.Tensor) -> None:
        weight = net[0].first.weight
        seen.append((weight + torch.ones_like(weight, device="cpu")).device.type)

    with machine(8) as manager:
        net = build(Parted)
        with manage(net, manager=manager, **options_of("streamed", net, Path())):
            factor = torch.ones((), requires_grad=True)
            x = X.clone().requires_grad_()
            y = net(x)
            y.register_hook(look)
            (y.square().mean().cpu() + (net[0].first.weight * factor).sum()).backward()
            del y
            assert seen == ["cpu"] and net[0].first.weight.is_cpu
            assert factor.grad is not None and torch.allclose(factor.grad, net[0].first.weight.sum())
