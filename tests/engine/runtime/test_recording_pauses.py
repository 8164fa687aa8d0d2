"""A host that records what its blocks allocate, as ComfyUI from 0.35 on, meets no memory of ours there."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.runtime.forwards.recording_pauses import HostRecordings, host_recordings
from highwater.tests.comfyui.stand_in.highwater_test_recorder import Recorder
from highwater.tests.engine.conftest import MIB, Block, build_net

DIM = 64


class Doomed:
    """Releases a component when it is collected, as a patcher does that is gone."""

    def __init__(self, manager: MemoryManager, member: Any) -> None:
        self.itself: object = None
        weakref.finalize(self, manager.remove, member)


def add(manager: MemoryManager, net: nn.Module, *, is_hosted: bool = False) -> Any:
    """Put a net under management on the first device, without a handle of its own."""
    (member,), _ = manager.add(
        {"other": net},
        placement=parse_placement("gpu:0", devices=["gpu:0"]),
        profile=parse_profile("auto", devices=["gpu:0"]),
        precision=None,
        name=None,
        node_id=None,
        is_hosted=is_hosted,
    )
    return member


class InPlaceNet(nn.Module):
    """Blocks as core writes them for its compiler: the activations stay where they are, and nothing else is left."""

    def __init__(self, recorder: Recorder, num_blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(num_blocks))
        self.out = nn.Linear(DIM, DIM)
        self.recorder = [recorder]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        recorder = self.recorder[0]
        x = self.embed(x)
        shift = x + 1
        recorder.begin()
        try:
            for number, block in enumerate(self.blocks):
                recorder.iterate(f"block {number}")
                x.copy_(block(x, shift))
            recorder.iterate(None)
        except BaseException:
            recorder.abort()
            raise
        recorder.end()
        return self.out(x)


@pytest.fixture
def recorder(sim: ModuleType) -> Iterator[Recorder]:
    recorder = Recorder(str(sim.default_build_directory() / "highwater_simdevice.so"))
    recorder.take_allocations()
    try:
        yield recorder
    finally:
        host_recordings.pause_with(None)
        gc.collect()
        recorder.leave()


@pytest.fixture
def guard(recorder: Recorder) -> Recorder:
    """The recorder, with its pause given to the engine."""
    host_recordings.pause_with(recorder.pause_malloc_graph)
    return recorder


@pytest.fixture
def net(recorder: Recorder) -> InPlaceNet:
    torch.manual_seed(0)
    return InPlaceNet(recorder).eval().requires_grad_(False)


INPUT = torch.randn(1, 16, DIM, generator=torch.Generator().manual_seed(1))

CASES = {
    "resident": ("auto", "gpu:0", "as stored"),
    "streamed": ("0.3MiB", "gpu:0", "as stored"),
    "eight bits": ("auto", "gpu:0", "fp8 scaled"),
    "eight bits, streamed": ("0.3MiB", "gpu:0", "fp8 scaled"),
    "split": ("auto", "gpu:0&gpu:1@0.5", "as stored"),
    "split and streamed": ("0.3MiB", "gpu:0&gpu:1@0.5", "as stored"),
}


def give_up(*_: Any) -> None:
    raise KeyboardInterrupt


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_a_recording_meets_nothing_that_outlives_a_block(machine, guard: Recorder, net: InPlaceNet, case: str) -> None:
    profile, placement, precision = CASES[case]
    with (
        machine(8, 8) as manager,
        manage(net, profile, placement=placement, precision=precision, manager=manager) as managed,
    ):
        results = [net(INPUT).cpu() for _ in range(4)]
        assert all(torch.equal(result, results[0]) for result in results)
        managed.reprofile("0.25MiB" if profile == "auto" else "auto")
        assert torch.equal(net(INPUT).cpu(), results[0])
    assert guard.num_recorded > 0
    assert guard.faults == []
    assert (guard.num_pauses > 0) == ("gpu:1" in placement), "a pause of ours may end one of the host's"


@torch.no_grad()
def test_a_split_without_a_pause_is_what_ends_a_process(machine, recorder: Recorder, net: InPlaceNet) -> None:
    with (
        machine(8, 8) as manager,
        manage(net, "auto", placement="gpu:0&gpu:1@0.5", precision="as stored", manager=manager),
    ):
        net(INPUT)
    assert any("of device 1 were recorded" in fault for fault in recorder.faults)
    assert any("outlive it" in fault for fault in recorder.faults)


@torch.no_grad()
@pytest.mark.parametrize("block", [1, 4], ids=["at home", "elsewhere"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_ends_the_pauses(
    machine, guard: Recorder, net: InPlaceNet, block: int, error: type[BaseException]
) -> None:
    def fail(*_: Any) -> None:
        raise error("trouble")

    with (
        machine(8, 8) as manager,
        manage(net, "auto", placement="gpu:0&gpu:1@0.5", precision="as stored", manager=manager),
    ):
        want = net(INPUT).cpu()
        handle = net.blocks[block].down.register_forward_pre_hook(fail)
        with pytest.raises(error, match="trouble"):
            net(INPUT)
        handle.remove()
        assert torch.equal(net(INPUT).cpu(), want)
        assert host_recordings.open == {}
    assert guard.faults == []


@torch.no_grad()
def test_a_pause_that_a_thread_left_open_is_ended_by_another(machine, guard: Recorder, net: InPlaceNet) -> None:
    with (
        machine(8, 8) as manager,
        manage(net, "auto", placement="gpu:0&gpu:1@0.5", precision="as stored", manager=manager),
    ):
        want = net(INPUT).cpu()
        handle = net.blocks[4].down.register_forward_pre_hook(give_up)

        def interrupted() -> None:
            with pytest.raises(KeyboardInterrupt):
                net(INPUT)

        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join()
        assert len(host_recordings.open) == 1
        handle.remove()
        assert torch.equal(net(INPUT).cpu(), want)
        assert host_recordings.open == {}
    assert guard.faults == []


@torch.no_grad()
@pytest.mark.parametrize("is_guarded", [True, False])
def test_what_is_evicted_and_loaded_on_entry_is_not_recorded(
    machine, recorder: Recorder, net: InPlaceNet, is_guarded: bool
) -> None:
    """A part of a model may be entered inside a recorded forward: a ControlNet, or a text encoder token by token."""
    if is_guarded:
        host_recordings.pause_with(recorder.pause_malloc_graph)
    other, first = build_net(1), build_net(2)
    with machine(2) as manager, manage({"a": other, "b": first}, "auto", placement="gpu:0", manager=manager):
        x = torch.zeros(1, 4, DIM, device="sim:0")
        want = [net(x).cpu() for net in (other, first)]
        out = torch.empty_like(x)
        for turn in range(4):
            with recorder.recorded():
                recorder.iterate("a block")
                out.copy_((other, first)[turn % 2](x))
                recorder.iterate(None)
            assert torch.equal(out.cpu(), want[turn % 2])
        assert [event for event in manager.report()["events"] if event["kind"] == "evict"]
        del x, out
    assert (recorder.faults == []) == is_guarded, recorder.faults


@torch.no_grad()
@pytest.mark.parametrize("is_guarded", [True, False])
def test_what_a_hosted_component_gives_up_on_entry_is_not_recorded(
    machine, recorder: Recorder, is_guarded: bool
) -> None:
    """Its host has loaded it; inputs that need more than is free make it stream, which takes staging memory."""
    if is_guarded:
        host_recordings.pause_with(recorder.pause_malloc_graph)
    net = build_net(1)
    recorder.leave()  # with it the devices know no peaks, from which needs are learned
    with machine(16) as manager:
        member = add(manager, net, is_hosted=True)
        manager.hosting.load(member)
        x = torch.zeros(1, 1000, DIM, device="sim:0")
        net(x)
        out = net(x)
        free_bytes = manager.devices["gpu:0"].free_bytes()  # a forward takes up to 3.5 MiB of it
        filler = torch.empty(free_bytes - 3 * MIB, dtype=torch.uint8, device="sim:0")
        manager.capacity.outdate_plans()
        member.settled.clear()
        held_bytes = manager.ledger.used("gpu:0")
        recorder.take_allocations()
        with recorder.recorded():
            recorder.iterate("a block")
            out.copy_(net(x))
            recorder.iterate(None)
        assert manager.ledger.used("gpu:0") < held_bytes, "nothing had to leave"
        del x, filler, out
    assert (recorder.faults == []) == is_guarded, recorder.faults


@torch.no_grad()
def test_a_garbage_collection_in_a_block_frees_in_a_pause(machine, guard: Recorder, net: InPlaceNet) -> None:
    def collect(*_: Any) -> None:
        doomed.clear()
        gc.collect()

    with machine(8) as manager:
        other = build_net(1)
        member = add(manager, other)
        manager.load_now(member)
        doomed = [Doomed(manager, member)]
        doomed[0].itself = doomed[0]
        with manage(net, "auto", placement="gpu:0", precision="as stored", manager=manager):
            net(INPUT)
            num_pauses, held = guard.num_pauses, manager.ledger.used("gpu:0")
            handle = net.blocks[1].down.register_forward_pre_hook(collect)
            net(INPUT)
            handle.remove()
            assert manager.ledger.used("gpu:0") < held
            assert guard.num_pauses > num_pauses
    assert guard.faults == []


# -- the pauses themselves


class Log:
    """A host's pause that notes what is called."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self) -> Log:
        return self

    def __enter__(self) -> None:
        self.told.append("pause")

    def __exit__(self, *_: Any) -> None:
        self.told.append("resume")


