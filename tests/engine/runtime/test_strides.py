"""Weights keep their strides, wherever they are: kernels choose by them, and their sums round accordingly."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage

X = torch.randn(2, 16, 12, 12).to(memory_format=torch.channels_last)


class ConvBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(16, 32, 3, padding=1)
        self.narrow = nn.Conv2d(32, 16, 1)
        self.mix = nn.Linear(16, 16)
        self.register_buffer("kernel", torch.randn(16, 1, 3, 3).to(memory_format=torch.channels_last))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, C, H, W]
        x = x + self.narrow(nn.functional.gelu(self.wide(x)))
        x = x + nn.functional.conv2d(x, self.kernel, padding=1, groups=16)
        return self.mix(x.movedim(1, -1)).movedim(-1, 1)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(16, 16, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock() for _ in range(6))
        self.level = nn.Parameter(torch.full((1,), 0.5).expand(12))  # overlaps itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return x * self.level


def build_net() -> ConvNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = ConvNet().to(memory_format=torch.channels_last).eval().requires_grad_(False)
    for block in net.blocks:
        block.mix.weight.data = block.mix.weight.detach().t().contiguous().t()  # dense, in no order that has a name
    return net


def strides_of(net: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in net.state_dict(keep_vars=True).items() if name != "level"}


class Seen:
    """The strides that the weights of a module have while its blocks compute."""

    def __init__(self, net: ConvNet) -> None:
        self.strides: dict[str, tuple[int, ...]] = {}
        for name, block in net.blocks.named_children():
            block.wide.register_forward_hook(lambda *_, at=f"blocks.{name}.", block=block: self.look(at, block))

    def look(self, at: str, block: nn.Module) -> None:
        for name, tensor in (*block.named_parameters(), *block.named_buffers()):
            self.strides[at + name] = tensor.stride()


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("place", ["gpu:0", "gpu:0:host", "cpu"])
@pytest.mark.parametrize("streams", [False, True])
def test_managed_computes_with_the_strides_of_unmanaged(machine, precision: str, place: str, streams: bool) -> None:
    device = "cpu" if place == "cpu" else "sim:0"
    with machine(8) as manager, torch.no_grad():
        net, want_strides = build_net(), strides_of(build_net())
        assert any(len(stride) == 4 and stride[1] == 1 for stride in want_strides.values())
        seen = Seen(net)
        budget = {"as stored": "0.1MiB", "fp8 scaled": "0.06MiB"}[precision] if streams else "auto"
        with manage(net, budget, placement=place, precision=precision, manager=manager) as managed:
            assert strides_of(net) == want_strides
            outputs = [net(X).cpu() for _ in range(2)]
            assert seen.strides == {name: stride for name, stride in want_strides.items() if name in seen.strides}
            assert len(seen.strides) == 6 * 7
            assert place == "cpu" or bool(managed.members[0].managed.plan.shares[0].streamed) == streams
        assert strides_of(net) == want_strides
        want = net.to(device)(X.to(device)).cpu()  # with what eight bits leave of the weights
        assert all(torch.equal(output, want) for output in outputs)
        assert all(output.stride() == want.stride() for output in outputs)
        net.to("cpu")


@pytest.mark.parametrize("came_on_meta", [False, True])
@pytest.mark.parametrize("tier", ["disk", "pinned"])
def test_what_is_read_from_a_file_is_contiguous_and_right(machine, tmp_path, tier: str, came_on_meta: bool) -> None:
    path = tmp_path / "net.safetensors"
    state = {name: tensor.contiguous() for name, tensor in build_net().state_dict().items()}
    save_file({name: tensor for name, tensor in state.items() if "kernel" not in name}, path)
    with machine(8) as manager, torch.no_grad():
        net = build_net()
        kernels = {name: buffer.clone() for name, buffer in net.named_buffers()}
        if came_on_meta:
            net.to("meta")
            for name, kernel in kernels.items():
                owner, _, attribute = name.rpartition(".")
                net.get_submodule(owner).register_buffer(attribute, kernel)
        contiguous = build_net()
        for parameter in contiguous.parameters():
            parameter.data = parameter.contiguous()
        with manage({"net": net}, "0.1MiB", placement=f"gpu:0:{tier}", files={"net": [path]}, manager=manager):
            output = net(X).cpu()
            assert {
                name: tensor.cpu().equal(state[name]) for name, tensor in net.state_dict().items()
            } == dict.fromkeys(state, True)
            assert net.blocks[0].kernel.stride() == build_net().blocks[0].kernel.stride()
        if tier == "disk" or came_on_meta:
            assert torch.equal(output, contiguous.to("sim:0")(X.to("sim:0")).cpu())
            contiguous.to("cpu")


def to_contiguous(net: ConvNet) -> None:
    net.to(memory_format=torch.contiguous_format)


def assign_data(net: ConvNet) -> None:
    for block in net.blocks:
        block.mix.weight.data = (
            block.mix.weight.detach().clone(memory_format=torch.contiguous_format).to(block.mix.weight.data.device)
        )
        weight = block.wide.weight.data
        block.wide.weight.data = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)


def assign_parameters(net: ConvNet) -> None:
    for block in net.blocks:
        weight = block.wide.weight.detach()
        weight = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) * 1.5
        block.wide.weight = nn.Parameter(weight, requires_grad=False)


def transpose_and_scale(net: ConvNet) -> None:
    for block in net.blocks:
        block.mix.weight.data = block.mix.weight.data.t() * 0.5


def transpose(net: ConvNet) -> None:
    for block in net.blocks:
        block.mix.weight.data = block.mix.weight.data.t()  # the same memory in another order


WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.1MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "pageable": {"placement": "gpu:0:host", "profile": "0.1MiB"},
    "CPU": {"placement": "cpu"},
}


@pytest.mark.parametrize("change", [to_contiguous, assign_data, assign_parameters, transpose_and_scale, transpose])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("forwards", [0, 1])
def test_strides_that_are_assigned_are_kept(machine, change, way: str, forwards: int) -> None:
    device = "cpu" if way == "CPU" else "sim:0"
    with machine(8, 8) as manager, torch.no_grad():
        net, plain = build_net(), build_net()
        plain.to(device)
        with manage(net, manager=manager, **WAYS[way]) as managed:
            for _ in range(forwards):
                assert torch.equal(net(X).cpu(), plain(X.to(device)).cpu())
            for each in (net, plain):
                change(each)
            for _ in range(2):
                assert torch.equal(net(X).cpu(), plain(X.to(device)).cpu())
            managed.members[0].managed.unload()
            assert torch.equal(net(X).cpu(), plain(X.to(device)).cpu())
            for each in (net, plain):
                each.blocks[2].wide.weight.mul_(2)
            assert torch.equal(net(X).cpu(), plain(X.to(device)).cpu())
        plain.to("cpu")
        got, want = ({k: v for k, v in strides_of(each).items() if "kernel" not in k} for each in (net, plain))
        assert got == want
        assert all(map(torch.equal, net.state_dict().values(), plain.state_dict().values()))


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("profile", ["auto", "0.06MiB"])
@torch.no_grad()
def test_strides_that_other_code_changes_between_forwards_stay_changed(machine, profile: str, compiles: bool) -> None:
    """The same memory read in another order; on the device, at rest, after an eviction and after the release."""
    net, plain = build_net(), build_net()
    x = X.to("sim:0")
    with machine(8) as manager:
        plain.to("sim:0")
        managed = manage(net, profile, compile=compiles, manager=manager)
        for _ in range(4):
            net(x)
        for change in (lambda: None, managed.members[0].managed.unload, lambda: managed.reprofile("auto")):
            for each in (net, plain):
                weight = each.blocks[2].mix.weight
                weight.data = weight.data.t()
            assert torch.allclose(net(x), plain(x), atol=1e-5)
            change()
            for _ in range(3):
                assert torch.allclose(net(x), plain(x), atol=1e-5)
        managed.release()
        assert torch.equal(net.blocks[2].mix.weight, plain.blocks[2].mix.weight.cpu())
        del x
        plain.to("cpu")


class Turning(nn.Module):
    """Reads the memory of its weight in another order with each forward."""

    def __init__(self, num_turns: int) -> None:
        super().__init__()
        self.mix = nn.Linear(64, 64, bias=False)
        self.num_turns = num_turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.mix.weight
        for _ in range(self.num_turns):
            weight.data = weight.data.t()
        return x + torch.tanh(self.mix(x))


@pytest.mark.parametrize("profile", ["auto", "0.07MiB"])
@pytest.mark.parametrize("num_turns", [1, 2, 3])
@torch.no_grad()
def test_strides_that_a_forward_changes_stay_changed(machine, profile: str, num_turns: int) -> None:
    net, plain = (nn.Sequential(*(Turning(num_turns) for _ in range(6))) for _ in range(2))
    plain.load_state_dict(net.state_dict())
    x = torch.randn(2, 64)
    with machine(8) as manager:
        managed = manage(net, profile, manager=manager)
        for evicts in (False, True):
            for _ in range(5):
                assert torch.allclose(net(x).cpu(), plain(x), atol=1e-4)
            if evicts:
                managed.members[0].managed.unload()
        assert torch.allclose(net(x).cpu(), plain(x), atol=1e-4)
        managed.release()
    assert torch.allclose(net(x), plain(x), atol=1e-4)
