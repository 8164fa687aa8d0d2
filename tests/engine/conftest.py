"""Small models with the shapes that matter, and a manager on simulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

MIB = 1 << 20


class Block(nn.Module):
    """A residual layer with a norm, two matrices and a buffer, of a width that can differ between blocks."""

    def __init__(self, dim: int, factor: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, factor * dim)
        self.down = nn.Linear(factor * dim, dim)
        self.register_buffer("gain", torch.full((dim,), 0.5))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:  # [B, T, D]
        return x + self.gain * self.down(torch.nn.functional.gelu(self.up(self.norm(x) + shift)))


class Net(nn.Module):
    """Two stacks of unequal blocks between an embedder and a tied output, as transformers have."""

    def __init__(self, dim: int = 64, doubles: int = 3, singles: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.doubles = nn.ModuleList(Block(dim, 6) for _ in range(doubles))
        self.singles = nn.ModuleList(Block(dim, 3) for _ in range(singles))
        self.out = nn.Linear(dim, dim, bias=False)
        self.out.weight = self.embed.weight
        self.skip: frozenset[int] = frozenset()
        self.repeat: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.embed(x)
        for number, block in enumerate([*self.doubles, *self.singles]):
            if number in self.skip:
                continue
            x = block(x, shift)
            if number in self.repeat:
                x = block(x, shift)
        return self.out(x)


def build_net(seed: int = 0, dtype: torch.dtype = torch.float32, **shape: int) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(**shape).to(dtype).eval().requires_grad_(False)


def bare_net() -> Net:
    """Return the toy network without memory for its weights; buffers are real."""
    net = build_net()
    gains = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.to("meta")
    for name, gain in gains.items():
        owner, _, attribute = name.rpartition(".")
        net.get_submodule(owner).register_buffer(attribute, gain)
    net.out.weight = net.embed.weight
    return net


@pytest.fixture
def toys() -> SimpleNamespace:
    return SimpleNamespace(Block=Block, Net=Net, build_net=build_net, bare_net=bare_net, MIB=MIB)


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], None]:
    """Return a function that waits until a condition holds; fails if it never does."""

    def wait(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, "the condition never held"
            time.sleep(0.02)

    return wait


@pytest.fixture
def machine(sim) -> Callable[..., AbstractContextManager[object]]:
    """Return a context manager: simulated devices of these MiB, strict, and a fresh manager without a watermark.

    Leaving it compares the books with what is there, releases everything, and fails on leaked device or pinned bytes
    and on races.
    """
    from highwater.memory import MemoryManager

    @contextmanager
    def build(*mebibytes: float, low: int = 0, high: int = 0, **rates: float) -> Iterator[MemoryManager]:
        specs = [sim.SimDeviceSpec(total_bytes=int(size * MIB), **rates) for size in mebibytes]
        with sim.cluster(specs):
            manager = MemoryManager()
            manager.set_watermark("*", low, high)
            manager.set_watermark("host", 0, 0)  # as if this machine had all the RAM that it needs
            try:
                yield manager
                manager.ledger.check()
            finally:
                manager.release_all()
                manager.ledger.check()

    return build


@pytest.fixture
def steady_seconds(sim) -> Callable[[Callable[[], object]], float]:
    """Return what a step takes on the clock of the simulated devices, after two others."""

    def seconds_of(step: Callable[[], object]) -> float:
        for _ in range(2):
            step()
        begin_s = wait_for_all()
        step()
        return wait_for_all() - begin_s

    def wait_for_all() -> float:
        for index in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(index)
        return float(sim.clock_s())

    return seconds_of
