"""Staging memory at work: whatever order blocks run in, within whatever memory, every one computes with its weights."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import manage
from highwater.memory.runtime.blocks.weight_store import HostStore
from highwater.memory.runtime.devices.prefetch import Streamer

WIDTH = 16
LINK = 2e9


class Layers(torch.nn.Module):
    """Unequal blocks, which run as they are told to."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(widths))
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, width), torch.nn.Linear(width, WIDTH)) for width in widths
        )
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.2, generator=generator)

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for number in order:
            x = x + self.layers[number](x)
        return x


widths = st.lists(st.sampled_from([16, 48, 64, 208, 400]), min_size=2, max_size=9)


@settings(max_examples=40)
@given(widths, st.floats(0.0, 1.0), st.booleans(), st.sampled_from(["all", "some", "none"]), st.data())
def test_any_order_within_any_memory_computes_the_same(
    machine, widths: list[int], part: float, learns: bool, pinned: str, data
) -> None:
    orders = st.one_of(
        st.just(list(range(len(widths)))), st.lists(st.integers(0, len(widths) - 1), min_size=1, max_size=12)
    )
    passes = data.draw(st.lists(orders, min_size=3, max_size=8))
    net, twin = Layers(widths), Layers(widths)
    sizes = [sum(weight.nbytes for weight in layer.parameters()) + 1024 for layer in net.layers]
    budget_bytes = max(sizes) + int(part * (sum(sizes) - max(sizes)))
    x = torch.randn(3, WIDTH)
    # Copies and computes take about as long as each other: what is in a wrong order is a race, and fails.
    with (
        machine(4, h2d_bytes_per_s=LINK, launch_s=1e-6) as manager,
        torch.no_grad(),
        pytest.MonkeyPatch.context() as patch,
    ):
        if pinned == "some":
            patch.setattr(
                "highwater.memory.manager.live_capacity.pin_limit_bytes", lambda *args, **choices: budget_bytes // 2
            )
        if learns:
            manager.capacity.links["gpu:0"] = LINK
        twin.to("sim:0")
        wanted = [twin(x.to("sim:0"), order).cpu() for order in passes]
        twin.to("cpu")
        profile = f"{budget_bytes / 1e6:.6f}MB,pinned={pinned.replace('some', 'all')}"
        with manage(net, profile=profile, placement="gpu:0", manager=manager):
            for order, want in zip(passes, wanted, strict=True):
                assert torch.equal(net(x, order).cpu(), want)


@settings(max_examples=25)
@given(widths, st.floats(0.0, 1.0), st.sampled_from(["all", "none"]), st.data())
def test_who_remembers_what_is_ahead_copies_what_who_looks_again_copies(
    machine, widths: list[int], part: float, pinned: str, data
) -> None:
    numbers = st.integers(0, len(widths) - 1)
    orders = st.one_of(st.just(list(range(len(widths)))), st.lists(numbers, min_size=1, max_size=12))
    passes = data.draw(st.lists(orders, min_size=3, max_size=8))
    written = data.draw(st.lists(st.tuples(st.integers(0, len(passes) - 1), numbers), max_size=3))
    sizes = [2 * 4 * WIDTH * width + 1024 for width in widths]
    budget_bytes = max(sizes) + int(part * (sum(sizes) - max(sizes)))
    profile = f"{budget_bytes / 1e6:.6f}MB,pinned={pinned}"
    prefetch, copy_to = Streamer.prefetch, HostStore.copy_to

    def look_and_prefetch(self, *args) -> None:
        self.look_again()
        prefetch(self, *args)

    def copies(*, looks_again: bool) -> tuple[list[tuple[int, int]], list[torch.Tensor]]:
        made: list[tuple[int, int]] = []

        def note(self, target, begin, *args) -> None:
            made.append((target.storage_offset(), target.numel()))
            copy_to(self, target, begin, *args)

        net, outputs = Layers(widths), []
        with machine(4) as manager, torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostStore, "copy_to", note)
            if looks_again:
                patch.setattr(Streamer, "prefetch", look_and_prefetch)
            with manage(net, profile=profile, placement="gpu:0", manager=manager):
                for number, order in enumerate(passes):
                    for _, block in [write for write in written if write[0] == number]:
                        net.layers[block][0].weight.mul_(1.5)
                    outputs.append(net(torch.ones(2, WIDTH), order).cpu())
        return made, outputs

    (made, outputs), (wanted, want) = copies(looks_again=False), copies(looks_again=True)
    assert made == wanted
    assert all(map(torch.equal, outputs, want))


def test_what_is_copied_is_what_is_missing(machine) -> None:
    """Two blocks of which half of each lies alone: only the halves that they share move."""
    net = Layers([1024, 1024])
    block_bytes = sum(weight.nbytes for weight in net.layers[0].parameters())
    with machine(4) as manager, torch.no_grad():
        budget = f"{1.5 * block_bytes / 1e6 + 0.001:.6f}MB"
        blocks = {"model": "layers.*"}
        with manage(net, profile=budget, placement="gpu:0", blocks=blocks, manager=manager) as managed:
            share = managed.members[0].managed.shares[0]
            for _ in range(3):
                net(torch.ones(1, WIDTH), [0, 1])
            assert len(share.streamer.groups) == 2
            before = manager.bytes_moved()
            net(torch.ones(1, WIDTH), [0, 1])
            moved = manager.bytes_moved() - before
            assert 0.9 * block_bytes < moved < 1.1 * block_bytes  # not both


