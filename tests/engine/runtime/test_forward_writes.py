"""Weights that a forward writes to, in the block that computes: as unmanaged, or refused in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

DIM = 32
PLACES = {
    "resident": ("auto", "gpu:0"),
    "streamed": ("0.04MiB", "gpu:0"),
    "pageable": ("0.04MiB,pinned=none", "gpu:0"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("0.04MiB", "gpu:0&gpu:1"),
    "cpu": ("auto", "cpu"),
    "disk": ("0.04MiB", "gpu:0:disk"),
}
Write = Callable[[nn.Module, torch.Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, 2 * DIM)
        self.b = nn.Linear(2 * DIM, DIM)
        self.write: Write | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.write is not None:
            self.write(self, x)
        return x + self.b(torch.relu(self.a(x)))


class ActNorm(nn.Module):
    """Sets itself up by its first input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.log_scale = nn.Parameter(torch.zeros(DIM))
        self.lin = nn.Linear(DIM, DIM)
        self.register_buffer("is_set", torch.zeros(1, dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set.item():
            self.bias.data.copy_(-x.mean((0, 1)))
            self.log_scale.data.copy_(torch.log(1.0 / (x.std((0, 1)) + 1e-6)))
            self.is_set.fill_(1)
        return x + self.lin((x + self.bias) * self.log_scale.exp())


class Codebook(nn.Module):
    """A quantizer whose codes are a moving average of what comes (VQ-EMA)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, DIM)
        self.lin = nn.Linear(DIM, DIM)
        self.register_buffer("sizes", torch.ones(16))
        self.register_buffer("sums", torch.randn(16, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.lin(x).reshape(-1, DIM)
        codes = torch.cdist(flat, self.embedding.weight).argmin(1)
        hot = nn.functional.one_hot(codes, 16).to(flat.dtype)
        self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(hot.t() @ flat, alpha=0.1)
        self.embedding.weight.data = self.sums / self.sizes.unsqueeze(1)
        return x + self.embedding(codes).view_as(x)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block, num: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BUDGETS = {ActNorm: "0.018", Codebook: "0.035"}


def build(kind: type[nn.Module] = Block, write: Write | None = None, num: int = 5) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(kind, num).eval().requires_grad_(False)
    for block in net.blocks if write else ():
        block.write = write
    return net


def set_item(block: nn.Module, x: torch.Tensor) -> None:
    block.a.weight.data[0] = 0.5
    block.a.weight.data[:, 3] *= 2.0


def assign_data(block: nn.Module, x: torch.Tensor) -> None:
    block.a.weight.data = block.a.weight.data * 1.5
    block.a.weight.data[1] = 0.25


def replace(block: nn.Module, x: torch.Tensor) -> None:
    block.b.bias = nn.Parameter(block.b.bias + x.mean((0, 1)), requires_grad=False)
    block.a.weight = nn.Parameter(block.a.weight * 0.75, requires_grad=False)


def read_and_replace(block: nn.Module, x: torch.Tensor) -> None:
    block.a.weight = nn.Parameter(block.a.weight.data * 0.75, requires_grad=False)


WRITES: dict[str, Write] = {
    "mul_": lambda block, x: block.a.weight.mul_(1.25),
    "copy_": lambda block, x: block.a.bias.copy_(x.mean() + block.a.bias),
    "view": lambda block, x: block.a.weight.view(-1)[:7].add_(1.0),
    "detach": lambda block, x: block.a.weight.detach().mul_(1.25),
    "data.mul_": lambda block, x: block.a.weight.data.mul_(0.75),
    "data of data": lambda block, x: block.b.weight.data.view(-1).add_(x.mean()),
    "data[0]": set_item,
    "data =": assign_data,
    "replaced": replace,
    "read and replaced": read_and_replace,
}


def has_same_state(net: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(tensor.cpu(), state[name]) for name, tensor in net.state_dict().items())


def check(machine, tmp_path, place: str, make: Callable[[], Net], mode=torch.no_grad, budget: str = "0.04") -> None:
    profile, placement = PLACES[place]
    streams, profile = "0.04" in profile, profile.replace("0.04", budget)
    net, other = make(), make()
    save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, tmp_path / "net.safetensors")
    files = {"net": [tmp_path / "net.safetensors"]} if place == "disk" else None
    inputs = [torch.randn(2, 3, DIM) for _ in range(3)]
    with mode(), machine(8, 8) as manager:
        with manage({"net": net}, profile, placement=placement, files=files, manager=manager) as managed:
            assert ("stream" in managed.plan.text()) == streams
            for x in inputs:
                assert torch.equal(net(x).cpu(), other(x)), managed.plan.text()
                assert has_same_state(net, other)
            manager.ledger.check()
        assert has_same_state(net, other)
        assert all(type(weight) is nn.Parameter for weight in net.parameters())
        assert torch.equal(net(inputs[0]), other(inputs[0]))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("place", PLACES)
def test_a_write_in_a_forward_counts_and_outlives_it(machine, tmp_path, place: str, write: str) -> None:
    check(machine, tmp_path, place, lambda: build(write=WRITES[write]))


@pytest.mark.parametrize("kind", [ActNorm, Codebook])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", PLACES)
def test_layers_that_set_themselves_up(machine, tmp_path, place: str, kind: type[nn.Module], mode) -> None:
    check(machine, tmp_path, place, lambda: build(kind, num=10), mode, BUDGETS[kind])


def have_grown(net: nn.Module, before: list[torch.Tensor], factor: float) -> bool:
    state = net.state_dict()
    now = [state[f"blocks.{number}.a.weight"].cpu() for number in range(len(before))]
    return all(torch.equal(new, factor * old) for new, old in zip(now, before, strict=True))


@pytest.mark.parametrize("write", ["mul_", "data.mul_", "data =", "read and replaced"])
@pytest.mark.parametrize("place", ["resident", "streamed", "split and streamed", "cpu"])
@torch.no_grad()
def test_eight_bits_are_rounded_again(machine, place: str, write: str) -> None:
    """By powers of two, which eight bits have: as if the scale had been another."""
    profile, placement = PLACES[place]
    factor = {"data =": 4.0}.get(write, 2.0)

    def double(block: nn.Module, x: torch.Tensor) -> None:
        weight = block.a.weight
        if write == "mul_":
            weight.mul_(factor)
        elif write == "data.mul_":
            weight.data.mul_(factor)
        elif write == "data =":
            weight.data = weight.data * factor
        else:
            block.a.weight = nn.Parameter(weight.data * factor, requires_grad=False)

    net = build(write=double)
    with machine(8, 8) as manager:
        profile = profile.replace("0.04", "0.03")
        with manage(net, profile, placement=placement, precision="fp8 scaled", manager=manager):
            before = [block.a.weight.detach().clone() * 1.0 for block in net.blocks]
            for number in (1, 2, 3):
                net(torch.randn(2, 3, DIM))
                assert have_grown(net, before, factor**number)
        assert have_grown(net, before, factor**3)


REFUSED: dict[str, Write] = {
    "of another shape": lambda block, x: setattr(block.a, "weight", nn.Parameter(torch.zeros(3, DIM, device=x.device))),
    "data of another dtype": lambda block, x: setattr(block.a.weight, "data", block.a.weight.data.half()),
    "none": lambda block, x: setattr(block.a, "bias", None),
}


@pytest.mark.parametrize("write", REFUSED)
@pytest.mark.parametrize("place", ["streamed", "split and streamed"])
@torch.no_grad()
def test_what_cannot_be_kept_is_undone_and_refused(machine, place: str, write: str) -> None:
    profile, placement = PLACES[place]
    net, other, x = build(), build(), torch.randn(2, 3, DIM)

    def at_the_end(module: nn.Module, args: object, output: torch.Tensor) -> None:
        REFUSED[write](net.blocks[2], x.to(output.device))

    hook = net.blocks[2].b.register_forward_hook(at_the_end)
    with machine(8, 8) as manager, manage(net, profile, placement=placement, manager=manager):
        with pytest.raises(UnsafeState, match=r"model: 'blocks.2.a.(weight|bias)' was .* while blocks.2 computed"):
            net(x)
        hook.remove()
        assert torch.equal(net(x).cpu(), other(x))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in net.state_dict().items())


@torch.no_grad()
def test_reading_data_copies_nothing_back(machine) -> None:
    net, other, x = build(write=lambda block, x: block.a.weight.data.sum()), build(), torch.randn(2, 3, DIM)
    with machine(8) as manager, manage(net, "0.04MiB", placement="gpu:0", manager=manager) as managed:
        assert torch.equal(net(x).cpu(), other(x))
        groups = managed.members[0].managed.groups
        before = [group.at_rest.version for group in groups]
        saved = copy.copy(before)
        net(x)
        assert [group.at_rest.version for group in groups] == saved


@pytest.mark.parametrize("place", ["streamed", "split and streamed"])
@torch.no_grad()
def test_what_a_later_hook_writes_through_data_counts(machine, place: str) -> None:
    profile, placement = PLACES[place]
    net, other, x = build(), build(), torch.randn(2, 3, DIM)

    def grow(module: nn.Module, args: object, output: torch.Tensor) -> None:
        module.weight.data.mul_(1.5)

    want = []
    with machine(8, 8) as manager, manage(net, profile, placement=placement, manager=manager):
        for each in (net, other):
            each.blocks[2].a.register_forward_hook(grow)
        for _ in range(3):
            want.append(other(x))
            assert torch.equal(net(x).cpu(), want[-1])
    assert not torch.equal(want[0], want[1])
    assert torch.equal(net.blocks[2].a.weight, other.blocks[2].a.weight)
