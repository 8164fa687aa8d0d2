"""Lent bytes are free for another program, count as used in every plan, and come back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory import InvalidInput, manage
from highwater.memory.errors import DoesNotFit, UnsafeState
from highwater.memory.manager.claims.loans import Loan, Loans, parse_seconds
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import MIB

X = torch.ones(2, 5, 64)


def test_idle_components_leave_for_a_loan_and_runs_stream_beside_it(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net, expected = toys.build_net(), toys.build_net()(X)
        with manage(net, manager=manager) as managed:
            assert torch.equal(net(X).cpu(), expected)
            whole = manager.ledger.held("model", "gpu:0")
            lent = int(7.2 * MIB)
            report = manager.commands.lend(lent, 60)
            gpu = manager.devices["gpu:0"]
            assert report.freed_bytes > 0 and report.missing_bytes == 0
            assert gpu.driver_free_bytes() == report.free_bytes >= lent
            assert torch.equal(net(X).cpu(), expected)
            assert gpu.free_bytes() >= lent
            assert 0 < manager.ledger.held("model", "gpu:0") < whole
            assert managed.members[0].managed.plan.streams
            manager.commands.take_back()
            assert torch.equal(net(X).cpu(), expected)
            assert manager.ledger.held("model", "gpu:0") == whole


def test_what_the_borrower_takes_counts_once(toys, machine, sim) -> None:
    with machine(8) as manager, torch.no_grad():
        net, expected = toys.build_net(), toys.build_net()(X)
        with manage(net, manager=manager):
            manager.commands.lend(7 * MIB, 60)
            net(X)
            held = manager.ledger.held("model", "gpu:0")
            for taken in (3 * MIB, 7 * MIB):
                sim.occupy(0, taken)
                manager.begin_run("r", "run")
                assert torch.equal(net(X).cpu(), expected)
                manager.end_run()
                now = manager.ledger.held("model", "gpu:0")
                assert abs(now - held) < 16 << 10  # some activations are alive at one time, not at the other
            sim.occupy(0, 0)


def test_a_loan_during_a_forward_leaves_what_computes_alone(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net, other = toys.build_net(), toys.build_net(seed=1)
        expected = net(X)
        with manage(net, manager=manager), manage(other, manager=manager, name="other"):
            other(X)
            reports = []

            def lend(*_: object) -> None:
                if not reports:
                    reports.append(manager.commands.lend(5 * MIB, 60))

            net.doubles[1].register_forward_hook(lend)
            assert torch.equal(net(X).cpu(), expected)
            assert reports[0].freed_bytes >= 0
            assert torch.equal(net(X).cpu(), expected)
            assert manager.devices["gpu:0"].free_bytes() >= 5 * MIB


def test_what_computes_is_not_lent(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager) as managed, manager.lease(managed.members[0]):
            with pytest.raises(UnsafeState, match=r"cannot lend 8.00MiB of gpu:0: model computes with .*allowed now: "):
                manager.commands.lend(8 * MIB, 60)
            assert manager.capacity.loans.running() == []
            assert manager.commands.lend(4 * MIB, 60).missing_bytes == 0


@pytest.mark.parametrize("num_bytes", [0, -1, 9 * MIB, 1 << 62])
def test_a_loan_is_at_most_the_device(machine, num_bytes: int) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match=r"allowed: more than 0, up to 8.00MiB"):
        manager.commands.lend(num_bytes, 60)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(2.5 * MIB + 0.5, 60), ("1GiB", 60), (True, 60), (MIB, "3")])
def test_what_is_no_amount_or_time_changes_nothing(toys, machine, num_bytes, seconds) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager):
            with pytest.raises(InvalidInput, match=r"^lend .*allowed: a "):
                manager.commands.lend(num_bytes, seconds)
            net(X)
            manager.commands.lend(MIB, 60)


def test_what_does_not_fit_beside_a_loan_names_the_loan(toys, machine) -> None:
    with machine(4) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager):
            manager.commands.lend(4 * MIB - 4096, 60)
            with pytest.raises(DoesNotFit, match=r"0B reserved, 4.00MiB lent to another program; end the loan"):
                net(X)
            manager.commands.take_back()
            net(X)


@pytest.mark.parametrize("seconds", [0, 0.5, -1, 1e9, float("inf"), float("nan")])
def test_a_loan_ends_some_day(machine, seconds: float) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match="allowed: 1 s to 24 h"):
        manager.commands.lend(MIB, seconds)


def test_a_device_is_lent_once_and_has_to_be_named_where_there_are_two(machine) -> None:
    with machine(8, 8) as manager:
        with pytest.raises(InvalidInput, match="name one: gpu:0, gpu:1"):
            manager.commands.lend(MIB, 60)
        for device, told in (
            ("cpu", "'cpu' is not allowed here; allowed: gpu:0, gpu:1"),
            ("gpu:5", "no device 'gpu:5'"),
        ):
            with pytest.raises(InvalidInput, match=told):
                manager.commands.lend(MIB, 60, device)
        manager.commands.lend(MIB, 60, "gpu:1")
        with pytest.raises(UnsafeState, match=r"lent already, for .* more; give them back first"):
            manager.commands.lend(MIB, 60, "gpu:1")
        manager.commands.lend(MIB, 60, "gpu:0")
        manager.commands.take_back("gpu:1")
        with pytest.raises(UnsafeState, match="nothing of gpu:1 is lent"):
            manager.commands.take_back("gpu:1")


def test_what_is_said_of_a_device_that_is_not_there_is_the_same_everywhere(machine) -> None:
    """And everywhere other programs' names and blanks around them are read."""
    with machine(8, 8) as manager:
        devices = ["cpu", "gpu:0", "gpu:1"]
        ways: dict[str, Callable[[str], object]] = {
            "": lambda name: manager.commands.lend(MIB, 60, name),
            "again": lambda name: manager.commands.release_between_runs(None, name, reason="test"),
            "watermark: ": lambda name: manager.set_watermark(name, 0, 0),
            "placement 'gpu:2', column 1: ": lambda name: parse_placement(name, devices=devices),
            "profile 'gpu:2=1GiB', column 1: ": lambda name: parse_profile(f"{name}=1GiB", devices=devices),
        }
        for begin, ask in ways.items():
            with pytest.raises(InvalidInput) as error:
                ask("gpu:2")
            told = str(error.value)
            assert told.startswith(begin.removeprefix("again") + "this machine has no device 'gpu:2'; did you mean")
            assert "gpu:0" in told and "gpu:1" in told
            ask(" cuda:1 ")


