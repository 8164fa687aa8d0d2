"""A model larger than each of two unequal devices, with a LoRA on top: what one large device computes, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from highwater.memory import manage

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

DIM, BATCH, TOKENS = 128, 2, 4
SHAPE = {"dim": DIM, "doubles": 4, "singles": 6}
# The model has 5.5 MiB of weights, and its LoRA.
ROOMY, TIGHT = (5, 3), (2.75, 1.75)
FREE = 256 << 10  # for activations
PLACEMENTS = ("gpu:0&gpu:1", "gpu:1&gpu:0", "gpu:0&gpu:1/auto", "gpu:0&gpu:1/6")


def build(toys) -> nn.Module:
    """Return the toy network with a LoRA that changes its results."""
    net = toys.build_net(**SHAPE)
    net.out.weight = nn.Parameter(net.out.weight.clone(), requires_grad=False)  # peft puts no LoRA on tied weights
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(net, config).eval().requires_grad_(False)


def halves(device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(BATCH, TOKENS, DIM, generator=generator).to(device) for _ in range(2)]


def on_one_device(machine, toys, *, with_lora: bool = True) -> list[torch.Tensor]:
    net = build(toys)
    if not with_lora:
        net.disable_adapter_layers()
    with machine(64) as manager, torch.no_grad(), manage(net, placement="gpu:0", manager=manager):
        return [net(x).cpu() for x in halves("sim:0")]


@pytest.mark.parametrize("sizes", [ROOMY, TIGHT], ids=["resident", "streamed"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_both_devices_compute_what_one_large_device_does(
    machine, toys, placement: str, sizes: tuple[float, ...]
) -> None:
    wanted = on_one_device(machine, toys)
    net = build(toys)
    num_bytes = sum(parameter.nbytes for parameter in net.parameters())
    assert num_bytes > max(sizes) * toys.MIB
    home = "sim:1" if placement.startswith("gpu:1") else "sim:0"
    with machine(*sizes, low=FREE, high=FREE) as manager, torch.no_grad():
        with manage(net, placement=placement, manager=manager) as managed:
            (part,) = managed.plan.components
            assert part.streams == (sizes is TIGHT)
            assert {share.device for share in part.shares if share.blocks} == {"gpu:0", "gpu:1"}
            x = halves(home)
            for _ in range(2):  # the first one loads
                assert all(torch.equal(net(each).cpu(), want) for each, want in zip(x, wanted, strict=True))
                got = managed.run_micro_batches([lambda each=each: net(each) for each in x])
                assert all(torch.equal(each.cpu(), want) for each, want in zip(got, wanted, strict=True))
                manager.ledger.check()
        del x, got


def test_the_lora_is_seen(machine, toys) -> None:
    plain = on_one_device(machine, toys, with_lora=False)
    assert not any(map(torch.equal, on_one_device(machine, toys), plain))
