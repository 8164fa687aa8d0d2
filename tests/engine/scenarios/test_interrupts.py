"""An interrupt behind any call of the engine that moves or notes something: the next pass is right in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

from highwater.memory import manage
from highwater.memory.manager.attacher import Attacher
from highwater.memory.manager.leases import Leases
from highwater.memory.planner.staging_layout import Occupancy
from highwater.memory.runtime import packing
from highwater.memory.runtime.blocks.placed_tensors import PlacedTensors
from highwater.memory.runtime.blocks.staging import StagingArea, StagingSlot
from highwater.memory.runtime.blocks.weight_group import WeightGroup
from highwater.memory.runtime.devices.device_share import DeviceShare
from highwater.memory.runtime.devices.ledger import Ledger
from highwater.memory.runtime.devices.prefetch import Streamer
from highwater.memory.runtime.forwards.device_hops import DeviceHops
from highwater.memory.runtime.forwards.forward_blocks import Forwards
from highwater.memory.runtime.forwards.forward_pass import Passes
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.runtime.packing import Packing
from highwater.memory.transfer.bounce_buffers import BounceBuffers
from highwater.memory.transfer.copy_stream import CopyStream
from highwater.memory.transfer.timing import PassTimes

CASES = {
    "streamed": ("0.45MiB", "gpu:0"),
    "pageable": ("0.45MiB,pinned=none", "gpu:0"),
    "split": ("gpu:0=unlimited,gpu:1=0.3MiB", "gpu:0&gpu:1@0.5"),
}
STEPS = [
    (Leases, "acquire_locked"),
    (Leases, "enter"),
    (PassTimes, "take"),
    (Forwards, "finish_pass"),
    (Passes, "begin"),
    (Passes, "end"),
    (Passes, "leave"),
    (DeviceShare, "begin_pass"),
    (DeviceShare, "end_pass"),
    (DeviceShare, "enter"),
    (DeviceShare, "leave"),
    (Streamer, "acquire"),
    (Streamer, "prefetch"),
    (StagingArea, "claim"),
    (StagingArea, "fill"),
    (StagingArea, "give_back"),
    (StagingSlot, "use"),
    (WeightGroup, "compute_from"),
    (WeightGroup, "rest"),
    (Occupancy, "take"),
    (DeviceHops, "visit"),
    (DeviceHops, "copy"),
]


@pytest.fixture(autouse=True)
def others_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for a pass learns soon that no thread runs it any more."""
    monkeypatch.setattr("highwater.memory.runtime.forwards.forward_pass.LOOK_EVERY_S", 0.01)


def in_another_thread(work: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    outcome: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    thread.join(600)
    return outcome[0] if outcome else "hangs"


def interrupt(monkeypatch: pytest.MonkeyPatch, kind: object, step: str) -> list[int]:
    """Raise a `KeyboardInterrupt` behind a call of a step; returns the countdown to it, which runs from 1 on."""
    original, left = getattr(kind, step), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(kind, step, interrupted)
    return left


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "step"), STEPS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_the_next_pass_is_right(toys, machine, monkeypatch, case: str, kind: object, step: str, nth: int) -> None:
    profile, placement = CASES[case]
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    left = interrupt(monkeypatch, kind, step)

    @torch.no_grad()
    def compute() -> torch.Tensor:
        return net(x).cpu()

    with machine(8, 8) as manager, manage(net, profile=profile, placement=placement, manager=manager) as managed:
        want = compute()
        for another in (True, False):
            left[0] = nth
            while left[0] > 0:  # some steps come once in a pass
                try:
                    compute()
                except KeyboardInterrupt:
                    break
                assert left[0] < nth, "a pass does not take this step"
            left[0] = 0
            got = in_another_thread(compute) if another else compute()
            assert isinstance(got, torch.Tensor) and torch.equal(got, want)
        assert not managed.members[0].leases


