"""How long calls computed is measured in passes, outlives the process, and costs a steady pass nothing."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.manager.leases import write_speeds
from highwater.memory.manager.needs_file import NeedsFile
from highwater.memory.manager.speeds import MAX_CALLS, CallKey, MeasuredCall, Speeds, fit_rates, main_dtype, seconds_at
from highwater.memory.manager.speeds_file import SPEEDS_FILE_NAME, SpeedsFile, read_row, row_of
from highwater.memory.tracing import Work, trace_forward
from highwater.memory.weights.module_component import component_from_module
from highwater.nodes.call_seconds import Computed, MeasuredSeconds

DIM, ROWS = 1024, 512
SPEC = {"total_bytes": 256 << 20, "flops_per_s": 1e12}


class Net(nn.Module):
    def __init__(self, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def run(sim, path: Path, profile: str = "auto", times: int = 4, module: nn.Module | None = None) -> Speeds:
    """Run a net in a new manager, as another process would; returns what that knows of speeds then."""
    with sim.cluster([sim.SimDeviceSpec(**SPEC)]), torch.no_grad():
        manager = MemoryManager(needs_file=NeedsFile(path))
        net = module or Net()
        with manage(net, profile=profile, manager=manager):
            for _ in range(times):
                net(torch.ones(1, ROWS, DIM))
            torch.accelerator.synchronize()
            net(torch.ones(1, ROWS, DIM))
        return manager.capacity.speeds


def flops() -> int:
    return 6 * 2 * ROWS * DIM * DIM


@pytest.mark.parametrize(("profile", "of_blocks"), [("auto", False), ("16MiB", True)], ids=["resident", "streamed"])
def test_a_call_is_timed_as_the_device_computes_it(sim, tmp_path, profile, of_blocks) -> None:
    """Without what streaming waits for: that is the link's."""
    ((key, call),) = run(sim, tmp_path / "needs.sqlite3", profile).known.items()
    assert (key.entry, key.shapes, call.of_blocks) == (0, ((1, ROWS, DIM),), of_blocks)
    assert call.seconds == pytest.approx(flops() / SPEC["flops_per_s"], rel=0.05)


def test_what_was_measured_outlives_the_process(sim, tmp_path) -> None:
    path = tmp_path / "needs.sqlite3"
    known = run(sim, path).known
    assert known and run(sim, path, times=0).known.keys() == known.keys()


def test_a_trace_of_the_same_call_has_its_key_and_tells_the_rate(sim, tmp_path) -> None:
    speeds = run(sim, tmp_path / "needs.sqlite3")
    ((key, _),) = speeds.known.items()
    trace = trace_forward(Net(), (torch.empty(1, ROWS, DIM, device="meta"),))
    (entry,) = trace.entries
    assert (entry.number, entry.shapes, entry.work.flops) == (key.entry, key.shapes, flops())
    assert entry.work == trace.work
    larger = trace_forward(Net(), (torch.empty(2, ROWS, DIM, device="meta"),)).work
    assert speeds.predict(key.device, key.dtype, key.component, larger) is None  # nothing is assumed
    speeds.note_work(key, entry.work)
    assert key.dtype == main_dtype(component_from_module(Net(), name="net")) == "F32"
    expected = 2 * flops() / SPEC["flops_per_s"]
    assert speeds.predict(key.device, key.dtype, key.component, larger) == pytest.approx(expected, rel=0.05)
    assert speeds.predict(key.device, "BF16", key.component, larger) is None
    assert speeds.predict("2" * 32, key.dtype, key.component, larger) is None


@given(st.data())
def test_rates_of_calls_of_several_kinds_predict_others(data: st.DataObject) -> None:
    """Of a device that takes so long for an operation and so long to launch a kernel."""
    rates = data.draw(st.tuples(st.floats(1e-15, 1e-12), st.just(0.0), st.floats(0, 1e-4)))
    works = [Work(data.draw(st.integers(10**6, 10**13)), 10**6, data.draw(st.integers(1, 3000))) for _ in range(4)]
    found = fit_rates([(seconds_at(rates, work), work) for work in works[:3]])
    assert found is not None and min(found) >= 0
    for work in works[:3]:
        assert seconds_at(found, work) == pytest.approx(seconds_at(rates, work), rel=0.05)


