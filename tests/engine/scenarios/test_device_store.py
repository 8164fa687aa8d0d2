"""Blocks that stream from the memory of another GPU: the same results, exact books, and nothing that can be lost."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.runtime.blocks.weight_store import FileStore, HostStore
from highwater.memory.runtime.devices.ledger import Kind

# Toy sizes in bytes of float32: embedder 16.6 KiB, double blocks 194 KiB, single blocks 97 KiB.
TIGHT = "0.45MiB"
STORED = "gpu:0:gpu:1"
MIB = 1 << 20


@pytest.fixture
def cards(sim) -> Callable[..., object]:
    """Return a context manager: two simulated devices of these MiB, strict, and a fresh manager without a watermark."""

    @contextmanager
    def build(first: float = 8, second: float = 8, *, peer: bool = True, **rates: float) -> Iterator[MemoryManager]:
        specs = [
            sim.SimDeviceSpec(total_bytes=int(size * MIB), has_peer_access=peer, **rates) for size in (first, second)
        ]
        with sim.cluster(specs):
            manager = MemoryManager()
            manager.set_watermark("*", 0, 0)
            manager.set_watermark("host", 0, 0)
            try:
                yield manager
                manager.ledger.check()
            finally:
                manager.release_all()
                manager.ledger.check()

    return build


@pytest.fixture
def file(toys, tmp_path):
    """The weights of the toy network; its buffers and the name of its tied weight are not in the file."""
    path = tmp_path / "net.safetensors"
    state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if "gain" not in name}
    del state["out.weight"]
    save_file(state, path)
    return path


def wanted(toys, x: torch.Tensor) -> torch.Tensor:
    return toys.build_net().to("sim:0")(x.to("sim:0")).cpu()


def of(managed, name: str = "net"):
    return next(member for member in managed.members if member.name == name).managed


def stored_bytes(manager: MemoryManager) -> int:
    return sum(size for (place, _, kind), size in manager.ledger.entries.items() if kind is Kind.STORED)


@torch.no_grad()
@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize("in_file", [True, False])
def test_computes_alike_and_its_bytes_are_in_the_books(toys, cards, sim, file, in_file: bool, peer: bool) -> None:
    x = torch.randn(2, 5, 64)
    with cards(peer=peer) as manager:
        want = wanted(toys, x)
        net = toys.bare_net() if in_file else toys.build_net()
        files = {"files": {"net": file}} if in_file else {}
        with manage({"net": net}, placement=STORED, profile=TIGHT, manager=manager, **files) as managed:
            for _ in range(4):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
                for index in range(2):
                    assert manager.ledger.used(f"gpu:{index}") == sim.stats(index).used_bytes
            part = of(managed)
            (share,) = part.plan.shares
            assert share.streamed and share.stored == set(share.streamed), "all that streams, and nothing else"
            assert manager.ledger.entry("gpu:1", "net", Kind.STORED) == share.stored_bytes == part.plan.stored_bytes
            stores = {type(group.at_rest.store) for group in part.groups if group.name}
            assert stores == {FileStore if in_file else HostStore}, "the origin stays what it is"
            copies = sim.stats(0).num_peer, sim.stats(1).num_d2h
            assert bool(copies[0]) == peer and bool(copies[1]) == (not peer)
            assert "stored on gpu:1" in part.plan.text()
        assert in_file or torch.equal(net(x), toys.build_net()(x)), "what came with its weights has them again"


@torch.no_grad()
def test_a_pass_copies_nothing_over_the_hosts_link(toys, cards, sim, file) -> None:
    x = torch.randn(2, 5, 64).to("cpu")
    with cards() as manager:
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager) as managed:
            for _ in range(3):
                net(x)
            before = [sim.stats(index).h2d_bytes for index in range(2)], sim.stats(0).peer_bytes
            net(x)
            after = [sim.stats(index).h2d_bytes for index in range(2)], sim.stats(0).peer_bytes
            assert after[0] == [before[0][0] + x.nbytes, before[0][1]], "only the input"
            (share,) = of(managed).plan.shares
            assert 0 < after[1] - before[1] <= share.streamed_bytes


@torch.no_grad()
@pytest.mark.parametrize("peer", [True, False])
def test_the_speed_of_the_way_is_measured_and_told(toys, cards, peer: bool) -> None:
    """Copies of 2 MiB and more tell a speed: the toy blocks are wider here."""
    x = torch.randn(1, 2, 512)
    with cards(64, 64, peer=peer, peer_bytes_per_s=2e10, h2d_bytes_per_s=5e9, d2h_bytes_per_s=5e9) as manager:
        net = toys.build_net(dim=512, doubles=1, singles=4)
        with manage({"net": net}, placement=STORED, profile="20MiB", manager=manager) as managed:
            for _ in range(4):
                net(x)
            told = of(managed).plan.text()
            way = "peer copies at 19" if peer else "through page-locked RAM, 3.6"
            assert way in told, told


@torch.no_grad()
def test_it_takes_only_free_memory_and_the_rest_streams_from_its_file(toys, cards, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards(8, 0.5) as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager) as managed:
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            part = of(managed)
            (share,) = part.plan.shares
            assert 0 < len(share.stored) < len(share.streamed) and share.read_bytes
            assert "more blocks stream from their file" in part.plan.text()


@torch.no_grad()
@pytest.mark.parametrize("in_file", [True, False])
def test_a_component_that_computes_there_gets_the_memory(toys, cards, file, in_file: bool) -> None:
    x = torch.randn(2, 5, 64)
    with cards(8, 1.9) as manager:
        want = wanted(toys, x)
        net, other = toys.bare_net() if in_file else toys.build_net(), toys.build_net(seed=1)
        files = {"files": {"net": file}} if in_file else {}
        with (
            manage({"net": net}, placement=STORED, profile=TIGHT, manager=manager, **files),
            manage({"other": other}, placement="gpu:1", manager=manager),
        ):
            assert torch.equal(net(x).cpu(), want)
            before = stored_bytes(manager)
            theirs = other(x).cpu()
            assert 0 <= stored_bytes(manager) < before, "it left for the one that computes there"
            manager.ledger.check()
            events = [event for event in manager.report()["events"] if event["kind"] == "evict"]
            assert events and events[-1]["device"] == "gpu:1"
            assert torch.equal(net(x).cpu(), want), "nothing was lost"
            manager.ledger.check()
            assert torch.equal(other(x).cpu(), theirs)
            assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
def test_the_watermark_there_stays_free_and_a_higher_one_is_obeyed_at_once(toys, cards, sim, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards(8, 1.5) as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        manager.set_watermark("gpu:1", MIB, MIB)
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):
            assert torch.equal(net(x).cpu(), want)
            assert 0 < stored_bytes(manager) <= MIB // 2
            manager.set_watermark("gpu:1", MIB * 5 // 4, MIB * 5 // 4)
            assert stored_bytes(manager) <= MIB // 4
            assert torch.equal(net(x).cpu(), want)
            assert stored_bytes(manager) <= MIB // 4
            manager.set_watermark("gpu:1", 0, 0)
            assert torch.equal(net(x).cpu(), want)
            assert stored_bytes(manager) > MIB // 2, "what has room is stored again"


@torch.no_grad()
def test_lending_there_takes_what_is_stored(toys, cards, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards(8, 1.5) as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):
            net(x)
            assert stored_bytes(manager) > MIB // 2
            manager.commands.lend(MIB * 5 // 4, 60, "gpu:1")
            assert stored_bytes(manager) <= MIB // 4
            assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
def test_leaving_the_computing_device_keeps_what_is_stored(toys, cards, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards(1.2, 8) as manager:
        want = wanted(toys, x)
        net, other = toys.bare_net(), toys.build_net(seed=1)
        with (
            manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager),
            manage({"other": other}, placement="gpu:0", profile="0.9MiB", manager=manager),
        ):
            net(x)
            before = stored_bytes(manager)
            other(x)
            assert manager.ledger.held("net", "gpu:0") == 0
            assert stored_bytes(manager) == before > 0
            assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
def test_too_little_memory_there_is_one_line_and_leaves_nothing(toys, cards, sim, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards() as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager) as managed:
            sim.fail_alloc(1, 3)
            with pytest.raises(torch.OutOfMemoryError) as caught:
                net(x)
            told = [line for line in str(caught.value).splitlines() if line.startswith("Highwater: ")]
            told += [note for note in getattr(caught.value, "__notes__", []) if note.startswith("Highwater: ")]
            del caught  # its traceback has what was loaded
            gc.collect()
            assert len(told) == 1 and "while it was stored there" in told[0]
            assert manager.ledger.used("gpu:0") == manager.ledger.used("gpu:1") == 0
            assert [sim.stats(index).used_bytes for index in range(2)] == [0, 0]
            assert torch.equal(net(x).cpu(), want)
            assert of(managed).plan.stored_bytes == 0
            assert "nothing is stored on gpu:1: it ran out of memory there" in of(managed).plan.text()


@torch.no_grad()
@pytest.mark.parametrize("peer", [True, False])
@pytest.mark.parametrize("nth", range(1, 40, 3))
@pytest.mark.parametrize("card", [0, 1])
def test_a_failed_copy_fails_its_pass_and_no_other(toys, cards, sim, file, card: int, nth: int, peer: bool) -> None:
    x = torch.randn(2, 5, 64)
    with cards(peer=peer) as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):
            sim.fail_copy(card, nth)
            failed = 0
            for _ in range(4):
                try:
                    assert torch.equal(net(x).cpu(), want)
                except RuntimeError:
                    failed += 1
                manager.ledger.check()
            assert failed <= 1
            sim.fail_copy(card, 0)
            assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
def test_buffers_that_cannot_be_page_locked_are_told_and_hold_the_host(toys, cards, sim) -> None:
    x = torch.randn(2, 5, 64)
    with cards(peer=False) as manager:
        want = wanted(toys, x)
        net = toys.build_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, manager=manager) as managed:
            sim.fail_registration(1)
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            assert of(managed).shares[0].stored.was_refused
            assert any("refused to page-lock" in event["reason"] for event in manager.report()["events"])


class Stop(BaseException):
    """As an interrupt that a host raises in a forward, which runs no hooks."""


@torch.no_grad()
def test_an_interrupt_leaves_nothing_wrong(toys, cards, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards() as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):
            net(x)

            def stop(*_: object) -> None:
                raise Stop

            for block in [*net.doubles, *net.singles]:
                handle = block.down.register_forward_pre_hook(stop)
                with pytest.raises(Stop):
                    net(x)
                handle.remove()
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()


@torch.no_grad()
def test_an_interrupt_while_it_is_dropped_is_mended_by_the_next_loading(toys, cards, file, monkeypatch) -> None:
    x = torch.randn(2, 5, 64)
    with cards() as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager) as managed:
            net(x)

            def stop() -> None:
                raise Stop

            with monkeypatch.context() as patch, pytest.raises(Stop):
                patch.setattr(of(managed).shares[0].stored.copies, "drain", stop)
                manager.free_memory("gpu:1", MIB, "a test asked")
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            assert all(group.stored is stored for group, stored in of(managed).shares[0].stored.by_group.items())


@torch.no_grad()
@pytest.mark.parametrize("nth", [1, 3, 5, 7, 9])
def test_a_loading_that_is_cancelled_while_it_stores_leaves_nothing(toys, cards, sim, file, nth: int) -> None:
    x, calls = torch.randn(2, 5, 64), itertools.count(1)
    with cards() as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):

            def stop(*_: object) -> None:
                if next(calls) == nth:
                    raise Stop

            end = manager.watch_loading(stop)
            with pytest.raises(Stop):
                net(x)
            end()
            manager.ledger.check()
            assert manager.ledger.used("gpu:0") == manager.ledger.used("gpu:1") == 0
            assert torch.equal(net(x).cpu(), want) and stored_bytes(manager) > 0


@torch.no_grad()
@pytest.mark.parametrize("in_file", [True, False])
def test_a_weight_that_is_written_to_is_copied_again(toys, cards, file, in_file: bool) -> None:
    x = torch.randn(2, 5, 64)
    with cards() as manager:
        net = toys.bare_net() if in_file else toys.build_net()
        files = {"files": {"net": file}} if in_file else {}
        with manage({"net": net}, placement=STORED, profile=TIGHT, manager=manager, **files) as managed:
            net(x)
            (share,) = of(managed).plan.shares
            twin = toys.build_net()
            for number in sorted(share.stored):
                blocks, twins = [*net.doubles, *net.singles], [*twin.doubles, *twin.singles]
                blocks[number].up.weight.mul_(1.5)
                twins[number].up.weight.mul_(1.5)
                blocks[number].gain.add_(0.25)
                twins[number].gain.add_(0.25)
                assert torch.equal(net(x).cpu(), copy.deepcopy(twin).to("sim:0")(x.to("sim:0")).cpu())
                manager.ledger.check()
            state = net.state_dict()
            assert all(torch.equal(state[name].cpu(), weight) for name, weight in twin.state_dict().items())
            del state  # what is resident is on its device


class Counting(nn.Module):
    """Blocks that count their calls in a buffer, which a forward writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class CountingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.linear(x) * self.calls


