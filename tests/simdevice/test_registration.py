"""Host memory pinned by registering it, as `cudaHostRegister` does: codes, books, copies, and the error that stays."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

MIB = 1 << 20
PAGE = mmap.PAGESIZE
PORTABLE = 1
OK, INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED, NOT_REGISTERED = 0, 1, 2, 712, 713


@pytest.fixture
def cudart(hardware: ModuleType) -> SimpleNamespace:
    return torch.get_device_module("sim").cudart()


@pytest.fixture
def pages() -> Iterator[torch.Tensor]:
    """Sixteen pages of ordinary memory, all their own."""
    memory = torch.zeros(17 * PAGE, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE
    # A storage of its own: torch asks for the start of the storage whether a tensor is pinned.
    yield torch.from_numpy(memory.numpy()[start : start + 16 * PAGE])


def read_error() -> None:
    """Read the thread's last error as programs do who cannot call cudaGetLastError: launch something."""
    with pytest.raises(torch.AcceleratorError, match="of an earlier host registration"):
        torch.ones(1, device="sim")


def test_registered_memory_is_pinned_and_counted_exactly(
    hardware: ModuleType, cudart: SimpleNamespace, pages: torch.Tensor
) -> None:
    assert not pages.is_pinned()
    assert cudart.cudaHostRegister(pages.data_ptr(), 5 * PAGE, PORTABLE) == OK
    assert pages.is_pinned() and pages[PAGE:].is_pinned() and pages.view(torch.float32).is_pinned()
    allocated = torch.empty(3 * PAGE, dtype=torch.uint8, pin_memory=True)
    books = hardware.pinned()
    assert (books.used_bytes, books.registered_bytes, books.num_registered) == (9 * PAGE, 5 * PAGE, 1)
    assert cudart.cudaHostUnregister(pages.data_ptr()) == OK
    assert not pages.is_pinned() and allocated.is_pinned()
    assert (hardware.pinned().used_bytes, hardware.pinned().peak_bytes) == (4 * PAGE, 9 * PAGE)


def test_what_the_driver_refuses(cudart: SimpleNamespace, pages: torch.Tensor) -> None:
    start = pages.data_ptr()
    refused = [
        (cudart.cudaHostRegister(0, PAGE, PORTABLE), INVALID_VALUE),
        (cudart.cudaHostRegister(start, 0, PORTABLE), INVALID_VALUE),
        (cudart.cudaHostRegister(start, PAGE, 16), INVALID_VALUE),
        (cudart.cudaHostUnregister(start), NOT_REGISTERED),
        (cudart.cudaHostRegister(start + PAGE, 3 * PAGE, PORTABLE), OK),
        (cudart.cudaHostRegister(start + PAGE, 3 * PAGE, PORTABLE), ALREADY_REGISTERED),
        (cudart.cudaHostRegister(start, 2 * PAGE, PORTABLE), ALREADY_REGISTERED),
        (cudart.cudaHostRegister(start, 8 * PAGE, PORTABLE), ALREADY_REGISTERED),
        (cudart.cudaHostUnregister(start + 2 * PAGE), NOT_REGISTERED),
        (cudart.cudaHostUnregister(start + PAGE), OK),
        (cudart.cudaHostUnregister(start + PAGE), NOT_REGISTERED),
    ]
    assert [code for code, _ in refused] == [expected for _, expected in refused]
    allocated = torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True)
    assert cudart.cudaHostRegister(allocated.data_ptr(), 4 * PAGE, PORTABLE) == ALREADY_REGISTERED
    assert cudart.cudaHostUnregister(allocated.data_ptr()) == NOT_REGISTERED
    read_error()


