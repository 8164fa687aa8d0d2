"""A second thread acts at each line of a forward pass: results are right, and each module has the hooks that it needs.

What may change hooks when is in [Note: changes of hooks] in `forward_hooks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.api import Managed
from highwater.memory.errors import UnsafeState
from highwater.memory.hosted_component import HostedComponent
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.runtime.devices.ledger import Kind, Ledger
from highwater.memory.runtime.holders import find_holders
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.runtime.tensors.deep_copies import OwnHook
from highwater.tests.engine.interleaving import Interleaving, lines_of

SHAPE = {"doubles": 1, "singles": 2}
ROOM_MIB, RESERVE = 0.95, 256 << 10  # of the device: one such model fits beside what its forward needs, two do not
TIGHT, OTHER = "0.25MiB", "0.35MiB"
X = torch.randn(2, 4, 64)


@torch.no_grad()
def compute(net: nn.Module) -> torch.Tensor:
    return net(X).cpu()


def compute_thrice(net: nn.Module) -> torch.Tensor:
    compute(net)
    compute(net)
    return compute(net)


ACTS: dict[str, Callable[[Managed, nn.Module, nn.Module], Any]] = {
    "computes": lambda managed, net, other: compute(net),
    "computes thrice": lambda managed, net, other: compute_thrice(net),
    "gives another profile": lambda managed, net, other: managed.reprofile(OTHER),
    "gives room for all": lambda managed, net, other: managed.reprofile("unlimited"),
    "releases": lambda managed, net, other: managed.release(),
    "needs its room": lambda managed, net, other: compute(other),
}


def sweep(toys, machine, act: str, profile: str, num_passes: int, room: str) -> None:
    """Let the second thread act at each line of a pass that comes after so many others."""
    net, other = toys.build_net(**SHAPE), toys.build_net(seed=1, **SHAPE)
    with machine(ROOM_MIB, low=RESERVE, high=RESERVE) as manager:
        with manage({"net": net}, profile, manager=manager):
            want = compute(net)
        manage({"other": other}, manager=manager)
        want_of_act = compute(other) if act == "needs its room" else want

        def begin() -> Managed:
            managed = manage({"net": net}, profile, manager=manager)
            for _ in range(num_passes):
                compute(net)
            return managed

        with begin():
            places = lines_of(partial(compute, net), room=room)
        for number, place in places:
            with begin() as managed:
                both = Interleaving(partial(compute, net), partial(ACTS[act], managed, net, other), room=room)
                try:
                    first, second = both.run(number)
                    assert torch.allclose(result_of(first), want, atol=1e-5)  # released, it computes on the CPU
                    if isinstance(second, torch.Tensor):
                        assert torch.equal(second, want_of_act)
                    elif not (isinstance(second, UnsafeState) and "computes" in str(second)):
                        result_of(second)
                    check(manager, managed, net)
                    assert torch.equal(compute(net), want) or "net" not in manager.members
                except BaseException as error:
                    error.add_note(f"the second thread acted before {place}")
                    raise


def result_of(outcome: Any) -> Any:
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def check(manager: MemoryManager, managed: Managed, net: nn.Module) -> None:
    manager.ledger.check()
    if "net" in manager.members:
        (member,) = managed.members
        assert not member.leases
        assert member.managed.passes.open is None
        check_hooks(member.managed)
    else:
        assert not any(map(num_hooks, net.modules()))


def check_hooks(managed: ManagedComponent) -> None:
    """With those that quiet passes do without, each module that the component has to see has each hook once."""
    hooks, hooked = managed.hooks, managed.forwards.hooked
    hooks.watch_inside()
    assert hooks.handles.keys() == hooks.exits.keys() == hooked
    for module in managed.module.modules():
        assert num_hooks(module) == (2 if module in hooked else 0), type(module).__name__


def num_hooks(module: nn.Module) -> int:
    return sum(
        isinstance(hook, OwnHook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    )


@pytest.mark.parametrize("act", ["computes thrice", "gives another profile"])
def test_a_thread_at_each_line_of_the_first_pass_which_removes_hooks(toys, machine, act: str) -> None:
    sweep(toys, machine, act, "auto", 0, "runtime/forwards/forward_")


@pytest.mark.slow
@pytest.mark.parametrize("num_passes", range(4))
@pytest.mark.parametrize("profile", ["auto", TIGHT])
@pytest.mark.parametrize("act", ACTS)
def test_a_thread_at_each_line_of_a_pass(toys, machine, act: str, profile: str, num_passes: int) -> None:
    sweep(toys, machine, act, profile, num_passes, "runtime")


@pytest.mark.parametrize("act", ["comes", "leaves"])
def test_a_component_of_another_manager_comes_or_leaves_while_all_are_looked_through(toys, machine, act: str) -> None:
    nets = [toys.build_net(seed=seed, **SHAPE) for seed in range(3)]
    with machine(8) as manager:
        other = MemoryManager()
        manage({"a": nets[0], "b": nets[1]}, manager=manager)
        look, join = partial(find_holders, {id(nets[0])}), partial(manage, {"c": nets[2]}, manager=other)
        for number, _ in lines_of(look, room="/"):
            managed = join() if act == "leaves" else None
            both = Interleaving(look, join if managed is None else managed.release, room="/")
            found, changed = map(result_of, both.run(number))
            assert [places.owner for places in found] == ["a"]
            for handle in (managed, changed):
                if handle is not None:
                    handle.release()


def test_a_component_comes_while_a_host_asks_for_room(toys, machine, monkeypatch) -> None:
    nets = [toys.build_net(seed=seed, **SHAPE) for seed in range(3)]
    with machine(8) as manager:
        monkeypatch.setattr("highwater.memory.hosted_component.default_manager", lambda: manager)
        device = torch.device("sim:0")
        hosted = [HostedComponent(f"hosted {number}", "diffusion", profile=OffloadProfile()) for number in range(2)]
        for component, net in zip(hosted, nets, strict=False):
            component.join(net, device)

        ask = partial(hosted[0].free_memory, device, 1, "asked", is_loaded=lambda module: True)
        for number, _ in lines_of(ask, room="hosted_component"):
            both = Interleaving(ask, partial(manage, {"new": nets[2]}, manager=manager), room="hosted_component")
            freed, managed = map(result_of, both.run(number))
            assert freed == 0  # none of them is loaded
            managed.release()


def test_books_are_summed_anew_after_each_of_two_changes_at_once() -> None:
    change = partial(Ledger().charge, "gpu:0", "a", Kind.STAGING, 1)
    for number, place in lines_of(change, room="runtime/devices/ledger", step="opcode"):
        ledger = Ledger()

        def other(ledger: Ledger = ledger) -> int:
            ledger.charge("gpu:0", "b", Kind.STAGING, 2)
            return ledger.used("gpu:0")

        first = partial(ledger.charge, "gpu:0", "a", Kind.STAGING, 1)
        for outcome in Interleaving(first, other, room="runtime/devices/ledger", step="opcode").run(number):
            result_of(outcome)
        assert ledger.used("gpu:0") == 3, place
