"""What is used next and rests in its file is read while another component computes, and nothing waits for that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.memory import load_model, manage
from highwater.memory.planner import mixed_tiers
from highwater.memory.transfer.devices import HostMemory
from highwater.memory.weights import file_reader
from highwater.memory.weights.file_reader import WeightsFile
from highwater.memory.weights.safetensors_header import read_header
from highwater.memory.weights.source import WeightsSource
from highwater.tests.engine.weights.test_page_cache import forget, resident

X = torch.ones(1, 64)


@pytest.fixture(autouse=True)
def spares_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 0)


def layers() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))


@pytest.fixture
def models(tmp_path: Path) -> dict[str, torch.nn.Module]:
    """Three models in files of their own, unread."""
    found = {}
    for name in "abc":
        save_file(layers().state_dict(), tmp_path / f"{name}.safetensors")
        found[name] = load_model(tmp_path / f"{name}.safetensors", layers)
    return found


class Warmed:
    """Stands for the reading of files: notes what it is asked for, and waits before each piece if it is told to."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.pieces = 0
        self.go = threading.Event()
        self.go.set()

    def warm(self, source: WeightsSource, names: object) -> Iterator[int]:
        name = next(iter(source.paths)).rpartition("/")[2][0]
        self.began.append(name)
        try:
            for _ in range(4):
                assert self.go.wait(60)
                self.pieces += 1
                yield 1000
        finally:
            self.ended.append(name)


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> Warmed:
    warmed = Warmed()
    monkeypatch.setattr(WeightsSource, "warm", lambda source, names: warmed.warm(source, names))
    return warmed


@torch.no_grad()
def test_the_components_of_the_next_steps_are_read_in_their_order(machine, models, warmed, wait_until) -> None:
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        manager.foresee([{"a"}, {"c"}, {"unknown"}, {"b"}])
        wait_until(lambda: warmed.ended == ["c", "b"])
        manager.foresee([{"a"}, {"c"}, {"unknown"}, {"b"}])  # as before: nothing is read again
        models["a"](X)
        manager.foresee([{"c"}, {"b"}])
        wait_until(lambda: len(warmed.ended) == 3)
        assert warmed.ended == ["c", "b", "b"]
        models["c"](X)
        (load,) = [e for e in manager.event_log.events if e.kind == "load" and e.component == "c"]
        assert "; 3.91KiB of it were read ahead: " in load.reason and load.reason.endswith(" hidden")
        models["a"](X)
        assert (
            "hidden" not in [e for e in manager.event_log.events if e.kind == "load" and e.component == "a"][-1].reason
        )


@torch.no_grad()
def test_another_forecast_ends_the_reading_within_a_piece(machine, models, warmed, wait_until) -> None:
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        warmed.go.clear()
        manager.foresee([{"a"}, {"b"}, {"c"}])
        wait_until(lambda: warmed.began == ["b"])
        manager.foresee([{"a"}, {"c"}])  # returns at once
        warmed.go.set()
        wait_until(lambda: warmed.ended == ["b", "c"])
        assert warmed.pieces == 1 + 4


@torch.no_grad()
@pytest.mark.parametrize("why", ["off", "no room", "loaded", "in RAM", "not known"])
def test_nothing_is_read_in_vain(machine, models, warmed, wait_until, why: str) -> None:
    placement = "*=gpu:0:pinned" if why == "in RAM" else "*=gpu:0"
    with machine(8) as manager, manage(models, placement=placement, manager=manager):
        if why == "off":
            manager.look_ahead(False)
        elif why == "no room":
            total = HostMemory.now().total_bytes
            manager.set_watermark("host", total, total)
        elif why == "loaded":
            models["b"](X)
        manager.foresee([{"a"}, {"b"}] if why != "not known" else [{"a"}])
        models["a"](X)
        manager.look_ahead(why != "off")
        assert not warmed.began


@torch.no_grad()
def test_it_waits_while_what_computes_reads_its_own_file(machine, models, warmed, wait_until, monkeypatch) -> None:
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager) as handle:
        holder, member = object(), handle.members[0]
        (share,) = member.managed.plan.shares
        monkeypatch.setattr(
            member.managed, "plan", replace(member.managed.plan, shares=(replace(share, read_bytes=5),))
        )
        manager.hold(member, holder)
        manager.foresee([{"a"}, {"b"}])
        wait_until(lambda: warmed.pieces == 1)
        manager.let_go(member, holder)
        wait_until(lambda: warmed.ended == ["b"])


@torch.no_grad()
def test_what_computes_copies_as_much_in_the_same_time(sim, machine, models, wait_until) -> None:
    """In virtual seconds, which count what goes over the link: reading ahead adds nothing to that."""
    told = {}
    for is_on in (False, True):
        with machine(8) as manager, manage(models, placement="*=gpu:0", profile="0.1MiB", manager=manager):
            manager.look_ahead(is_on)
            models["a"](X)
            sim.reset_stats()
            before = sim.clock_s()
            manager.foresee([{"a"}, {"b"}, {"c"}])
            for _ in range(3):
                models["a"](X)
            told[is_on] = sim.clock_s() - before, sim.stats(0).h2d_bytes
    assert told[True] == told[False]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which tells what it has of a file")
def test_files_are_brought_into_the_systems_cache(
    machine, models, tmp_path: Path, monkeypatch, wait_until: Callable
) -> None:
    monkeypatch.setattr(file_reader, "WARM_BYTES", 16384)
    path = tmp_path / "b.safetensors"
    forget(path)
    if resident(path):
        pytest.skip("NOT TESTED: this folder is in memory")
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        manager.foresee([{"a"}, {"b"}])
        wait_until(lambda: len(resident(path)) >= path.stat().st_size // 4096)
        path.unlink()
        manager.foresee([{"b"}, {"a"}])
        manager.foresee([{"a"}, {"b"}])  # the file is gone: its loading will say so


def test_a_file_is_warmed_piece_by_piece_and_what_is_there_costs_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(file_reader, "WARM_BYTES", 1 << 16)
    path = tmp_path / "net.safetensors"
    save_file({f"t{n}": torch.ones(40_000) for n in range(5)}, path)
    forget(path)
    if sys.platform == "linux" and resident(path):
        pytest.skip("NOT TESTED: this folder is in memory")
    file = WeightsFile(read_header(path))
    names = [f"t{n}" for n in (0, 1, 3)]
    assert 0 < sum(file.warm(names)) <= 3 * 160_000
    assert sum(file.warm(names)) == 0 or sys.platform != "linux"
