"""Bounce buffers: how much of them is filled at a time."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from highwater.memory.transfer.bounce_buffers import CACHED_BYTES, BounceBuffers, WindowCopies
from highwater.memory.transfer.copy_stream import CopyStream
from highwater.memory.transfer.devices import find_device
from highwater.memory.units import MIB

BUFFER_BYTES = 3 * CACHED_BYTES


@pytest.fixture
def bounce(sim: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)]):
        copies = CopyStream(find_device("gpu:0"))
        bounce = BounceBuffers(copies)
        bounce.open(BUFFER_BYTES, locks=True)
        yield bounce
        bounce.close()


def copy(bounce: BounceBuffers, *, was_cached: bool) -> None:
    part = bounce.take()[: bounce.convertible_bytes]
    target = bounce.copies.allocate(part.numel())
    bounce.note_cached(was_cached)
    bounce.queue_copies([(part, target)])
    bounce.copies.drain()


def test_of_a_file_in_ram_so_much_is_converted_at_a_time_as_caches_hold(bounce: BounceBuffers) -> None:
    for was_cached in (False, True, True, False, False):
        copy(bounce, was_cached=was_cached)
        assert bounce.convertible_bytes == (CACHED_BYTES if was_cached else BUFFER_BYTES)


def test_what_is_not_known_yet_counts_as_in_ram(bounce: BounceBuffers) -> None:
    assert bounce.convertible_bytes == CACHED_BYTES
    copy(bounce, was_cached=False)
    bounce.close()
    bounce.open(BUFFER_BYTES, locks=False)
    assert bounce.convertible_bytes == CACHED_BYTES


def test_a_buffer_that_is_smaller_is_filled(bounce: BounceBuffers) -> None:
    bounce.close()
    bounce.open(MIB, locks=True)
    assert bounce.convertible_bytes == MIB


@pytest.mark.parametrize("num_cores, num_threads", [(1, 1), (2, 1), (3, 2), (4, 3), (16, 8), (None, 1)])
def test_so_much_is_converted_for_each_thread_that_reads_from_ram(
    bounce: BounceBuffers, monkeypatch, num_cores: int | None, num_threads: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: num_cores)
    assert bounce.convertible_bytes == min(num_threads, 3) * CACHED_BYTES


@pytest.mark.parametrize("steps", [[], [MIB], [1, MIB + 3, 2 * MIB], [2 * MIB + 1]], ids=str)
def test_what_has_come_of_a_window_is_copied_while_the_rest_comes(bounce: BounceBuffers, steps: list[int]) -> None:
    sizes = [MIB, 0, 5, MIB]
    buffer = bounce.take()[: sum(sizes)]
    target = bounce.copies.allocate(sum(sizes))
    expected = torch.randint(0, 255, (sum(sizes),), dtype=torch.uint8)
    copies = WindowCopies(bounce, list(zip(buffer.split(sizes), target.split(sizes), strict=True)))
    filled = 0
    for num_bytes in [*steps, sum(sizes)]:
        buffer[filled:num_bytes] = expected[filled:num_bytes]
        copies.follow(num_bytes)
        filled = num_bytes
        bounce.copies.wait()
        assert torch.equal(target[:filled].cpu(), expected[:filled])
    copies.restart()
    buffer.copy_(expected.flip(0))
    copies.follow(sum(sizes))
    bounce.copies.wait()
    assert torch.equal(target.cpu(), expected.flip(0))
