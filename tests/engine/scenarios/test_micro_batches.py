"""Independent calls of a split module on all its devices at once: the same bits, no races, whatever happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from highwater.memory import InvalidInput, Managed, MemoryManager, manage
from highwater.memory.options.precision import Precision
from highwater.memory.planner.run import Use

DIM = 32
SPLIT = "gpu:0&gpu:1/4"


def inputs(num_calls: int, device: str = "sim:0") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, DIM, generator=generator).to(device) for _ in range(num_calls)]


def clear(*lists: list[torch.Tensor]) -> None:
    """Drop tensors before their devices go."""
    for each in lists:
        each.clear()


def at_once(managed: Managed, net: nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return managed.run_micro_batches([lambda x=x: net(x) for x in given])


def used_streams(managed: Managed) -> int:
    """Return on how many streams its passes were since they were ordered last."""
    copies = managed.members[0].managed.shares[0].copies
    assert copies is not None
    return 1 + len(copies.other_computes)


def is_closed(managed: Managed) -> bool:
    """Whether no micro-batch has left anything: streams, copies and passes are as before."""
    forwards = managed.members[0].managed.forwards
    current = [torch.accelerator.current_stream(index).stream_id for index in range(2)]
    return (
        current == [0, 0]
        and torch.accelerator.current_device_index() == 0
        and forwards.step is None
        and forwards.passes.open is None
        and not forwards.hops.twins
        and not forwards.calls.open
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("placement", "num_calls"),
    [("gpu:0&gpu:1", 1), ("gpu:0&gpu:1", 3), (SPLIT, 5), ("gpu:1&gpu:0/auto", 2), ("gpu:0&gpu:1&gpu:2/6", 3)],
)
def test_results_are_those_of_one_after_the_other(
    machine, toys, placement: str, num_calls: int, mode: Callable[[], Any]
) -> None:
    net = toys.build_net(dim=DIM)
    with machine(8, 8, 8) as manager, mode():
        home = "sim:1" if placement.startswith("gpu:1") else "sim:0"
        x = inputs(num_calls, home)
        with manage(net, placement="gpu:0", manager=manager):
            want = [net(each).to(home) for each in x]
        with manage(net, placement=placement, manager=manager) as managed:
            for _ in range(3):  # the first one loads
                got = at_once(managed, net, x)
                assert all(map(torch.equal, got, want)) and len(got) == len(want)
                manager.ledger.check()
        clear(x, got, want)


def test_devices_compute_at_the_same_time(machine, toys, steady_seconds) -> None:
    net = toys.build_net(dim=DIM, doubles=0, singles=12)
    with machine(8, 8, flops_per_s=1e8, launch_s=0, latency_s=0, peer_bytes_per_s=1e12) as manager, torch.no_grad():
        x = inputs(2)

        with manage(net, placement="gpu:0&gpu:1/auto", manager=manager) as managed:
            in_turn_s = steady_seconds(lambda: [net(each) for each in x])
            assert in_turn_s / steady_seconds(lambda: at_once(managed, net, x)) > 1.4
        with manage(net, placement="gpu:0", manager=manager) as managed:
            in_turn_s = steady_seconds(lambda: [net(each) for each in x])
            assert in_turn_s == pytest.approx(steady_seconds(lambda: at_once(managed, net, x))), (
                "one device gains nothing"
            )
        clear(x)


class Recurrent(nn.Module):
    """Each block keeps what it computed last, and adds to it what the last call left there."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_blocks))
        self.kept: dict[int, torch.Tensor] = {}
        self.past: list[torch.Tensor | None] = []
        for number, block in enumerate(self.blocks):
            block.register_forward_hook(self.keep(number))
        self.requires_grad_(False)

    def keep(self, number: int) -> Callable[..., torch.Tensor]:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            before = self.kept.get(number)
            self.past.append(before)  # else it is freed while another stream uses it
            self.kept[number] = output
            return output if before is None else output + before.to(output.device)

        return hook

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def test_what_a_block_leaves_for_the_next_call_is_there(machine, sim) -> None:
    torch.manual_seed(1)
    net = Recurrent()
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(3)
        with manage(net, placement="gpu:0&gpu:1", manager=manager):
            want = [net(each) for each in x]
        net.kept.clear()
        with manage(net, placement=SPLIT, manager=manager) as managed:
            got = at_once(managed, net, x)
            assert all(map(torch.equal, got, want))
        net.kept.clear()
        net.past.clear()
        assert sim.races() == []
        clear(got, want, x)


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        total += x
        return x * total


