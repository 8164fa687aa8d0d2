"""Slabs that become the weights' own memory: pieces show what the slab had, and go back to the system one by one."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from highwater.memory.transfer.pinned_memory import HostSlab, Slabs, allocate_slab, pinned_used_bytes
from highwater.memory.transfer.slab_memory import CAN_CUT
from highwater.memory.units import KIB, MIB, PAGE_BYTES

pytestmark = pytest.mark.skipif(not CAN_CUT, reason="this system takes no single pages back")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def filled(num_bytes: int) -> HostSlab:
    slab = allocate_slab(num_bytes)
    slab.data.random_(generator=torch.Generator().manual_seed(num_bytes))
    return slab


def cut(slab: HostSlab, begin: int, end: int) -> torch.Tensor:
    piece = slab.piece(begin, end)
    assert piece is not None
    return piece


@given(data=st.data())
def test_pieces_and_kept_views_show_what_the_slab_had_whatever_goes_first(data: st.DataObject) -> None:
    size = data.draw(st.integers(128 * KIB, 160 * KIB), label="bytes")
    slab = filled(size)
    cuts = sorted(data.draw(st.sets(st.integers(0, size), max_size=8), label="cuts") | {0, size})
    ranges = [pair for pair in pairwise(cuts) if data.draw(st.booleans())]
    ranges += data.draw(st.lists(st.sampled_from(ranges), max_size=2)) if ranges else []  # taken again
    kept = [(begin, end, cut(slab, begin, end)) for begin, end in ranges]
    kept += [
        (begin, end, slab.data[begin:end])
        for begin, end in data.draw(st.lists(st.sampled_from(list(pairwise(cuts))), max_size=2), label="kept views")
    ]
    expected = slab.data.clone()
    del slab
    while kept:
        for begin, end, tensor in kept:
            assert torch.equal(tensor, expected[begin:end])
        kept.pop(data.draw(st.integers(0, len(kept) - 1), label="dropped"))


def test_a_piece_is_an_ordinary_tensor_of_its_own_bytes() -> None:
    slab = filled(MIB)
    first, second, none = cut(slab, 0, 1000), cut(slab, 1024, 2048), cut(slab, 5, 5)
    assert first.untyped_storage().nbytes() == 1000 and second.untyped_storage().nbytes() == 1024
    assert second.storage_offset() == 0 and none.numel() == 0 and not first.is_inference()
    before = slab.data._version
    first.fill_(1)
    assert slab.data._version == before and second._version == 0 and (slab.data[:1000] == 1).all()
    file = io.BytesIO()
    torch.save(second, file)
    assert file.tell() < 4 * KIB, "not the whole slab"


def test_a_slab_of_which_pieces_come_and_go_counts_those_that_are_there() -> None:
    """Weights that are kept for a model that comes and goes lie in one slab all the time."""
    slab = filled(MIB)
    assert slab.memory is not None
    last = cut(slab, 60 * KIB, 64 * KIB)
    for turn in range(50):
        pieces = [cut(slab, begin * KIB + turn, (begin + 1) * KIB) for begin in range(10)]
        assert slab.has_pieces()
        del pieces
    assert len(slab.memory.ended) <= 10 and len(slab.memory.num_users) <= 11
    del last
    assert not slab.has_pieces()
    expected = slab.data[: 4 * KIB].clone()
    first = cut(slab, 0, 4 * KIB)
    del slab
    assert torch.equal(first, expected)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads what Linux tells of a process")
def test_what_is_dropped_goes_back_to_the_system_and_nothing_else_does() -> None:
    slab = filled(32 * MIB)
    large, small, last = cut(slab, 0, 16 * MIB), cut(slab, 16 * MIB, 16 * MIB + 100), cut(slab, 24 * MIB, 32 * MIB)
    gc.collect()
    before = resident_bytes()
    kept = slab.data[:10]
    del slab
    assert resident_bytes() > before - MIB, "a view of the slab is left"
    del kept
    assert resident_bytes() < before - 7 * MIB, "what no piece was cut from"
    del large
    assert resident_bytes() < before - 23 * MIB
    assert small.numel() == 100 and last.numel() == 8 * MIB
    del small, last
    assert resident_bytes() < before - 31 * MIB


def test_pieces_of_a_locked_arena_outlive_its_lock(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)], pinned_bytes=MIB):
        first, second = Slabs([60 * KIB, 60 * KIB], pinned_bytes=MIB, before_unlock=lambda: None)
        for slab in (first, second):
            slab.data.fill_(7)
        pieces = [cut(first, 0, 10 * KIB), cut(second, 20 * KIB, 60 * KIB)]
        del first, slab
        assert pinned_used_bytes() == 120 * KIB and pieces[0].is_pinned()
        del second
        assert pinned_used_bytes() == sim.pinned().used_bytes == 0 and not pieces[0].is_pinned()
        assert all((piece == 7).all() for piece in pieces)


def test_pieces_dropped_by_several_threads_and_by_a_collection() -> None:
    slab = filled(8 * MIB)
    expected = slab.data.clone()
    pieces = [cut(slab, begin, begin + 8 * KIB) for begin in range(0, 8 * MIB, 8 * KIB)]
    del slab
    parts: list[list[object]] = [list(pieces[number::4]) for number in range(3)]
    parts[0].append(parts[0])  # a cycle
    kept = pieces[3::4]
    pieces = []
    threads = [threading.Thread(target=part.clear) for part in parts[1:]]
    for thread in threads:
        thread.start()
    parts = []
    gc.collect()
    for thread in threads:
        thread.join()
    assert all(
        torch.equal(piece, expected[begin : begin + 8 * KIB])
        for piece, begin in zip(kept, range(24 * KIB, 8 * MIB, 32 * KIB), strict=True)
    )


# --- Released modules


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def net() -> Iterator[Layers]:
    torch.manual_seed(0)
    yield Layers().eval().requires_grad_(False)


X = torch.ones(2, 256)
PLACES = {"pinned": "gpu:0:pinned", "pageable": "gpu:0:host", "split": "gpu:0&gpu:1"}


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_a_released_module_has_weights_of_their_own_bytes_in_plain_memory(machine, net, place: str, precision) -> None:
    from highwater.memory import manage

    expected = {name: weight.clone() for name, weight in net.named_parameters()}
    with machine(8, 8) as manager:
        managed = manage(net, manager=manager, placement=PLACES[place], precision=precision)
        views = {name: weight.data for name, weight in net.named_parameters()}
        net(X)
        managed.release()
        del views["blocks.0.0.weight"]
        for name, weight in net.named_parameters():
            assert type(weight) is nn.Parameter and weight.untyped_storage().nbytes() == weight.nbytes
            assert weight.storage_offset() == 0
            if precision == "as stored":
                assert torch.equal(weight, expected[name])
            weight.requires_grad_(True)
        values = {name: weight.detach().clone() for name, weight in net.named_parameters()}
        if precision == "as stored":
            kept = {name: view.clone() for name, view in views.items()}
            net.blocks[1] = nn.Identity()
            del weight
            gc.collect()
            assert all(torch.equal(views[name], kept[name]) for name in kept), "what other code kept"
        views.clear()
        gc.collect()
        assert pinned_used_bytes() == 0
        for name, weight in net.named_parameters():
            assert torch.equal(weight, values[name])
        again = manage(net, manager=manager, placement=PLACES[place])
        net(X)
        again.release()
        for name, weight in net.named_parameters():
            assert torch.equal(weight, values[name])


@pytest.mark.parametrize("nth", range(1, 12, 2))
@torch.no_grad()
def test_a_release_that_was_interrupted_goes_through_the_next_time(machine, net, monkeypatch, nth: int) -> None:
    from highwater.memory import manage
    from highwater.memory.runtime.blocks.weights_at_rest import WeightsAtRest

    expected = {name: weight.clone() for name, weight in net.named_parameters()}
    own_leaves, calls = WeightsAtRest.own_leaves, []

    def interrupted(self: WeightsAtRest, index: int) -> list[torch.Tensor] | None:
        calls.append(index)
        leaves = own_leaves(self, index)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return leaves

    with machine(8) as manager:
        managed = manage(net, manager=manager, placement="gpu:0")
        net(X)
        monkeypatch.setattr(WeightsAtRest, "own_leaves", interrupted)
        with pytest.raises(KeyboardInterrupt):
            managed.release()
        managed.release()
        del managed
        gc.collect()
        for name, weight in net.named_parameters():
            assert torch.equal(weight, expected[name])
        assert pinned_used_bytes() == 0
