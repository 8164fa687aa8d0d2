"""Weights that other code converts while they are managed: what is computed is what the plain module computes."""

from __future__ import annotations

import gc
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import DoesNotFit, InvalidInput, UnsafeState

X = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.5MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "eight bits": {"placement": "gpu:0", "precision": "fp8 scaled"},
    "disk": {"placement": "gpu:0:disk"},
    "on the CPU": {"placement": "cpu"},
}
DTYPES = (torch.float16, torch.float32, torch.bfloat16)


@pytest.fixture(params=WAYS)
def way(request) -> str:
    return request.param


def build(toys, manager, way: str, folder: Path) -> tuple[nn.Module, nn.Module, dict[str, Any]]:
    """Return a module to be managed, one like it that computes as it does, and how to manage it."""
    net, plain, how = toys.build_net(), toys.build_net(), dict(WAYS[way])
    if way == "eight bits":
        with manage(plain, manager=manager, **how):
            plain(X)  # rounds its weights as the other's are
    if way == "disk":
        save_file({name: tensor.clone() for name, tensor in net.state_dict().items()}, folder / "net.safetensors")
        how["files"] = {"model": folder / "net.safetensors"}
    return net, plain, how


def assert_same(net: nn.Module, plain: nn.Module, manager: Any) -> None:
    dtype = next(plain.parameters()).dtype
    assert next(net.parameters()).dtype is dtype
    assert torch.equal(net(X.to(dtype)).cpu(), plain(X.to(dtype)))
    assert next(net.parameters()).dtype is dtype
    manager.ledger.check()


def assert_same_state(net: nn.Module, plain: nn.Module) -> None:
    state = net.state_dict()
    assert all(torch.equal(state[name].cpu(), weight) for name, weight in plain.state_dict().items())
    del state


@torch.no_grad()
@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_each_dtype_and_back_twice(toys, machine, tmp_path: Path, way: str, ran: bool, leaves: bool) -> None:
    with machine(8, 8) as manager:
        net, plain, how = build(toys, manager, way, tmp_path)
        managed = manage(net, manager=manager, **how)
        if ran:
            assert_same(net, plain, manager)
        for dtype in (*DTYPES, *DTYPES):
            for each in (net, plain):
                each.to(dtype)
            if leaves:
                managed.members[0].managed.unload()
            if way != "disk":
                assert_same_state(net, plain)
            for _ in range(2):
                assert_same(net, plain, manager)
        changes = [event.reason for event in manager.event_log.events if event.reason.endswith("packed anew")]
        assert changes[0] == "its weights were changed to torch.float16 by other code: packed anew"
        for each in (net, plain):
            each.half()
        managed.release()
        assert_same_state(net, plain)
        assert not net._forward_pre_hooks


ACTIONS = ("pass", "half", "float", "bfloat16", "part", "reprofile", "unload", "idle", "again")


@torch.no_grad()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@example(actions=["float"], way="disk")  # which changes nothing
@example(actions=["half", "reprofile", "pass"], way="disk")
@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=8), way=st.sampled_from(sorted(WAYS)))
def test_any_order_of_conversions_computes_as_the_plain_module(
    toys, machine, tmp_path: Path, actions: list[str], way: str
) -> None:
    with machine(8, 8) as manager:
        net, plain, how = build(toys, manager, way, tmp_path)
        managed = manage(net, manager=manager, **how)
        for action in actions:
            if action in ("half", "float", "bfloat16"):
                for each in (net, plain):
                    getattr(each, action)()
            elif action == "part":  # to another dtype and back: rounded
                for each in (net, plain):
                    dtype = each.singles[1].up.weight.dtype
                    each.singles[1].half().to(dtype)
            elif action == "pass":
                assert_same(net, plain, manager)
            elif action == "reprofile":
                try:
                    managed.reprofile()
                except InvalidInput as error:  # a pass would let them rest in RAM, and tell so
                    assert way == "disk" and re.search("'disk' is not available .* weights as they are", str(error))
            elif action == "unload":
                managed.members[0].managed.unload()
            elif action == "idle":
                manager.commands.free_idle("asked for")
            else:
                managed.release()
                assert_same_state(net, plain)
                managed = manage(net, manager=manager, **how | {"placement": "gpu:0", "precision": None})
            manager.ledger.check()
        assert_same(net, plain, manager)
        managed.release()
        assert_same_state(net, plain)
        del net, managed
        gc.collect()


