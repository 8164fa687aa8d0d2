"""A driver that keeps its books in the simulated devices: C functions, ranges, and what it is asked for allocations.

The driver here is this file: it calls the library's functions as a driver would, and answers for torch's allocations.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

PAGE = mmap.PAGESIZE
RANGE_BYTES = 64 * PAGE
OK, INVALID_VALUE, OUT_OF_MEMORY, ALREADY_REGISTERED = 0, 1, 2, 712
CLAIM, RELEASE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64), ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture
def library(hardware: ModuleType) -> ctypes.CDLL:
    (path,) = (path for path in torch.ops.loaded_libraries if Path(path).name.startswith("highwater_simdevice"))
    library = ctypes.CDLL(path)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments in {
        "charge": [ctypes.c_int, number],
        "refund": [ctypes.c_int, number],
        "memory_info": [ctypes.c_int, ctypes.POINTER(number), ctypes.POINTER(number)],
        "add_range": [ctypes.c_int, pointer, number],
        "remove_range": [pointer],
        "copy": [ctypes.c_int, number, pointer, pointer, number, ctypes.c_int],
        "record": [ctypes.c_int, number],
        "wait": [pointer],
        "forget": [pointer],
        "register": [pointer, number],
        "unregister": [pointer],
    }.items():
        getattr(library, f"highwater_sim_{name}").argtypes = arguments
    library.highwater_sim_record.restype = pointer
    return library


@pytest.fixture
def memory(library: ctypes.CDLL) -> Iterator[tuple[int, torch.Tensor]]:
    """Memory that the driver maps on the second device: its address, and the same bytes seen from the host."""
    anonymous = mmap.mmap(-1, RANGE_BYTES)
    seen = torch.frombuffer(anonymous, dtype=torch.uint8)
    library.highwater_sim_add_range(1, seen.data_ptr(), RANGE_BYTES)
    yield seen.data_ptr(), seen
    library.highwater_sim_synchronize(1)
    library.highwater_sim_remove_range(seen.data_ptr())


@pytest.fixture
def locked(library: ctypes.CDLL) -> Iterator[torch.Tensor]:
    """Locked host memory full of sevens."""
    pages = torch.frombuffer(mmap.mmap(-1, RANGE_BYTES), dtype=torch.uint8).fill_(7)
    assert library.highwater_sim_register(pages.data_ptr(), RANGE_BYTES) == OK
    yield pages
    assert library.highwater_sim_unregister(pages.data_ptr()) == OK


def tensor_at(address: int, num_bytes: int, device: str) -> torch.Tensor:
    return torch.ops.highwater_simdevice.tensor_at(address, num_bytes, torch.device(device))


def test_what_a_driver_charges_is_in_use(hardware: ModuleType, library: ctypes.CDLL) -> None:
    total = hardware.stats(0).total_bytes
    assert library.highwater_sim_charge(0, total - 10) == OK
    free, size = ctypes.c_int64(), ctypes.c_int64()
    library.highwater_sim_memory_info(0, free, size)
    assert (free.value, size.value) == (10, total)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(11, dtype=torch.uint8, device="sim:0")
    assert library.highwater_sim_charge(0, 11) == OUT_OF_MEMORY
    assert library.highwater_sim_charge(len("three"), 1) not in (OK, OUT_OF_MEMORY), "there are three devices"
    library.highwater_sim_refund(0, total - 10)
    assert (hardware.stats(0).used_bytes, hardware.stats(0).num_ooms) == (0, 2)


class Driver:
    """Answers for torch's allocations, with a lock of its own, under which it calls the devices."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.lock = threading.Lock()
        self.claimed: dict[int, tuple[int, int]] = {}
        self.num_claims = 0
        self.callbacks = CLAIM(self.claim), RELEASE(self.release)

    def claim(self, num_bytes: int) -> int:
        with self.lock:
            device = self.library.highwater_sim_current_device()
            if self.library.highwater_sim_charge(device, num_bytes):
                return 0
            self.num_claims += 1
            self.claimed[self.num_claims] = (device, num_bytes)
            return self.num_claims

    def release(self, claimed: int) -> None:
        with self.lock:
            self.library.highwater_sim_refund(*self.claimed.pop(claimed))


