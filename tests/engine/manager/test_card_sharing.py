"""Processes on one device keep the larger marks free, ask each other for memory, and get it where nothing runs."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from highwater.memory import DoesNotFit, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.manager import card_sharing
from highwater.memory.manager.claims.neighbours import ProcessUse, shared_path
from highwater.memory.manager.sharing_check import describe_sharing
from highwater.memory.options.idle_limits import IdleLimits
from highwater.memory.units import MIB

from . import sharing_process
from .test_process_slots import Other, posix
from .test_steered import Host, Paged

X = torch.ones(2, 5, 64)
ROOM = 2 * MIB


class Process:
    """A process of `sharing_process`."""

    def __init__(self, folder: Path, mebibytes: float) -> None:
        command = [sys.executable, sharing_process.__file__, str(folder), str(mebibytes)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, *words: object) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(*words, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.do("state")
        return state

    def crash(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "highwater"


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[Process, Process]]:
    """Two processes on the same device, on which one model has room and a second one has not."""
    processes = Process(folder, 1.7), Process(folder, 1.7)
    yield processes
    for process in processes:
        process.crash()


def share_memory(one: Process, two: Process) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let each see of the device what the other has, as on a real one; returns the states of both."""
    states = one.state(), two.state()
    one.do("occupy", states[1]["used"])
    two.do("occupy", states[0]["used"])
    return states


