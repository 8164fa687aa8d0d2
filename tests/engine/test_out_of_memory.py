"""After a forward ran out of memory the next one fits, if any plan does, and the user reads what was done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.footprint import least_bytes
from highwater.memory.units import MIB

DIM = 64
TRIES = 2


class Hungry(nn.Module):
    """Layers beside which a forward takes ``scale`` times its input at one place, or at each.

    Args:
        place: the number of a layer, or -1 for all; from ``len(widths)`` on beside them all.
    """

    def __init__(self, widths: list[int], place: int = -1, scale: int = 1) -> None:
        super().__init__()
        pairs = ((nn.Linear(DIM, width), nn.Linear(width, DIM)) for width in widths)
        self.layers = nn.ModuleList(Greedy(nn.Sequential(*pair)) for pair in pairs)
        self.place, self.scale = place, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scale if self.place in (-1, number) else 0)
        return take(x, self.scale) if self.place >= len(self.layers) else x


class Greedy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, scale: int) -> torch.Tensor:
        return take(self.inner(x), scale)


def take(x: torch.Tensor, scale: int) -> torch.Tensor:
    """Return the input as it is, after half of what is taken and then the other half were there for a moment."""
    if not scale:
        return x
    first = x.new_zeros(x.numel() * scale // 2)
    second = x.new_zeros(x.numel() * scale // 2)
    return x + (first[:1] + second[:1])


def build(widths: list[int], place: int = -1, scale: int = 1, seed: int = 0) -> Hungry:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Hungry(widths, place, scale).eval().requires_grad_(False)


def least_of(member) -> int:
    attachment = member.attachment
    plan = attachment.plan
    return sum(
        least_bytes(attachment.component, share.blocks, plan.cast, first=not index)
        for index, share in enumerate(plan.shares)
    )


def tries_until_it_fits(manager, forward: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor, list[str]]:
    """Run until it comes through; the books are right after each failure."""
    lines = []
    for number in range(1, 5):
        try:
            return number, forward(), lines
        except torch.OutOfMemoryError as error:
            lines.append(str(error).splitlines()[-1])
        manager.ledger.check()
        for member in manager.members.values():
            assert not member.leases and not member.attachment.passes.is_busy()
            assert not any(share.computing for share in member.attachment.shares)
    raise AssertionError(lines)


SHAPES = {
    "activations larger than all weights": ([64] * 12, -1, 24, 1024),
    "small weights": ([16] * 6, -1, 8, 1024),
    "a peak in one block": ([256] * 8, 5, 8, 768),
    "a peak in the first block": ([256] * 8, 0, 8, 768),
    "a peak beside the blocks": ([256] * 8, 8, 8, 768),
    "large weights": ([512] * 8, -1, 4, 256),
    "unequal blocks": ([64, 512, 64, 256, 128, 512, 64, 64], 3, 8, 512),
}


@torch.no_grad()
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPES)
@pytest.mark.parametrize("has_runs", [True, False], ids=["runs", "no runs"])
def test_the_second_try_fits_if_any_plan_does(sim, machine, shape: str, precision: str, has_runs: bool) -> None:
    widths, place, scale, length = SHAPES[shape]
    x = torch.randn(1, length, DIM)
    with machine(512) as manager, manage(build(widths, place, scale), precision=precision, manager=manager) as managed:
        (member,) = managed.members
        want = member.attachment.module(x).cpu()
        need, whole, least = member.activation_bytes["gpu:0"], manager.ledger.used("gpu:0"), least_of(member)
    # With the input there it fits beside the least form, and not beside all weights.
    for slack in (0, (whole - least) // 2):
        with machine((least + need + slack) / MIB) as manager:
            module = build(widths, place, scale)
            with manage(module, precision=precision, manager=manager) as managed:

                def forward(module=module, manager=manager) -> torch.Tensor:
                    if has_runs:
                        manager.begin_run("r", "r")
                    try:
                        return module(x).cpu()
                    finally:
                        manager.end_run()

                tries, found, lines = tries_until_it_fits(manager, forward)
                assert tries == TRIES
                assert torch.equal(found, want)
                assert "the next run keeps" in lines[0] and "free for model" in lines[0]
                for _ in range(4):  # and so it stays
                    assert torch.equal(forward(), want)
                (share,) = managed.members[0].attachment.plan.shares
                assert share.keeps_bytes >= need
                if slack > need // 8:
                    assert share.device_bytes > least + slack // 4  # not much more leaves than has to
            if precision == "as stored":
                pairs = zip(
                    module.state_dict().values(), build(widths, place, scale).state_dict().values(), strict=True
                )
                assert all(torch.equal(found, want) for found, want in pairs)


@torch.no_grad()
def test_what_was_learned_is_said_by_plan_and_event(sim, machine) -> None:
    x = torch.randn(1, 1024, DIM)
    with machine(6) as manager, manage(build([1024] * 8, 3, 12), manager=manager) as managed:
        with pytest.raises(
            torch.OutOfMemoryError, match=r"(?s)Tried to allocate.*\nHighwater: model ran out of memory on"
        ):
            managed.members[0].attachment.module(x)
        (event,) = [event for event in manager.report()["events"] if event["kind"] == "error"]
        assert "the next run keeps" in event["reason"] and event["component"] == "model"
        for _ in range(2):
            managed.members[0].attachment.module(x)
        assert "free: an earlier run needed it" in managed.members[0].attachment.plan.text()
