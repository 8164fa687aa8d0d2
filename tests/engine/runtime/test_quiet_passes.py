"""Whatever is called next to quiet passes, in whatever order, computes what it should and ends its pass."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import UnsafeState

OPS = (
    "forward",
    "block",
    "rest",
    "other thread",
    "failing block",
    "failing forward",
    "interrupted",
    "unload",
    "stream",
    "split",
    "resident",
)


class Stopped(BaseException):
    """What torch calls no hooks for."""


def call(net, op: str, x: torch.Tensor) -> torch.Tensor | None:
    given = x.to("sim:0")  # without hooks nothing moves the inputs of a block that is called by itself
    shift = given * 0.5
    match op:
        case "forward":
            return net(x)
        case "block":
            return net.singles[1](given, shift)
        case "rest":
            return net.embed(x)
        case "other thread":
            found: list[torch.Tensor] = []

            def run() -> None:
                with torch.no_grad():
                    found.append(net.doubles[0](given, shift))

            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            return found[0]
    return None


def fail(net, op: str, x: torch.Tensor) -> None:
    """Raise in the middle of a call."""
    block = net.singles[2]
    error = Stopped("stop") if op == "interrupted" else ValueError("stop")

    def raise_it(*args: object) -> None:
        raise error

    handle = block.register_forward_pre_hook(raise_it)
    try:
        with pytest.raises((ValueError, Stopped), match="stop"):
            block(x, x) if op == "failing block" else net(x)
    finally:
        handle.remove()


@settings(max_examples=30)
@given(st.lists(st.sampled_from(OPS), min_size=4, max_size=14))
@torch.no_grad()
def test_what_comes_next_to_quiet_passes_is_right(toys, machine, ops: list[str]) -> None:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with machine(8, 8) as manager:
        plain, net = toys.build_net(seed=1).to("sim:0"), toys.build_net(seed=1)
        wanted = {op: None if (out := call(plain, op, x.to("sim:0"))) is None else out.cpu() for op in OPS}
        del plain
        with manage(net, "auto", placement="gpu:0", manager=manager) as managed:
            for op in [*["forward"] * 3, *ops, *["forward"] * 3]:
                match op:
                    case "unload":
                        managed.members[0].managed.unload()
                    case "stream":
                        managed.reprofile("0.45MiB", placement="gpu:0")
                    case "split":
                        managed.reprofile("auto", placement="gpu:0&gpu:1")
                    case "resident":
                        managed.reprofile("auto", placement="gpu:0")
                    case "failing block" | "failing forward" | "interrupted":
                        fail(net, op, x)
                        # An interrupted pass ends when the whole module is called next, or another thread asks.
                        assert torch.equal(net(x).cpu(), wanted["forward"]), (op, ops)
                    case _:
                        assert torch.equal(call(net, op, x).cpu(), wanted[op]), (op, ops)
                assert managed.members[0].managed.passes.open is None, (op, ops)
                assert not managed.members[0].leases, (op, ops)
            manager.ledger.check()


def has_hooks(module: nn.Module) -> tuple[bool, bool]:
    """Whether anything is called before and after a module's forward."""
    return bool(module._forward_pre_hooks), bool(module._forward_hooks)


