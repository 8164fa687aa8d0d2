"""Weights that a user writes while their module is managed: what computes next computes with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from highwater.memory import manage

PROFILES = ["auto", "0.8MiB", "0.55MiB", "0.45MiB"]


def load(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    net.load_state_dict(state)


def copy(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.copy_(state[name])


def assign_data(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in net.named_parameters():
        parameter.data = state[name].clone()


def assign(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, parameter in list(net.named_parameters()):
        path, _, attribute = name.rpartition(".")
        setattr(net.get_submodule(path), attribute, nn.Parameter(state[name].clone(), parameter.requires_grad))


@pytest.mark.parametrize("write", [load, copy, assign_data, assign])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("num_passes", [0, 1, 3])
@torch.no_grad()
def test_the_next_pass_computes_with_what_was_written(
    toys, machine, profile: str, num_passes: int, write: Callable[[nn.Module, dict[str, torch.Tensor]], None]
) -> None:
    net, other, x = toys.build_net(0), toys.build_net(1), torch.randn(2, 5, 64)
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with machine(8) as manager:
        want = other.to("sim:0")(x.to("sim:0")).cpu()
        other.to("cpu")
        with manage(net, profile=profile, placement="gpu:0", manager=manager):
            for _ in range(num_passes):
                net(x)
            torch.accelerator.synchronize(0)  # no copy under way: what was staged is old
            write(net, state)
            for _ in range(5):
                assert torch.equal(net(x).cpu(), want)
        assert all(torch.equal(parameter, state[name]) for name, parameter in net.named_parameters())
