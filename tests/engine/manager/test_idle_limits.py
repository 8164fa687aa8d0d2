"""At most so many components stay loaded; idle ones leave after a while; nothing moves while anything computes."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import InvalidInput, manage
from highwater.memory.options.idle_limits import IdleLimits

X = torch.ones(2, 5, 64)


def loaded(manager) -> set[str]:
    return set(manager.ledger.by_component("gpu:0"))


def test_no_more_components_stay_loaded_than_were_set(toys, machine) -> None:
    with machine(32) as manager, torch.no_grad():
        manager.commands.set_idle_limits(IdleLimits(num_loaded=2))
        nets = [toys.build_net(seed=seed) for seed in range(4)]
        handles = [manage(net, name=f"net{n}", manager=manager) for n, net in enumerate(nets)]
        for number, net in enumerate(nets):
            net(X)
            assert loaded(manager) == {f"net{n}/model" for n in range(max(0, number - 1), number + 1)}
        handles[2].keep()
        nets[0](X)
        assert loaded(manager) == {"net0/model", "net2/model"}
        manager.commands.set_idle_limits(IdleLimits(num_loaded=1))
        assert loaded(manager) == {"net2/model"}
        reasons = {event["reason"] for event in manager.report()["events"] if event["kind"] == "evict"}
        assert any("at most 1 component stays loaded" in reason for reason in reasons)


def test_a_limit_of_one_does_not_stop_models_that_compute_inside_each_other(toys, machine) -> None:
    with machine(32) as manager, torch.no_grad():
        manager.commands.set_idle_limits(IdleLimits(num_loaded=1))
        outer, inner = toys.build_net(), toys.build_net(seed=1)
        expected = inner(X)
        found = []
        with manage(outer, name="outer", manager=manager), manage(inner, name="inner", manager=manager):
            outer.doubles[1].register_forward_hook(lambda *_: found.append(inner(X)))
            outer(X)
            assert torch.equal(found.pop().cpu(), expected)


def test_what_is_idle_for_long_leaves_by_itself(toys, machine, wait_until) -> None:
    with machine(32) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager):
            net(X)
            manager.commands.set_idle_limits(IdleLimits(idle_s=0.3))
            wait_until(lambda: not loaded(manager))
            reasons = [event["reason"] for event in manager.report()["events"] if event["kind"] == "evict"]
            assert reasons == ["idle for more than 0.3 s; fully evicted"]
            net(X)
            assert loaded(manager)
            wait_until(lambda: not loaded(manager))
            manager.commands.set_idle_limits(IdleLimits())
            assert manager.look() is None


@pytest.mark.parametrize("busy", ["run", "host", "lease", "lock"])
def test_nothing_moves_while_anything_computes(toys, machine, busy: str) -> None:
    import threading

    with machine(32) as manager, torch.no_grad():
        net, other = toys.build_net(), toys.build_net(seed=1)
        with manage(net, manager=manager) as managed, manage(other, name="other", manager=manager):
            net(X)
            other(X)
            held = loaded(manager)
            manager.idle.take(IdleLimits(idle_s=1e-9))
            if busy == "host":
                manager.commands.ask_before_moving(lambda: True)
                assert manager.look() > 0
            elif busy == "run":
                manager.begin_run("r", "run")
                assert manager.look() > 0
                assert loaded(manager) == held
                manager.end_run()
                return
            elif busy == "lease":
                with manager.lease(managed.members[0]):
                    assert manager.look() > 0
                    assert loaded(manager) == held
                return
            else:
                entered, leave = threading.Event(), threading.Event()

                def hold() -> None:
                    with manager.exclusive():
                        entered.set()
                        leave.wait(60)

                thread = threading.Thread(target=hold)
                thread.start()
                entered.wait(60)
                assert manager.look() > 0  # returns although the lock is held
                leave.set()
                thread.join()
            assert loaded(manager) == held


@pytest.mark.parametrize(
    "limits",
    [{"num_loaded": 0}, {"num_loaded": -1}, {"num_loaded": 1.5}, {"num_loaded": True}, {"num_loaded": 10**9},
     {"idle_s": 0}, {"idle_s": -1}, {"idle_s": "60"}, {"idle_s": float("nan")}, {"idle_s": float("inf")}],
)  # fmt: skip
def test_other_limits_are_refused_in_one_line(limits: dict) -> None:
    with pytest.raises(InvalidInput, match="allowed: "):
        IdleLimits(**limits)
