"""Packed weights: tensors of another library's class, which says in Python attributes what their bytes mean."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.weights.module_component import component_from_module
from highwater.memory.weights.quantized_leaves import PackedForm, Wrapper, leaves_of

GROUP = 32
"""Elements that share a scale."""


class Packed(torch.Tensor):
    """Bytes of a weight, as ComfyUI-GGUF's class has them: copies of it are itself, and its shape is the weight's."""

    logical: torch.Size
    kind: str
    changes: tuple[torch.Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        return vars(self).get("logical", self.size())

    def detach(self, *_: Any, **__: Any) -> Packed:
        return self

    def clone(self, *_: Any, **__: Any) -> Packed:
        return self

    def new_empty(self, *args: Any, **kwargs: Any) -> Packed:
        return super().new_empty(*args, **kwargs).as_subclass(Packed)

    def to(self, *args: Any, **kwargs: Any) -> Packed:
        moved = super().to(*args, **kwargs)
        if moved is not self:
            vars(moved).update(vars(self))
        return moved


def packed(memory: torch.Tensor, logical: torch.Size, kind: str) -> nn.Parameter:
    weight = memory.as_subclass(Packed)
    weight.logical, weight.kind, weight.changes = logical, kind, ()
    return nn.Parameter(weight, requires_grad=False)


def pack(weight: torch.Tensor) -> nn.Parameter:
    """Eight bits per element, and a scale in half precision before every group."""
    groups = weight.reshape(-1, GROUP)
    scale = groups.abs().amax(1, keepdim=True).clamp_min(1e-6).div(127).half()
    numbers = groups.div(scale.float()).round().clamp(-127, 127).to(torch.int8)
    memory = torch.cat([scale.view(torch.uint8), numbers.view(torch.uint8)], 1)
    return packed(memory.reshape(weight.shape[0], -1), weight.shape, "eight bits")


def unpack(weight: Packed) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        memory = torch.Tensor.detach(weight)
    if weight.kind == "half":
        return memory.float()
    groups = memory.reshape(-1, GROUP + 2)
    scale, numbers = groups[:, :2].contiguous().view(torch.float16), groups[:, 2:].contiguous().view(torch.int8)
    wide = (numbers.float() * scale.float()).reshape(weight.shape)
    for change in weight.changes:
        wide = wide + change.to(wide.device)
    return wide


class PackedLinear(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight = pack(layer.weight.detach())
        self.bias = None if layer.bias is None else packed(layer.bias.detach().half(), layer.bias.shape, "half")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, unpack(self.weight), None if self.bias is None else unpack(self.bias))


def packed_net(toys: Any) -> nn.Module:
    net = toys.build_net()
    for block in (*net.doubles, *net.singles):
        block.up, block.down = PackedLinear(block.up), PackedLinear(block.down)
    return net.requires_grad_(False)


def test_a_packed_weight_is_what_its_memory_and_attributes_make(toys) -> None:
    weight = packed_net(toys).doubles[0].up.weight
    form = Wrapper.of(weight)
    assert isinstance(form, PackedForm)
    (leaf,) = leaves_of(weight)
    assert type(leaf) is torch.Tensor and leaf.dtype is torch.uint8 and leaf.shape == weight.size()
    again = form.assemble(iter([leaf.clone()]))
    assert type(again) is Packed and again.shape == weight.shape
    assert torch.equal(unpack(again), unpack(weight))
    weight.changes = (torch.ones(()),)
    assert torch.equal(unpack(again), unpack(weight))


def test_the_books_count_the_bytes_in_memory(toys) -> None:
    net = packed_net(toys)
    component = component_from_module(net, name="net")
    assert component.weight_bytes == sum(leaf.nbytes for weight in net.parameters() for leaf in leaves_of(weight))
    specs = [spec for block in component.blocks for spec in block.tensors]
    assert not any(spec.encodable for spec in specs if spec.leaves)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("profile", "placement"),
    [("auto", "gpu:0"), ("0.2MiB", "gpu:0"), ("gpu:0=0.15MiB,gpu:1=0.08MiB", "gpu:0&gpu:1"), ("auto", "cpu")],
)
def test_equal_to_unmanaged_also_with_changes_that_come_and_go(
    toys, machine, sim, profile: str, placement: str, mode
) -> None:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    change = torch.randn(6 * 64, 64, generator=torch.Generator().manual_seed(1)) * 0.05
    device = "cpu" if placement == "cpu" else "sim:0"
    net = packed_net(toys)
    with machine(8, 8) as manager, mode():
        own = packed_net(toys).to(device)
        want = [own(x.to(device)).cpu()]
        own.doubles[1].up.weight.changes = (change,)
        want.append(own(x.to(device)).cpu())
        assert not torch.equal(*want)
        del own
        with manage(net, profile=profile, placement=placement, manager=manager) as managed:
            for number in (0, 1, 0, 1, 1):
                net.doubles[1].up.weight.changes = (change,) if number else ()
                assert torch.equal(net(x).cpu(), want[number])
            for index in range(2):
                assert manager.ledger.used(f"gpu:{index}") == sim.stats(index).used_bytes
            shares = managed.report()["components"][0]["plan"]["shares"]
            assert any(share["streamed_blocks"] for share in shares) == ("MiB" in profile)
            assert all(type(block.up.weight) is Packed for block in net.doubles)
    weight = net.doubles[1].up.weight
    assert type(weight) is Packed and isinstance(weight, nn.Parameter) and not weight.is_inference()
    assert len(weight.changes) == 1 and weight.shape == (6 * 64, 64)
    assert torch.equal(net(x), want[1]) or device != "cpu"


def test_a_copy_of_a_managed_module_is_apart_from_it(toys, machine) -> None:
    net = packed_net(toys)
    x = torch.randn(2, 5, 64)
    want = net(x)
    with machine(8) as manager, manage(net, profile="0.2MiB", placement="gpu:0", manager=manager):
        net(x)
        copied = copy.deepcopy(net.doubles[1].up)
        copied.weight.changes = (torch.ones(()),)
        assert net.doubles[1].up.weight.changes == ()
    assert torch.equal(net(x), want)
