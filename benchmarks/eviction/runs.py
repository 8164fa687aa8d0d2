"""A trace run by the real manager on a simulated device."""

from __future__ import annotations

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.manager.policies.named import POLICIES

from .traces import SIZES, Trace

__all__ = ["CAPACITY_BYTES", "run_trace", "size_of"]

BLOCK_BYTES = 64 * 1024
CAPACITY_BYTES = 24 * BLOCK_BYTES + BLOCK_BYTES // 2  # half a block for inputs and outputs


class Weighing(nn.Module):
    """A block that reads its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(BLOCK_BYTES // 4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight[:1]


def size_of(component: str) -> int:
    return SIZES[component.partition("@")[0]] * BLOCK_BYTES


def run_trace(trace: Trace, policy: str, num_visible: int = 0) -> list[int]:
    """Return the bytes that each prompt copied to the device.

    Args:
        num_visible: how many waiting prompts ``next-use`` sees; the other policies see none, nor the running one.
    """
    simdevice.install("sim", num_devices=1)
    moved = []
    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=CAPACITY_BYTES)]), torch.no_grad():
        manager = MemoryManager(POLICIES[policy]())
        manager.set_watermark("*", 0, 0)
        names = dict.fromkeys(component for component, _ in trace.uses())
        nets = {name: nn.Sequential(*(Weighing() for _ in range(SIZES[name.partition("@")[0]]))) for name in names}
        managed = {
            name: manage({name.replace("@", " version "): net}, placement="gpu:0", manager=manager)
            for name, net in nets.items()
        }
        ids = {name: managed[name].members[0].id for name in nets}
        x = torch.ones(1)
        for turn, prompt in enumerate(trace.prompts):
            before = manager.bytes_moved()
            manager.begin_run(str(turn), f"prompt {turn}")
            for number, (component, num_passes) in enumerate(prompt):
                if policy == "next-use":
                    coming = [*prompt[number:]]
                    for waiting in trace.prompts[turn + 1 : turn + 1 + num_visible]:
                        coming += waiting
                    manager.foresee([ids[name]] for name, _ in coming)
                manager.begin_node(str(number), component)
                for _ in range(num_passes):
                    nets[component](x)
                manager.end_node()
            manager.end_run()
            moved.append(manager.bytes_moved() - before)
        manager.release_all()
    return moved
