"""What the driver locks and refuses, which the engine's arenas and the simulated device take for granted."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from highwater.memory import manage
from highwater.memory.transfer.pinned_memory import PORTABLE, discard_error, pinned_used_bytes
from highwater.memory.units import PAGE_BYTES
from highwater.tests.gpu.conftest import Card
from highwater.tests.gpu.models import build, make_inputs

PAGE = PAGE_BYTES
Pages = Callable[[float, float], torch.Tensor]
NUM_PAGES = 16


@pytest.fixture
def pages() -> Pages:
    """Return a function that gives one range of the same ordinary memory, from one page to another.

    Each with a storage of its own: torch asks for the start of the storage whether a tensor is pinned.
    """
    memory = mmap.mmap(-1, NUM_PAGES * PAGE)

    def view(begin: float, end: float) -> torch.Tensor:
        offset = int(begin * PAGE)
        return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=int(end * PAGE) - offset)

    return view


@pytest.fixture
def driver(card: Card) -> Iterator[SimpleNamespace]:
    """The calls that lock and unlock; what a test locks is unlocked after it, and its last error is read."""
    cudart = card.device.module.cudart()
    locked: list[int] = []

    def lock(tensor: torch.Tensor) -> int:
        code = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, PORTABLE))
        if code:
            discard_error(card.torch_device)
        else:
            locked.append(tensor.data_ptr())
        return code

    def unlock(tensor: torch.Tensor) -> int:
        code = int(cudart.cudaHostUnregister(tensor.data_ptr()))
        if code:
            discard_error(card.torch_device)
        elif tensor.data_ptr() in locked:
            locked.remove(tensor.data_ptr())
        return code

    yield SimpleNamespace(lock=lock, unlock=unlock)
    card.synchronize()
    for address in locked:
        cudart.cudaHostUnregister(address)
    discard_error(card.torch_device)


def test_locked_memory_is_pinned_until_it_is_unlocked(driver: SimpleNamespace, pages: Pages) -> None:
    part = pages(1, 5)
    assert not part.is_pinned()
    assert driver.lock(part) == 0
    assert part.is_pinned() and pages(3, 5).is_pinned()
    assert not pages(8, 16).is_pinned()
    assert driver.unlock(part) == 0
    assert not part.is_pinned()


def test_locked_ranges_do_not_overlap(driver: SimpleNamespace, pages: Pages, record_property) -> None:
    assert driver.lock(pages(4, 8)) == 0
    for begin, end in ((4, 8), (0, 6), (0, 16), (5, 6)):
        code = driver.lock(pages(begin, end))
        record_property(f"pages {begin} to {end} beside 4 to 8", code)
        assert code != 0


def test_two_locked_ranges_that_share_a_page_are_refused_or_right(
    card: Card, driver: SimpleNamespace, pages: Pages, record_property
) -> None:
    """The engine needs no such ranges, ComfyUI makes some. Driver 580.159 on an H200 locks them."""
    pages(0, 2).random_(generator=torch.Generator().manual_seed(0))
    assert driver.lock(pages(0, 0.5)) == 0
    code = driver.lock(pages(0.5, 1.5))
    record_property("the second range of a page", code)
    if code:
        assert not pages(1, 1.5).is_pinned()
        assert driver.lock(pages(1, 2)) == 0, "the next page is another matter"
    for begin, end in ((0, 0.5), (1, 1.5), *(() if code else ((0.5, 1.5),))):
        part = pages(begin, end)
        assert torch.equal(copy_right_or_refused(card, part), part)


def copy_right_or_refused(card: Card, part: torch.Tensor) -> torch.Tensor | None:
    """Return what reaches the card; None where the driver refuses."""
    try:
        return part.to(card.torch_device, non_blocking=True).cpu()
    except RuntimeError:
        discard_error(card.torch_device)
        return None


def test_a_copy_lies_in_one_locked_range_or_in_none(
    card: Card, driver: SimpleNamespace, pages: Pages, record_property
) -> None:
    """Why no slab of the engine lies in two arenas.

    Driver 580.159 on an H200 refuses what begins in a locked range and ends beyond it, and copies what begins before
    one as if nothing were locked. The simulated device refuses both, as the driver's documentation has it.
    """
    pages(0, NUM_PAGES).random_(generator=torch.Generator().manual_seed(0))
    assert driver.lock(pages(4, 8)) == 0 and driver.lock(pages(8, 12)) == 0
    for begin, end in ((4, 8), (5, 6), (0, 4), (12, 16)):
        part = pages(begin, end)
        assert torch.equal(copy_right_or_refused(card, part), part)
    refused = []
    for begin, end in ((4, 9), (4, 12), (6, 10), (11, 13), (0, 5), (0, 16)):
        part = pages(begin, end)
        got = copy_right_or_refused(card, part)
        if got is None:
            refused.append((begin, end))
        else:
            assert torch.equal(got, part), "neither refused nor right"
    record_property("copies refused, of 6 over the edge of a range", len(refused))
    assert refused[:4] == [(4, 9), (4, 12), (6, 10), (11, 13)], "what begins in a locked range"


def test_a_refused_call_leaves_no_error_behind(card: Card, driver: SimpleNamespace, pages: Pages) -> None:
    assert driver.unlock(pages(0, NUM_PAGES)) != 0
    assert (torch.ones(8, device=card.torch_device) + 1).sum().item() == 16
    assert driver.lock(pages(0, NUM_PAGES)) == 0


def test_many_small_ranges_and_a_large_one_can_be_locked(driver: SimpleNamespace, record_property) -> None:
    """As packing does, arena by arena; every second one is unlocked before the next is locked."""
    memory = [torch.frombuffer(mmap.mmap(-1, size * PAGE), dtype=torch.uint8) for size in (1, 2, 3, 4096) * 8]
    for number, tensor in enumerate(memory):
        assert driver.lock(tensor) == 0
        if number % 2:
            assert driver.unlock(tensor) == 0
    record_property("ranges locked", len(memory))


def test_weights_at_rest_are_page_locked_and_unlocked_with_their_release(card: Card) -> None:
    before = pinned_used_bytes()
    with card.manager() as manager:
        net, (x,) = build(card), make_inputs(card, 1)
        managed = manage(net, profile="unlimited", placement="gpu:0", manager=manager)
        net(x.to(card.torch_device))
        assert manager.ledger.used("pinned") == pinned_used_bytes() - before > 0
        assert all(group.host_slab.is_pinned() for group in managed.members[0].managed.groups)
        managed.release()
        assert pinned_used_bytes() == before
        assert not any(weight.is_pinned() for weight in net.parameters())