def test_a_call_of_this_component_corrects_what_others_say() -> None:
    speeds = Speeds()
    for number, (seconds, flops) in enumerate([(1.0, 100), (2.0, 200), (6.0, 100)]):
        key = CallKey(f"{number:032x}", "1" * 32, "F16", 0, ())
        speeds.note(key, seconds, of_blocks=False)
        speeds.note_work(key, Work(flops, 1, 1))
    assert speeds.predict("1" * 32, "F16", f"{2:032x}", Work(100, 1, 1)) == pytest.approx(6.0)
    assert speeds.predict("1" * 32, "F16", "f" * 32, Work(100, 1, 1)) < 6.0


def test_a_component_that_computes_on_the_cpu_is_timed_by_the_clock(tmp_path) -> None:
    manager, net = MemoryManager(needs_file=NeedsFile(tmp_path / "needs.sqlite3")), Net(1)
    with torch.no_grad(), manage(net, placement="cpu", manager=manager):
        for _ in range(3):
            net(torch.ones(1, 4, DIM))
    assert [call.seconds > 0 for call in manager.capacity.speeds.known.values()] == [True]


def test_a_call_that_fails_is_not_timed(sim, tmp_path) -> None:
    class Failing(Net):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise KeyError("x")
            return super().forward(x)

    net = Failing()
    with sim.cluster([sim.SimDeviceSpec(**SPEC)]), torch.no_grad():
        manager = MemoryManager()
        with manage(net, manager=manager):
            net(torch.ones(1, ROWS, DIM))
            net.fails = True
            with pytest.raises(KeyError):
                net(torch.ones(1, ROWS, DIM))
            net.fails = False
            net(torch.ones(1, ROWS, DIM))
        assert not manager.capacity.speeds.known


@pytest.mark.parametrize("profile", ["auto", "16MiB"], ids=["resident", "streamed"])
def test_a_call_whose_inputs_tell_no_size_is_not_timed(sim, profile) -> None:
    """Rows of numbers, in which any call of them would be the same."""
    net = Net()
    with sim.cluster([sim.SimDeviceSpec(**SPEC)]), torch.no_grad():
        manager = MemoryManager()
        with manage(net, profile=profile, manager=manager):
            for _ in range(4):
                net(torch.ones(ROWS, DIM))
                torch.accelerator.synchronize()
        assert not manager.capacity.speeds.known


def test_the_blocks_of_one_call_do_not_count_for_the_next_one(sim) -> None:
    net = Net()
    with sim.cluster([sim.SimDeviceSpec(**SPEC)]), torch.no_grad():
        manager = MemoryManager()
        with manage(net, profile="16MiB", manager=manager):
            for rows in (torch.ones(16, DIM), torch.ones(16, DIM), torch.ones(1, ROWS, DIM), torch.ones(1, ROWS, DIM)):
                net(rows)
                torch.accelerator.synchronize()
        assert not manager.capacity.speeds.known


def test_a_direct_measurement_of_a_whole_call_is_better_than_that_of_blocks() -> None:
    speeds, key = Speeds(), CallKey("0" * 32, "1" * 32, "F16", 0, ((1, 2, 3),))
    speeds.note(key, 2.0, of_blocks=True)
    speeds.note(key, 3.0, of_blocks=False)
    speeds.note(key, 9.0, of_blocks=True)
    assert speeds.known[key].seconds == 3.0
    speeds.note(key, 4.0, of_blocks=False)
    assert 3.0 < speeds.known[key].seconds < 4.0


def key_of(number: int) -> CallKey:
    return CallKey(f"{number:032x}", "1" * 32, "F16", 0, ((1, 2, number),))


