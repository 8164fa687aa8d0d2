"""`ledger.check()` compares the books with the memory that is there: it passes in every form of a component, and fails
for every entry that is wrong and for memory that comes or goes without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_model

from highwater.memory import MemoryManager, manage
from highwater.memory.runtime.blocks.weight_store import HostStore
from highwater.memory.runtime.devices.ledger import Entry, Kind
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.transfer import pinned_memory
from highwater.memory.transfer.pinned_memory import HostSlab
from highwater.memory.units import MIB

FORMS = {
    "resident": {},
    "streamed": {"profile": "0.6MiB"},
    "eight bits": {"profile": "0.45MiB", "precision": "fp8 scaled"},
    "pageable": {"profile": "0.6MiB,pinned=none"},
    "in its file": {"profile": "0.6MiB", "placement": "gpu:0:disk"},
    "split": {"profile": "0.45MiB", "placement": "gpu:0&gpu:1"},
    "split in its file": {"profile": "0.45MiB", "placement": "gpu:0&gpu:1:disk"},
    "on the CPU": {"placement": "cpu", "precision": "fp8 scaled"},
}


@pytest.fixture
def computed(toys, machine, tmp_path) -> Callable[..., object]:
    """A component that has computed, in one of the forms."""

    @contextmanager
    def build(form: str) -> Iterator[tuple[MemoryManager, ManagedComponent]]:
        net = toys.build_net()
        save_model(net, str(tmp_path / "net.safetensors"))
        with machine(8, 8) as manager, torch.no_grad():
            choices = {"placement": "gpu:0", **FORMS[form]}
            files = {"net": [tmp_path / "net.safetensors"]}
            managed = manage({"net": net}, manager=manager, files=files, **choices)
            net(torch.ones(1, 3, 64))
            yield manager, managed.members[0].managed

    return build


@pytest.mark.parametrize("form", FORMS)
def test_wrong_entries_are_found_and_named(computed, form: str) -> None:
    with computed(form) as (manager, _):
        ledger = manager.ledger
        ledger.check()
        wrong: list[tuple[Entry, int]] = []
        for entry, num_bytes in ledger.entries.items():
            wrong += [(entry, num_bytes + 1), (entry, num_bytes - 1), (entry, 0)]
            wrong += [((place, "net", kind), 1) for place in ledger.rows for kind in Kind]
            wrong += [((entry[0], "gone", entry[2]), num_bytes), ((entry[0], "net", entry[2]), -num_bytes)]
        for (place, component, kind), num_bytes in wrong:
            before = ledger.entry(place, component, kind)
            if num_bytes != before:
                ledger.write(place, component, kind, num_bytes)
                with pytest.raises(AssertionError, match=f"{component}'s {kind.value} at {place}"):
                    ledger.check()
                ledger.write(place, component, kind, before)
                ledger.check()


Fault = tuple[object, str, object]
"""An object, what of it changes beside the books, and to what."""


def faults_of(managed: ManagedComponent) -> Iterator[Fault]:
    if managed.packing.books.taken["pinned"]:
        yield pinned_memory, "locked_arenas", {}
    for share in managed.shares:
        if share.streamer is not None:
            yield share.memory, "streamer", None
        if share.memory.scratch is not None:
            yield share.memory, "scratch", None
        yield share.memory, "scratch", torch.empty(MIB, dtype=torch.uint8, device=share.device.torch_device)
        if share.bounce is not None:
            opened = [torch.empty(4096, dtype=torch.uint8)] * (0 if share.bounce.buffers else 2)
            yield share.bounce, "slabs", (opened, {"host": 8192} if opened else {})
        for group in share.groups:
            if group.copy is not None:
                yield group, "copy", None
                larger = torch.empty(group.slab_bytes + 256, dtype=torch.uint8, device=share.device.torch_device)
                yield group.copy, "slab", larger
            if (
                isinstance(group.at_rest.store, HostStore) and group.at_rest.blocks_host
            ):  # else its arena stays: others lie in it, too
                yield group.at_rest, "store", None
            if group.at_rest.store is not None and group.slab_bytes:
                yield (
                    group.at_rest,
                    "store",
                    HostStore(HostSlab(torch.empty(group.slab_bytes + 256, dtype=torch.uint8))),
                )


@pytest.mark.parametrize("form", FORMS)
def test_memory_that_comes_or_goes_beside_the_books_is_found(computed, monkeypatch, form: str) -> None:
    with computed(form) as (manager, managed):
        num_faults = 0
        for place, name, wrong in faults_of(managed):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, wrong)
                with pytest.raises(AssertionError, match="in the ledger"):
                    manager.ledger.check()
            manager.ledger.check()
            num_faults += 1
        assert num_faults >= 3


@pytest.mark.parametrize("form", FORMS)
def test_books_that_an_interrupt_left_behind_are_put_right_between_runs(computed, form: str) -> None:
    """A step was taken, and its entry was not made: on a device, or for the buffers in front of it."""
    with computed(form) as (manager, _):
        for (place, component, kind), num_bytes in manager.ledger.entries.items():
            if kind is Kind.WEIGHTS and place in ("host", "pinned"):
                continue
            for other in (0, 2 * num_bytes):
                manager.ledger.write(place, component, kind, other)
                manager.begin_run("1", "")
                manager.end_run()
                assert manager.ledger.entry(place, component, kind) == num_bytes