COMING_AND_GOING = [
    (BounceBuffers, "close"),
    (BounceBuffers, "open"),
    (CopyStream, "allocate"),
    (CopyStream, "drain"),
    (Ledger, "change"),
    (DeviceShare, "fit_staging"),
    (DeviceShare, "free_staging"),
    (DeviceShare, "load"),
    (WeightGroup, "drop"),
    (WeightGroup, "load"),
    (PlacedTensors, "put"),
]


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("placement", ["gpu:0:host", "gpu:0:disk"])
@pytest.mark.parametrize(("kind", "step"), COMING_AND_GOING, ids=lambda part: getattr(part, "__name__", part))
def test_the_books_say_what_is_there(
    toys, machine, sim, tmp_path, monkeypatch, placement: str, kind: object, step: str, nth: int
) -> None:
    """Interrupted while it is loaded, and while it leaves."""
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    path = tmp_path / "net.safetensors"
    save_model(net, str(path))
    left = interrupt(monkeypatch, kind, step)

    @torch.no_grad()
    def compute() -> torch.Tensor:
        return net(x).cpu()

    num_interrupted = 0
    with machine(8) as manager:
        files = {"net": [path]}
        managed = manage({"net": net}, "0.45MiB", placement=placement, files=files, manager=manager)
        managed_component, want = managed.members[0].managed, compute()
        for is_leaving in (False, True):
            (compute if is_leaving else managed_component.unload)()
            left[0] = nth
            try:
                (managed_component.unload if is_leaving else compute)()
            except KeyboardInterrupt:
                num_interrupted += 1
            left[0] = 0
            manager.recover()  # a pass may be open, with what it holds
            managed_component.unload()
            assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0") == 0
            got = compute()
            assert torch.equal(got, want)
            assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0") > 0
        managed.release()
        assert not manager.ledger.entries
    assert num_interrupted or nth > 1 or (kind is BounceBuffers and placement == "gpu:0:host")


JOINING = [
    (ManagedComponent, "attach"),
    (ManagedComponent, "hook"),
    (ManagedComponent, "find_hooked_modules"),
    (Ledger, "charge"),
    (Packing, "measure"),
    (Packing, "pack"),
    (Attacher, "attach"),
    (Attacher, "prepare"),
    (WeightGroup, "pack"),
]


@pytest.mark.parametrize(("kind", "step"), JOINING, ids=lambda part: getattr(part, "__name__", part))
def test_who_was_interrupted_while_joining_is_not_there(toys, machine, monkeypatch, kind: object, step: str) -> None:
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    left = interrupt(monkeypatch, kind, step)
    with machine(8) as manager, torch.no_grad():
        want = net(x)
        left[0] = 1
        with pytest.raises(KeyboardInterrupt):
            manage(net, "0.45MiB", manager=manager)
        assert not manager.members
        assert not manager.ledger.entries
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
        assert torch.equal(net(x), want)
        with manage(net, "0.45MiB", manager=manager):
            assert torch.allclose(net(x).cpu(), want, atol=1e-5)


LEAVING = [
    (Ledger, "change"),
    (Ledger, "credit"),
    (Packing, "end"),
    (Packing, "end_group"),
    (DeviceShare, "free_staging"),
    (WeightGroup, "drop"),
    (PlacedTensors, "put"),
    (packing, "unpack"),
]


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize(
    ("action", "kind", "step"),
    [
        (action, kind, step)
        for action in ("release", "reprofile")
        for kind, step in LEAVING
        if (action, step) != ("reprofile", "end_group")  # what it packs anew is unpacked block by block
    ],
    ids=lambda part: getattr(part, "__name__", part),
)
def test_who_was_interrupted_while_leaving_can_leave_again(
    toys, machine, sim, monkeypatch, action: str, precision: str, kind: object, step: str
) -> None:
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    left = interrupt(monkeypatch, kind, step)
    with machine(8) as manager, torch.no_grad():
        managed = manage(net, "0.45MiB", placement="gpu:0", precision=precision, manager=manager)
        want = net(x).cpu()
        left[0] = 1
        with pytest.raises(KeyboardInterrupt):
            managed.release() if action == "release" else managed.reprofile("auto", placement="gpu:0:host")
        left[0] = 0
        if action == "reprofile":
            assert torch.equal(net(x).cpu(), want)
        managed.release()
        assert not manager.members and not manager.ledger.entries
        assert sim.stats(0).used_bytes == 0
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
        assert torch.allclose(net(x), want, atol=1e-5)