@torch.no_grad()
def test_a_dtype_that_exceeds_the_budget_streams_more_or_is_refused_in_one_line(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net().half()
        plain = toys.build_net().half()
        managed = manage(net, "0.5MiB", placement="gpu:0", manager=manager)
        assert_same(net, plain, manager)
        resident = len(managed.members[0].managed.plan.shares[0].resident)
        for each in (net, plain):
            each.float()
        assert_same(net, plain, manager)
        assert len(managed.members[0].managed.plan.shares[0].resident) < resident
    with machine(8) as manager:
        net, plain = toys.build_net().half(), toys.build_net().half()
        manage(net, "0.25MiB", placement="gpu:0", manager=manager)
        assert_same(net, plain, manager)
        net.double()
        for _ in range(2):
            with pytest.raises((DoesNotFit, InvalidInput), match=r"^[^\n]*$"):
                net(X.double())
            manager.ledger.check()
        net.half()
        assert_same(net, plain, manager)


REFUSED = r"(first|second): its weights were changed to torch.float16; the change was undone: release it before such.*"


def error_of(net: nn.Module) -> UnsafeState | None:
    try:
        net(X)
    except UnsafeState as error:
        return error
    return None


def narrow(block: Any) -> None:
    """Make a block narrower inside, as transformers resizes embeddings: new data here, a new layer there."""
    for parameter in (block.up.weight, block.up.bias):
        parameter.data = parameter.detach()[:100].clone()
    down = nn.Linear(100, 64, bias=False)
    down.weight.data = block.down.weight.detach().to("cpu")[:, :100].clone()
    block.down = down


@torch.no_grad()
@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("releases", [True, False])
def test_a_resized_weight_and_a_layer_in_place_of_another_are_taken_over_together(
    toys, machine, tmp_path: Path, way: str, ran: bool, releases: bool
) -> None:
    with machine(8, 8) as manager:
        net, plain, how = build(toys, manager, way, tmp_path)
        managed = manage(net, manager=manager, **how)
        if ran:
            assert_same(net, plain, manager)
        narrow(net.singles[1])
        narrow(plain.singles[1])
        for _ in range(0 if releases else 2):
            assert_same(net, plain, manager)
        managed.release()
        manager.ledger.check()
        assert_same_state(net, plain)
        assert_same(net, plain, manager)


@torch.no_grad()
def test_a_language_model_with_resized_embeddings_computes(machine) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=100, **sizes)).eval(), torch.arange(12).reshape(2, 6)
    with machine(8) as manager, manage(model, placement="gpu:0", manager=manager) as managed:
        model.resize_token_embeddings(120)
        want = [model(ids).logits.cpu() for _ in range(2)]
        manager.ledger.check()
        managed.release()
        assert want[0].shape[-1] == 120 and torch.equal(*want)
        assert torch.equal(model(ids).logits, want[0])


@torch.no_grad()
def test_shared_weights_are_refused_as_before(toys, machine) -> None:
    with machine(8) as manager:
        first, second = toys.build_net(), toys.build_net()
        second.embed.weight = second.out.weight = first.embed.weight
        manage({"first": first, "second": second}, placement="gpu:0", manager=manager)
        want = first(X).cpu(), second(X).cpu()
        for net in (first, second):
            net.half()
            refused = [str(error) for each in (first, second) if (error := error_of(each)) is not None]
            assert refused and all(re.fullmatch(REFUSED, words) for words in refused)
        assert all(torch.equal(net(X).cpu(), out) for net, out in zip((first, second), want, strict=True))


@torch.no_grad()
def test_two_threads_enter_a_converted_module(toys, machine) -> None:
    with machine(8) as manager:
        net, plain = toys.build_net(), toys.build_net()
        manage(net, "0.5MiB", placement="gpu:0", manager=manager)
        for change in ("half", "float", "bfloat16"):
            for each in (net, plain):
                getattr(each, change)()
            x = X.to(next(plain.parameters()).dtype)
            got: list[torch.Tensor] = []
            threads = [threading.Thread(target=lambda x=x, got=got: got.append(run(net, x))) for _ in range(3)]
            with ExitStack() as stack:
                for thread in threads:
                    thread.start()
                    stack.callback(thread.join)
            assert len(got) == 3 and all(torch.equal(each, plain(x)) for each in got)


def run(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net(x).cpu()


@torch.no_grad()
def test_a_watcher_that_cancels_the_packing_leaves_the_converted_module(toys, machine) -> None:
    with machine(8) as manager:
        net, plain = toys.build_net(), toys.build_net()
        managed = manage(net, "0.5MiB", placement="gpu:0", manager=manager)
        assert_same(net, plain, manager)
        for each in (net, plain):
            each.half()

        def cancel(*_: object) -> None:
            raise KeyError("cancelled")

        end = manager.watch_loading(cancel)
        with pytest.raises(KeyError):
            net(X.half())
        end()
        manager.ledger.check()
        for _ in range(2):
            assert_same(net, plain, manager)
        managed.release()
        assert_same_state(net, plain)
