"""What a split costs: every output of the second device brought home, beside the cut alone.

All seconds are virtual: two simulated devices with a link of a given speed between them. The model stands in for Flux
at 1024x1024 in bf16: its 57 blocks take and return hidden states of the real sizes, which really move, and compute as
long as their flops take on the card; their weights are a 1024th of the real ones and stay on their devices. What a
block returned goes home while its device computes the next one, by way of a copy on the device at 1 TB/s; launches cost
nothing, and each copy to another device has a latency of 10 microseconds.

"Cut alone" is the same model without the engine: its hidden states, with what the blocks take beside them, are moved
once, at the engine's own cut, and the result comes back at the end. That is the least that any split costs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage

from .case import Result
from .shapes import Shape, flux
from .streaming import CARDS, SCALE

LINKS = {"8 GB/s": 8e9, "25 GB/s": 25e9}
IMAGE_TOKENS, TEXT_TOKENS, WIDTH, HEAD_WIDTH = 4096, 512, 3072, 128
NUM_STEPS = 2
SPLIT = "gpu:0&gpu:1"
Hidden = tuple[torch.Tensor, torch.Tensor]


class TimedBlock(nn.Module):
    """A block that takes what one of Flux takes, computes for a given time and returns new hidden states."""

    def __init__(self, weight_bytes: int, compute_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(max(1, weight_bytes // SCALE // 2), dtype=torch.bfloat16), False)
        self.compute_s = compute_s

    def forward(self, image: torch.Tensor, text: torch.Tensor, temb: torch.Tensor, rotary: Hidden) -> Hidden:
        simdevice.advance(image.device, self.compute_s)
        return torch.empty_like(image), torch.empty_like(text)


class StandIn(nn.Module):
    """Flux's two stacks, in the order in which they run, under their own names."""

    def __init__(self, shape: Shape, flops_per_s: float) -> None:
        super().__init__()
        stretches, _ = shape.stretches(shape.block_of)
        for part in stretches:
            if part.name:
                stack, _, _ = part.name.rpartition(".")
                if not hasattr(self, stack):
                    setattr(self, stack, nn.ModuleList())
                getattr(self, stack).append(TimedBlock(part.weight_bytes, part.flops / flops_per_s))
        self.rest_s = sum(part.flops for part in stretches if not part.name) / flops_per_s

    @property
    def in_order(self) -> list[nn.Module]:
        return [block for stack in self.children() for block in stack.children()]

    def forward(self, image: torch.Tensor, text: torch.Tensor, temb: torch.Tensor, rotary: Hidden) -> torch.Tensor:
        simdevice.advance(image.device, self.rest_s)
        for block in self.in_order:
            image, text = block(image, text, temb, rotary)
        return image


def inputs_on(device: str) -> tuple[Any, ...]:
    """Return hidden states of image and text, the embedding of time, and the rotary embedding."""
    image, text = (
        torch.zeros(1, tokens, WIDTH, dtype=torch.bfloat16, device=device) for tokens in (IMAGE_TOKENS, TEXT_TOKENS)
    )
    temb = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device)
    rotary = tuple(torch.zeros(IMAGE_TOKENS + TEXT_TOKENS, HEAD_WIDTH, device=device) for _ in range(2))
    return image, text, temb, rotary


def seconds_of(step: Any) -> float:
    """Return the virtual seconds of a step, after one that does not count."""
    step()
    for index in range(2):
        torch.accelerator.synchronize(index)
    begin_s = simdevice.clock_s()
    for _ in range(NUM_STEPS):
        step()
        for index in range(2):
            torch.accelerator.synchronize(index)
    return (simdevice.clock_s() - begin_s) / NUM_STEPS


def run_cut(model: StandIn, cut: int, inputs: tuple[Any, ...], second: str) -> None:
    """Compute the blocks from a number on, on the second device; all is moved there and the result back."""
    image, text, temb, rotary = inputs
    home = image.device
    simdevice.advance(home, model.rest_s)
    for number, block in enumerate(model.in_order):
        if number == cut:
            image, text, temb = (tensor.to(second) for tensor in (image, text, temb))
            rotary = tuple(tensor.to(second) for tensor in rotary)
        image, text = block(image, text, temb, rotary)
    image.to(home)


def run_case(shape: Shape, card: str, link: str) -> dict[str, Any]:
    spec = simdevice.SimDeviceSpec(
        total_bytes=2 << 30, peer_bytes_per_s=LINKS[link], flops_per_s=1e30, memory_bytes_per_s=1e12, launch_s=0
    )
    with simdevice.cluster([spec, spec]), torch.no_grad():
        return {"card": card, "between the two": link, **run_passes(StandIn(shape, CARDS[card]))}


def run_passes(model: StandIn) -> dict[str, Any]:
    """Return what a pass takes on one device, in a split by the engine, and with the cut of that alone."""
    first, second = (f"{simdevice.name()}:{index}" for index in range(2))
    inputs = inputs_on(first)
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    with manage(model, placement="gpu:0", manager=manager):
        one_s = seconds_of(lambda: model(*inputs))
    with manage(model, placement=SPLIT, manager=manager) as managed:
        managed_component = managed.members[0].managed
        hops = managed_component.forwards.hops
        split_s = seconds_of(lambda: model(*inputs))
        before = hops.num_hops, hops.bytes_moved
        model(*inputs)
        num_hops, moved_bytes = hops.num_hops - before[0], hops.bytes_moved - before[1]
        away = {managed_component.component.blocks[number].name for number in managed_component.plan.shares[1].blocks}
    names = [path for path, module in model.named_modules() if isinstance(module, TimedBlock)]
    cut = len(names) - len(away)
    assert away == set(names[cut:]), "the second device does not have the last blocks"
    cut_s = seconds_of(lambda: run_cut(model, cut, inputs, second))
    return {
        "one device, ms": 1e3 * one_s,
        "blocks on the second": len(away),
        "copies": num_hops,
        "GB moved": moved_bytes / 1e9,
        "cut alone, ms": 1e3 * cut_s,
        "split, ms": 1e3 * split_s,
        "cut alone, longer by": f"{cut_s / one_s - 1:.1%}",
        "split, longer by": f"{split_s / one_s - 1:.1%}",
        "split : cut alone": split_s / cut_s,
    }


def measure() -> Result:
    """Measure three cards and two links; under half a minute."""
    simdevice.install("sim", num_devices=2)
    shape = flux()
    rows = [run_case(shape, card, link) for card in CARDS for link in LINKS]
    return Result(
        question=(
            "How much longer a pass of Flux at 1024x1024 takes in a split over two devices than on one, everything "
            "resident: with the cut alone, and as the engine does it, with every output brought home. Virtual time."
        ),
        rows=rows,
        ratio=max(found["split : cut alone"] for found in rows),
        meaning="the most that a split takes of the time of the cut alone; no target, README states the price",
    )
