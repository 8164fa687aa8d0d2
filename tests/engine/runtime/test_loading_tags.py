"""The tags by which writes are seen are computed while a loading copies, and cost it next to nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import manage

NUM_BLOCKS, WIDTH = 16, 256
BLOCK_BYTES = 4 * WIDTH * WIDTH
COPY_S, TAG_S = 0.1, 0.02  # of one block; a tag reads it twice


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))).requires_grad_(False)


def test_a_loading_takes_its_copies_and_the_tags_of_one_block(machine) -> None:
    rates = {
        "h2d_bytes_per_s": BLOCK_BYTES / COPY_S,
        "memory_bytes_per_s": 2 * BLOCK_BYTES / TAG_S,
        "launch_s": 0.0,
        "latency_s": 0.0,
    }
    with machine(8, **rates) as manager, torch.no_grad():
        managed = manage({"net": blocks()}, placement="gpu:0", manager=manager)
        component = managed.members[0].managed
        torch.accelerator.synchronize(0)
        begin_s = simdevice.clock_s()
        component.load(component.plan)
        seconds = simdevice.clock_s() - begin_s
        assert all(group.copy is not None and group.copy.tags for group in component.groups if group.slab_bytes)
        managed.release()
    copies_s = NUM_BLOCKS * COPY_S
    assert copies_s + 0.9 * TAG_S < seconds < copies_s + 2 * TAG_S


def test_a_device_with_room_for_the_weights_alone_loads_them_untagged(machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = blocks()
        managed = manage({"net": net}, placement="gpu:0", manager=manager)
        component = managed.members[0].managed
        simdevice.occupy(0, (8 << 20) - sum(group.slab_bytes for group in component.groups))
        component.load(component.plan)
        groups = [group for group in component.groups if group.slab_bytes]
        assert len(groups) == NUM_BLOCKS
        assert all(group.copy is not None and group.copy.is_untagged and not group.copy.tags for group in groups)
        net[3].weight.data.fill_(3.0)
        component.unload()
        assert (net[3].weight == 3.0).all()
        simdevice.occupy(0, 0)
        managed.release()


def test_copies_of_a_loading_that_fails_are_not_copied_back(machine) -> None:
    with machine(8) as manager, torch.no_grad():
        managed = manage({"net": blocks()}, placement="gpu:0", manager=manager)
        component = managed.members[0].managed
        sizes = [group.slab_bytes for group in component.groups]
        simdevice.occupy(0, (8 << 20) - sum(sizes) + max(sizes) // 2)
        with pytest.raises(torch.OutOfMemoryError):
            component.load(component.plan)
        assert not manager.ledger.used("gpu:0") and simdevice.stats(0).d2h_bytes == 0
        simdevice.occupy(0, 0)
        managed.release()