@torch.no_grad()
def test_quiet_passes_have_hooks_at_their_entries_only(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        net = toys.build_net()
        block = net.singles[1]
        with manage(net, "auto", manager=manager) as managed:
            (member,) = managed.members
            changes = {
                "embed": lambda: net.embed(x),  # a pass of its own, which may leave it loaded or not
                "unload": member.managed.unload,
                "shrink": lambda: member.managed.shrink("gpu:0", 1),
                "watermark": lambda: manager.set_watermark("gpu:0", 7 * toys.MIB, 7 * toys.MIB),
                "reprofile": lambda: managed.reprofile("0.45MiB"),
            }
            for name, change in changes.items():
                manager.set_watermark("gpu:0", 0, 0)
                assert has_hooks(block) == (True, True), name
                for _ in range(4):
                    net(x)
                assert has_hooks(block) == (False, False), name
                assert has_hooks(net.embed)[0] and has_hooks(net) == (True, True), name
                change()
            assert has_hooks(block) == (True, True)
            for _ in range(3):
                net(x)
            assert has_hooks(block) == (True, True)
        assert has_hooks(block) == has_hooks(net) == (False, False)


@torch.no_grad()
def test_blocks_that_were_called_by_themselves_keep_their_hooks(toys, machine) -> None:
    """So such calls go on to count as uses of the component, and to move their inputs."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, "auto", manager=manager) as managed:
            (member,) = managed.members
            want = net.singles[1](x, x).cpu()
            for _ in range(4):
                net(x)
            before = member.last_use
            assert torch.equal(net.singles[1](x, x).cpu(), want)
            assert member.last_use > before


class Paused:
    """Stops a module's forward in the middle of a block, in another thread, until it is told to go on."""

    def __init__(self, block: nn.Module, x: torch.Tensor) -> None:
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self.found: list[torch.Tensor] = []
        self.hook = block.down.register_forward_pre_hook(self.pause)
        self.thread = threading.Thread(target=self.run, args=(block, x))
        self.thread.start()
        assert self.reached.wait(60)

    def pause(self, module: nn.Module, args: object) -> None:
        if threading.current_thread() is self.thread:
            self.reached.set()
            while not self.goes_on.is_set():  # computes, in the eyes of other threads
                time.sleep(0.001)

    def run(self, block: nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            self.found.append(block(x, x))

    def finish(self) -> torch.Tensor:
        self.goes_on.set()
        self.thread.join()
        self.hook.remove()
        return self.found.pop()


@torch.no_grad()
def test_a_call_that_began_without_hooks_keeps_its_component_where_it_is(toys, machine) -> None:
    x = torch.randn(2, 5, 64, device="sim:0")
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, "auto", manager=manager) as managed:
            (member,) = managed.members
            for _ in range(4):
                out = net(x)
            want = net.singles[1](x, x)
            held = manager.ledger.held(member.id, "gpu:0")
            paused = Paused(net.singles[1], x)
            manager.set_watermark("gpu:0", 8 * toys.MIB, 8 * toys.MIB)  # evicts all that is idle
            assert manager.ledger.held(member.id, "gpu:0") == held
            with pytest.raises(UnsafeState, match="computes now"):
                managed.reprofile("0.45MiB")
            with pytest.raises(UnsafeState, match="computes now"):
                managed.release()
            assert torch.equal(paused.finish(), want)
            manager.set_watermark("gpu:0", 0, 0)
            manager.set_watermark("gpu:0", 8 * toys.MIB, 8 * toys.MIB)
            assert manager.ledger.held(member.id, "gpu:0") == 0
            manager.set_watermark("gpu:0", 0, 0)
            assert torch.equal(net(x), out)
            managed.reprofile("0.45MiB")
            assert torch.equal(net(x), out)
            del want, out


class Marked:
    """An object whose end can be seen."""


@torch.no_grad()
def test_looking_for_calls_without_hooks_keeps_nothing_alive(toys, machine) -> None:
    def compute() -> weakref.ref[Marked]:
        marked = Marked()
        managed.members[0].managed.unload()
        return weakref.ref(marked)

    with machine(8) as manager:
        net, x = toys.build_net(), torch.randn(2, 5, 64)
        with manage(net, "auto", manager=manager) as managed:
            for _ in range(4):
                net(x)
            gc.disable()
            try:
                assert compute()() is None
            finally:
                gc.enable()


@torch.no_grad()
def test_weights_move_after_a_call_that_began_without_hooks(toys, machine) -> None:
    """A forward in another thread that has to load anew waits for it."""
    x = torch.randn(2, 5, 64, device="sim:0")
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, "auto", manager=manager) as managed:
            for _ in range(4):
                out = net(x)
            want = net.singles[1](x, x)
            paused = Paused(net.singles[1], x)
            events: list[str] = []

            def unload() -> None:
                managed.members[0].managed.unload()
                events.append("unloaded")

            thread = threading.Thread(target=unload)
            thread.start()
            while not has_hooks(net.singles[1])[0]:  # the hooks are back before it waits
                time.sleep(0.001)
            time.sleep(0.02)
            assert not events
            assert torch.equal(paused.finish(), want)
            thread.join()
            assert events and torch.equal(net(x), out)
            del want, out


@torch.no_grad()
def test_a_block_without_hooks_may_move_its_own_component(toys, machine) -> None:
    """Its own thread cannot wait for it: nothing is evicted under it, and what is told to leave leaves."""
    x = torch.randn(2, 5, 64, device="sim:0")
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, "auto", manager=manager) as managed:
            (member,) = managed.members
            for _ in range(4):
                net(x)
            want, block = net.singles[1](x, x), net.singles[1]
            held = manager.ledger.held(member.id, "gpu:0")

            def evict(module: nn.Module, args: object) -> None:
                manager.set_watermark("gpu:0", 8 * toys.MIB, 8 * toys.MIB)
                assert manager.ledger.held(member.id, "gpu:0") == held
                with pytest.raises(UnsafeState, match="computes now"):
                    managed.release()

            hook = block.down.register_forward_pre_hook(evict)
            assert torch.equal(block(x, x), want)
            hook.remove()
            manager.set_watermark("gpu:0", 0, 0)
            managed.release()
        assert not any(has_hooks(net.singles[1]))
        del want


@pytest.mark.parametrize("order", [("auto", "0.45MiB"), ("0.45MiB", "auto", "0.45MiB")])
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_compiled_model_computes_right_when_hooks_come_and_go(toys, machine, order: tuple[str, ...]) -> None:
    x = torch.randn(2, 5, 64, device="sim:0")
    with machine(8) as manager:
        net = toys.build_net()
        compiled = torch.compile(net, backend="eager")
        with manage(net, order[0], manager=manager) as managed:
            want = net(x)
            for profile in order:
                managed.reprofile(profile)
                for evicts in (False, True):
                    for _ in range(5):
                        assert torch.equal(compiled(x), want), (profile, evicts)
                    if evicts:
                        managed.members[0].managed.unload()
                assert torch.equal(compiled(x), want), profile
            del want
        torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0&gpu:1"])
@pytest.mark.parametrize("profile", ["auto", "0.45MiB"])
def test_a_model_that_is_called_inside_its_own_block_is_right_or_refused(toys, machine, profile, placement) -> None:
    with machine(8, 8) as manager:
        net, x = toys.build_net(), torch.randn(2, 5, 64)
        want = net(x)
        x = x.to("sim:0")
        with manage(net, profile, placement=placement, manager=manager):
            for _ in range(3):
                hooks = net.singles[1]._forward_pre_hooks

                def call_again(module, args, hooks=hooks, given=x) -> None:
                    hooks.popitem()
                    net(given)

                net.singles[1].register_forward_pre_hook(call_again)
                if profile == "auto":
                    assert torch.allclose(net(x).cpu(), want, atol=1e-5)
                else:
                    with pytest.raises(UnsafeState, match=r"^model is called inside its own forward[^\n]*release it$"):
                        net(x)
                assert torch.allclose(net(x).cpu(), want, atol=1e-5)
        del x, call_again
