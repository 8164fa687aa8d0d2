"""Copies and kernels run beside each other on the card, in the order that their events say, and in no other."""

from __future__ import annotations

import threading

import pytest
import torch

from highwater.benchmarks.gpu_worker import Meter, watch_copies
from highwater.memory import manage
from highwater.tests.gpu.conftest import Card
from highwater.tests.gpu.models import build, make_inputs, reference, weight_bytes

NUM_PASSES = 12
# What a pass may copy beside weights.
SMALL_COPIES = 64 << 10


def streaming(net: torch.nn.Module, share: float = 0.4) -> str:
    return f"{share * weight_bytes(net) / 2**20:.4f}MiB"


@pytest.mark.parametrize("busy", [False, True], ids=["card waits", "host waits"])
def test_passes_queued_without_a_wait_keep_their_weights(card: Card, busy: bool) -> None:
    """A copy that came too early would overwrite the weights of a block that still computes."""
    net, inputs = build(card), make_inputs(card, NUM_PASSES)
    wanted = reference(net, card, inputs)
    on_card = [x.to(card.torch_device) for x in inputs]
    with card.manager() as manager, manage(net, profile=streaming(net), placement="gpu:0", manager=manager):
        outputs = []
        for x in on_card:
            if busy:
                card.delay()
            outputs.append(net(x))
        for got, want in zip(outputs, wanted, strict=True):
            assert torch.equal(got.cpu(), want)


def test_kernels_that_take_long_hold_back_the_copies_behind_them(card: Card) -> None:
    """Each block begins late: copies that did not wait for it would be done long before."""
    net, inputs = build(card), make_inputs(card, 2)
    wanted = reference(net, card, inputs)
    handles = [block.register_forward_pre_hook(lambda *_: card.delay()) for block in [*net.doubles, *net.singles]]
    with card.manager() as manager, manage(net, profile=streaming(net), placement="gpu:0", manager=manager):
        for x, want in zip(inputs, wanted, strict=True):
            assert torch.equal(net(x.to(card.torch_device)).cpu(), want)
    for handle in handles:
        handle.remove()


def test_a_forward_on_a_stream_of_its_own_is_equal(card: Card) -> None:
    net, inputs = build(card), make_inputs(card, 4)
    wanted = reference(net, card, inputs)
    with card.manager() as manager, manage(net, profile=streaming(net), placement="gpu:0", manager=manager):
        for x, want in zip(inputs, wanted, strict=True):
            stream = torch.Stream(device=card.torch_device)
            with stream:
                card.delay()
                got = net(x.to(card.torch_device))
            stream.synchronize()
            assert torch.equal(got.cpu(), want)


def test_two_threads_with_a_stream_each_do_not_disturb_each_other(card: Card) -> None:
    nets = [build(card, seed=seed) for seed in (0, 1)]
    inputs = make_inputs(card, 4)
    wanted = [reference(net, card, inputs) for net in nets]
    outputs: list[list[torch.Tensor]] = [[], []]
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            stream = torch.Stream(device=card.torch_device)
            with torch.no_grad(), stream:
                for x in inputs:
                    outputs[number].append(nets[number](x.to(card.torch_device)).cpu())
        except BaseException as error:
            failures.append(error)

    with card.manager() as manager:
        models = {"first": nets[0], "second": nets[1]}
        with manage(models, profile=streaming(nets[0]), placement="gpu:0", manager=manager):
            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert failures == []
    for got, want in zip(outputs, wanted, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_no_more_is_copied_than_the_plan_says(card: Card, record_property) -> None:
    """By torch's profiler on a GPU; it also tells in which part of the copies' time kernels ran."""
    net, (x,) = build(card), make_inputs(card, 1)
    on_card = x.to(card.torch_device)
    with card.manager() as manager, manage(net, profile=streaming(net), placement="gpu:0", manager=manager) as managed:
        for _ in range(3):
            net(on_card)
        before = manager.bytes_moved()
        moved, overlap = watch_copies(lambda: net(on_card), Meter(card.torch_device))
        counted = manager.bytes_moved() - before
        (share,) = managed.plan["model"].shares
        assert 0 < counted <= share.streamed_block_bytes * len(share.streamed)
    if moved is None:
        pytest.skip("the profiler has no access to this card")
    record_property("bytes copied in a pass", moved)
    assert 0 <= moved - counted < SMALL_COPIES
    if overlap is not None:
        record_property("copies' time in which kernels ran", f"{overlap:.0%}")
        assert overlap > 0, "no copy ran beside a kernel"
