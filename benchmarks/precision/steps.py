"""A step of a streamed model in eight bits beside the same in bf16, in virtual time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.transfer.devices import find_device
from highwater.memory.transfer.link_speed import link_bytes_per_s

__all__ = ["measure_steps"]

# A card's link, memory and products as its data sheet says them, and a model's bytes a 64th of a real block's.
CARDS = {"RTX 3060": (12e9, 360e9, 25e12), "RTX 4090": (25e9, 1008e9, 120e12), "H200": (55e9, 4800e9, 600e12)}
SCALE = 64
WIDTH, NUM_BLOCKS, NUM_TOKENS = 512, 24, 64
NUM_WARM_UPS, NUM_STEPS = 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def measure_steps(ours: str) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each card and form, and the worst of our step over that in bf16."""
    simdevice.install(num_devices=1)
    rows: list[dict[str, Any]] = []
    ratios = []
    for card, rates in CARDS.items():
        base_s = 0.0
        for form in ("as stored", ours, "fp8 plain", "fp8 per row"):
            seconds, num_bytes = measure_step(form, *rates)
            base_s = base_s or seconds
            rows.append(
                {
                    "card": card,
                    "weights": "bf16" if form == "as stored" else form,
                    "ms": 1e3 * seconds,
                    "MB over the link": num_bytes / 1e6,
                    "over the link alone": seconds / (num_bytes / (rates[0] / SCALE)),
                    "over bf16": seconds / base_s,
                }
            )
            if form == ours:
                ratios.append(seconds / base_s)
    return rows, max(ratios)


def measure_step(form: str, link: float, memory: float, flops: float) -> tuple[float, int]:
    """Return the virtual seconds of a step, and the bytes that it copies."""
    spec = simdevice.SimDeviceSpec(
        total_bytes=1 << 30,
        h2d_bytes_per_s=link / SCALE,
        memory_bytes_per_s=memory / SCALE,
        flops_per_s=flops / SCALE,
        launch_s=0,
        latency_s=0,
    )
    with simdevice.cluster([spec]), torch.no_grad():
        link_bytes_per_s(find_device("gpu:0"), lambda: spec.h2d_bytes_per_s)
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS))).bfloat16().eval().requires_grad_(False)
        block_bytes = 2 * 8 * WIDTH * WIDTH
        with manage(model, f"{4 * block_bytes / 1e6}MB", placement="gpu:0", precision=form, manager=manager) as managed:
            x = torch.randn(NUM_TOKENS, WIDTH).bfloat16().to(managed.device)
            for _ in range(NUM_WARM_UPS):
                model(x)
            torch.accelerator.synchronize(0)
            begin_s, before = simdevice.clock_s(), simdevice.stats(0).h2d_bytes
            for _ in range(NUM_STEPS):
                model(x)
            torch.accelerator.synchronize(0)
            seconds = (simdevice.clock_s() - begin_s) / NUM_STEPS
            num_bytes = (simdevice.stats(0).h2d_bytes - before) // NUM_STEPS
            del x
    return seconds, num_bytes
