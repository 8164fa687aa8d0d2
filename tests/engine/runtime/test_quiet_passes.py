"""Whatever is called next to quiet passes, in whatever order, computes what it should and ends its pass."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
    shift = x * 0.5
    match op:
        case "forward":
            return net(x)
        case "block":
            return net.singles[1](x, shift)
        case "rest":
            return net.embed(x)
        case "other thread":
            found: list[torch.Tensor] = []

            def run() -> None:
                with torch.no_grad():
                    found.append(net.doubles[0](x, shift))

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


@torch.no_grad()
def test_quiet_passes_have_no_hook_on_the_end_of_blocks(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        net = toys.build_net()
        block = net.singles[1]
        with manage(net, "auto", manager=manager) as managed:
            assert block._forward_hooks
            for _ in range(3):
                net(x)
            assert not block._forward_hooks and block._forward_pre_hooks and net._forward_hooks
            net.embed(x)  # a pass of its own, which may leave it loaded or not
            assert block._forward_hooks
            managed.reprofile("0.45MiB")
            for _ in range(3):
                net(x)
            assert block._forward_hooks
        assert not block._forward_hooks and not block._forward_pre_hooks


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
