"""What the streams of a device share: one engine that computes, and its links. Times are virtual and exact."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

MIB = 1 << 20
# Launches and latencies cost nothing here, so that times are those of the work alone.
FREE = {"launch_s": 0.0, "latency_s": 0.0}
LINKS = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 2e9, "peer_bytes_per_s": 4e9}


@pytest.fixture
def shared(sim: ModuleType):
    spec = sim.SimDeviceSpec(total_bytes=64 * MIB, flops_per_s=1e9, memory_bytes_per_s=1e12, **LINKS, **FREE)
    with sim.cluster([spec] * 3):
        yield sim


def new_streams(num_streams: int, index: int = 0) -> list[torch.Stream]:
    return [torch.Stream(device=f"sim:{index}") for _ in range(num_streams)]


def end_s(sim: ModuleType, streams: list[torch.Stream]) -> float:
    """Return when the last of the streams is done, and wait for it, so that all that was used can be freed."""
    ends_s = max(sim.stream_time_s(stream) for stream in streams)
    for stream in streams:
        stream.synchronize()
    return ends_s


# --- Kernels


def multiply(sim: ModuleType, num_products: int, streams: list[torch.Stream]) -> float:
    """Return the virtual seconds of equal products of matrices, which the streams take in turn."""
    squares = {stream.device_index: torch.ones(128, 128, device=stream.device) for stream in streams}
    torch.accelerator.synchronize(0)
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device_index))
    sim.reset_clock()
    for number in range(num_products):
        with streams[number % len(streams)] as stream:
            torch.mm(squares[stream.device_index], squares[stream.device_index])
    return end_s(sim, streams)


@pytest.mark.parametrize("num_streams", [1, 2, 4])
@pytest.mark.parametrize("num_products", [1, 4, 7])
def test_products_take_the_same_time_on_any_number_of_streams(
    shared: ModuleType, num_products: int, num_streams: int
) -> None:
    one_s = 2 * 128**3 / 1e9
    assert multiply(shared, num_products, new_streams(num_streams)) == pytest.approx(num_products * one_s, rel=1e-12)


def test_devices_compute_at_the_same_time(shared: ModuleType) -> None:
    streams = [*new_streams(2, index=0), *new_streams(2, index=1)]
    assert multiply(shared, 4, streams) == pytest.approx(2 * 2 * 128**3 / 1e9, rel=1e-12)


def test_copies_on_the_device_share_its_engine(shared: ModuleType) -> None:
    source, targets = torch.ones(MIB, device="sim:0"), torch.empty(2, MIB, device="sim:0")
    streams = new_streams(2)
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(0))
    shared.reset_clock()
    for stream, target in zip(streams, targets, strict=True):
        with stream:
            target.copy_(source)
    assert end_s(shared, streams) == pytest.approx(2 * 2 * source.nbytes / 1e12, rel=1e-12)


def test_a_kernel_that_waits_does_not_hold_up_one_that_is_ready(shared: ModuleType) -> None:
    waiting, ready, far = *new_streams(2), *new_streams(1, index=1)
    arrived = torch.Event(device="sim:1")
    shared.advance(far, 10.0)
    arrived.record(far)
    waiting.wait_event(arrived)
    shared.advance(waiting, 3.0)
    shared.advance(ready, 4.0)
    assert shared.stream_time_s(ready) == 4
    assert shared.stream_time_s(waiting) == 13
    shared.advance(ready, 8.0)
    assert shared.stream_time_s(ready) == 15, "six seconds before the other, two after it"
    assert shared.stream_time_s(waiting) == 13, "what is settled does not move"
    ready.synchronize()
    shared.advance(waiting, 1.0)
    assert shared.stream_time_s(waiting) == 16, "the host launched it at 15"


def test_what_fits_a_gap_ends_with_it(shared: ModuleType) -> None:
    """Three tenths are a little more than 0.3, and would end behind the kernel that begins there."""
    waiting, ready, far = *new_streams(2), *new_streams(1, index=1)
    shared.advance(far, 0.3)
    waiting.wait_stream(far)
    shared.advance(waiting, 1.0)
    for _ in range(3):
        shared.advance(ready, 0.1)
    assert shared.stream_time_s(ready) == 0.3
    end_s(shared, [waiting])


# Stream, the one to which it copies or None for a kernel, seconds, which of the last events to wait for, pause before.
NUMBERS = st.integers(0, 7)
TASKS = st.lists(
    st.tuples(NUMBERS, st.none() | NUMBERS, st.integers(1, 9), st.none() | st.integers(1, 6), st.integers(0, 3)),
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(tasks=TASKS)
@example(tasks=[(0, None, 5, None, 0), (0, 6, 3, None, 0), (2, 4, 6, None, 0), (1, 3, 4, None, 0)])
def test_an_engine_works_whenever_work_is_ready(
    sim: ModuleType, tasks: list[tuple[int, int | None, int, int | None, int]]
) -> None:
    """Beside a clock of whole seconds: a task takes the first that are free once host, streams and event are there."""
    spec = sim.SimDeviceSpec(total_bytes=MIB, peer_bytes_per_s=1, **FREE)
    with sim.cluster([spec] * 4, check_races=False):
        streams = [stream for index in range(4) for stream in new_streams(2, index)]
        buffers = [torch.empty(9, dtype=torch.uint8, device=f"sim:{index}") for index in range(4)]
        events: list[torch.Event] = []
        reached: list[int] = []
        ends, host = [0] * 8, 0
        taken: dict[str, set[int]] = defaultdict(set)
        for number, other, seconds, waits_for, pause in tasks:
            stream, index = streams[number], number // 2
            sim.advance("cpu", float(pause))
            host += pause
            if waits_for is not None and waits_for <= len(events):
                stream.wait_event(events[-waits_for])
                ends[number] = max(ends[number], reached[-waits_for])
            if other is None or other // 2 == index:
                others, engines = [number], [taken[f"compute {index}"]]
                sim.advance(stream, float(seconds))
            else:
                others, engines = [number, other], [taken[f"peer {index}"], taken[f"peer {other // 2}"]]
                with stream, streams[other]:
                    buffers[other // 2][:seconds].copy_(buffers[index][:seconds])
            now = max(host, *(ends[each] for each in others))
            while seconds:
                if not any(now in engine for engine in engines):
                    seconds -= 1
                    for engine in engines:
                        engine.add(now)
                now += 1
            for each in others:
                ends[each] = now
                assert sim.stream_time_s(streams[each]) == now
            events.append(torch.Event(device=stream.device))
            events[-1].record(stream)
            reached.append(now)
        for stream in streams:
            stream.synchronize()
        assert sim.clock_s() == max([host, *ends])
        del buffers


def run_micro_batches(sim: ModuleType, models: list[nn.Sequential], streams: list[torch.Stream]) -> float:
    """Return the virtual seconds of one batch on each stream, layer by layer in turn, by the model on its device."""
    batches = [torch.ones(32, 64).to(stream.device) for stream in streams]
    kept = [*batches]  # until both streams are done
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream(stream.device_index))
    sim.reset_clock()
    for layer in range(len(models[0])):
        for number, stream in enumerate(streams):
            with stream:
                batches[number] = models[stream.device_index][layer](batches[number])
                kept.append(batches[number])
    return end_s(sim, streams)


@pytest.mark.parametrize("launch_s", [0.0, 5e-6])
def test_two_micro_batches_on_one_device_gain_nothing_by_a_second_stream(sim: ModuleType, launch_s: float) -> None:
    """The control for every schedule of micro-batches: what one gains beside this, other hardware has done."""
    spec = sim.SimDeviceSpec(total_bytes=64 * MIB, flops_per_s=1e10, launch_s=launch_s)
    with sim.cluster([spec] * 2), torch.no_grad():
        models = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(12))).to(f"sim:{index}") for index in range(2)]
        first, second, far = *new_streams(2), *new_streams(1, index=1)
        in_turn_s = run_micro_batches(sim, models, [first, first])
        assert 1 <= in_turn_s / run_micro_batches(sim, models, [first, second]) <= 1.02
        assert in_turn_s / run_micro_batches(sim, models, [first, far]) > 1.8
        del models


# --- Copies


def pinned_rows(num_rows: int) -> Tensor:
    return torch.ones(num_rows, 250_000).pin_memory()  # 1 MB each


@pytest.mark.parametrize("num_streams", [1, 2, 4])
@pytest.mark.parametrize("direction", ["to the device", "to the host"])
def test_copies_in_one_direction_share_the_link(shared: ModuleType, direction: str, num_streams: int) -> None:
    host, device = pinned_rows(4), torch.empty(4, 250_000, device="sim:0")
    streams = new_streams(num_streams)
    shared.reset_clock()
    for number in range(4):
        pair = (device[number], host[number]) if direction == "to the device" else (host[number], device[number])
        with streams[number % num_streams]:
            pair[0].copy_(pair[1], non_blocking=True)
    rate = 1e9 if direction == "to the device" else 2e9
    assert end_s(shared, streams) == pytest.approx(host.nbytes / rate, rel=1e-12)


def test_both_directions_and_kernels_overlap(shared: ModuleType) -> None:
    sent, back, device = pinned_rows(2), pinned_rows(4), torch.empty(6, 250_000, device="sim:0")
    up, down, computes = new_streams(3)
    shared.reset_clock()
    for number in range(2):
        with up:
            device[number].copy_(sent[number], non_blocking=True)
    for number in range(4):
        with down:
            back[number].copy_(device[2 + number], non_blocking=True)
    shared.advance(computes, 2e-3)
    for stream in (up, down, computes):
        assert shared.stream_time_s(stream) == pytest.approx(2e-3, rel=1e-12)
    end_s(shared, [up, down, computes])


def test_a_copy_that_waits_does_not_hold_up_one_that_is_ready(shared: ModuleType) -> None:
    sent, device = pinned_rows(2), torch.empty(2, 250_000, device="sim:0")
    waiting, ready = new_streams(2)
    computed = torch.Event(device="sim:0")
    shared.reset_clock()
    shared.advance("sim:0", 10e-3)
    computed.record()
    waiting.wait_event(computed)
    for number, stream in enumerate((waiting, ready)):
        with stream:
            device[number].copy_(sent[number], non_blocking=True)
    assert shared.stream_time_s(ready) == pytest.approx(1e-3, rel=1e-12)
    assert shared.stream_time_s(waiting) == pytest.approx(11e-3, rel=1e-12)
    end_s(shared, [waiting, ready])


def test_copies_between_devices_share_the_links_of_both(shared: ModuleType) -> None:
    """One link to other devices for both directions. A copy needs the links of both ends at the same time."""
    streams = {index: new_streams(2, index) for index in range(3)}
    rows = {index: torch.ones(4, 250_000, device=f"sim:{index}") for index in range(3)}

    def send(number: int, source: int, target: int) -> float:
        with streams[source][number], streams[target][number]:
            rows[target][2 * number].copy_(rows[source][2 * number + 1])
        return shared.stream_time_s(streams[target][number])

    for index in range(3):
        for stream in streams[index]:
            stream.wait_stream(torch.accelerator.current_stream(index))
    shared.reset_clock()
    one_s = 1e6 / 4e9
    assert send(0, 0, 1) == pytest.approx(one_s, rel=1e-12)
    assert send(1, 1, 0) == pytest.approx(2 * one_s, rel=1e-12), "the other direction"
    assert send(0, 2, 0) == pytest.approx(3 * one_s, rel=1e-12), "the link of the first device is taken until then"
    assert send(1, 1, 2) == pytest.approx(4 * one_s, rel=1e-12), "the link of the third is"
    for each in streams.values():
        end_s(shared, each)
