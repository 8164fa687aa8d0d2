"""Streams, events, deferred copies and virtual time. Every time here is exact: no wall clock is read for it."""

from __future__ import annotations

import time
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

DEVICE = "sim:0"
MIB = 1 << 20
# Round numbers, so that a test can add them up.
LAUNCH_S, LATENCY_S = 1e-6, 1e-5
RATES = {
    "h2d_bytes_per_s": 1e9,
    "d2h_bytes_per_s": 2e9,
    "peer_bytes_per_s": 4e9,
    "flops_per_s": 1e9,
    "memory_bytes_per_s": 1e10,
    "launch_s": LAUNCH_S,
    "latency_s": LATENCY_S,
}


@pytest.fixture
def timed(sim: ModuleType):
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB, **RATES)] * 2):
        yield sim


def pinned_ones(num_bytes: int) -> Tensor:
    return torch.ones(num_bytes // 4).pin_memory()


# --- The API


def test_streams_and_events(hardware: ModuleType) -> None:
    side, done = torch.Stream(device="sim:1"), torch.Event(device="sim:1")
    main = torch.accelerator.current_stream(1)
    source = torch.randn(4, 8).pin_memory()
    assert side.device_index == 1
    with side:
        assert torch.accelerator.current_stream(1) == side
        moved = source.to("sim:1", non_blocking=True)
        done.record(side)
    assert torch.accelerator.current_stream(1) == main != side
    main.wait_event(done)
    done.synchronize()
    side.synchronize()
    main.wait_stream(side)
    assert done.query() and side.query() and main.query()
    assert torch.equal(moved.cpu(), source)
    moved.record_stream(main)


def test_streams_come_from_a_pool(hardware: ModuleType) -> None:
    streams = [torch.Stream(device="sim:1") for _ in range(33)]
    ids = [stream.stream_id for stream in streams]
    assert len(set(ids[:32])) == 32
    assert 0 not in ids, "0 is the default stream"
    assert ids[32] == ids[0]
    assert torch.Stream(device="sim:0") != torch.Stream(device="sim:1")


def test_a_stream_of_a_missing_device(hardware: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.Stream(device="sim:3")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.current_stream(3)


def test_polling_ends(hardware: ModuleType) -> None:
    done = torch.Event(device=DEVICE)
    hardware.advance(DEVICE, 1e-3)
    done.record()
    polls = 0
    while not done.query():
        polls += 1
    assert 100 < polls < 10_000
    assert torch.accelerator.current_stream(0).query()


# --- Deferred copies


def test_a_reader_that_waits_sees_the_bytes_and_one_that_does_not_sees_poison(hardware: ModuleType) -> None:
    side, done = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    main = torch.accelerator.current_stream(0)
    source, target = torch.full((8,), 7.0).pin_memory(), torch.zeros(8, device=DEVICE)
    side.wait_stream(main)
    with side:
        target.copy_(source, non_blocking=True)
        done.record(side)
    assert target.isnan().all().item()
    assert len(hardware.races()) == 1
    main.wait_event(done)
    assert (target == 7).all().item()
    assert not hardware.races()


@pytest.mark.parametrize("how", ["later operation", "event", "stream", "device", "query"])
def test_everything_that_orders_a_copy_runs_it(hardware: ModuleType, how: str) -> None:
    side, done = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    source, target = torch.zeros(8).pin_memory(), torch.ones(8, device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream(0))
    with side:
        source.copy_(target, non_blocking=True)
        done.record()
        assert source.isnan().all(), "the host must not look before the copy is done"
        if how == "later operation":
            target.add_(1)
    if how == "event":
        done.synchronize()
    elif how == "stream":
        side.synchronize()
    elif how == "device":
        torch.accelerator.synchronize(0)
    while how == "query" and not done.query():
        pass
    assert (source == 1).all()
    side.synchronize()


def test_a_pinned_buffer_overwritten_in_flight_sends_the_wrong_bytes(hardware: ModuleType) -> None:
    source, target = torch.full((8,), 1.0).pin_memory(), torch.empty(8, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)
    assert target[0].item() == 2.0


@pytest.mark.parametrize("num_bytes", [4 * MIB, 9 * MIB])
def test_the_copy_engine_moves_bytes_while_the_host_does_something_else(timed: ModuleType, num_bytes: int) -> None:
    """In pieces of 4 MiB, and the virtual clock knows nothing of it."""
    source, target = pinned_ones(num_bytes), torch.empty(num_bytes // 4, device=DEVICE)
    with timed.copy_engine():
        target.copy_(source, non_blocking=True)
        until_s = time.monotonic() + 600
        while timed.copying_bytes() and time.monotonic() < until_s:
            time.sleep(0.001)
        source.fill_(2.0)
        assert timed.clock_s() == pytest.approx(LAUNCH_S, rel=1e-12), "nobody waited"
        assert (target == 1).all().item()
    target.copy_(source, non_blocking=True)
    assert timed.copying_bytes() == num_bytes, "the engine has ended with its body"
    assert (target == 2).all().item()


def test_whoever_waits_finishes_what_the_copy_engine_has_begun(timed: ModuleType) -> None:
    values = torch.arange(6 * MIB)  # 48 MiB
    source, target = values.pin_memory(), torch.empty_like(values, device=DEVICE)
    with timed.copy_engine():
        target.copy_(source, non_blocking=True)
        torch.accelerator.current_stream(0).synchronize()
        source.zero_()
        assert torch.equal(target.cpu(), values)


@pytest.mark.parametrize("num_words", [3, 512 * 1024, 3 * 1024 * 1024 + 5])  # of 8 bytes
@pytest.mark.parametrize("waits", [True, False])
def test_with_the_copy_engine_pageable_memory_is_staged_first(timed: ModuleType, num_words: int, waits: bool) -> None:
    """A copy that does not wait returns when its source may change; the clock is the one without an engine."""
    values = torch.arange(num_words)
    torch.empty_like(values, device=DEVICE).copy_(values, non_blocking=not waits)
    torch.accelerator.current_stream(0).synchronize()
    without_s = timed.clock_s()
    timed.reset_clock()
    source, targets = values.clone(), [torch.empty_like(values, device=DEVICE) for _ in range(2)]
    with timed.copy_engine():
        targets[0].copy_(source, non_blocking=not waits)
        assert not (waits and timed.copying_bytes()), "it waited until all was moved"
        source.neg_()
        with torch.Stream(device=DEVICE) as side:
            targets[1].copy_(source, non_blocking=not waits)
            source.zero_()
        side.synchronize()
        torch.accelerator.current_stream(0).synchronize()
        assert torch.equal(targets[0].cpu(), values) and torch.equal(targets[1].cpu(), -values)
    timed.reset_clock()
    with timed.copy_engine():
        targets[0].copy_(values, non_blocking=not waits)
        torch.accelerator.current_stream(0).synchronize()
    assert timed.clock_s() == pytest.approx(without_s, rel=1e-12)


def test_copies_of_one_stream_stay_in_order(hardware: ModuleType) -> None:
    first, second, back = (torch.full((8,), float(n)).pin_memory() for n in (1, 2, 0))
    target = torch.empty(8, device=DEVICE)
    target.copy_(first, non_blocking=True)
    back.copy_(target, non_blocking=True)
    target.copy_(second, non_blocking=True)
    torch.accelerator.current_stream(0).synchronize()
    assert (back == 1).all()
    assert (target == 2).all().item()


@pytest.mark.parametrize("why", ["pageable", "converted", "strided", "blocking"])
def test_only_a_plain_pinned_copy_is_asynchronous(timed: ModuleType, why: str) -> None:
    source, target = torch.ones(1000, 1000), torch.empty(1000, 1000, device=DEVICE)
    if why != "pageable":
        source = source.pin_memory()
    if why == "converted":
        source = source.double()[:, :].pin_memory()
    if why == "strided":
        source = torch.ones(1000, 2000).pin_memory()[:, :1000]
    target.copy_(source, non_blocking=why != "blocking")
    source.zero_()
    assert timed.clock_s() == pytest.approx(LAUNCH_S + LATENCY_S + 4e-3)
    assert target.sum().item() == 1e6
    assert not timed.races()


# --- Virtual time


def test_a_copy_takes_latency_and_bytes_over_the_link(timed: ModuleType) -> None:
    source = pinned_ones(4_000_000)
    target = torch.empty(1_000_000, device=DEVICE)
    target.copy_(source, non_blocking=True)
    main = torch.accelerator.current_stream(0)
    assert timed.clock_s() == pytest.approx(LAUNCH_S, rel=1e-12), "the host only launched it"
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + LATENCY_S + 4e-3, rel=1e-12)
    main.synchronize()
    assert timed.clock_s() == timed.stream_time_s(main)
    before = timed.clock_s()
    target.cpu()
    assert timed.clock_s() - before == pytest.approx(LAUNCH_S + LATENCY_S + 2e-3, rel=1e-9)


def test_both_directions_overlap_and_one_direction_queues(timed: ModuleType) -> None:
    source, target = pinned_ones(4_000_000), torch.empty(3, 1_000_000, device=DEVICE)
    back = torch.empty(1_000_000, pin_memory=True)
    up, also_up, down = (torch.Stream(device=DEVICE) for _ in range(3))
    with up:
        target[0].copy_(source, non_blocking=True)
    with also_up:
        target[1].copy_(source, non_blocking=True)
    with down:
        back.copy_(target[2], non_blocking=True)
    one = LATENCY_S + 4e-3
    assert timed.stream_time_s(up) == pytest.approx(LAUNCH_S + one, rel=1e-9)
    assert timed.stream_time_s(also_up) == pytest.approx(LAUNCH_S + 2 * one, rel=1e-9)
    assert timed.stream_time_s(down) == pytest.approx(3 * LAUNCH_S + LATENCY_S + 2e-3, rel=1e-9)
    torch.accelerator.synchronize(0)


def test_copies_between_devices_use_the_peer_link_and_hold_both_streams(timed: ModuleType) -> None:
    source = torch.ones(1_000_000, device="sim:0")
    timed.reset_clock()
    moved = source.to("sim:1")
    expected = pytest.approx(LAUNCH_S + LATENCY_S + 1e-3, rel=1e-9)
    assert timed.stream_time_s(torch.accelerator.current_stream(0)) == expected
    assert timed.stream_time_s(torch.accelerator.current_stream(1)) == expected
    assert timed.clock_s() == pytest.approx(LAUNCH_S), "the host does not wait"
    assert (moved + 1).sum().item() == 2e6
    assert not timed.races()


@pytest.mark.parametrize(
    "operator", ["mm", "addmm", "bmm", "baddbmm", "linear", "conv2d", "conv_transpose2d", "attention"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flops_are_those_of_torchs_counter(sim: ModuleType, operator: str, dtype: torch.dtype) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    def make(device: str) -> list[Tensor]:
        return [torch.ones(shape, dtype=dtype, device=device) for shape in shapes]

    function, shapes = {
        "mm": (torch.mm, [(64, 32), (32, 48)]),
        "addmm": (torch.addmm, [(48,), (64, 32), (32, 48)]),
        "bmm": (torch.bmm, [(3, 64, 32), (3, 32, 48)]),
        "baddbmm": (torch.baddbmm, [(3, 64, 48), (3, 64, 32), (3, 32, 48)]),
        "linear": (F.linear, [(2, 64, 32), (48, 32), (48,)]),
        "conv2d": (lambda x, w: F.conv2d(x, w, padding=1, groups=2), [(2, 8, 9, 9), (16, 4, 3, 3)]),
        "conv_transpose2d": (lambda x, w: F.conv_transpose2d(x, w, stride=2), [(2, 8, 9, 9), (8, 6, 3, 3)]),
        "attention": (F.scaled_dot_product_attention, [(2, 4, 32, 16)] * 3),
    }[operator]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*make("meta"))
    flops = counter.get_total_flops()
    # Memory without cost, so that only flops take time.
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB, flops_per_s=1e9, memory_bytes_per_s=1e30, launch_s=0.0)]):
        inputs = make(DEVICE)
        sim.reset_clock()
        function(*inputs)
        assert sim.stream_time_s(torch.accelerator.current_stream(0)) == pytest.approx(flops / 1e9, rel=1e-12)
        del inputs


