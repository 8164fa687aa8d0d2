"""Threads that compute, release and give other profiles at the same time: nothing hangs, nothing is wrong."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch

from highwater.memory import manage
from highwater.memory.errors import UnsafeState
from highwater.memory.runtime.blocks.weight_group import WeightGroup
from highwater.memory.runtime.forwards.device_hops import DeviceHops
from highwater.memory.runtime.forwards.forward_pass import LOOK_EVERY_S

TIGHT = "0.45MiB"
X = torch.randn(2, 4, 64)


@torch.no_grad()
def compute(net: torch.nn.Module) -> torch.Tensor:
    return net(X).cpu()


def test_what_waits_to_compute_is_not_released(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        managed = manage(net, TIGHT, manager=manager)
        want = compute(net)
        with manager.exclusive():  # as a long loading of something else would
            entering = pool.submit(compute, net)
            while not managed.members[0].managed.passes.open:
                pass
            with pytest.raises(UnsafeState, match="computes"):
                managed.release()
        assert torch.equal(entering.result(600), want)
        managed.release()
        assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


def test_what_waits_to_compute_does_so_with_the_new_profile(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        managed = manage(net, TIGHT, manager=manager)
        want, former = compute(net), managed.members[0].managed
        with manager.exclusive():
            entering = pool.submit(compute, net)
            while not former.passes.open:
                pass
            managed.reprofile("unlimited")
        assert torch.equal(entering.result(600), want)
        member = managed.members[0]
        assert former.passes.open is None
        assert member.managed.is_loaded
        assert not member.leases


@pytest.mark.parametrize("through", ["root", "block"])
@pytest.mark.parametrize("change", ["release", "reprofile"])
def test_the_module_changes_between_torchs_look_at_its_hooks_and_the_first(
    toys, machine, monkeypatch, change: str, through: str
) -> None:
    """torch has its list of hooks when the change begins, and calls them when it is over."""
    net = toys.build_net()
    slot = net if through == "root" else net.doubles[0]
    inputs = (X,) if through == "root" else (X, X)
    with machine(8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, manager=manager)
        want = slot(*inputs).cpu()

        def change_it(module: torch.nn.Module, args: object) -> None:
            if module is slot:
                getattr(managed, change)()

        first = torch.nn.modules.module.register_module_forward_pre_hook(change_it)
        try:
            got = slot(*inputs).cpu()
        finally:
            first.remove()
        assert torch.allclose(got, want, atol=1e-5)  # released, it computes on the CPU
        assert not managed.members[0].leases
        assert managed.members[0].managed.passes.open is None


@pytest.mark.parametrize("change", ["0.45MiB", "0.9MiB", "unlimited"])
def test_other_profiles_between_the_passes_of_another_thread(toys, machine, change: str) -> None:
    net = toys.build_net()
    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        managed = manage(net, "0.6MiB", manager=manager)
        want = compute(net)
        passes = pool.submit(lambda: [compute(net) for _ in range(60)])
        num_changed = 0
        while not passes.done():
            time.sleep(0.002)  # the lock is not fair
            try:
                managed.reprofile([change, "0.6MiB"][num_changed % 2])
                num_changed += 1
            except UnsafeState as refused:
                assert "computes" in str(refused)
        assert all(torch.equal(got, want) for got in passes.result())
        assert num_changed
        assert not managed.members[0].leases


@pytest.mark.parametrize("profile", [TIGHT, "auto"])
def test_threads_whose_components_push_each_other_out(toys, machine, profile: str) -> None:
    """Two threads with three components, on a device that has room for two."""
    nets = [toys.build_net(seed=seed) for seed in range(3)]
    with machine(1.5 if profile == TIGHT else 2.75, low=256 << 10, high=256 << 10) as manager:
        for number, net in enumerate(nets):
            manage({f"part{number}": net}, profile, manager=manager)
        want = [compute(net) for net in nets]

        def passes(first: int) -> list[bool]:
            return [torch.equal(compute(nets[(first + i) % 3]), want[(first + i) % 3]) for i in range(30)]

        with ThreadPoolExecutor(2) as pool:
            assert all(itertools.chain(*pool.map(passes, range(2))))
        assert any(event.kind == "evict" for event in manager.event_log.events)
        assert not any(member.leases for member in manager.members.values())


COPIES_IN_A_PASS = 8


@pytest.mark.parametrize("nth", range(1, COPIES_IN_A_PASS + 1))
def test_out_of_memory_in_a_hop_leaves_no_pass_open(toys, machine, monkeypatch, nth: int) -> None:
    """Also in the last one, which brings the result back when all blocks have computed."""
    net, copy, left = toys.build_net(), DeviceHops.copy, [0]

    def fail_nth(self: DeviceHops, *args: object, **options: object) -> object:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("no room for a hidden state")
        return copy(self, *args, **options)

    monkeypatch.setattr(DeviceHops, "copy", fail_nth)
    with machine(8, 8) as manager, ThreadPoolExecutor(1) as pool:
        manage(net, placement="gpu:0&gpu:1@0.5", manager=manager)
        want = compute(net)
        assert left[0] == -COPIES_IN_A_PASS
        for again in (lambda work: work(), lambda work: pool.submit(work).result(600)):
            run: Callable[..., torch.Tensor] = again
            left[0] = nth
            with pytest.raises(torch.OutOfMemoryError, match="hidden state"):
                compute(net)
            assert torch.equal(run(lambda: compute(net)), want)


def test_what_computes_is_not_released_from_inside(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager:
        managed = manage(net, TIGHT, manager=manager)
        want, errors = compute(net), []

        def release(*_: object) -> None:
            with pytest.raises(UnsafeState, match="computes") as refused:
                managed.release()
            errors.append(str(refused.value))

        handle = net.singles[1].register_forward_hook(release)
        assert torch.equal(compute(net), want)
        assert errors
        handle.remove()
        managed.release()
        assert not manager.members


def test_a_watch_may_be_ended_twice(toys, machine) -> None:
    with machine(8) as manager:
        seen: list[int] = []
        end, other = (manager.watch_loading(lambda *step: seen.append(1)) for _ in range(2))
        end()
        end()
        manage(toys.build_net(), TIGHT, manager=manager)
        compute(manager.members["model"].managed.module)
        assert seen
        other()
        assert not manager.leases.watchers


def test_waiting_for_a_pass_keeps_nothing_of_it_alive(machine) -> None:
    """The waiting thread looks at the stack of the one that computes, where a tensor was just dropped."""

    class Dropping(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(64, 64)
            self.is_waited_for = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            large = torch.ones(1 << 10)
            dropped = weakref.ref(large)
            if self.is_waited_for:
                waiting.append(pool.submit(compute, net))
                time.sleep(2.5 * LOOK_EVERY_S)
            del large
            alive.append(dropped() is not None)
            self.is_waited_for = False
            return self.inner(x)

    net, waiting, alive = Dropping().requires_grad_(False), [], []
    with machine(8) as manager, ThreadPoolExecutor(1) as pool, manage(net, placement="gpu:0", manager=manager):
        want = compute(net)
        net.is_waited_for = True
        assert torch.equal(compute(net), want)
        assert torch.equal(waiting[0].result(600), want)
        assert not any(alive)


@contextmanager
def paused(net: torch.nn.Module, pool: ThreadPoolExecutor) -> Iterator[list[torch.Tensor]]:
    """Run a forward in another thread that stops inside a block meanwhile; afterwards the list has its result."""
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        assert go_on.wait(600)

    handle = net.singles[1].norm.register_forward_hook(wait)
    computing, results = pool.submit(compute, net), []
    try:
        assert inside.wait(600)
        yield results
    finally:
        go_on.set()
        handle.remove()
    results.append(computing.result(600))


@pytest.mark.parametrize("profile", [TIGHT, "auto", "auto,quantize=all"])
def test_a_lease_does_not_plan_anew_under_the_pass_of_another_thread(toys, machine, profile: str) -> None:
    net = toys.build_net()
    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        managed = manage(net, profile, placement="gpu:0", manager=manager)
        want, (member,) = compute(net), managed.members
        plan = member.managed.plan
        with paused(net, pool) as results:
            manager.set_watermark("*", 7 << 20, 7 << 20)  # for which the next pass will have less
            with manager.lease(member):
                assert member.managed.plan is plan
                assert member.planned_in_epoch != manager.capacity.epoch
        assert torch.equal(results[0], want)
        assert not member.leases
        assert torch.equal(compute(net), want)
        assert manager.ledger.used("gpu:0") <= 1 << 20


@pytest.mark.parametrize("profile", [TIGHT, "auto"])
def test_nor_does_a_lease_in_the_middle_of_a_pass_of_this_thread(toys, machine, profile: str) -> None:
    net = toys.build_net()
    with machine(8) as manager:
        managed = manage(net, profile, placement="gpu:0", manager=manager)
        want, (member,) = compute(net), managed.members

        def lease(*_: object) -> None:
            manager.set_watermark("*", 7 << 20, 7 << 20)
            with manager.lease(member):
                pass

        handle = net.singles[1].norm.register_forward_hook(lease)
        assert torch.equal(compute(net), want)
        handle.remove()
        assert torch.equal(compute(net), want)


def test_a_lease_ends_a_pass_that_nobody_runs_and_loads(toys, machine) -> None:
    net = toys.build_net()
    with machine(8) as manager:
        managed = manage(net, TIGHT, placement="gpu:0", manager=manager)
        want, (member,) = compute(net), managed.members

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = net.singles[1].norm.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            compute(net)
        handle.remove()
        manager.capacity.outdate_plans()
        with manager.lease(member):
            assert member.managed.passes.open is None
            assert member.planned_in_epoch == manager.capacity.epoch
            assert torch.equal(compute(net), want)


def test_not_all_is_released_while_some_computes(toys, machine) -> None:
    nets = {"a": toys.build_net(), "b": toys.build_net(seed=1)}
    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        manage(nets, TIGHT, placement="gpu:0", manager=manager)
        want = compute(nets["b"])
        with paused(nets["b"], pool) as results:
            with pytest.raises(UnsafeState, match="b: computes now"):
                manager.release_all()
            assert sorted(manager.members) == ["a", "b"]
        assert torch.equal(results[0], want)
        manager.release_all()
        assert not manager.members


def test_a_forward_while_the_old_profile_comes_back_is_right(toys, machine, monkeypatch) -> None:
    net, pack = toys.build_net(), WeightGroup.pack

    def pack_slowly(*args: object, **named: object) -> None:
        time.sleep(0.01)
        pack(*args, **named)

    def cancel(*step: object) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    with machine(8) as manager, ThreadPoolExecutor(1) as pool:
        managed = manage(net, placement="gpu:0", manager=manager)
        want = compute(net)
        monkeypatch.setattr(WeightGroup, "pack", pack_slowly)
        end = manager.watch_loading(cancel)
        passes = pool.submit(lambda: [compute(net) for _ in range(20)])
        while not passes.done():
            with suppress(UnsafeState), pytest.raises(KeyboardInterrupt):
                managed.reprofile("auto", placement="gpu:0:host")
            time.sleep(0.002)
        end()
        assert all(torch.equal(got, want) for got in passes.result())


def test_blocks_that_their_forward_calls_in_other_threads_are_refused(toys, machine, monkeypatch) -> None:
    """The forward waits for the threads, and they for its pass: without a look at where it waits, for ever."""
    monkeypatch.setattr("highwater.memory.runtime.forwards.forward_pass.LOOK_EVERY_S", 0.01)

    class Spreading(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(2) as workers:
                return sum(workers.map(lambda layer: layer(x), self.layers))

    net = Spreading().requires_grad_(False)
    with (
        machine(8) as manager,
        manage(net, placement="gpu:0", manager=manager),
        pytest.raises(UnsafeState, match="computes in one thread only: release it first"),
    ):
        net(torch.randn(2, 64))