def test_the_time_is_up_by_itself(machine, wait_until) -> None:
    with machine(8) as manager:
        manager.commands.lend(MIB, 1)
        wait_until(lambda: not manager.capacity.loans.loans)
        events = [event["reason"] for event in manager.report()["events"] if event["kind"] == "lend"]
        assert events == ["lent to another program for 1 s", "1.00MiB were lent: the time is up"]


def test_a_loan_is_in_the_report(machine) -> None:
    with machine(8) as manager:
        assert manager.report()["devices"][1]["lent"] is None
        manager.commands.lend(MIB, 60)
        lent = manager.report()["devices"][1]["lent"]
        assert lent["num_bytes"] == lent["missing_bytes"] == MIB and 0 < lent["left_s"] <= 60
        assert manager.recent_report(1)["devices"][1]["lent"]["num_bytes"] == MIB


def test_a_manager_with_an_alarm_is_collected(machine) -> None:
    from highwater.memory import MemoryManager

    with machine(8):
        manager = MemoryManager()
        manager.commands.lend(MIB, 3600)
        alive = weakref.ref(manager)
        del manager
        gc.collect()
        assert alive() is None


@given(lent=st.integers(1, 100), foreign=st.lists(st.integers(0, 300), min_size=2, max_size=2), now=st.floats(0, 10))
def test_lent_and_taken_bytes_are_never_counted_twice(lent: int, foreign: list[int], now: float) -> None:
    loans = Loans(lambda _: foreign[1], lambda: now)
    loans.loans["gpu:0"] = loan = Loan(device="gpu:0", num_bytes=lent, until_s=5, foreign_bytes=foreign[0])
    taken = min(lent, max(0, foreign[1] - foreign[0]))
    assert loan.missing_bytes(foreign[1]) + taken == lent
    assert loans.missing_bytes("gpu:0") == (lent - taken if now < 5 else 0)


@pytest.mark.parametrize(("text", "seconds"), [("60s", 60), ("1.5 h", 5400), (" 2MIN ", 120), ("1m", 60)])
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_seconds(text, what="--for", most_s=86400) == seconds


@pytest.mark.parametrize("text", ["60", "", "s", "-1s", "1d", "25h", "0s", "1e3s", "nan s", None, 60, "9" * 400 + "s"])
def test_other_durations_are_refused_in_one_line(text: object) -> None:
    with pytest.raises(InvalidInput, match="allowed: ") as refused:
        parse_seconds(text, what="--for", most_s=86400)
    assert len(str(refused.value)) < 300
