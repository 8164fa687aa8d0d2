"""What several devices at work at once gain: two halves of a step as micro-batches, over groups of blocks in turn.

All seconds are virtual: simulated devices with one engine that computes and one link to the others each. The model is
that of `hops.py`, a stand-in for Flux at 1024x1024 in bf16: its blocks compute as long as their flops take on the card,
and their hidden states move in the time of the real ones, of which they, and the links, are a sixteenth. A step is two
calls, such as the conditional and the unconditional half with classifier-free guidance, or four, of two images.
Everything is resident. The host launches a kernel in 5 microseconds, and each copy has a latency of 10.

"One device" makes the calls one after the other on the fastest device alone. "One run each" is the same split with one
run of blocks per device, the calls one after the other: what a split was without micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage

from .case import Result
from .hops import HEAD_WIDTH, IMAGE_TOKENS, TEXT_TOKENS, WIDTH, Hidden, StandIn, TimedBlock
from .shapes import flux
from .streaming import CARDS

GB_S = 1e9
SCALE = 16
NUM_STEPS = 2
EQUAL, UNEQUAL = 1.7, 1.35
# Name, card, the speed of each device beside that card, bytes per second between two devices, number of calls.
CASES: tuple[tuple[str, str, tuple[float, ...], float, int], ...] = (
    ("two equal", "RTX 4090", (1, 1), 25 * GB_S, 2),
    ("2:1", "RTX 4090", (1, 0.5), 25 * GB_S, 2),
    ("1:2", "RTX 4090", (0.5, 1), 25 * GB_S, 2),
    ("three equal", "RTX 4090", (1, 1, 1), 25 * GB_S, 2),
    ("four equal", "RTX 4090", (1, 1, 1, 1), 25 * GB_S, 2),
    ("two equal", "RTX 4090", (1, 1), 25 * GB_S, 4),
    ("three equal", "RTX 4090", (1, 1, 1), 25 * GB_S, 4),
    ("four equal", "RTX 4090", (1, 1, 1, 1), 25 * GB_S, 4),
    ("two equal", "RTX 3060", (1, 1), 8 * GB_S, 2),
    ("2:1", "RTX 3060", (1, 0.5), 8 * GB_S, 2),
    ("two equal", "RTX 4090", (1, 1), 8 * GB_S, 2),
    ("2:1", "RTX 4090", (1, 0.5), 8 * GB_S, 2),
    ("two equal", "H200", (1, 1), 25 * GB_S, 2),
    ("two equal", "H200", (1, 1), 200 * GB_S, 2),
)


class PacedBlock(nn.Module):
    """A block of the stand-in that takes longer on a slower device."""

    def __init__(self, block: TimedBlock, speeds: Sequence[float]) -> None:
        super().__init__()
        self.weight = block.weight
        self.compute_s = block.compute_s
        self.speeds = speeds

    def forward(self, image: torch.Tensor, text: torch.Tensor, temb: torch.Tensor, rotary: Hidden) -> Hidden:
        simdevice.advance(image.device, self.compute_s / self.speeds[image.device.index])
        return image + 1, text + 1


def build(card: str, speeds: Sequence[float]) -> StandIn:
    model = StandIn(flux(), CARDS[card])
    for stack in model.children():
        for name, block in list(stack.named_children()):
            assert isinstance(block, TimedBlock)
            setattr(stack, name, PacedBlock(block, speeds))
    model.rest_s /= speeds[0]
    return model


def hidden_states(number: int) -> tuple[torch.Tensor, ...]:
    """Return those of image and text, and the embedding of time, of one call."""
    sizes = (1, IMAGE_TOKENS, WIDTH // SCALE), (1, TEXT_TOKENS, WIDTH // SCALE), (1, WIDTH // SCALE)
    return tuple(torch.full(size, number, dtype=torch.bfloat16, device=f"{simdevice.name()}:0") for size in sizes)


def seconds_of(step: Callable[[], Any], num_devices: int) -> float:
    """Return the virtual seconds of a step, after two that do not count: the first one loads."""
    for _ in range(2):
        step()
    synchronize(num_devices)
    begin_s = simdevice.clock_s()
    for _ in range(NUM_STEPS):
        step()
        synchronize(num_devices)
    return (simdevice.clock_s() - begin_s) / NUM_STEPS


def synchronize(num_devices: int) -> None:
    for index in range(num_devices):
        torch.accelerator.synchronize(index)


def run_case(name: str, card: str, speeds: tuple[float, ...], link: float, num_calls: int) -> dict[str, Any]:
    specs = [
        simdevice.SimDeviceSpec(
            total_bytes=4 << 30,
            peer_bytes_per_s=link / SCALE,
            flops_per_s=CARDS[card] * speed,
            memory_bytes_per_s=1e12 / SCALE,
        )
        for speed in speeds
    ]
    with simdevice.cluster(specs), torch.no_grad():
        return {
            "devices": name,
            "card": card,
            "GB/s between": link / GB_S,
            "calls": num_calls,
            **run_passes(card, speeds, num_calls),
        }


def run_passes(card: str, speeds: tuple[float, ...], num_calls: int) -> dict[str, Any]:
    """Return what a step takes on one device, in a split with one run each, and over groups in turn."""
    model, count = build(card, speeds), len(speeds)
    rotary = tuple(
        torch.zeros(IMAGE_TOKENS + TEXT_TOKENS, HEAD_WIDTH // SCALE, device=f"{simdevice.name()}:0") for _ in range(2)
    )
    calls = [partial(model, *hidden_states(number), rotary) for number in range(num_calls)]
    manager = MemoryManager()
    manager.set_watermark("*", 0, 0)
    manager.set_watermark("host", 0, 0)
    split = "&".join(f"gpu:{index}" for index in range(count))
    fastest = max(range(count), key=lambda index: speeds[index])
    one_s = num_calls * sum(block.compute_s for block in model.in_order) + num_calls * model.rest_s * speeds[0]
    if fastest == 0:
        with manage(model, placement="gpu:0", manager=manager):
            one_s = seconds_of(lambda: [call() for call in calls], count)
    with manage(model, placement=split, manager=manager):
        run_s = seconds_of(lambda: [call() for call in calls], count)
        want = [call() for call in calls]
    with manage(model, placement=f"{split}/auto", manager=manager) as managed:
        groups = managed.plan.components[0].placement.groups
        turns_s = seconds_of(lambda: managed.run_micro_batches(calls), count)
        got = managed.run_micro_batches(calls)
        assert all(map(torch.equal, got, want)), "the halves are not what they are one after the other"
    assert not simdevice.races()
    return {
        "groups": groups,
        "one device, ms": 1e3 * one_s,
        "one run each, ms": 1e3 * run_s,
        "groups in turn, ms": 1e3 * turns_s,
        "one run each, x": one_s / run_s,
        "groups in turn, x": one_s / turns_s,
        "at most, x": min(sum(speeds) / max(speeds), num_calls),
    }


def measure() -> Result:
    """Measure all cases; under two minutes."""
    simdevice.install("sim", num_devices=4)
    rows = [run_case(*case) for case in CASES]
    reached = {name: row["groups in turn, x"] for name, row in zip([case[0] for case in CASES[:2]], rows, strict=False)}
    return Result(
        question=(
            "How many times as fast as its fastest device alone a split computes a step of two or four calls, all "
            "resident, with micro-batches over groups of blocks in turn, beside one run of blocks per device and one "
            "call after the other. Results are equal to the bit. Virtual time."
        ),
        rows=rows,
        ratio=max(EQUAL / reached["two equal"], UNEQUAL / reached["2:1"]),
        meaning=(
            f"the worse of {EQUAL} over what two equal devices reach and {UNEQUAL} over what 2:1 reach, both of RTX "
            "4090 over 25 GB/s: the first two rows; target at most 1"
        ),
    )