def test_an_idle_process_gives_what_another_one_asks_for(pair, wait_until) -> None:
    idle, asking = pair
    for process in pair:
        process.do("mark", MIB // 8, MIB // 8)
    idle.do("forward")
    share_memory(idle, asking)
    wait_until(lambda: asking.state()["device"]["neighbours"] and asking.do("look"))
    asking.do("begin")
    asking.do("forward")
    first = asking.state()
    assert not first["whole"] and idle.state()["used"]

    def is_whole() -> bool:
        share_memory(idle, asking)
        asking.do("forward")
        return asking.state()["whole"]

    wait_until(is_whole)
    asking.do("end")
    reasons = [reason for reason in idle.state()["events"] if f"another process (pid {first['pid']}) needs" in reason]
    assert reasons and "least recently used" in reasons[0]
    assert asking.state()["device"]["neighbours"][0]["pid"] == idle.state()["pid"]
    idle.do("forward")


def test_marks_join_and_go_with_their_process(pair, wait_until) -> None:
    one, two = pair
    one.do("mark", MIB // 4, MIB // 2)
    wait_until(lambda: two.do("look") and two.state()["low"] == MIB // 4)
    state = two.state()
    assert state["device"]["watermark"] == {"low_bytes": MIB // 4, "high_bytes": MIB // 2}
    assert f"keep free: low 0.25MiB, high 0.50MiB; another process (pid {one.state()['pid']})" in state["events"]
    two.do("mark", MIB // 8, MIB)
    wait_until(lambda: one.do("look") and one.state()["device"]["watermark"]["high_bytes"] == MIB)
    one.crash()
    wait_until(lambda: two.do("look") and two.state()["low"] == MIB // 8)
    assert two.state()["device"]["neighbours"] == []


def test_two_busy_processes_do_not_take_turns_in_evicting_each_other(pair) -> None:
    for process in pair:
        process.do("mark", MIB // 8, MIB // 8)
    for _ in range(20):
        for process, other in (pair, pair[::-1]):
            share_memory(*pair)
            process.do("begin")
            process.do("forward")
            process.do("foresee")  # its queue will use the model again
            share_memory(*pair)
            other.do("look")
            share_memory(*pair)
            process.do("forward")
            process.do("end")
    states = share_memory(*pair)
    given = [event for state in states for event in state["events"] if "another process (pid" in event]
    assert len(given) <= 5, "each takes from the other what that needs next"
    assert all(state["used"] > 0.3 * MIB for state in states)


# -- one manager, and another process that says what a test wants


class Says:
    """What another process says of a device of `ROOM` bytes."""

    def __init__(self, path: Path) -> None:
        self.other = Other(path)
        self.use = ProcessUse(
            pid=self.other.process.pid, low_bytes=0, high_bytes=0, used_bytes=0, idle_bytes=0, need_bytes=0
        )
        self.request = 0

    def say(self, **amounts: int) -> None:
        self.request += "need_bytes" in amounts
        fields = {name: getattr(self.use, name) for name in ProcessUse.__slots__}
        self.use = ProcessUse(**(fields | amounts | {"request": self.request}))
        self.other.write(self.use.to_bytes())

    def heard(self) -> ProcessUse:
        (entry,) = self.other.read()
        use = ProcessUse.from_bytes(entry, ROOM)
        assert use is not None
        return use


@pytest.fixture
def shared(machine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[MemoryManager, Says]]:
    """A manager on a device of 2 MiB, and another process there."""
    monkeypatch.setattr(card_sharing, "LEAST_IDLE_S", 0.0)
    with machine(ROOM / MIB) as manager, torch.no_grad():
        manager.sharing.join(folder)
        card = manager.devices["gpu:0"].card()
        says = Says(shared_path(folder, card))
        says.say()
        yield manager, says
        manager.capacity.neighbours.leave()
        says.other.crash()


def test_no_more_leaves_than_is_missing_and_once_for_each_request(shared, toys, sim) -> None:
    manager, says = shared
    net, expected = toys.build_net(), toys.build_net()(X)
    with manage(net, manager=manager):
        assert torch.equal(net(X).cpu(), expected)
        whole = manager.ledger.held("model", "gpu:0")
        says.say(need_bytes=ROOM - whole)
        manager.look()
        assert manager.ledger.held("model", "gpu:0") == whole  # that much is free
        sim.occupy(0, ROOM - whole)
        says.say(need_bytes=MIB // 4)
        manager.look()
        left = manager.ledger.held("model", "gpu:0")
        assert 0 < left <= whole - MIB // 4
        sim.occupy(0, ROOM - left)
        manager.look()
        assert manager.ledger.held("model", "gpu:0") == left  # the other took it, and has not asked again
        says.say(need_bytes=MIB // 4)
        manager.look()
        assert manager.ledger.held("model", "gpu:0") < left
        sim.occupy(0, 0)
        says.say(need_bytes=0)
        assert torch.equal(net(X).cpu(), expected)
    told = [event["reason"] for event in manager.report()["events"] if event["kind"] == "evict"]
    assert all(f"another process (pid {says.use.pid}) needs 0.25MiB; least recently used" in reason for reason in told)


def test_nothing_leaves_during_a_run_or_a_pass_or_if_it_is_kept(shared, toys, sim) -> None:
    manager, says = shared
    net = toys.build_net()
    with manage(net, manager=manager) as managed:
        net(X)
        whole = manager.ledger.held("model", "gpu:0")
        sim.occupy(0, ROOM - whole - MIB // 8)
        says.say(need_bytes=MIB)
        manager.begin_run("r", "run")
        manager.look()
        assert manager.ledger.held("model", "gpu:0") == whole
        managed.keep()
        manager.end_run()
        manager.look()
        assert manager.ledger.held("model", "gpu:0") == whole
        managed.keep(False)
        with manager.lease(managed.members[0]):
            manager.look()
            assert manager.ledger.held("model", "gpu:0") == whole
        manager.look()
        assert manager.ledger.held("model", "gpu:0") < whole
        sim.occupy(0, 0)


def test_what_the_queue_uses_leaves_only_beyond_an_equal_part(shared, toys, sim) -> None:
    manager, says = shared
    net = toys.build_net()
    with manage(net, manager=manager) as managed:
        net(X)
        whole = manager.ledger.held("model", "gpu:0")
        assert whole > ROOM // 2
        sim.occupy(0, ROOM - whole)
        manager.foresee([[managed.members[0].id]])
        for _ in range(3):
            says.say(need_bytes=ROOM)
            manager.look()
        left = manager.ledger.held("model", "gpu:0")
        assert ROOM // 2 - 256 * 1024 < left <= ROOM // 2  # a block more at most
        manager.foresee([])
        says.say(need_bytes=ROOM)
        manager.look()
        assert manager.ledger.held("model", "gpu:0") == 0
        sim.occupy(0, 0)


def test_what_a_plan_lacks_is_asked_for_while_the_run_lasts(shared, toys, sim) -> None:
    manager, says = shared
    net, expected = toys.build_net(), toys.build_net()(X)
    with manage(net, manager=manager):
        net(X)
        whole = manager.ledger.held("model", "gpu:0")
        manager.commands.free_idle("test")
        sim.occupy(0, ROOM - whole // 2)
        for idle, asked in ((0, False), (whole, True)):
            says.say(idle_bytes=idle, used_bytes=whole)
            manager.begin_run("r", "run")
            assert torch.equal(net(X).cpu(), expected)
            held = manager.ledger.held("model", "gpu:0")
            assert 0 < held <= whole // 2
            assert says.heard().need_bytes == (whole - held if asked else 0)
            manager.end_run()
            assert says.heard().need_bytes == 0
        # What the other gives is taken in the same run, with the next forward.
        manager.begin_run("r", "run")
        net(X)
        sim.occupy(0, 0)
        says.say(idle_bytes=0, used_bytes=0)
        manager.look()
        net(X)
        assert manager.ledger.held("model", "gpu:0") == whole
        assert says.heard().need_bytes == 0
        manager.end_run()


def test_what_does_not_fit_is_asked_for(shared, toys, sim) -> None:
    manager, says = shared
    net = toys.build_net()
    with manage(net, manager=manager):
        sim.occupy(0, ROOM - MIB // 8)
        says.say(idle_bytes=MIB, used_bytes=ROOM - MIB // 8)
        manager.begin_run("r", "run")
        told = rf"needs at least .*; another process \(pid {says.use.pid}\) uses 1.88MiB of gpu:0, and was asked"
        with pytest.raises(DoesNotFit, match=told):
            net(X)
        assert says.heard().need_bytes > MIB // 2
        manager.end_run()
        sim.occupy(0, 0)


def test_what_others_lend_is_free_for_nobody(shared, toys) -> None:
    manager, says = shared
    net, expected = toys.build_net(), toys.build_net()(X)
    with manage(net, manager=manager):
        net(X)
        whole = manager.ledger.held("model", "gpu:0")
        says.say(lent_bytes=ROOM - whole // 2)
        manager.begin_run("r", "run")
        assert torch.equal(net(X).cpu(), expected)
        assert manager.ledger.held("model", "gpu:0") <= whole // 2
        manager.end_run()
        manager.commands.lend(MIB // 4, 60)
        manager.look()
        assert says.heard().lent_bytes == MIB // 4


def test_what_another_process_lends_is_not_lent_again(shared) -> None:
    manager, says = shared
    says.say(lent_bytes=ROOM - MIB // 2)
    manager.look()
    with pytest.raises(UnsafeState, match=r"MiB lent by another process; allowed now: up to 0.50MiB"):
        manager.commands.lend(MIB, 60)
    manager.commands.lend(MIB // 2, 60)


def test_what_other_processes_take_is_not_taken_for_the_borrowers(shared, sim) -> None:
    manager, says = shared
    manager.commands.lend(MIB, 60)
    sim.occupy(0, MIB // 2)
    says.say(used_bytes=MIB // 2)
    manager.look()
    assert manager.capacity.lent_bytes("gpu:0") == MIB
    sim.occupy(0, MIB // 2 + MIB // 4)
    assert manager.capacity.lent_bytes("gpu:0") == MIB - MIB // 4
    sim.occupy(0, 0)
    manager.commands.take_back()


class Wanting(Paged):
    """A component that its host moves, and that would have so many pages if there were room."""

    num_wanted = 0

    def wanted_bytes(self) -> dict[str, int]:
        return {"gpu:0": self.num_wanted * self.PAGE_BYTES}


def test_what_a_host_would_load_is_asked_for(shared, sim) -> None:
    manager, says = shared
    component = Wanting("dynamic", 2)
    manager.hosting.steer(Host(component))
    sim.occupy(0, MIB)
    says.say(used_bytes=MIB, idle_bytes=MIB // 2)
    # It has half a MiB, and as much is free.
    for num_wanted, asked in ((2, 0), (4, 0), (5, MIB // 4), (7, MIB // 2)):
        component.num_wanted = num_wanted
        manager.begin_run("r", "run")
        manager.hosting.note_use(component)
        assert says.heard().need_bytes == asked
        manager.end_run()
        assert says.heard().need_bytes == 0
    sim.occupy(0, 0)
    component.pages.clear()


def test_what_a_host_moves_leaves_for_others(shared, sim) -> None:
    manager, says = shared
    component = Paged("dynamic", 4)
    manager.hosting.steer(Host(component))
    sim.occupy(0, MIB)
    manager.look()
    says.say(need_bytes=MIB // 2)
    manager.look()
    assert len(component.pages) == 2
    sim.occupy(0, 0)
    component.pages.clear()


def test_what_cannot_be_is_not_heard(shared) -> None:
    manager, says = shared
    for amounts in ({"high_bytes": ROOM + 1}, {"low_bytes": 2, "high_bytes": 1}, {"need_bytes": 1 << 62}):
        says.say(**{"low_bytes": 0, "high_bytes": 0, "need_bytes": 0} | amounts)
        manager.look()
        assert manager.capacity.neighbours.on("gpu:0") == ()
    says.say(low_bytes=0, high_bytes=0, need_bytes=0)
    manager.look()
    assert len(manager.capacity.neighbours.on("gpu:0")) == 1


def test_a_file_that_is_in_the_way_ends_no_run_and_sharing_comes_back(shared, toys) -> None:
    manager, _ = shared
    net, expected = toys.build_net(), toys.build_net()(X)
    path = shared_path(says_folder(manager), manager.devices["gpu:0"].card())
    path.unlink()
    path.mkdir()
    with manage(net, manager=manager):
        manager.begin_run("r", "run")
        assert torch.equal(net(X).cpu(), expected)
        manager.end_run()
        assert "directory" in manager.capacity.neighbours.why_not("gpu:0")
        path.rmdir()
        manager.look()
        assert manager.capacity.neighbours.why_not("gpu:0") is None
        assert path.is_file()


def says_folder(manager: MemoryManager) -> Path:
    return manager.capacity.neighbours.shared["gpu:0"].path.parent


# -- where nothing can be shared


@posix
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_folder_that_is_not_private_turns_sharing_off(machine, folder: Path, toys, mode: int) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with machine(8) as manager:
        manager.sharing.join(folder)
        assert "run: chmod" in manager.capacity.neighbours.why_not("gpu:0")
        assert manager.look() is None
        with manage(toys.build_net(), manager=manager) as managed, torch.no_grad():
            assert managed.members
    assert list(folder.iterdir()) == []


def test_a_device_without_a_uuid_is_not_shared(machine, folder: Path, sim, monkeypatch: pytest.MonkeyPatch) -> None:
    with machine(8) as manager:
        module = manager.devices["gpu:0"].module
        found = module.get_device_properties(0)
        for uuid in ("", "00000000-0000-0000-0000-000000000000"):
            found.uuid = uuid
            monkeypatch.setattr(module, "get_device_properties", lambda device=None, found=found: found)
            manager.sharing.join(folder)
            assert manager.capacity.neighbours.why_not("gpu:0") == "torch reports no uuid of it"
            (state,) = describe_sharing(manager.devices.values(), folder, root=folder)
            assert "not shared with other processes: torch reports no uuid of it" in state.text and not state.is_warning

        def fail(device: object = None) -> None:
            raise RuntimeError("No CUDA GPUs are available")

        monkeypatch.setattr(module, "get_device_properties", fail)
        manager.sharing.join(folder)
        assert "No CUDA GPUs are available" in manager.capacity.neighbours.why_not("gpu:0")
        monkeypatch.undo()
        manager.capacity.neighbours.leave()


def test_processes_with_simulated_devices_share_nothing_unless_they_are_told_to(
    run_python: Callable[[str], None],
) -> None:
    run_python(
        "from highwater.headless import simdevice\n"
        "from highwater.memory.manager.default import shared_folder, share_devices_in\n"
        "assert shared_folder() is not None\n"
        "simdevice.install('sim')\n"
        "assert shared_folder() is None\n"
        "share_devices_in('/somewhere')\n"
        "assert str(shared_folder()) == '/somewhere'\n"
    )


def test_a_manager_that_ends_gives_its_slot_back(machine, folder: Path) -> None:
    with machine(8) as unshared:
        manager = MemoryManager(shared_folder=folder)
        manager.commands.set_idle_limits(IdleLimits())
        shared = manager.capacity.neighbours.shared["gpu:0"]
        other = Other(shared.path)
        try:
            assert [ProcessUse.from_bytes(entry, 8 * MIB).pid for entry in other.read()] == [os.getpid()]
            del manager
            gc.collect()
            assert other.read() == []
        finally:
            other.crash()
        del unshared


# -- what the doctor says


def test_the_doctor_says_who_shares_a_device_and_creates_nothing(machine, folder: Path) -> None:
    with machine(ROOM / MIB) as manager:
        devices = list(manager.devices.values())
        (alone,) = describe_sharing(devices, folder, root=folder)
        assert alone.text == f"gpu:0: no other process with this pack uses it now (looked in {folder})"
        assert not alone.is_warning and not folder.exists()
        manager.sharing.join(folder)
        says = Says(shared_path(folder, manager.devices["gpu:0"].card()))
        says.say(used_bytes=MIB, idle_bytes=MIB // 2)
        (shared,) = describe_sharing(devices, folder, root=folder)
        assert shared.text == f"gpu:0: shared with 1 other process: pid {says.use.pid} uses 1.00MiB, 0.50MiB of it idle"
        says.other.crash()
        assert describe_sharing(devices, folder, root=folder) == [alone]
        assert describe_sharing(devices[:1], folder, root=folder) == []
        assert describe_sharing(devices, None)[0].text == (
            "off: other processes on the same devices are not seen; that needs the package platformdirs, "
            "and a runtime folder of your own"
        )
        manager.capacity.neighbours.leave()


@posix
def test_the_doctor_says_why_nothing_is_shared(machine, folder: Path, tmp_path: Path) -> None:
    with machine(ROOM / MIB) as manager:
        folder.parent.mkdir(mode=0o700)
        folder.symlink_to(tmp_path)
        (state,) = describe_sharing(manager.devices.values(), folder, root=folder)
        assert (
            state.is_warning and state.remedy and "gpu:0: not shared: " in state.text and "it is a link" in state.text
        )


@pytest.mark.parametrize("mark", [".dockerenv", "run/.containerenv", "proc/1/cgroup"])
def test_the_doctor_says_that_a_container_sees_nobody_outside(machine, folder: Path, tmp_path: Path, mark: str) -> None:
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    with machine(ROOM / MIB) as manager:
        assert len(describe_sharing(manager.devices.values(), folder, root=tmp_path)) == 1
        (tmp_path / mark).write_text("12:memory:/docker/0123\n0::/\n")
        _, told = describe_sharing(manager.devices.values(), folder, root=tmp_path)
        assert told.text.startswith("this is a container: processes outside of it, or in others, are seen only if")