def test_a_call_that_reads_what_the_one_before_wrote_waits_for_it(machine) -> None:
    net = WritesItsInput()
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(3)
        with manage(net, placement=SPLIT, manager=manager) as managed:
            shared = [torch.zeros(2, 4, DIM, device="sim:0")]
            want = [net(each, shared[0]) for each in x]
            shared[0].zero_()
            got = managed.run_micro_batches([lambda each=each: net(each, shared[0]) for each in x])
            assert all(map(torch.equal, got, want))
        clear(got, want, x, shared)


def test_what_all_calls_take_is_copied_once(machine, sim) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Bilinear(DIM, DIM, DIM) for _ in range(4))
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, table)
            return x

    net = Shared()
    with machine(16, 16) as manager, torch.no_grad():
        x, shared = inputs(4), [torch.randn(2, 4, DIM).to("sim:0")]
        with manage(net, placement=SPLIT, manager=manager) as managed:
            hops = managed.members[0].managed.forwards.hops
            net(x[0], shared[0])
            before = hops.num_hops
            net(x[0], shared[0])
            alone = hops.num_hops - before
            before = hops.num_hops
            managed.run_micro_batches([lambda each=each: net(each, shared[0]) for each in x])
            assert hops.num_hops - before == len(x) * (alone - 1) + 1
        clear(x, shared)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(("failing", "number"), [(0, 0), (1, 3), (2, 7), (0, 7)])
def test_a_call_that_fails_leaves_all_as_it_was(
    machine, toys, failing: int, number: int, error: type[BaseException]
) -> None:
    net = toys.build_net(dim=DIM)
    calls = 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise error("on purpose")

    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(3)
        with manage(net, placement=SPLIT, manager=manager) as managed:
            want = [net(each) for each in x]
            block = [*net.doubles, *net.singles][number]
            handle = block.norm.register_forward_pre_hook(fail)
            with pytest.raises(error):
                at_once(managed, net, x)
            handle.remove()
            if error is not KeyboardInterrupt:  # after one that skips hooks the next call closes the pass
                assert is_closed(managed)
            got = at_once(managed, net, x)
            assert all(map(torch.equal, got, want))
            assert is_closed(managed)
        clear(x, got, want)


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"placement": "gpu:0"}, "it computes on one device"),
        ({"placement": SPLIT, "profile": "gpu:0=0.05MiB,gpu:1=0.05MiB"}, "blocks stream"),
        ({"placement": "gpu:0&gpu:1", "precision": "fp8 scaled"}, "weights are decoded into one scratch memory"),
    ],
)
def test_calls_are_made_one_by_one_where_nothing_can_overlap(machine, toys, choices: dict[str, str], why: str) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    with machine(8, 8) as manager, torch.no_grad():
        x = [each.bfloat16() for each in inputs(2)]
        with manage(net, manager=manager, **choices) as managed:
            want = [net(each) for each in x]
            assert managed.members[0].managed.why_one_by_one().startswith(why)
            assert all(map(torch.equal, at_once(managed, net, x), want))
            assert used_streams(managed) == 1
        clear(x, want)


@pytest.mark.parametrize(
    "choices",
    [
        {"placement": "gpu:0&gpu:1", "profile": "gpu:0=0.05MiB,gpu:1=0.05MiB"},
        {"placement": SPLIT, "profile": "gpu:0=0.05MiB,gpu:1=0.05MiB"},
        {"placement": "gpu:0&gpu:1", "precision": "fp8 scaled"},
    ],
)
def test_a_plan_says_in_the_same_words_as_a_step_why_calls_are_made_one_by_one(
    machine, toys, choices: dict[str, str]
) -> None:
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    use = Use(component="net", kind="diffusion", num_calls=2)
    with machine(8, 8) as manager, torch.no_grad():
        x = [each.bfloat16() for each in inputs(1)]
        with manage({"net": net}, manager=manager, uses=[use], **choices) as managed:
            lines = [line for line in managed.plan["net"].reasons if line.startswith("micro-batches: ")]
            net(x[0])
            assert lines == [f"micro-batches: off: {managed.members[0].managed.why_one_by_one()}"]
        clear(x)