def test_nested_pauses_are_one_of_the_host() -> None:
    log, recordings = Log(), HostRecordings()
    recordings.pause_with(log)
    with recordings.paused():
        inner = recordings.begin()
        with recordings.paused():
            assert log.told == ["pause"]
        assert inner is not None
        inner.end()
        inner.end()
        assert log.told == ["pause"]
    assert log.told == ["pause", "resume"] and recordings.open == {}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_passes_through_a_pause(error: type[BaseException]) -> None:
    log, recordings = Log(), HostRecordings()
    recordings.pause_with(log)
    with pytest.raises(error), recordings.paused():
        raise error
    assert log.told == ["pause", "resume"] and recordings.open == {}


def test_pauses_of_two_threads_are_two() -> None:
    log, recordings = Log(), HostRecordings()
    recordings.pause_with(log)

    def pause() -> None:
        with recordings.paused():
            assert log.told == ["pause", "pause"]

    with recordings.paused():
        thread = threading.Thread(target=pause)
        thread.start()
        thread.join()
        assert log.told == ["pause", "pause", "resume"]
    assert log.told == ["pause", "pause", "resume", "resume"]


def test_without_a_host_nothing_is_paused() -> None:
    recordings = HostRecordings()
    assert recordings.begin() is None
    with recordings.paused():
        assert recordings.open == {}


def test_a_host_that_leaves_in_a_pause_is_told_of_its_end() -> None:
    log, recordings = Log(), HostRecordings()
    recordings.pause_with(log)
    with recordings.paused():
        recordings.pause_with(None)
    assert log.told == ["pause", "resume"] and recordings.open == {}