def test_a_kernel_takes_the_longer_of_flops_and_bytes(timed: ModuleType) -> None:
    main = torch.accelerator.current_stream(0)
    a = torch.ones(1000, 1000, device=DEVICE)
    row, rows = torch.ones(1000, device=DEVICE), torch.zeros(10, dtype=torch.int64, device=DEVICE)
    timed.reset_clock()
    a + a
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + 3 * 4e6 / 1e10, rel=1e-9)
    timed.reset_clock()
    a + row
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + (2 * 4e6 + 4e3) / 1e10, rel=1e-9), "read once"
    timed.reset_clock()
    a @ a
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + 2 * 1e9 / 1e9, rel=1e-9)
    timed.reset_clock()
    F.embedding(rows, a)
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + 2 * 10 * 4000 / 1e10, rel=1e-9), "ten rows, not all"
    timed.reset_clock()
    a.t()[10:].unsqueeze(0).expand(3, 990, 1000)
    assert timed.clock_s() == timed.stream_time_s(main) == 0, "a view is no kernel"


def test_waiting_for_an_event_joins_the_clocks(timed: ModuleType) -> None:
    side, done = torch.Stream(device=DEVICE), torch.Event(device=DEVICE)
    main = torch.accelerator.current_stream(0)
    timed.advance(side, 5e-3)
    done.record(side)
    timed.advance(side, 5e-3)
    main.wait_event(done)
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + 5e-3)
    timed.advance(DEVICE, 1e-3)
    assert timed.stream_time_s(main) == pytest.approx(LAUNCH_S + 11e-3), "the engine computes for the side stream first"
    assert timed.clock_s() == pytest.approx(3 * LAUNCH_S)
    timed.advance("cpu", 1.0)
    assert timed.clock_s() == pytest.approx(1 + 3 * LAUNCH_S)
    assert timed.stats(0).num_syncs == 0
    timed.reset_clock()
    main.wait_event(done)
    assert timed.stream_time_s(main) == 0, "an event from before the reset is long past"