def test_two_ranges_may_not_share_a_page(cudart: SimpleNamespace, pages: torch.Tensor) -> None:
    start = pages.data_ptr()
    assert cudart.cudaHostRegister(start, PAGE // 2, PORTABLE) == OK
    assert cudart.cudaHostRegister(start + PAGE // 2, PAGE, PORTABLE) == ALREADY_REGISTERED
    read_error()
    assert cudart.cudaHostRegister(start + PAGE, PAGE, PORTABLE) == OK
    for range_start in (start, start + PAGE):
        assert cudart.cudaHostUnregister(range_start) == OK


def test_registering_counts_against_the_cap(sim: ModuleType, pages: torch.Tensor) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)], pinned_bytes=8 * PAGE):
        cudart = torch.get_device_module("sim").cudart()
        allocated = torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True)
        assert cudart.cudaHostRegister(pages.data_ptr(), 4 * PAGE + 1, PORTABLE) == OUT_OF_MEMORY
        read_error()
        assert cudart.cudaHostRegister(pages.data_ptr(), 4 * PAGE, PORTABLE) == OK
        with pytest.raises(torch.OutOfMemoryError, match="out of pinned memory"):
            torch.empty(1, dtype=torch.uint8, pin_memory=True)
        assert cudart.cudaHostUnregister(pages.data_ptr()) == OK
        del allocated


# --- Copies


def test_copies_of_registered_memory_are_asynchronous(
    hardware: ModuleType, cudart: SimpleNamespace, pages: torch.Tensor
) -> None:
    target = torch.empty(16 * PAGE, dtype=torch.uint8, device="sim:1")
    stream = torch.accelerator.current_stream(1)

    def host_seconds() -> float:
        hardware.reset_clock()
        target.copy_(pages, non_blocking=True)
        submitted = hardware.clock_s()
        stream.synchronize()
        assert hardware.clock_s() == hardware.stream_time_s(stream)
        return submitted / hardware.clock_s()

    assert host_seconds() == 1, "from pageable memory the host waits"
    assert cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, PORTABLE) == OK
    assert host_seconds() < 1
    pages.fill_(7)
    target.copy_(pages, non_blocking=True)
    pages.fill_(8)  # too early: a copy that is under way sends what is there when it gets to it
    stream.synchronize()
    assert target.float().mean().item() == 8
    pages.copy_(target + 1, non_blocking=True)
    assert pages.float().mean().item() == 255, "poison until somebody waits"
    stream.synchronize()
    assert pages.float().mean().item() == 9
    assert cudart.cudaHostUnregister(pages.data_ptr()) == OK


def test_a_copy_lies_in_one_range_or_in_none(cudart: SimpleNamespace, pages: torch.Tensor) -> None:
    start = pages.data_ptr()
    for first in (4, 8):
        assert cudart.cudaHostRegister(start + first * PAGE, 4 * PAGE, PORTABLE) == OK
    for first, last in ((4, 8), (5, 6), (8, 12), (0, 4), (12, 16)):
        pages[first * PAGE : last * PAGE].to("sim:0")
    for first, last in ((4, 9), (0, 5), (11, 13), (0, 16)):
        with pytest.raises(torch.AcceleratorError, match="more than one pinned range, or partly in one"):
            pages[first * PAGE : last * PAGE].to("sim:0")
        with pytest.raises(torch.AcceleratorError, match="more than one pinned range"):
            pages[first * PAGE : last * PAGE].copy_(torch.zeros((last - first) * PAGE, dtype=torch.uint8, device="sim"))
    pages.to("sim:0", torch.float32)  # types are converted first, into memory of its own
    for first in (4, 8):
        assert cudart.cudaHostUnregister(start + first * PAGE) == OK


@pytest.mark.parametrize("waits", [True, False])
def test_unregistering_under_a_copy_is_a_race(
    hardware: ModuleType, cudart: SimpleNamespace, pages: torch.Tensor, waits: bool
) -> None:
    pages.fill_(3)
    assert cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, PORTABLE) == OK
    target = torch.empty(16 * PAGE, dtype=torch.uint8, device="sim:1")
    target.copy_(pages, non_blocking=True)
    if waits:
        torch.accelerator.current_stream(1).synchronize()
    assert cudart.cudaHostUnregister(pages.data_ptr()) == OK
    found = hardware.races()
    assert len(found) == (not waits)
    if found:
        assert "host memory was unregistered while copy to device on sim:1 stream 0 may still use it" in found[0]
    assert target.float().mean().item() == 3, "and the simulation reads no freed memory"