def test_the_file_ends_at_so_many_calls_and_the_oldest_go(tmp_path) -> None:
    file = SpeedsFile(tmp_path / SPEEDS_FILE_NAME, "1")
    calls = {key_of(number): MeasuredCall(seconds=1.0, used_s=number) for number in range(MAX_CALLS + 5)}
    assert file.write(calls)
    found = file.read()
    assert len(found) == MAX_CALLS and key_of(0) not in found and key_of(MAX_CALLS + 4) in found
    assert file.write({key_of(0): MeasuredCall(seconds=2.0)}) and file.read()[key_of(0)].seconds == 2.0
    assert not SpeedsFile(file.path, "another version").read()


@example([(1.0, [0, 0, 0]), (1.0, [10**6, 1, 1])])
@example([(1e-310, [1, 1, 1]), (1.0, [1, 2, 3])])
@example([(1.0, [5, 1, 0]), (1.0, [10**6, 1, 900]), (2.0, [10**3, 1, 1800])])
@given(st.lists(st.tuples(st.floats(allow_nan=False), st.lists(st.integers(0, 2**62), min_size=3, max_size=3))))
def test_no_numbers_in_the_file_break_a_prediction(rows) -> None:
    stored = [
        row_of(key_of(number), MeasuredCall(seconds=seconds, work=Work(*work)), "1")
        for number, (seconds, work) in enumerate(rows)
    ]
    speeds = Speeds()
    for row in json.loads(json.dumps(stored)):
        speeds.restore(read_row(row))
    for number in range(2):
        told = speeds.predict("1" * 32, "F16", f"{number:032x}", Work(10**9, 10**6, 10))
        assert told is None or told > 0


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{", b"[]", b'{"format": 2}', b"[" * 100_000])
def test_a_bad_file_is_told_in_one_line_and_replaced(tmp_path, content) -> None:
    file = SpeedsFile(tmp_path / SPEEDS_FILE_NAME, "1")
    file.path.write_bytes(content)
    assert file.read() == {}
    assert "cannot be read" in file.problem and "\n" not in file.problem
    assert file.write({key_of(1): MeasuredCall(seconds=1.0)})
    assert file.read().keys() == {key_of(1)} and not file.problem


@pytest.mark.parametrize(
    ("field", "value"),
    [("seconds", 0.0), ("seconds", -1.0), ("seconds", "1"), ("seconds", float("inf")), ("seconds", 1e-310),
     ("seconds", 1e300), ("work", [1, 2]), ("work", [1, 2, -3]), ("work", [0, 0, 0]), ("work", [0, 1, 1]),
     ("work", [1, 1, 0]), ("work", []), ("work", 4), ("entry", 1.5), ("entry", -1), ("component", "../x"),
     ("device", 5), ("shapes", []), ("shapes", [[1, "2"]]), ("shapes", [3]), ("shapes", [[1] * 1000]),
     ("dtype", "x" * 1000), ("of_blocks", 1), ("used", None)],
)  # fmt: skip
def test_an_entry_that_this_program_does_not_write_is_left_out(tmp_path, field, value) -> None:
    file = SpeedsFile(tmp_path / SPEEDS_FILE_NAME, "1")
    assert file.write({key_of(1): MeasuredCall(seconds=1.0), key_of(2): MeasuredCall(seconds=1.0)})
    stored = json.loads(file.path.read_text())
    stored["calls"][0][field] = value
    file.path.write_text(json.dumps(stored))
    assert file.read().keys() == {key_of(2)} and not file.problem


class WhileRead(CallKey):
    """A call; while its device is read, another thread notes one more."""

    speeds: Speeds

    @property
    def device(self) -> str:  # type: ignore[override]
        note_one_more(self.speeds)
        return self[1]

    @property
    def component(self) -> str:  # type: ignore[override]
        note_one_more(self.speeds)
        return self[0]


class UsedWhileRead:
    """A measured call; while it is read when it was used, another thread notes one more."""

    seconds, work, of_blocks = 1.0, Work(1, 1, 1), False

    def __init__(self, speeds: Speeds) -> None:
        self.speeds = speeds

    @property
    def used_s(self) -> int:
        note_one_more(self.speeds)
        return 0


def note_one_more(speeds: Speeds) -> None:
    speeds.known[key_of(10**6 + len(speeds.known))] = MeasuredCall(seconds=1.0)


def test_a_plan_reads_speeds_while_another_thread_notes_them() -> None:
    speeds = Speeds()
    for number in range(4):
        key = WhileRead(*key_of(number))
        key.speeds = speeds
        speeds.known[key] = MeasuredCall(seconds=1.0, work=Work(10 + number, 1, 1))
    assert speeds.predict("1" * 32, "F16", "0" * 32, Work(20, 1, 1)) is not None
    found = MeasuredSeconds(MemoryManager())
    found.speeds = speeds
    computed = Computed(component="f" * 32, dtype="F32")
    assert not found.may_tell(lambda: computed) and not list(found.untraced(lambda: computed))


def test_the_oldest_call_goes_while_another_thread_notes_some() -> None:
    speeds = Speeds()
    speeds.known |= {key_of(number): MeasuredCall(seconds=1.0, used_s=1) for number in range(MAX_CALLS - 1)}
    speeds.known[key_of(MAX_CALLS)] = UsedWhileRead(speeds)  # type: ignore[assignment]
    speeds.note(key_of(MAX_CALLS + 1), 1.0, of_blocks=False)
    assert key_of(MAX_CALLS) not in speeds.known and key_of(MAX_CALLS + 1) in speeds.known


def test_a_call_is_written_again_only_after_it_moved() -> None:
    speeds, key = Speeds(), key_of(1)
    speeds.note(key, 1.0, of_blocks=False)
    assert speeds.take_changed().keys() == {key}
    for seconds in (1.01, 0.99, 1.02):
        speeds.note(key, seconds, of_blocks=False)
        assert not speeds.changed
    speeds.note_work(key, Work(1, 1, 1))
    assert speeds.take_changed()[key].work == Work(1, 1, 1)
    speeds.note(key, 1.2, of_blocks=False)
    assert speeds.take_changed().keys() == {key}


def test_a_call_that_drifts_is_written_although_each_step_is_small() -> None:
    speeds, key = Speeds(), key_of(1)
    speeds.restore([(key, MeasuredCall(seconds=1.0, used_s=int(time.time())))])
    for step in range(20):
        speeds.note(key, 1 + step / 200, of_blocks=False)
    assert speeds.changed == {key}


def test_a_call_that_is_still_in_use_is_written_once_a_day() -> None:
    """Of a full file the calls go that were written longest ago."""
    speeds, key = Speeds(), key_of(1)
    speeds.restore([(key, MeasuredCall(seconds=1.0, used_s=int(time.time()) - 2 * 86400))])
    speeds.note(key, 1.0, of_blocks=False)
    assert speeds.take_changed().keys() == {key}
    speeds.note(key, 1.0, of_blocks=False)
    assert not speeds.changed


def test_a_call_is_written_whole_after_its_blocks_were() -> None:
    speeds, key = Speeds(), key_of(1)
    speeds.restore([(key, MeasuredCall(seconds=1.0, of_blocks=True, used_s=int(time.time())))])
    speeds.note(key, 1.0, of_blocks=False)
    assert speeds.changed == {key}


def test_a_call_whose_writing_failed_is_written_the_next_time(tmp_path) -> None:
    speeds, key = Speeds(), key_of(1)
    speeds.note(key, 1.0, of_blocks=False)
    (tmp_path / "taken").touch()
    write_speeds(speeds, SpeedsFile(tmp_path / "taken" / SPEEDS_FILE_NAME, "1"))
    assert speeds.changed == {key}
    speeds.note(key, 1.0, of_blocks=False)
    assert speeds.changed == {key}


def test_steady_calls_leave_the_file_alone(sim, tmp_path) -> None:
    """Every sixteenth is timed; its virtual seconds are the same."""
    path = tmp_path / SPEEDS_FILE_NAME
    with sim.cluster([sim.SimDeviceSpec(**SPEC)]), torch.no_grad():
        net = Net(2)
        with manage(net, manager=MemoryManager(needs_file=NeedsFile(tmp_path / "needs.sqlite3"))):
            for number in range(60):
                net(torch.ones(1, ROWS, DIM))
                torch.accelerator.synchronize()
                if number == 8:
                    written = path.stat().st_mtime_ns
        assert path.stat().st_mtime_ns == written
