"""The order book: what nothing orders is reported, what something orders is not."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

DEVICE = "sim:0"


@pytest.fixture
def side(hardware: ModuleType) -> torch.Stream:
    return torch.Stream(device=DEVICE)


@pytest.fixture
def main(hardware: ModuleType) -> torch.Stream:
    return torch.accelerator.current_stream(0)


def pinned_ones() -> Tensor:
    return torch.ones(1000).pin_memory()


def test_reading_before_a_copy_is_waited_for(hardware, side, main) -> None:
    source = pinned_ones()
    with side:
        target = source.to(DEVICE, non_blocking=True)
    target + 1
    (race,) = hardware.races()
    assert race == (
        "aten::add on sim:0 stream 0 reads bytes that copy to device on "
        f"sim:0 stream {side.stream_id} writes, and nothing orders the two"
    )
    main.wait_stream(side)
    target + 1
    side.wait_stream(main)
    assert not hardware.races()


def test_overwriting_what_is_still_read(hardware, side, main) -> None:
    source = pinned_ones()
    slot = source.to(DEVICE)
    side.wait_stream(main)
    slot * 2
    with side:
        slot.copy_(source, non_blocking=True)
    assert "writes bytes that aten::mul on sim:0 stream 0 reads" in hardware.races()[0]
    side.synchronize()


def test_an_event_orders_only_what_came_before_it(hardware, side, main) -> None:
    source = pinned_ones()
    slot, free = source.to(DEVICE), torch.Event(device=DEVICE)
    slot * 2
    free.record(main)
    slot * 3
    side.wait_event(free)
    with side:
        slot.copy_(source, non_blocking=True)
    assert len(hardware.races()) == 1, "the second reader came after the event"
    side.synchronize()


def test_byte_ranges_of_one_slab_are_independent(hardware, side, main) -> None:
    source = pinned_ones()
    slab = torch.zeros(2, 1000, device=DEVICE)
    side.wait_stream(main)
    with side:
        slab[1].copy_(source, non_blocking=True)
    slab[0] + 1
    slab.view(-1)[:1000].view(torch.uint8) + 1
    assert not hardware.races()
    slab.view(torch.uint8).view(-1)[3999:4001] + 1
    assert len(hardware.races()) == 1
    main.wait_stream(side)


def test_two_readers_need_no_order(hardware, side, main) -> None:
    source = pinned_ones()
    shared = source.to(DEVICE)
    shared + 1
    with side:
        shared + 1
    side.synchronize()
    assert not hardware.races()


def test_order_is_transitive_over_streams_and_the_host(hardware, side, main) -> None:
    source = pinned_ones()
    third, done = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    target = torch.empty(1000, device=DEVICE)
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
    main.wait_stream(side)
    third.wait_stream(main)
    with third:
        target.mul_(2)
        done.record()
    done.synchronize()
    target.add_(1)
    assert not hardware.races()


def test_a_host_that_polled_an_event_knows(hardware, side, main) -> None:
    source = pinned_ones()
    done = torch.Event(device=DEVICE)
    with side:
        target = source.to(DEVICE, non_blocking=True)
        done.record()
    while not done.query():
        pass
    assert target.sum().item() == 1000
    target.record_stream(main)
    del target
    assert not hardware.races()


def test_pageable_copies_hold_the_host_but_order_nothing(hardware, side, main) -> None:
    """cudaMemcpyAsync returns once pageable bytes are staged, not once they have arrived."""
    plain = torch.ones(1000)
    target = torch.empty(1000, device=DEVICE)
    side.wait_stream(main)
    with side:
        target.copy_(plain, non_blocking=True)
    target + 1
    assert len(hardware.races()) == 1
    side.wait_stream(main)
    with side:
        target.copy_(plain)
    target + 1
    assert not hardware.races(), "a blocking copy waits for its stream"


def test_pinned_buffers_are_watched_too(hardware, side, main) -> None:
    source = pinned_ones()
    on_device = torch.zeros(1000, device=DEVICE)
    side.wait_stream(main)
    with side:
        source.copy_(on_device, non_blocking=True)
    on_device.copy_(source, non_blocking=True)
    assert any("copy to device on sim:0 stream 0 reads bytes that copy to host" in race for race in hardware.races())
    torch.accelerator.synchronize(0)


@pytest.mark.parametrize("guard", ["nothing", "record_stream", "wait", "host"])
def test_freeing_what_another_stream_uses(hardware, side, main, guard: str) -> None:
    source = pinned_ones()
    target = torch.empty(1000, device=DEVICE)
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
    if guard == "record_stream":
        target.record_stream(side)
    elif guard == "wait":
        main.wait_stream(side)
    elif guard == "host":
        side.synchronize()
    del target
    found = hardware.races()
    assert len(found) == (guard == "nothing")
    assert all("freed while copy to device" in race for race in found)


def test_correct_multi_device_work_is_clean(hardware) -> None:
    """A layer split with hops, from side streams too: a peer copy orders both current streams."""
    source = pinned_ones()
    sides = [torch.Stream(device=f"sim:{i}") for i in range(3)]
    for _ in range(3):
        x = source.to("sim:0", non_blocking=True)
        for device in ("sim:1", "sim:2", "sim:0"):
            x = x.to(device, non_blocking=True) * 2
        with sides[0], sides[1]:
            y = torch.ones(10, device="sim:0").to("sim:1") + 1
        torch.accelerator.current_stream(1).wait_stream(sides[1])
        assert (x.sum().item(), y.sum().item()) == (8000, 20)
        y.record_stream(torch.accelerator.current_stream(1))
        del x, y
    assert not hardware.races()


def test_a_peer_copy_orders_only_the_current_streams(hardware) -> None:
    side = torch.Stream(device="sim:1")
    x = torch.ones(1000, device="sim:0")
    with side:
        moved = x.to("sim:1")
    moved + 1
    assert len(hardware.races()) == 1
    torch.accelerator.synchronize(1)


def test_resetting_clocks_forgets_no_order_and_invents_no_race(hardware, side, main) -> None:
    source = pinned_ones()
    slot = source.to(DEVICE)
    slot * 2
    hardware.reset_clock()
    side.wait_stream(main)
    with side:
        slot.copy_(source, non_blocking=True)
    main.wait_stream(side)
    slot * 2
    hardware.strict(check_races=False)
    slot * 2
    hardware.strict(check_races=True)
    slot * 2
    assert not hardware.races()


def test_cluster_reports_races(sim: ModuleType) -> None:
    specs = [sim.SimDeviceSpec(total_bytes=1 << 20)]
    with pytest.raises(AssertionError, match="1 races, the first: aten::add"), sim.cluster(specs):
        with torch.Stream(device=DEVICE):
            target = torch.ones(10).pin_memory().to(DEVICE, non_blocking=True)
        target + 1
        torch.accelerator.synchronize(0)
        del target