def test_two_streams_that_write_a_registered_range_race(
    hardware: ModuleType, cudart: SimpleNamespace, pages: torch.Tensor
) -> None:
    assert cudart.cudaHostRegister(pages.data_ptr(), pages.nbytes, PORTABLE) == OK
    source = torch.ones(16 * PAGE, dtype=torch.uint8, device="sim:0")
    torch.accelerator.synchronize(0)
    for stream in (torch.Stream(device="sim:0"), torch.Stream(device="sim:0")):
        with stream:
            pages.copy_(source, non_blocking=True)
    torch.accelerator.synchronize(0)
    assert len(hardware.races()) == 1
    assert cudart.cudaHostUnregister(pages.data_ptr()) == OK


# --- The error that stays, and failures on demand


def test_a_refusal_is_raised_by_the_next_kernel_and_by_none_after_it(
    cudart: SimpleNamespace, pages: torch.Tensor
) -> None:
    ones = torch.ones(4, device="sim:1")
    assert cudart.cudaHostUnregister(pages.data_ptr()) == NOT_REGISTERED
    view = ones[1:]
    copied = ones.cpu()
    with pytest.raises(torch.AcceleratorError, match=r"error 713 .*raised by aten::add"):
        ones + ones
    assert (ones + ones).sum().item() == 8
    assert copied.sum() == 4 and view.numel() == 3


def test_a_success_does_not_clear_the_error(cudart: SimpleNamespace, pages: torch.Tensor) -> None:
    assert cudart.cudaHostUnregister(pages.data_ptr()) == NOT_REGISTERED
    assert cudart.cudaHostRegister(pages.data_ptr(), PAGE, PORTABLE) == OK
    assert cudart.cudaHostUnregister(pages.data_ptr()) == OK
    read_error()


def test_the_nth_registration_fails_and_the_next_succeeds(
    hardware: ModuleType, cudart: SimpleNamespace, pages: torch.Tensor
) -> None:
    hardware.fail_registration(2)
    starts = [pages.data_ptr() + number * PAGE for number in range(3)]
    codes = [cudart.cudaHostRegister(start, PAGE, PORTABLE) for start in starts]
    assert codes == [OK, OUT_OF_MEMORY, OK]
    read_error()
    assert hardware.pinned().num_registered == 2
    for start in (starts[0], starts[2]):
        assert cudart.cudaHostUnregister(start) == OK


# --- The cluster's own checks


def test_cluster_reports_a_leaked_registration_and_an_unread_error(sim: ModuleType, pages: torch.Tensor) -> None:
    spec = sim.SimDeviceSpec(total_bytes=MIB)
    leaked = rf"{2 * PAGE} bytes are still pinned, 1 registered ranges among them; error 712 of a refused registration"
    with pytest.raises(AssertionError, match=leaked), sim.cluster([spec]):
        cudart = torch.get_device_module("sim").cudart()
        cudart.cudaHostRegister(pages.data_ptr(), 2 * PAGE, PORTABLE)
        cudart.cudaHostRegister(pages.data_ptr(), 2 * PAGE, PORTABLE)
    with pytest.warns(UserWarning, match=f"{2 * PAGE} bytes"), sim.cluster([spec]):
        assert sim.pinned().used_bytes == sim.pinned().num_registered == 0, "the next one starts clean"
        assert cudart.cudaHostRegister(pages.data_ptr() + PAGE, 2 * PAGE, PORTABLE) == OK, "over what was left"
        assert cudart.cudaHostUnregister(pages.data_ptr() + PAGE) == OK
        torch.ones(1, device="sim")


def test_devices_of_other_hardware_have_other_identities(sim: ModuleType) -> None:
    """What was measured of one is not taken for another's."""

    def identity(rate: float) -> str:
        with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB, h2d_bytes_per_s=rate)]):
            return torch.get_device_module("sim").get_device_properties(0).uuid

    assert identity(12e9) != identity(25e9)
    assert identity(12e9) == identity(12e9)