@torch.no_grad()
@pytest.mark.parametrize("in_file", [True, False])
def test_what_a_forward_writes_to_a_buffer_is_kept(cards, tmp_path, in_file: bool) -> None:
    torch.manual_seed(0)
    net, twin, x = Counting(), Counting(), torch.randn(2, 64)
    twin.load_state_dict(net.state_dict())
    path = tmp_path / "counting.safetensors"
    save_file({name: tensor for name, tensor in net.state_dict().items() if "calls" not in name}, path)
    files = {"files": {"net": path}} if in_file else {}
    for layer in net.layers if in_file else ():
        layer.linear.to("meta")
    with cards() as manager:
        twin.to("sim:0")
        with manage({"net": net}, placement=STORED, profile="0.06MiB", manager=manager, **files):
            for _ in range(4):
                assert torch.equal(net(x).cpu(), twin(x.to("sim:0")).cpu())
                manager.ledger.check()
        assert [layer.calls.item() for layer in net.layers] == [4.0] * 6
        twin.to("cpu")


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp8 scaled", "int8"])
def test_encoded_weights_rest_there_as_they_would_in_ram(toys, cards, precision: str) -> None:
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    with cards() as manager:
        results = []
        for placement in ("gpu:0:host", STORED):
            net = toys.build_net(dtype=torch.bfloat16)
            with manage(
                {"net": net}, placement=placement, profile="0.25MiB", precision=precision, manager=manager
            ) as managed:
                results.append([net(x).cpu() for _ in range(3)])
                if placement == STORED:
                    share = of(managed).plan.shares[0]
                    assert manager.ledger.entry("gpu:1", "net", Kind.STORED) == share.stored_bytes > 0
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@torch.no_grad()
def test_a_copy_and_another_placement_have_the_same_weights(toys, cards, file) -> None:
    x = torch.randn(2, 5, 64)
    with cards() as manager:
        want = wanted(toys, x)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager) as managed:
            net(x)
            with pytest.raises(UnsafeState, match="release it before copying"):
                copy.deepcopy(net)
            managed.reprofile(profile=TIGHT, placement="gpu:0:disk")
            assert torch.equal(net(x).cpu(), want) and stored_bytes(manager) == 0
            managed.reprofile(profile=TIGHT, placement=STORED)
            assert torch.equal(net(x).cpu(), want) and stored_bytes(manager) > 0
            net.to("cpu")
            assert torch.equal(net(x).cpu(), want)
            manager.ledger.check()


