"""A failure at every place of a run, one after the other: the books stay true, and the next run is right.

`make faults` tries all of them, and writes how many to `benchmarks/results/faults.md`; else a sample is tried.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import nn

from highwater.memory import manage


class Interrupt(BaseException):
    """As ComfyUI's."""


class Trouble(Exception):
    """An error of a layer."""


ERRORS = {"exception": Trouble, "out of memory": torch.OutOfMemoryError, "interrupt": Interrupt}
FORMS = {
    "resident": {"profile": "auto", "placement": "gpu:0"},
    "streamed": {"profile": "0.45MiB", "placement": "gpu:0"},
    "pageable": {"profile": "0.45MiB,pinned=none", "placement": "gpu:0"},
    "split": {"profile": "gpu:0=unlimited,gpu:1=0.3MiB", "placement": "gpu:0&gpu:1@0.5"},
    "disk": {"profile": "0.45MiB", "placement": "gpu:0:disk"},
    "stored": {"profile": "gpu:0=0.45MiB", "placement": "gpu:0:gpu:1"},
    "fp8": {"profile": "0.3MiB", "placement": "gpu:0", "precision": "fp8 scaled"},
}
STEPS = 2
ALL = pytest.param(1, marks=[pytest.mark.slow, pytest.mark.faults], id="all")


class Run:
    """A run of a few steps of one managed module, on simulated devices."""

    def __init__(self, sim: Any, manager: Any, net: nn.Module, managed: Any) -> None:
        self.sim, self.manager, self.net, self.managed = sim, manager, net, managed
        self.x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def compute(self) -> torch.Tensor:
        self.manager.begin_run("run", "run")
        x = self.x
        for _ in range(STEPS):
            x = self.net(x).cpu()
        self.manager.end_run()
        return x

    def assert_books(self) -> None:
        self.manager.recover()
        self.manager.ledger.check()
        for member in self.manager.members.values():
            assert not member.leases
            assert not any(share.computing for share in member.managed.shares)
        for index in range(2):
            assert self.sim.stats(index).used_bytes == self.manager.ledger.used(f"gpu:{index}")


@contextmanager
def a_run(
    sim: Any, machine: Any, toys: Any, folder: Path, form: str, *, begin: Callable[[], None] = lambda: None
) -> Iterator[Run]:
    net = toys.build_net()
    path = folder / "net.safetensors"
    if not path.exists():
        save_model(net, str(path))
    with machine(8, 8) as manager:
        begin()
        managed = manage({"net": net}, files={"net": [path]}, manager=manager, **FORMS[form])
        yield Run(sim, manager, net, managed)
        managed.release()
        assert not manager.ledger.entries
        assert [sim.stats(index).used_bytes for index in range(2)] == [0, 0]


def note(what: str, counts: Counter[str]) -> None:
    line = f"| {what} | {', '.join(f'{number} {name}' for name, number in counts.items())} |"
    print(line)
    path = os.environ.get("HIGHWATER_FAULTS_RESULTS")
    if path:
        with open(path, "a") as file:
            file.write(f"{line}\n")


@pytest.mark.parametrize("stride", [pytest.param(9, id="sample"), ALL])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("form", FORMS)
def test_trouble_at_a_block_boundary(
    sim, machine, toys, tmp_path, monkeypatch, form: str, error: str, stride: int
) -> None:
    """Before and behind each block of each step."""
    monkeypatch.setattr("highwater.memory.runtime.forwards.forward_pass.LOOK_EVERY_S", 0.01)
    counts: Counter[str] = Counter()
    with a_run(sim, machine, toys, tmp_path, form) as run:
        want = run.compute()
        left = [0]

        def cross(*_: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise ERRORS[error]("trouble on purpose")

        blocks = [*run.net.doubles, *run.net.singles]
        handles = [block.register_forward_pre_hook(cross) for block in blocks]
        handles += [block.register_forward_hook(cross) for block in blocks]
        num_boundaries = 2 * len(blocks) * STEPS
        for nth in range(1, num_boundaries + 1, stride):
            left[0] = nth
            with pytest.raises(ERRORS[error], match="trouble on purpose"):
                run.compute()
            run.assert_books()
            assert torch.equal(run.compute(), want), nth
            counts[f"of {num_boundaries} boundaries"] += 1
        for handle in handles:
            handle.remove()
    note(f"{error} at block boundaries, {form}", counts)


FAULTS: dict[str, Callable[[Any, int], None]] = {
    "allocation": lambda sim, nth: [sim.fail_alloc(index, nth) for index in range(2)],
    "copy": lambda sim, nth: [sim.fail_copy(index, nth) for index in range(2)],
}

NUMBERS: dict[str, Callable[[Any], int]] = {
    "allocation": lambda stats: stats.num_allocs,
    "copy": lambda stats: stats.num_h2d + stats.num_d2h + stats.num_peer,
}


@pytest.mark.parametrize("stride", [pytest.param(17, id="sample"), ALL])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_failed_allocation_or_copy(sim, machine, toys, tmp_path, form: str, fault: str, stride: int) -> None:
    """The n-th of a run that begins with nothing on the devices, for each n."""
    counts: Counter[str] = Counter()
    with a_run(sim, machine, toys, tmp_path, form) as run:
        run.compute()
        run.managed.members[0].managed.unload()
        sim.reset_stats()
        want = run.compute()
        number = max(NUMBERS[fault](sim.stats(index)) for index in range(2))
        for nth in range(1, number + 1, stride):
            run.managed.members[0].managed.unload()
            FAULTS[fault](sim, nth)
            try:
                assert torch.equal(run.compute(), want), nth
                counts["without effect"] += 1
            except RuntimeError:
                counts["errors"] += 1
            FAULTS[fault](sim, 0)
            run.assert_books()
            assert torch.equal(run.compute(), want), nth
        counts[f"of {number} tried"] = len(range(1, number + 1, stride))
    assert counts["errors"]
    note(f"{fault} failed, {form}", counts)


@pytest.mark.faults
@pytest.mark.parametrize("form", FORMS)
def test_a_refused_registration(sim, machine, toys, tmp_path, form: str) -> None:
    """The n-th of packing and loading, for each n: what could not be page-locked is pageable, and an event says so."""
    counts: Counter[str] = Counter()
    with a_run(sim, machine, toys, tmp_path, form) as run:
        want = run.compute()
    for nth in itertools.count(1):
        with a_run(sim, machine, toys, tmp_path, form, begin=lambda: sim.fail_registration(nth)) as run:  # noqa: B023
            assert torch.equal(run.compute(), want), nth
            run.assert_books()
            assert torch.equal(run.compute(), want), nth
            events = run.manager.report()["events"]
        sim.fail_registration(0)
        assert sim.pinned().used_bytes == sim.pinned().num_registered == 0, (
            "what was page-locked beside the refused piece is unlocked again"
        )
        if not any("the driver refused to page-lock more memory" in event["reason"] for event in events):
            break
        counts["refused"] += 1
    assert bool(counts["refused"]) == (form not in ("pageable", "stored")), "these page-lock nothing"
    note(f"registration refused, {form}", counts or Counter({"without any": 1}))