def test_events_measure(timed: ModuleType) -> None:
    start, end = (torch.Event(device=DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    timed.advance(DEVICE, 3e-3)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(3 + LAUNCH_S * 1e3)


def test_reading_a_value_waits_for_the_stream_only(timed: ModuleType) -> None:
    side = torch.Stream(device=DEVICE)
    tensor = torch.ones(1, device=DEVICE)
    timed.advance(DEVICE, 1e-3)
    timed.advance(side, 1.0)
    tensor.item()
    assert 1e-3 < timed.clock_s() < 2e-3
    assert timed.stats(0).num_syncs == 0
    torch.accelerator.synchronize(0)
    assert timed.clock_s() > 1
    assert (timed.stats(0).num_syncs, timed.stats(1).num_syncs) == (1, 0)


# --- Overlap


def stream_blocks(sim: ModuleType, *, kernel_s: float, depth: int = 2, pinned: bool = True) -> float:
    """Run 20 blocks of 1 MB through ``depth`` slots and return the virtual seconds from start to end."""
    host = [torch.full((250_000,), float(i)) for i in range(20)]
    host = [block.pin_memory() for block in host] if pinned else host
    slots = [torch.empty(250_000, device=DEVICE) for _ in range(depth)]
    ready, free = ([torch.Event(device=DEVICE) for _ in range(depth)] for _ in range(2))
    copies, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream(0)
    copies.wait_stream(main)
    sim.reset_clock()

    def fetch(i: int) -> None:
        with copies:
            copies.wait_event(free[i % depth])
            slots[i % depth].copy_(host[i], non_blocking=True)
            ready[i % depth].record(copies)

    sums = []
    for i in range(depth):
        fetch(i)
    for i in range(20):
        main.wait_event(ready[i % depth])
        sums.append(slots[i % depth][:8].sum())
        sim.advance(DEVICE, kernel_s)
        free[i % depth].record(main)
        if i + depth < 20:
            fetch(i + depth)
    main.synchronize()
    elapsed_s = sim.clock_s()
    assert [s.item() for s in sums] == [8.0 * i for i in range(20)]
    assert sim.stats(0).num_syncs == 0
    return elapsed_s


def test_prefetch_hides_transfers_and_pageable_memory_does_not(sim: ModuleType) -> None:
    specs = [sim.SimDeviceSpec(total_bytes=64 * MIB)]  # 1 MB is 50 us on the link
    with sim.cluster(specs):
        compute_bound = [stream_blocks(sim, kernel_s=60e-6) for _ in range(3)]
        transfer_bound = stream_blocks(sim, kernel_s=30e-6)
        one_slot = stream_blocks(sim, kernel_s=60e-6, depth=1)
        pageable = stream_blocks(sim, kernel_s=60e-6, pinned=False)
    assert len(set(compute_bound)) == 1, "no wall clock: the same to the last bit"
    assert 20 * 60e-6 / compute_bound[0] > 0.9
    assert 20 * 50e-6 / transfer_bound > 0.9
    assert one_slot > 1.6 * compute_bound[0]
    assert pageable > 1.6 * compute_bound[0]


def test_a_slowed_device_copies_a_smaller_model_in_the_time_of_the_full_size(sim: ModuleType) -> None:
    spec = sim.SimDeviceSpec(total_bytes=64 * MIB, **RATES)
    took = []
    for each, num_bytes in ((spec, 16 * MIB), (spec.slowed(16), MIB)):
        with sim.cluster([each]):
            tensor = torch.ones(num_bytes, dtype=torch.uint8).to(DEVICE)
            tensor.add_(1)
            torch.accelerator.synchronize()
            took.append(sim.clock_s())
            del tensor
    assert took[0] == pytest.approx(took[1], rel=1e-12)
    assert spec.slowed(16).total_bytes == spec.total_bytes
