"""What plan, ledger and report say of the card's memory is what torch's allocator and the driver have counted."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import manage
from highwater.tests.gpu.conftest import Card
from highwater.tests.gpu.models import build, make_inputs, weight_bytes

SHARES = {"resident": None, "most": 0.7, "least": 0.3}
# Tensors that a pass holds at a time; each may be rounded up.
NUM_TENSORS = 400


def as_profile(share: float | None, num_bytes: int) -> str:
    return "unlimited" if share is None else f"{share * num_bytes / 2**20:.4f}MiB"


def measure_activations(card: Card, net: torch.nn.Module, x: torch.Tensor) -> int:
    """Return the peak of a pass without the engine, beside the weights."""
    net.to(card.torch_device)
    on_card = x.to(card.torch_device)
    net(on_card)  # libraries take their workspaces
    before = card.device.allocated_bytes()
    card.device.reset_peak()
    net(on_card)
    peak = card.device.peak_bytes() - before
    net.to("cpu")
    card.device.empty_cache()
    return peak


@pytest.mark.parametrize("share", SHARES)
def test_the_peak_is_residents_staging_and_activations(card: Card, share: str, record_property) -> None:
    net, (x,) = build(card), make_inputs(card, 1)
    activations = measure_activations(card, net, x)
    profile = as_profile(SHARES[share], weight_bytes(net))
    on_card = x.to(card.torch_device)
    before = card.device.allocated_bytes()
    with card.manager() as manager, manage(net, profile=profile, placement="gpu:0", manager=manager) as managed:
        for _ in range(2):
            card.device.reset_peak()
            net(on_card)
            peak = card.device.peak_bytes() - before
            planned = managed.plan["model"].shares[0].device_bytes
            record_property("peak", peak)
            record_property("planned and activations", planned + activations)
            assert peak <= planned + activations + NUM_TENSORS * card.rounding


@pytest.mark.parametrize("share", SHARES)
def test_the_ledger_is_what_the_allocator_counts(card: Card, share: str) -> None:
    net, (x,) = build(card), make_inputs(card, 1)
    measure_activations(card, net, x)
    profile = as_profile(SHARES[share], weight_bytes(net))
    before = card.device.allocated_bytes()
    with card.manager() as manager, manage(net, profile=profile, placement="gpu:0", manager=manager) as managed:
        for _ in range(2):
            net(x.to(card.torch_device))
            rounded = card.device.allocated_bytes() - before - manager.ledger.used("gpu:0")
            assert 0 <= rounded <= NUM_TENSORS * card.rounding
        (device,) = (device for device in managed.report()["devices"] if device["name"] == "gpu:0")
        assert device["managed_bytes"] == manager.ledger.used("gpu:0")
        assert device["peak_bytes"] >= device["managed_bytes"]


def test_the_driver_has_everything_back_after_release(card: Card, record_property) -> None:
    net, (x,) = build(card), make_inputs(card, 1)
    measure_activations(card, net, x)
    before = card.device.module.mem_get_info(card.torch_device)[0]
    for _ in range(2):
        with card.manager() as manager, manage(net, profile="unlimited", placement="gpu:0", manager=manager):
            net(x.to(card.torch_device))
            held = before - card.device.module.mem_get_info(card.torch_device)[0]
            assert held >= manager.ledger.used("gpu:0")
        card.synchronize()
        card.device.empty_cache()
        left = before - card.device.module.mem_get_info(card.torch_device)[0]
        record_property("bytes left", left)
        assert left <= 2 * card.segment


def test_free_bytes_are_counted_once(card: Card) -> None:
    """What the allocator has cached counts as free, what tensors hold does not."""
    free = card.device.free_bytes()
    size = 64 << 20
    held = torch.empty(size, dtype=torch.uint8, device=card.torch_device)
    assert 0 <= free - card.device.free_bytes() - size <= card.segment
    del held
    assert abs(free - card.device.free_bytes()) <= card.segment
