"""Weights of a block that are asked for their device while it is not there: parents make tensors by the answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.runtime.tensors.reported_device import device_of

DIM = 64
X = torch.randn(2, DIM)
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.06MiB"},
    "pageable": {"placement": "gpu:0", "profile": "0.06MiB,pinned=none"},
    "second": {"placement": "gpu:1", "profile": "0.06MiB"},
    "on disk": {"placement": "gpu:0:disk", "profile": "0.06MiB"},
    "fp8": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "fp8 streamed": {"placement": "gpu:0", "precision": "fp8 scaled", "profile": "0.04MiB"},
    "split and streamed": {"placement": "gpu:0&gpu:1@0.5", "profile": "gpu:0=0.06MiB,gpu:1=0.04MiB"},
    "CPU": {"placement": "cpu"},
}


class Asking(nn.Module):
    """Has no non-block weights, and asks those that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(6))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        x = x + torch.ones(DIM, device=next(self.parameters()).device)
        for number, block in enumerate(self.blocks):
            weight = self.blocks[number - 3].weight
            x = block(x) + torch.full((DIM,), 0.5, device=weight.device, dtype=weight.dtype)
            x = x.to(weight.device, weight.dtype)
            self.seen.append(str(weight.device))
        return x if factor is None else x @ factor


def build() -> Asking:
    torch.manual_seed(0)
    return Asking().eval().requires_grad_(False)


def run(net: Asking, manager: Any, way: str, folder: Path) -> None:
    options = dict(WAYS[way])
    if way == "on disk":
        save_file(net.state_dict(), folder / "net.safetensors")
        options["files"] = {"model": folder / "net.safetensors"}
    with manage(net, manager=manager, **options) as managed:
        assert any(s.streamed for s in managed.plan.components[0].shares) == (way not in ("resident", "fp8", "CPU"))
        got = [net(X).cpu() for _ in range(3)]
        home = str(managed.device)
        assert set(net.seen) == {home}
        for block in net.blocks:
            where = device_of(block.weight)
            where = torch.device("cpu") if where.type == "meta" else where  # in its file, for who puts layers beside it
            assert block.weight.device == where, "outside of forwards they say where they are"
    net.to(home)
    want = net(X.to(home)).cpu()
    net.to("cpu")
    assert all(torch.equal(each, want) for each in got)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_what_a_parent_makes_by_the_answer_is_right(machine, way: str, tmp_path: Path) -> None:
    with machine(8, 8) as manager:
        run(build(), manager, way, tmp_path)


@torch.no_grad()
def test_a_weight_at_rest_may_be_an_argument(machine) -> None:
    with machine(8) as manager:
        net = build()
        want = net(X, net.blocks[2].weight)
        with manage(net, manager=manager, **WAYS["streamed"]):
            for _ in range(2):
                assert torch.equal(net(X, net.blocks[2].weight).cpu(), want)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@torch.no_grad()
def test_the_answer_ends_with_the_forward(machine, kind: type[BaseException]) -> None:
    with machine(8) as manager:
        net = build()
        asked: list[str] = []
        with manage(net, manager=manager, **WAYS["streamed"]):

            def look(*_: Any) -> None:
                other = threading.Thread(target=lambda: asked.append(str(net.blocks[5].weight.device)))
                other.start()
                other.join()
                asked.append(str(net.blocks[5].weight.device))
                raise kind

            handle = net.blocks[1].register_forward_pre_hook(look)
            with pytest.raises(kind):
                net(X)
            assert asked == ["cpu", "sim:0"] and net.blocks[5].weight.device == torch.device("cpu")
            handle.remove()
            net(X)
            assert net.blocks[5].weight.device == torch.device("cpu")
        assert all(type(block.weight) is nn.Parameter and not vars(block.weight) for block in net.blocks)
