"""Components that have parts or weights in common: one of them owns those, the others borrow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from highwater.memory import InvalidInput, manage
from highwater.memory.errors import UnsafeState

X = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(5))
MODES: dict[str, dict[str, Any]] = {
    "resident": {},
    "streamed": {"budgets": {"transformer": "0.45MiB", "controlnet": "0.3MiB"}},
    "split": {"placement": "gpu:0&gpu:1"},
    "split and streamed": {
        "placement": "gpu:0&gpu:1",
        "budgets": {"transformer": "0.45MiB", "controlnet": "0.3MiB"},
    },
    "fp8": {"precision": "fp8 scaled"},
}


class Guide(nn.Module):
    """Blocks of its own; the embedder, two blocks, the output's weight and a token are another model's."""

    def __init__(self, net: Any, block: type[nn.Module]) -> None:
        super().__init__()
        self.embed = net.embed
        self.refiner = nn.ModuleList([net.doubles[0], net.doubles[1]])
        self.own = nn.ModuleList(block(64, 4) for _ in range(3))
        self.proj = nn.Linear(64, 64, bias=False)
        self.proj.weight = net.last.weight
        self.token = net.token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = self.embed(x) + self.token
        for block in [*self.refiner, *self.own]:
            x = block(x, shift)
        return self.proj(x)


def build(toys: Any) -> tuple[Any, Guide]:
    """A model and its guide, as the two parts of a pipeline."""

    class Guided(toys.Net):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(64))
            self.last = nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor, hint: torch.Tensor | float = 0.0) -> torch.Tensor:
            return self.last(super().forward(x + self.token) + hint)

    torch.manual_seed(0)
    net = Guided()
    pair = net, Guide(net, toys.Block)
    for module in pair:
        module.eval().requires_grad_(False)
    return pair


@contextmanager
def streamed_pair(toys: Any, machine: Any) -> Iterator[tuple[Any, Guide, Any]]:
    """Yield a model, its guide and the handle that manages both, on a device that streams them."""
    with machine(8) as manager:
        net, guide = build(toys)
        with manage({"transformer": net, "controlnet": guide}, manager=manager, **MODES["streamed"]) as managed:
            yield net, guide, managed


def round_eight_bits(managed: Any) -> Callable[[Any, Any], None]:
    """Return what does to unmanaged weights what resting in eight bits does."""
    from highwater.memory.weights.cast_form import find_scale
    from highwater.memory.weights.fp8 import decode_fp8_into, encode_fp8

    cast = {member.name: member.managed.plan.forms for member in managed.members}

    def apply(net: Any, guide: Any) -> None:
        for name, module in {"transformer": net, "controlnet": guide}.items():
            for path in cast[name]:
                weight = module.get_parameter(path)
                scale = find_scale(weight, name=path)
                decode_fp8_into(weight, encode_fp8(weight, scale), scale)

    return apply


def steps(net: Any, guide: Any, device: str = "sim:0", count: int = 2) -> torch.Tensor:
    x = X.to(device)
    for _ in range(count):
        x = net(x, guide(x))
    return x.cpu()


@torch.no_grad()
@pytest.mark.parametrize("order", [("transformer", "controlnet"), ("controlnet", "transformer")])
@pytest.mark.parametrize("mode", MODES)
def test_two_components_with_parts_in_common_compute_as_unmanaged(toys, machine, mode: str, order: Any) -> None:
    with machine(8, 8) as manager:
        net, guide = build(toys)
        parts = {"transformer": net, "controlnet": guide}
        managed = manage({name: parts[name] for name in order}, manager=manager, **MODES[mode])
        plain = build(toys)
        round_eight_bits(managed)(*plain)
        want = steps(*(module.to("sim:0") for module in plain))
        del plain
        for _ in range(3):
            assert torch.equal(steps(net, guide), want)
            manager.ledger.check()
            assert not any(member.leases for member in managed.members)
        assert torch.equal(steps(net, guide, "cpu"), want)
        managed.release()
        manager.ledger.check()
        assert all(weight.device.type == "cpu" for module in (net, guide) for weight in module.parameters())
        assert net.token is guide.token and net.last.weight is guide.proj.weight
        if mode != "fp8":
            plain = build(toys)
            assert torch.equal(steps(net, guide, "cpu"), steps(*plain, device="cpu"))


@torch.no_grad()
def test_what_is_in_common_is_counted_once(toys, machine) -> None:
    with machine(8) as manager:
        net, guide = build(toys)
        everything = {id(weight): weight.nbytes for module in (net, guide) for weight in module.parameters()}
        with manage({"transformer": net, "controlnet": guide}, manager=manager) as managed:
            described = sum(plan.weight_bytes for plan in managed.plan.components)
            buffers = sum(b.nbytes for b in {id(b): b for m in (net, guide) for b in m.buffers()}.values())
            assert sum(everything.values()) <= described <= sum(everything.values()) + buffers + 4096
            assert "with transformer, which counts them; for example " in managed.plan.text()
            guide(X)
            assert torch.equal(steps(net, guide), steps(net, guide))
            held = sum(manager.ledger.held(member.id, "gpu:0") for member in managed.members)
            assert held < described + 64 * 1024


@torch.no_grad()
@pytest.mark.parametrize("megabytes", [1.0, 1.3, 1.6])
def test_both_fit_where_the_device_is_small(toys, machine, megabytes: float) -> None:
    with machine(8) as manager:
        want = steps(*(module.to("sim:0") for module in build(toys)))
    for low in (128 << 10, 0):
        with machine(megabytes, low=low, high=low) as manager:
            net, guide = build(toys)
            with manage({"transformer": net, "controlnet": guide}, manager=manager):
                num_failures = 0
                for _ in range(8):
                    try:
                        assert torch.equal(steps(net, guide), want)
                    except torch.OutOfMemoryError:
                        num_failures += 1
                    manager.ledger.check()
                assert torch.equal(steps(net, guide), want)
                assert num_failures <= (0 if low else 4)  # at most two tries for each


@torch.no_grad()
def test_reprofiling_one_or_both_keeps_them_together(toys, machine) -> None:
    with machine(8, 8) as manager:
        want = steps(*(module.to("sim:0") for module in build(toys)))
        net, guide = build(toys)
        with manage({"transformer": net, "controlnet": guide}, manager=manager) as managed:
            for choices in MODES["streamed"], MODES["split"], MODES["resident"]:
                assert torch.equal(steps(net, guide), want)
                managed.reprofile("auto", **{"placement": "auto", **choices})
            assert torch.equal(steps(net, guide), want)
            managed.verify(lambda x: net(x, guide(x)), X).assert_equal()


@torch.no_grad()
def test_a_borrower_that_is_refused_is_left_alone(toys, machine) -> None:
    with machine(8) as manager:
        net, guide = build(toys)
        own = guide.own[1].up.weight
        guide.own[1].up.weight = nn.Parameter(torch.empty_like(own, device="meta"), requires_grad=False)
        with manage({"transformer": net}, manager=manager):
            for parts in ({"controlnet": guide}, {"vae": toys.build_net(seed=2), "controlnet": guide}):
                with pytest.raises(InvalidInput, match="is on meta; allowed: cpu"):
                    manage(parts, manager=manager)
            net(X)
            assert net.last.weight.device.type == "sim" and guide.proj.weight.device.type == "cpu"
            guide.own[1].up.weight = own
            with manage({"controlnet": guide}, manager=manager):
                guide(X)
                assert guide.proj.weight.device.type == "sim"


@torch.no_grad()
def test_they_are_verified_together(toys, machine) -> None:
    with streamed_pair(toys, machine) as (net, guide, managed):
        managed.verify(guide, X).assert_equal()
        managed.verify(lambda x: net(x, guide(x)), X).assert_equal()


@torch.no_grad()
def test_a_failure_in_one_leaves_nothing_open(toys, machine) -> None:
    with streamed_pair(toys, machine) as (net, guide, managed):
        want = steps(net, guide)
        for error in (ValueError, KeyboardInterrupt):

            def fail(*_: Any, error: type[BaseException] = error) -> None:
                raise error

            for where in (guide.own[1], guide.refiner[1], guide.proj):
                handle = where.register_forward_pre_hook(fail)
                with pytest.raises(error):
                    guide(X)
                handle.remove()
                assert torch.equal(steps(net, guide), want)
                assert not any(member.leases for member in managed.members)


@torch.no_grad()
def test_threads_that_use_both_take_turns(toys, machine) -> None:
    with streamed_pair(toys, machine) as (net, guide, _):
        want = net(X).cpu(), guide(X).cpu()
        wrong: list[str] = []

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(10):
                    if not torch.equal((net, guide)[number % 2](X).cpu(), want[number % 2]):
                        wrong.append(str(number))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@torch.no_grad()
@pytest.mark.parametrize(
    ("placement", "line"),
    [
        ("transformer=gpu:0,controlnet=gpu:1", "controlnet and transformer share '[^']+', which can be on one device"),
        ("transformer=cpu,controlnet=gpu:0", "controlnet and transformer share '[^']+', which can be on one device"),
    ],
)
def test_two_devices_for_one_weight_are_refused(toys, machine, placement: str, line: str) -> None:
    with machine(8, 8) as manager:
        net, guide = build(toys)
        with pytest.raises(InvalidInput, match=line) as refusal:
            manage({"transformer": net, "controlnet": guide}, placement=placement, manager=manager)
        assert "\n" not in str(refusal.value)
        assert not manager.members
        steps(net, guide, "cpu")


@torch.no_grad()
def test_the_one_without_a_placement_follows_the_other(toys, machine) -> None:
    with machine(8, 8) as manager:
        net, guide = build(toys)
        for placement in ("transformer=gpu:1", "controlnet=gpu:1"):
            with manage({"transformer": net, "controlnet": guide}, placement=placement, manager=manager) as managed:
                assert {plan.shares[0].device for plan in managed.plan.components} == {"gpu:1"}
                steps(net, guide)


@torch.no_grad()
def test_a_weight_inside_a_block_stays_beside_the_blocks(toys, machine) -> None:
    class Tied(nn.Module):
        def __init__(self, net: Any) -> None:
            super().__init__()
            self.inner = nn.Linear(192, 64)
            self.inner.weight = net.singles[2].down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.repeat(1, 1, 3))

    with machine(8, 8) as manager:
        plain = toys.build_net()
        want = Tied(plain).requires_grad_(False)
        torch.nn.init.ones_(want.inner.bias)
        net = toys.build_net()
        tied = Tied(net).requires_grad_(False)
        torch.nn.init.ones_(tied.inner.bias)
        expected = want(X), plain(X)
        for arguments in ({}, {"budgets": {"net": "0.5MiB"}}, {"precision": "fp8 scaled"}):
            with manage({"net": net, "tied": tied}, manager=manager, **arguments):
                for _ in range(2):
                    got = tied(X).cpu(), net(X).cpu()
                    close = (
                        torch.equal if "precision" not in arguments else lambda a, b: (a - b).norm() < 0.2 * b.norm()
                    )
                    assert all(map(close, got, expected))
            del got
        with pytest.raises(InvalidInput, match=r"net and tied share 'singles.2.down.weight'.*gpu:1"):
            manage({"net": net, "tied": tied}, placement="net=gpu:0&gpu:1,tied=gpu:0", manager=manager)


@torch.no_grad()
def test_one_that_joins_later_borrows_too(toys, machine) -> None:
    with machine(8) as manager:
        want = steps(*(module.to("sim:0") for module in build(toys)))
        net, guide = build(toys)
        with manage({"transformer": net}, manager=manager) as first:
            net(X)
            with manage({"controlnet": guide}, manager=manager) as second:
                for _ in range(2):
                    assert torch.equal(steps(net, guide), want)
                with pytest.raises(UnsafeState, match=r"controlnet borrows .* of transformer; release that first"):
                    first.release()
                second.reprofile("auto", budgets={"controlnet": "0.3MiB"})
                assert torch.equal(steps(net, guide), want)
                first.reprofile("auto", budgets={"transformer": "0.45MiB"})
                assert torch.equal(steps(net, guide), want)
            assert torch.equal(guide.token, net.token.cpu()) and guide.token.device.type == "cpu"
            assert torch.equal(net(X).cpu(), net(X).cpu())
        assert torch.equal(steps(net, guide, "cpu"), steps(*build(toys), device="cpu"))


@torch.no_grad()
def test_a_pipelines_component_inside_another_one_goes_with_it(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        pipe = SimpleNamespace(components={"embed": net.embed, "net": net})
        want = toys.build_net().embed(X)
        with manage(pipe, manager=manager) as managed:
            assert managed.components == ("net",)
            assert str(net.embed._hf_hook.execution_device) == "sim:0"
            managed.reprofile("0.45MiB")
            assert torch.equal(net.embed(X.to("sim:0")).cpu(), want)
        assert not hasattr(net.embed, "_hf_hook") and not hasattr(net, "_hf_hook")


@torch.no_grad()
def test_whole_components_are_managed_once_for_two_pipelines(toys, machine) -> None:
    with machine(8) as manager:
        want = steps(*(module.to("sim:0") for module in build(toys)))
        net, guide = build(toys)
        first = manage({"transformer": net}, manager=manager)
        second = manage({"transformer": net, "controlnet": guide}, manager=manager)
        assert first.members[0] is second.members[0]
        assert {plan.component for plan in second.plan.components} == {"transformer", "controlnet"}
        assert torch.equal(steps(net, guide), want)
        first.release()
        first.release()
        assert torch.equal(steps(net, guide), want)
        second.release()
        assert not manager.members
        assert not net._forward_pre_hooks and not guide._forward_pre_hooks
        with manage({"transformer": net}, manager=manager):
            with pytest.raises(InvalidInput, match="transformer is managed already, with other choices"):
                manage({"transformer": net}, placement="cpu", manager=manager)
            net(X)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["resident", "streamed"])
def test_layers_added_to_a_shared_part_join_its_owner(toys, machine, mode: str) -> None:
    class Lora(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer = base_layer
            self.down = nn.Linear(64, 4, bias=False)
            self.up = nn.Linear(4, base_layer.out_features, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.up(self.down(x))

    def add(net: Any) -> None:
        torch.manual_seed(3)
        net.doubles[0].up = Lora(net.doubles[0].up).requires_grad_(False)

    with machine(8) as manager:
        plain = build(toys)
        add(plain[0])
        want = steps(*(module.to("sim:0") for module in plain))
        del plain
        net, guide = build(toys)
        with manage({"transformer": net, "controlnet": guide}, manager=manager, **MODES[mode]) as managed:
            steps(net, guide)
            sizes = [member.managed.component.weight_bytes for member in managed.members]
            add(net)
            for _ in range(2):
                assert torch.equal(steps(net, guide), want)
            grown = [member.managed.component.weight_bytes for member in managed.members]
            assert grown == [sizes[0] + 4 * 4 * (64 + 384), sizes[1]]
            managed.reprofile()
            assert torch.equal(steps(net, guide), want)


@torch.no_grad()
def test_writes_to_a_shared_weight_count_for_both(toys, machine) -> None:
    with streamed_pair(toys, machine) as (net, guide, _):
        steps(net, guide)
        net.doubles[0].up.weight.data.mul_(0.5)
        net.last.weight.data.mul_(0.5)
        guide.token.data.mul_(0.5)
        plain = build(toys)
        plain[0].doubles[0].up.weight.mul_(0.5)
        plain[0].last.weight.mul_(0.5)
        plain[1].token.mul_(0.5)
        want = steps(*(module.to("sim:0") for module in plain))
        del plain
        assert torch.equal(steps(net, guide), want)