@pytest.fixture
def driver(library: ctypes.CDLL) -> Iterator[Driver]:
    driver = Driver(library)
    library.highwater_sim_route(*driver.callbacks)
    yield driver
    gc.collect()
    library.highwater_sim_route(CLAIM(), RELEASE())
    assert driver.claimed == {}


MAKERS: dict[str, Callable[[torch.Tensor], object]] = {
    "empty": lambda ones: torch.empty_like(ones),
    "a kernel's result": lambda ones: ones + 1,
    "a view": lambda ones: ones[1:],
    "a resize": lambda ones: torch.empty(0, dtype=ones.dtype, device=ones.device).resize_(1000),
    "a copy through a temporary": lambda ones: torch.empty(100, 10).byte().copy_(ones.view(10, 100).t()),
    "an operator with an output": lambda ones: torch.add(ones, 1, out=torch.empty(0, device=ones.device).byte()),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_driver_is_asked_for_every_allocation(hardware: ModuleType, driver: Driver, name: str) -> None:
    """The books are the same as without it."""
    ones = torch.ones(1000, dtype=torch.uint8, device="sim:1")
    before = driver.num_claims, hardware.stats(1).num_allocs
    made = MAKERS[name](ones)
    assert driver.num_claims - before[0] == hardware.stats(1).num_allocs - before[1]
    assert (driver.num_claims == before[0]) == (name == "a view")
    assert sum(num_bytes for _, num_bytes in driver.claimed.values()) == hardware.stats(1).used_bytes
    assert {device for device, _ in driver.claimed.values()} == {1}
    del made, ones
    assert hardware.stats(1).used_bytes == 0


def test_what_a_driver_refuses_is_out_of_memory(hardware: ModuleType, driver: Driver) -> None:
    total = hardware.stats(0).total_bytes
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(total + 1, dtype=torch.uint8, device="sim:0")
    hardware.fail_alloc(0, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8, device="sim:0")
    assert (driver.claimed, hardware.stats(0).used_bytes, hardware.stats(0).num_ooms) == ({}, 0, 2)


def test_a_drivers_lock_may_be_held_by_a_thread_that_asks_the_devices(hardware: ModuleType, driver: Driver) -> None:
    def allocate() -> None:
        for _ in range(300):
            torch.ones(100, device="sim:0").add_(1).cpu()

    def ask() -> None:
        for _ in range(3000):
            with driver.lock:
                driver.library.highwater_sim_charge(0, 8)
                driver.library.highwater_sim_refund(0, 8)

    threads = [threading.Thread(target=work, daemon=True) for work in (allocate, allocate, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    del threads


def test_a_tensor_over_a_range_is_one_of_its_device(
    hardware: ModuleType, memory: tuple[int, torch.Tensor], library: ctypes.CDLL
) -> None:
    address, seen = memory
    used = hardware.stats(1).used_bytes
    tensor = tensor_at(address + PAGE, 100, "sim:1")
    assert (tensor.device, tensor.dtype, tensor.numel()) == (torch.device("sim:1"), torch.uint8, 100)
    assert hardware.stats(1).used_bytes == used, "the driver charges it"
    tensor.copy_(torch.arange(100, dtype=torch.uint8))
    tensor += 1
    assert torch.equal(seen[PAGE : PAGE + 100], torch.arange(1, 101, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="same device"):
        tensor + torch.ones(100, dtype=torch.uint8, device="sim:0")
    del tensor
    assert int(seen[PAGE]) == 1


@pytest.mark.parametrize("through", ["stream", "event", "operator", "removal", "another device"])
def test_copies_of_locked_memory_are_late(
    hardware: ModuleType, library: ctypes.CDLL, memory: tuple[int, torch.Tensor], locked: torch.Tensor, through: str
) -> None:
    """They are queued on a stream of the range's device, and arrive when something waits for them."""
    address, seen = memory
    current = 0 if through == "another device" else 1
    assert library.highwater_sim_copy(current, 0, address, locked.data_ptr(), RANGE_BYTES, 1) == OK
    assert hardware.stats(1).h2d_bytes == RANGE_BYTES and hardware.stats(0).h2d_bytes == 0
    assert bool((seen == 0xFF).all()) and hardware.copying_bytes() == RANGE_BYTES
    if through in ("stream", "another device"):
        library.highwater_sim_synchronize(1)
    elif through == "event":
        event = library.highwater_sim_record(1, 0)
        library.highwater_sim_wait(event)
        library.highwater_sim_forget(event)
    elif through == "operator":
        assert int(tensor_at(address, RANGE_BYTES, "sim:1").sum()) == 7 * RANGE_BYTES
    else:
        library.highwater_sim_remove_range(address)
        (race,) = hardware.races()
        assert "device memory was unmapped while copy to device on sim:1 stream 0 may still use it" in race
        library.highwater_sim_synchronize(1)  # for the locked memory, which is used as well
    assert bool((seen == 7).all()) and hardware.copying_bytes() == 0


def test_copies_of_pageable_memory_are_made_at_once(
    hardware: ModuleType, library: ctypes.CDLL, memory: tuple[int, torch.Tensor]
) -> None:
    address, seen = memory
    source = torch.full((RANGE_BYTES,), 3, dtype=torch.uint8)
    assert library.highwater_sim_copy(1, 0, address, source.data_ptr(), RANGE_BYTES, 1) == OK
    assert bool((seen == 3).all())
    back = torch.zeros_like(source)
    assert library.highwater_sim_copy(1, 0, back.data_ptr(), address, RANGE_BYTES, 0) == OK
    assert torch.equal(back, source) and hardware.stats(1).d2h_bytes == RANGE_BYTES
    hardware.fail_copy(1, 1)
    assert library.highwater_sim_copy(1, 0, address, source.data_ptr(), RANGE_BYTES, 1) == INVALID_VALUE
    library.highwater_sim_synchronize(1)


def test_unordered_uses_of_a_range_are_races(
    hardware: ModuleType, library: ctypes.CDLL, memory: tuple[int, torch.Tensor], locked: torch.Tensor
) -> None:
    """Also where a tensor lies in two ranges."""
    address, _ = memory
    library.highwater_sim_remove_range(address)
    for begin in (address, address + RANGE_BYTES // 2):
        library.highwater_sim_add_range(1, begin, RANGE_BYTES // 2)
    tensor = tensor_at(address + PAGE, RANGE_BYTES - 2 * PAGE, "sim:1")
    assert library.highwater_sim_copy(1, 5, address, locked.data_ptr(), PAGE // 2, 1) == OK
    tensor += 1
    assert hardware.races() == [], "the two use other bytes"
    end = address + RANGE_BYTES - 2 * PAGE
    assert library.highwater_sim_copy(1, 5, end, locked.data_ptr(), PAGE, 1) == OK
    (race,) = hardware.races()
    assert "copy to device on sim:1 stream 5 writes bytes that aten::add on sim:1 stream 0" in race
    library.highwater_sim_synchronize(1)
    library.highwater_sim_remove_range(address + RANGE_BYTES // 2)
    assert hardware.races() == []


def test_ranges_that_share_a_page_are_locked_where_the_driver_allows_it(
    hardware: ModuleType, library: ctypes.CDLL
) -> None:
    pages = torch.frombuffer(mmap.mmap(-1, PAGE), dtype=torch.uint8)
    start = pages.data_ptr()
    assert library.highwater_sim_register(start, 1024) == OK
    assert library.highwater_sim_register(start + 1024, 1024) == ALREADY_REGISTERED
    hardware.share_pages(True)
    try:
        assert library.highwater_sim_register(start + 1024, 1024) == OK
        assert library.highwater_sim_register(start + 2000, 1024) == ALREADY_REGISTERED
        assert hardware.pinned().num_registered == 2
        torch.ones(1, device="sim:0").add_(1)  # a driver's own refusals are no error of torch's
    finally:
        hardware.share_pages(False)
        assert library.highwater_sim_unregister(start) == library.highwater_sim_unregister(start + 1024) == OK
