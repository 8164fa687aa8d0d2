"""Modules entered through a method that is no forward, which calls something deep inside, or uses a weight itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import VQModel
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from highwater.memory import manage

LATENTS = torch.arange(16).reshape(1, 4, 4)


class Quantizer(nn.Module):
    """A part whose method looks codes up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.embedding.weight.T

    def look_up(self, codes: torch.Tensor) -> torch.Tensor:
        return self.embedding(codes)


class Coder(nn.Module):
    """Blocks between what methods reach: a layer two levels down, one in a dict, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.quantize = Quantizer()
        self.heads = nn.ModuleDict({"one": nn.Linear(64, 64)})
        self.shift = nn.Parameter(torch.randn(64))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["one"](x) + self.shift

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return self(self.quantize.look_up(codes))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads["one"](x)

    @apply_forward_hook
    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(x + self.shift)


def build(kind: type[nn.Module] = Coder) -> Any:
    torch.manual_seed(0)
    return kind().eval().requires_grad_(False)


@torch.no_grad()
@pytest.mark.parametrize("arguments", [{}, {"profile": "0.1MiB"}, {"placement": "gpu:0&gpu:1"}])
@pytest.mark.parametrize("method", ["decode", "project"])
def test_what_a_method_calls_deep_inside_is_seen(machine, method: str, arguments: dict[str, str]) -> None:
    given = torch.arange(8) if method == "decode" else torch.randn(2, 64)
    with machine(8, 8) as manager:
        want = getattr(build().to("sim:0"), method)(given.to("sim:0")).cpu()
        net = build()
        with manage(net, manager=manager, **arguments) as managed:
            for _ in range(2):
                for device in ("sim:0", "cpu"):
                    assert torch.equal(getattr(net, method)(given.to(device)).cpu(), want)
                assert not managed.members[0].leases
                managed.members[0].managed.unload()


@torch.no_grad()
def test_what_a_pipelines_model_does_in_encode_or_decode_has_its_weights(machine) -> None:
    x = torch.randn(2, 64)
    with machine(8) as manager:
        want = build().to("sim:0").shifted(x.to("sim:0")).cpu()
        net = build()
        with manage(SimpleNamespace(components={"net": net}), manager=manager) as managed:
            for _ in range(2):
                assert torch.equal(net.shifted(x.to("sim:0")).cpu(), want)
                assert not managed.members[0].leases
                managed.members[0].managed.unload()


@torch.no_grad()
@pytest.mark.parametrize("arguments", [{}, {"profile": "0.18MiB"}, {"placement": "gpu:0&gpu:1"}])
def test_a_codebook_of_diffusers_is_looked_up_on_the_device(machine, arguments: dict[str, str]) -> None:
    def build_vae() -> VQModel:
        torch.manual_seed(0)
        model = VQModel(
            block_out_channels=(16, 32), layers_per_block=1, latent_channels=32, num_vq_embeddings=32,
            norm_num_groups=4, down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2, lookup_from_codebook=True,
        )  # fmt: skip
        return model.eval().requires_grad_(False)

    options = {"force_not_quantize": True, "shape": (1, 4, 4, 32)}
    with machine(64, 64) as manager:
        want = build_vae().to("sim:0").decode(LATENTS.to("sim:0"), **options).sample.cpu()
        vae = build_vae()
        with manage(vae, manager=manager, **arguments):
            assert torch.equal(vae.decode(LATENTS.to("sim:0"), **options).sample.cpu(), want)


@torch.no_grad()
def test_a_method_is_verified_like_a_forward(machine) -> None:
    with machine(8) as manager:
        net = build()
        with manage(net, profile="0.1MiB", manager=manager) as managed:
            managed.verify(net.decode, torch.arange(8)).assert_equal()


def test_released_modules_are_entered_as_before(machine) -> None:
    with machine(8) as manager:
        net = build()
        with manage(net, manager=manager):
            pass
        hooks = [part for part in net.modules() if part._forward_hooks or part._forward_pre_hooks]
        assert hooks == []
