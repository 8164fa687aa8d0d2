"""Any deeds in any order around a component that another GPU stores: its results and the books stay right."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from highwater.headless import simdevice
from highwater.memory import DoesNotFit, InvalidInput, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.tests.engine.conftest import bare_net, build_net

KIB = 1 << 10
TIGHT = "gpu:0=0.45MiB"
Deed = tuple[str, int]
DEEDS = ("run", "run", "run other", "evict there", "evict here", "write", "occupy", "watermark")
TROUBLE = ("fail copy", "fail alloc", "interrupt", "place", "run of nodes")
deeds = st.tuples(st.sampled_from([*DEEDS, *TROUBLE]), st.integers(0, 30))


class Interrupt(BaseException):
    """As what a host raises in a forward, which runs no hooks."""


class Rig:
    """A component on ``gpu:0`` that ``gpu:1`` stores, another one on ``gpu:1``, and what both should compute."""

    def __init__(self, manager: MemoryManager, path: Path, *, in_file: bool) -> None:
        self.manager = manager
        self.net = bare_net() if in_file else build_net()
        self.twin = build_net()
        files = {"files": {"net": path}} if in_file else {}
        self.handle = manage({"net": self.net}, placement="gpu:0:gpu:1", profile=TIGHT, manager=manager, **files)
        self.other = build_net(seed=1)
        self.of_other = self.other(self.x)
        manage({"other": self.other}, placement="gpu:1", manager=manager)
        self.occupied = 0

    @property
    def x(self) -> torch.Tensor:
        return torch.linspace(-1, 1, 128).reshape(1, 2, 64)

    def look(self) -> None:
        """Compare the books with what is there."""
        self.manager.ledger.check()
        for index in range(2):
            assert self.manager.ledger.used(f"gpu:{index}") == simdevice.stats(index).used_bytes

    def compute(self) -> None:
        assert torch.allclose(self.net(self.x).cpu(), self.twin(self.x), atol=1e-5)

    def do(self, deed: str, number: int) -> None:
        blocks = [*self.net.doubles, *self.net.singles]
        block = number % len(blocks)
        match deed:
            case "run":
                self.compute()
            case "run other":
                assert torch.allclose(self.other(self.x).cpu(), self.of_other, atol=1e-5)
            case "evict there":
                self.manager.free_memory("gpu:1", number * 40 * KIB, "a test asked")
            case "evict here":
                self.manager.free_memory("gpu:0", number * 20 * KIB, "a test asked")
            case "write":
                for module in (self.net, self.twin):
                    layer = [*module.doubles, *module.singles][block]
                    (layer.up.weight if number % 2 else layer.gain).mul_(0.75)
            case "occupy":
                free = self.manager.devices["gpu:1"].free_bytes() + self.occupied
                self.occupied = min(number * 60 * KIB, free)
                simdevice.occupy(1, self.occupied)
            case "watermark":
                self.manager.set_watermark("gpu:1", number * 20 * KIB, number * 25 * KIB)
            case "fail copy" | "fail alloc":
                arm = simdevice.fail_copy if deed == "fail copy" else simdevice.fail_alloc
                arm(number % 2, number)
                try:
                    self.compute()
                finally:
                    arm(number % 2, 0)
            case "interrupt":
                handle = blocks[block].down.register_forward_pre_hook(self.stop)
                try:
                    self.net(self.x)
                finally:
                    handle.remove()
                    self.manager.recover()
            case "place":
                places = ["gpu:0:gpu:1", "gpu:0:gpu:1", "gpu:1:gpu:0", "gpu:0", "gpu:0&gpu:1"]
                self.handle.reprofile(TIGHT, placement=places[number % len(places)])
            case "run of nodes":
                self.manager.begin_run(str(number), "a run")
                self.manager.end_run()

    def stop(self, *_: object) -> None:
        raise Interrupt


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("store") / "net.safetensors"
    state = {name: weight for name, weight in build_net().state_dict().items() if "gain" not in name}
    del state["out.weight"]
    save_file(state, path)
    return path


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(deeds, min_size=1, max_size=25), st.booleans(), st.booleans(), st.sampled_from([900, 1500, 4000]))
def test_any_deeds_in_any_order(sim, file: Path, orders: Sequence[Deed], in_file: bool, peer: bool, there: int) -> None:
    sizes = (4000, there)
    with (
        torch.no_grad(),
        sim.cluster([sim.SimDeviceSpec(total_bytes=size * KIB, has_peer_access=peer) for size in sizes]),
    ):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        manager.set_watermark("host", 0, 0)
        rig = Rig(manager, file, in_file=in_file)
        try:
            for deed, number in orders:
                try:
                    rig.do(deed, number)
                except (DoesNotFit, InvalidInput, UnsafeState, Interrupt):
                    pass
                except RuntimeError as error:  # of a copy, or of an allocation
                    assert "simulated failure" in str(error) or isinstance(error, torch.OutOfMemoryError), error
                rig.look()
            simdevice.occupy(1, 0)
            manager.set_watermark("gpu:1", 0, 0)
            with suppress(torch.OutOfMemoryError):  # of activations, which it learns from
                rig.compute()
            rig.compute()
            rig.look()
        finally:
            del rig
            manager.release_all()
            manager.ledger.check()
