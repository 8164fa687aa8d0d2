"""After the card ran out of memory the next pass comes through, with the same output and books that are right."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import manage
from highwater.tests.gpu.conftest import Card
from highwater.tests.gpu.models import build, make_inputs, reference, weight_bytes

NUM_TRIES = 3


class Hungry(torch.nn.Module):
    """The toy; behind one of its blocks it takes so many bytes for a moment."""

    def __init__(self, net: torch.nn.Module, num_bytes: int) -> None:
        super().__init__()
        self.net, self.num_bytes = net, num_bytes
        net.singles[3].register_forward_hook(self.take)

    def take(self, module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
        torch.empty(self.num_bytes, dtype=torch.uint8, device=output.device).fill_(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def assert_nothing_is_left_behind(manager) -> None:
    manager.ledger.check()
    for member in manager.members.values():
        assert not member.leases and not member.managed.passes.is_busy()


def run_until_it_fits(card: Card, module: torch.nn.Module, x: torch.Tensor, manager) -> tuple[int, torch.Tensor]:
    """Return the number of tries and the output."""
    for number in range(1, NUM_TRIES + 1):
        try:
            return number, module(x.to(card.torch_device)).cpu()
        except torch.OutOfMemoryError:
            assert_nothing_is_left_behind(manager)
    raise AssertionError(f"out of memory {NUM_TRIES} times")


def test_a_pass_that_needs_the_room_of_weights_gets_it(card: Card, record_property) -> None:
    """The card has room for the weights, or for what the pass takes beside half of them."""
    net, inputs = build(card), make_inputs(card, 2)
    wanted = reference(net, card, inputs)
    whole = weight_bytes(net)
    module = Hungry(net, whole)
    with card.free(int(1.5 * whole)), card.manager() as manager, manage(module, placement="gpu:0", manager=manager):
        tries = []
        for x, want in zip(inputs, wanted, strict=True):
            number, got = run_until_it_fits(card, module, x, manager)
            tries.append(number)
            assert torch.equal(got, want)
            assert_nothing_is_left_behind(manager)
        record_property("tries", tries)
        # On a card torch's cache may be in pieces when the second pass begins: one more try tells how much that takes.
        assert len(tries) == 2 and tries[1] <= (2 if card.is_real else 1), (
            "what one pass needed is kept free for the next"
        )


def test_room_that_another_program_takes_is_missed_and_found_again(card: Card) -> None:
    """The weights stream while the card is full, and are resident when it is not."""
    net, (x,) = build(card), make_inputs(card, 1)
    (want,) = reference(net, card, [x])
    whole = weight_bytes(net)
    with card.manager() as manager, manage(net, placement="gpu:0", manager=manager) as managed:
        streamed = []
        for free_bytes in (None, int(0.6 * whole), None):
            manager.commands.free_idle("a test")
            if free_bytes is None:
                got = net(x.to(card.torch_device)).cpu()
                streamed.append(bool(managed.members[0].managed.plan.shares[0].streamed))
            else:
                with card.free(free_bytes):
                    got = net(x.to(card.torch_device)).cpu()
                    streamed.append(bool(managed.members[0].managed.plan.shares[0].streamed))
                    manager.commands.free_idle("a test")
            assert torch.equal(got, want)
            manager.begin_run("next", "tests")
            manager.end_run()
        assert streamed == [False, True, False]


@pytest.mark.parametrize("where", [0, 7, 15], ids=["first", "middle", "last"])
def test_an_allocation_that_no_card_can_grant_leaves_nothing_behind(card: Card, where: int) -> None:
    net, inputs = build(card), make_inputs(card, 2)
    wanted = reference(net, card, inputs)
    block = [*net.doubles, *net.singles][where]
    handle = block.register_forward_hook(
        lambda *_: torch.empty(1 << 50, dtype=torch.uint8, device=card.torch_device) and None
    )
    profile = f"{0.5 * weight_bytes(net) / 2**20:.4f}MiB"
    with card.manager() as manager, manage(net, profile=profile, placement="gpu:0", manager=manager):
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                net(inputs[0].to(card.torch_device))
            assert_nothing_is_left_behind(manager)
        handle.remove()
        for x, want in zip(inputs, wanted, strict=True):
            assert torch.equal(net(x.to(card.torch_device)).cpu(), want)