@torch.no_grad()
def test_a_lora_is_taken_along(toys, cards, file) -> None:
    import peft

    x = torch.randn(2, 5, 64)
    with cards() as manager:
        config = peft.LoraConfig(r=4, target_modules=["up"], init_lora_weights=False)
        torch.manual_seed(1)
        twin = peft.inject_adapter_in_model(config, toys.build_net()).requires_grad_(False)
        torch.manual_seed(1)
        net = toys.bare_net()
        with manage({"net": net}, placement=STORED, profile=TIGHT, files={"net": file}, manager=manager):
            net(x)
            peft.inject_adapter_in_model(config, net)
            net.requires_grad_(False)
            adapters = {name: weight for name, weight in twin.state_dict().items() if "lora" in name}
            for name, weight in net.named_parameters():
                if "lora" in name:
                    weight.copy_(adapters[name])
            twin.to("sim:0")
            for _ in range(2):
                assert torch.equal(net(x).cpu(), twin(x.to("sim:0")).cpu())
                manager.ledger.check()
            twin.to("cpu")


def test_what_cannot_be_is_refused_in_one_line(toys, cards) -> None:
    with cards() as manager:
        for placement in ("gpu:0&gpu:1:gpu:1", "gpu:1:gpu:1", "cpu:gpu:1"):
            with pytest.raises(InvalidInput, match="gpu:1 cannot store net: ") as caught:
                manage({"net": toys.build_net()}, placement=placement, manager=manager)
            assert "\n" not in str(caught.value)