def test_calls_with_gradients_are_made_one_by_one(machine, toys) -> None:
    net = toys.build_net(dim=DIM)
    with machine(8, 8) as manager:
        x = inputs(2)
        x = [each.requires_grad_() for each in x]
        with manage(net, placement=SPLIT, manager=manager) as managed:
            sum(got.sum() for got in at_once(managed, net, x)).backward()
            assert all(each.grad is not None and each.grad.isfinite().all() for each in x)
        clear(x)


def test_a_call_inside_a_micro_batch_may_make_micro_batches(machine, toys) -> None:
    net = toys.build_net(dim=DIM)
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(3)
        with manage(net, placement=SPLIT, manager=manager) as managed:
            want = [net(each) for each in x]
            inner = managed.run_micro_batches([lambda: at_once(managed, net, x[:2]), lambda: net(x[2])])
            got = [*inner[0], inner[1]]
            inner.clear()
            assert all(map(torch.equal, got, want))
        clear(x, got, want)


def test_an_unknown_component_is_refused(machine, toys) -> None:
    with (
        machine(8, 8) as manager,
        manage(toys.build_net(), placement=SPLIT, manager=manager) as managed,
        pytest.raises(InvalidInput, match="manages no component 'unet'"),
    ):
        managed.run_micro_batches([], "unet")


@settings(max_examples=25, deadline=None)
@given(
    groups=st.sampled_from(["", "/auto", "/2", "/3", "/5", "/8"]),
    form=st.sampled_from([("as stored", "block"), ("fp8 scaled", "block"), ("fp8 scaled", "component")]),
    skipped=st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=2, max_size=4),
    repeated=st.sets(st.integers(0, 7), max_size=2),
)
def test_any_calls_of_any_blocks_are_ordered(
    sim, toys, groups: str, form: tuple[str, str], skipped: list[set[int]], repeated: set[int]
) -> None:
    """Each call skips other blocks, and some blocks run twice: what one decodes, no other one decodes over."""
    net = toys.build_net(dim=DIM, dtype=torch.bfloat16)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 20)] * 2), torch.no_grad():
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        manager.set_watermark("host", 0, 0)
        x = [each.bfloat16() for each in inputs(len(skipped))]

        def call(number: int) -> torch.Tensor:
            net.skip, net.repeat = frozenset(skipped[number]), frozenset(repeated)
            return net(x[number])

        precision = Precision(form[0], granularity=form[1])
        try:
            with manage(net, placement=f"gpu:0&gpu:1{groups}", precision=precision, manager=manager) as managed:
                want = [call(number) for number in range(len(x))]
                got = managed.run_micro_batches([lambda number=number: call(number) for number in range(len(x))])
                has_one_scratch = form == ("fp8 scaled", "block") and not groups
                assert bool(managed.members[0].managed.why_one_by_one()) == has_one_scratch
                assert all(map(torch.equal, got, want))
        finally:
            net.skip = net.repeat = frozenset()
            manager.release_all()
        assert sim.races() == []
        clear(x, want, got)


def test_a_call_in_which_another_component_computes_is_waited_for(machine, toys) -> None:
    """Its copies are not those of the split component: without waiting the third call read them too early."""
    net, other = toys.build_net(dim=DIM), toys.build_net(dim=DIM)
    with machine(8, 8) as manager, torch.no_grad():
        x = inputs(1)
        with (
            manage(net, placement=SPLIT, manager=manager) as managed,
            manage(other, placement="gpu:1", manager=manager),
        ):
            want = [net(x[0]), other(x[0]), other(net(x[0]))]
            for _ in range(2):
                got = managed.run_micro_batches([lambda: net(x[0]), lambda: other(x[0]), lambda: other(net(x[0]))])
                assert all(map(torch.equal, got, want))
                got.clear()
        clear(x, want)


def test_what_is_no_function_is_refused(machine, toys) -> None:
    net = toys.build_net(dim=DIM)
    with machine(8, 8) as manager, manage(net, placement=SPLIT, manager=manager) as managed:
        for wrong in (None, 3, [1]):
            with pytest.raises(InvalidInput, match="takes functions without arguments"):
                managed.run_micro_batches(wrong)