@pytest.mark.parametrize(("budget", "fetches"), [("0.012MB", True), ("0.03MB", False)])
def test_a_copy_that_holds_the_host_is_made_ahead_only_where_nothing_runs_before(
    machine, budget: str, fetches: bool
) -> None:
    net, x, order = Layers([32] * 8), torch.ones(1, WIDTH), list(range(8))
    choices = {"profile": f"{budget},pinned=none", "placement": "gpu:0", "blocks": {"model": "layers.*"}}
    with machine(4) as manager, torch.no_grad(), manage(net, manager=manager, **choices) as managed:

        def state() -> tuple[bool, bool]:
            streamer = managed.members[0].managed.shares[0].streamer
            first = streamer.find(streamer.order[0], streamer.pass_number)
            return first.block == 0, streamer.is_there(first)

        for _ in range(3):
            net(x, order)
            assert state() == (fetches, fetches)


def test_unequal_blocks_are_copied_in_few_pieces(machine, monkeypatch) -> None:
    """Two or three blocks lie where one comes to be; what of them is free already is overwritten in one copy."""
    widths = random.Random(3).choices(range(16, 2000, 8), k=40)
    net = Layers(widths)
    order, x = list(range(len(widths))), torch.ones(1, WIDTH)
    budget_bytes = sum(weight.nbytes for weight in net.parameters()) // 2
    copy_to, copied = HostStore.copy_to, []

    def count(self, target, *args) -> None:
        copied.append(target.numel())
        copy_to(self, target, *args)

    monkeypatch.setattr(HostStore, "copy_to", count)
    profile, blocks = f"{budget_bytes / 1e6:.6f}MB", {"model": "layers.*"}
    with (
        machine(4) as manager,
        torch.no_grad(),
        manage(net, profile=profile, placement="gpu:0", blocks=blocks, manager=manager) as managed,
    ):
        for _ in range(4):
            net(x, order)
        copied.clear()
        before = manager.bytes_moved()
        net(x, order)
        assert sum(copied) == manager.bytes_moved() - before
        num_streamed = len(managed.members[0].managed.shares[0].streamer.groups)
        assert num_streamed <= len(copied) <= 2.5 * num_streamed


@pytest.mark.parametrize("position", [0, 3, 6])
def test_a_block_without_bytes_takes_its_turn(machine, position: int) -> None:
    class Nothing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 0.5 + self.weight.sum()

    net, twin = Layers([64] * 6), Layers([64] * 6)
    for layers in (net.layers, twin.layers):
        layers.insert(position, Nothing())
    x, order = torch.randn(2, WIDTH), list(range(7))
    want = twin(x, order)
    blocks = {"model": "layers.*"}
    with (
        machine(4) as manager,
        torch.no_grad(),
        manage(net, profile="0.025MB", placement="gpu:0", blocks=blocks, manager=manager) as managed,
    ):
        for _ in range(4):
            assert torch.allclose(net(x, order).cpu(), want, atol=1e-5)
        groups = managed.members[0].managed.shares[0].streamer.groups
        assert groups
        assert position not in groups


def test_a_copy_that_fails_is_made_anew(machine, monkeypatch) -> None:
    net, twin = Layers([64] * 6), Layers([64] * 6)
    x, order = torch.randn(2, WIDTH), list(range(6))
    want = twin(x, order)
    copy_to, failing = HostStore.copy_to, []

    def fail_sometimes(self, *args) -> None:
        if failing and failing.pop() == "now":
            raise OSError("the bus is gone")
        copy_to(self, *args)

    monkeypatch.setattr(HostStore, "copy_to", fail_sometimes)
    with machine(4) as manager, torch.no_grad(), manage(net, profile="0.025MB", placement="gpu:0", manager=manager):
        assert torch.allclose(net(x, order).cpu(), want, atol=1e-5)
        for number in range(8):
            failing[:] = ["now", *["later"] * number]
            with pytest.raises(OSError, match="bus"):
                for _ in range(3):
                    net(x, order)
            assert torch.allclose(net(x, order).cpu(), want, atol=1e-5)


@settings(max_examples=40)
@given(widths, st.floats(0.0, 1.0), st.data())
def test_blocks_that_compute_beside_each_other_on_two_streams_keep_their_bytes(
    machine, widths: list[int], part: float, data
) -> None:
    """Each of two branches waits for its own stream only: staging memory is free when both have computed."""

    class Branches(Layers):
        def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
            home = torch.accelerator.current_stream()
            streams = [torch.Stream(device="sim:0") for _ in range(2)]
            made: list[list[torch.Tensor]] = [[torch.zeros_like(x)] for _ in range(2)]
            for stream in streams:
                stream.wait_stream(home)
            for number in order:
                branch = number % 2
                with streams[branch]:
                    for _ in range(1 + 8 * branch):
                        made[branch] += self.layers[number](x), made[branch][-1]
                        made[branch].append(made[branch][-1] + made[branch][-2])
            for stream in streams:
                home.wait_stream(stream)
            total = made[0][-1] + made[1][-1]
            torch.accelerator.synchronize(0)  # what was made is freed now
            return total

    numbers = st.integers(0, len(widths) - 1)
    order = data.draw(st.one_of(st.permutations(range(len(widths))), st.lists(numbers, min_size=2, max_size=12)))
    net, twin = Branches(widths), Branches(widths)
    sizes = [sum(weight.nbytes for weight in layer.parameters()) + 1024 for layer in net.layers]
    budget_bytes = max(sizes) + int(part * (sum(sizes) - max(sizes)))
    x = torch.randn(64, WIDTH)
    with machine(4, h2d_bytes_per_s=LINK, launch_s=1e-6) as manager, torch.no_grad():
        twin.to("sim:0")
        want = twin(x.to("sim:0"), order).cpu()
        twin.to("cpu")
        with manage(net, profile=f"{budget_bytes / 1e6:.6f}MB", placement="gpu:0", manager=manager):
            for _ in range(4):
                assert torch.equal(net(x, order).cpu(), want)
