"""Toy models of comfy-aimdo's pages, without ComfyUI: every case runs in a process of its own, forked from this one.

python toy.py [CASE ...]      with the environment of `simulated.simulated_gpus`

Prints one line of JSON: how each case ended, 0 or the number of the signal or of the exit, and on stderr why.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import comfy_aimdo.control as control

assert control.init(implementation="cuda"), "comfy-aimdo did not load"

import torch  # noqa: E402  comfy-aimdo is loaded before it, as ComfyUI does
import torch_npu  # noqa: E402  the stand-in: simulated devices, and the driver

assert control.init_devices([(0, 0), (1, 0)]), "comfy-aimdo did not take the fake driver"

control.set_log_info()  # as ComfyUI

import comfy_aimdo.model_vbar as model_vbar  # noqa: E402  needs the library
import comfy_aimdo.torch  # noqa: E402
from comfy_aimdo.host_buffer import HostBuffer  # noqa: E402
from comfy_aimdo.model_vbar import ModelVBAR, vbar_fault, vbar_unpin, vbars_analyze  # noqa: E402

MIB = 1 << 20
PAGE = 32 * MIB
HEADROOM = 384 * MIB  # what comfy-aimdo keeps free as it makes room: 256 MiB and four pages, in 0.4.13 and 0.6.0
simdevice, driver = torch_npu.simdevice, torch_npu.driver


class Toy:
    """A model of some pages; each of its layers is one page."""

    def __init__(self, num_pages: int, device: int = 0) -> None:
        self.device = torch.device("npu", device)
        self.vbar = ModelVBAR(num_pages * PAGE, device)
        self.layers = [self.vbar.alloc(PAGE) for _ in range(num_pages)]
        self.signatures = [None] * num_pages
        self.vbar.prioritize()

    def run(self) -> int:
        """Use every layer, as core does: fault it in, copy it where it is not there, compute. Returns the copies."""
        num_copied = 0
        for number, layer in enumerate(self.layers):
            with torch.npu.device(self.device):
                signature = vbar_fault(layer)
                is_there = model_vbar.vbar_signature_compare(signature, self.signatures[number])
                self.signatures[number] = signature
                if signature is None:
                    continue  # no room: core computes with a temporary
                weight = comfy_aimdo.torch.aimdo_to_tensor(layer, self.device)
                if not is_there:
                    weight.copy_(torch.full((PAGE,), number, dtype=torch.uint8), non_blocking=True)
                    num_copied += 1
                assert int(weight[0]) == int(weight[-1]) == number, f"layer {number} does not hold its bytes"
                vbar_unpin(layer)
        return num_copied

    @property
    def num_resident(self) -> int:
        num = sum(flags & 1 for flags in self.vbar.get_residency())
        assert self.vbar.loaded_size() == num * PAGE
        return num


def used_bytes(device: int = 0) -> int:
    return simdevice.stats(device).used_bytes


def hold(num_bytes: int, device: int = 0) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=f"npu:{device}")


# -- the cases


def pages_are_used_bytes_of_the_device_that_torch_sees() -> None:
    toys = [Toy(4, 0), Toy(2, 1)]
    for device, toy in enumerate(toys):
        free, total = torch.npu.mem_get_info(device)
        assert free == total
        toy.run()
        assert toy.num_resident == len(toy.layers)
        assert used_bytes(device) == len(toy.layers) * PAGE
        assert torch.npu.mem_get_info(device) == (total - len(toy.layers) * PAGE, total)
        assert vbars_analyze(device) == len(toy.layers) * PAGE
    assert driver.read()["mapped_bytes"] == 6 * PAGE
    assert [toy.run() for toy in toys] == [0, 0]
    toys.clear()
    del toy
    gc.collect()
    assert [used_bytes(0), used_bytes(1)] == [0, 0]
    assert driver.read()["mapped_bytes"] == 0


def an_allocation_of_torch_evicts_pages() -> None:
    toy, other = Toy(12), Toy(4, 1)
    toy.run(), other.run()
    assert toy.num_resident == 12
    free, _ = torch.npu.mem_get_info(0)
    held = [hold(free - HEADROOM + 4 * PAGE)]
    assert toy.num_resident == 8
    after, total = torch.npu.mem_get_info(0)
    assert total - after == used_bytes() == len(held[0]) + 8 * PAGE
    held.append(hold(after + PAGE))  # does not fit without an eviction
    assert toy.num_resident == 0 and other.num_resident == 4
    held.clear()
    toy.vbar.prioritize()  # the watermark stays low until then
    assert toy.run() == 12 and toy.num_resident == 12


def pages_make_no_allocation_of_torch_fail() -> None:
    toy = Toy(12)
    toy.run()
    _, total = torch.npu.mem_get_info(0)
    held = [hold(16 * MIB) for _ in range(total // (16 * MIB))]
    assert used_bytes() == total and toy.num_resident == 0
    try:
        hold(1)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the device holds more than it has")
    held.clear()
    assert used_bytes() == 0


def results_of_operators_count_as_allocations() -> None:
    toy = Toy(12)
    toy.run()
    ones = torch.ones(64 * MIB, dtype=torch.uint8, device="npu:0")
    before = toy.num_resident
    results = [ones + 1 for _ in range(6)]
    assert toy.num_resident < before, "what a kernel allocates evicts no page"
    assert used_bytes() == 7 * 64 * MIB + toy.num_resident * PAGE
    del results


def a_page_that_finds_no_room_is_refused() -> None:
    toy = Toy(4)
    free, _ = torch.npu.mem_get_info(0)
    held = hold(free - PAGE)
    assert toy.run() == 0 and toy.num_resident == 0
    del held
    toy.vbar.prioritize()
    assert toy.run() == 4 and toy.num_resident == 4


def what_the_device_refuses_is_no_page() -> None:
    toy = Toy(12)
    simdevice.fail_alloc(0, 3)
    toy.run()
    assert simdevice.stats(0).num_ooms == 1 and used_bytes() == toy.num_resident * PAGE
    toy.vbar.free_memory(12 * PAGE)
    toy.vbar.prioritize()
    _, total = torch.npu.mem_get_info(0)
    simdevice.occupy(0, total - PAGE)  # by another program; comfy-aimdo may not have looked since
    toy.run()
    assert used_bytes() == toy.num_resident * PAGE <= PAGE
    simdevice.occupy(0, 0)
    toy.vbar.prioritize()
    toy.run()
    assert toy.num_resident == 12 and used_bytes() == 12 * PAGE


def a_model_evicts_another_that_is_worth_less() -> None:
    first, second = Toy(12), Toy(12)
    first.vbar.prioritize()
    first.run()
    second.vbar.prioritize()
    second.run()
    assert first.num_resident < 12 and second.num_resident == 12
    assert used_bytes() == (first.num_resident + 12) * PAGE
    first.vbar.prioritize()
    first.run()
    assert first.num_resident == 12


def a_watermark_is_a_budget() -> None:
    toy, neighbour = Toy(8), Toy(4)
    toy.run(), neighbour.run()
    for num_pages in (3, 5, 1, 8):
        toy.vbar.prioritize()
        toy.vbar.set_watermark(num_pages * PAGE)
        toy.run()
        assert toy.num_resident == num_pages, f"{toy.num_resident} pages for {num_pages}"
        assert neighbour.num_resident == 4


def copies_that_are_deferred_arrive_before_their_page_goes() -> None:
    toy = Toy(4)
    source = torch.full((PAGE,), 7, dtype=torch.uint8).pin_memory()
    stream = torch.Stream(device="npu:0")
    for layer in toy.layers:
        assert vbar_fault(layer) is not None
        with stream:
            comfy_aimdo.torch.aimdo_to_tensor(layer, toy.device).copy_(source, non_blocking=True)
        vbar_unpin(layer)
    assert simdevice.copying_bytes() == 4 * PAGE
    free, _ = torch.npu.mem_get_info(0)
    held = hold(free)
    assert toy.num_resident == 0
    assert simdevice.copying_bytes() == 0 and simdevice.races() == []
    del held


def a_use_that_nothing_orders_before_an_eviction_is_a_race() -> None:
    toy = Toy(1)
    assert vbar_fault(toy.layers[0]) is not None
    source = torch.full((PAGE,), 7, dtype=torch.uint8).pin_memory()
    weight = comfy_aimdo.torch.aimdo_to_tensor(toy.layers[0], toy.device)
    with torch.Stream(device="npu:0"):
        weight.copy_(source, non_blocking=True)
    weight.add_(1)  # on another stream, without waiting
    assert any("nothing orders" in race for race in simdevice.races())


def fresh_pages_hold_nothing_that_computes() -> None:
    toy = Toy(1)
    assert vbar_fault(toy.layers[0]) is not None
    weight = comfy_aimdo.torch.aimdo_to_tensor(toy.layers[0], toy.device)
    assert bool(weight.view(torch.bfloat16)[:1000].isnan().all())
    vbar_unpin(toy.layers[0])


def failures_are_survived() -> None:
    toy = Toy(6)
    for function in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        for nth in (1, 3):
            calls = driver.read()["calls"][function]
            toy.vbar.free_memory(6 * PAGE)
            toy.vbar.prioritize()
            driver.fail(function, nth)
            try:
                toy.run()
            except RuntimeError as error:
                assert "Fault failed" in str(error), error
            assert driver.read()["calls"][function] >= calls + nth, f"{function} was not called"
            driver.fail(function, 0)
            toy.vbar.prioritize()
            toy.run()
            assert toy.num_resident == 6, f"after {function} failed: {toy.num_resident} pages"
            assert used_bytes() == 6 * PAGE, f"after {function} failed: {used_bytes()} bytes"
    driver.fail("cuMemAlloc", 1)
    hold(MIB)  # comfy-aimdo tries again
    try:
        driver.fail("no such function", 1)
    except ValueError as error:
        assert "no such function" in str(error)
    else:
        raise AssertionError("took a function that is not there")


def locked_memory_is_counted_where_torch_counts_it() -> None:
    before = simdevice.pinned()
    buffer = HostBuffer(0, 0, 64 * MIB)
    buffer.extend(8 * MIB)
    assert simdevice.pinned().registered_bytes == before.registered_bytes + 8 * MIB
    driver.fail("cuMemHostRegister", 1)
    try:
        buffer.extend(8 * MIB)
    except RuntimeError:
        pass
    else:
        raise AssertionError("a registration that failed was not told")
    del buffer
    gc.collect()
    assert simdevice.pinned() == before or simdevice.pinned().used_bytes == before.used_bytes


def threads_do_not_wait_for_each_other_for_ever() -> None:
    """Allocations of torch evict pages, faults evict pages, and both free, at the same time, on both devices."""
    toys = [Toy(10), Toy(10), Toy(10, 1)]
    source = torch.full((PAGE,), 3, dtype=torch.uint8).pin_memory()
    errors = []

    def repeat(work: Callable[[], None]) -> None:
        try:
            for _ in range(6):
                work()
        except BaseException as error:
            errors.append(repr(error))

    def allocate() -> None:
        free, _ = torch.npu.mem_get_info(0)
        held = [hold(max(free - 64 * MIB, 64 * MIB)), hold(96 * MIB)]
        held.append(torch.ones(16 * MIB, dtype=torch.uint8, device="npu:0") + 1)

    def copy() -> None:
        torch.empty_like(source, device="npu:1").copy_(source, non_blocking=True)

    works = [toys[0].run, toys[1].run, toys[2].run, allocate, allocate, copy]
    threads = [threading.Thread(target=repeat, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread waits for ever"
    assert [error for error in errors if "OutOfMemoryError" not in error] == [], errors
    toys.clear()
    works.clear()
    gc.collect()
    assert [used_bytes(0), used_bytes(1)] == [0, 0]


# -- its recording of allocations, from 0.5 on; `stand_in/highwater_test_recorder.py` stands on what these show


class Recording:
    """A forward that is recorded: blocks on the default stream of the first device."""

    def __init__(self) -> None:
        driver.library.fake_cuda_take_allocations(1)
        stream = SimpleNamespace(device=SimpleNamespace(index=0), cuda_stream=0)
        self.graph = importlib.import_module("comfy_aimdo.malloc_graph").record(stream)

    def block(self, work: Callable[[], None]) -> None:
        self.graph.iterate("block")
        balanced = [hold(MIB), hold(9 * MIB)]
        work()
        balanced.clear()

    def end(self) -> int:
        """End the forward; returns how many allocations outlived their blocks."""
        self.graph.iterate(None)
        self.graph.pop()
        return self.graph.rogue_count

    def paused(self, work: Callable[[], None]) -> None:
        self.graph.pause()
        work()
        self.graph.resume()


def nothing() -> None:
    """Does nothing."""


def ends_the_process(case: Callable[[], None]) -> bool:
    return run_forked(case) in (signal.SIGSEGV, signal.SIGABRT)


def memory_that_a_later_block_frees_ends_the_process() -> None:
    def free() -> None:
        held: list[torch.Tensor] = []
        recording = Recording()
        recording.block(lambda: held.append(hold(9 * MIB)))
        recording.block(held.clear)
        recording.end()

    assert ends_the_process(free)


def memory_of_a_pause_may_stay_and_leave_at_any_time() -> None:
    held = [hold(9 * MIB)]
    recording = Recording()

    def take() -> None:
        held.append(hold(9 * MIB))

    recording.block(held.clear)
    recording.block(lambda: recording.paused(take))
    recording.block(held.clear)
    recording.block(lambda: recording.paused(take))
    recording.block(lambda: recording.paused(held.clear))
    recording.block(lambda: recording.paused(take))
    assert recording.end() == 0


def the_end_of_an_inner_pause_ends_the_outer() -> None:
    held: list[torch.Tensor] = []
    recording = Recording()

    def nested() -> None:
        recording.paused(nothing)
        held.append(hold(9 * MIB))

    recording.block(lambda: recording.paused(nested))
    assert recording.end() == 1


def recorded_memory_that_a_pause_frees_ends_the_process() -> None:
    def free() -> None:
        recording = Recording()
        held: list[torch.Tensor] = []
        recording.block(lambda: (held.append(hold(9 * MIB)), recording.paused(held.clear)))

    assert ends_the_process(free)


def a_recording_takes_memory_of_any_device() -> None:
    held: list[torch.Tensor] = []
    recording = Recording()
    recording.block(lambda: held.append(hold(9 * MIB, 1)))
    assert recording.end() == 1


def a_use_after_eviction_ends_the_process() -> None:
    toy = Toy(4)
    toy.run()
    weight = comfy_aimdo.torch.aimdo_to_tensor(toy.layers[-1], toy.device)
    free, _ = torch.npu.mem_get_info(0)
    held = hold(free)
    assert toy.num_resident == 0
    print("reads what is gone", file=sys.stderr, flush=True)
    int(weight[0])
    del held


CASES = [
    pages_are_used_bytes_of_the_device_that_torch_sees,
    an_allocation_of_torch_evicts_pages,
    pages_make_no_allocation_of_torch_fail,
    results_of_operators_count_as_allocations,
    a_page_that_finds_no_room_is_refused,
    what_the_device_refuses_is_no_page,
    a_model_evicts_another_that_is_worth_less,
    a_watermark_is_a_budget,
    copies_that_are_deferred_arrive_before_their_page_goes,
    a_use_that_nothing_orders_before_an_eviction_is_a_race,
    fresh_pages_hold_nothing_that_computes,
    failures_are_survived,
    locked_memory_is_counted_where_torch_counts_it,
    threads_do_not_wait_for_each_other_for_ever,
    a_use_after_eviction_ends_the_process,
]
if importlib.util.find_spec("comfy_aimdo.malloc_graph") is not None:
    CASES += [
        memory_that_a_later_block_frees_ends_the_process,
        memory_of_a_pause_may_stay_and_leave_at_any_time,
        the_end_of_an_inner_pause_ends_the_outer,
        recorded_memory_that_a_pause_frees_ends_the_process,
        a_recording_takes_memory_of_any_device,
    ]


def run_forked(case: Callable[[], None]) -> int:
    """Return 0, or what ended the process of a case: the number of a signal, or that of an exit."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            case()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    ended = {}
    for case in CASES:
        if not sys.argv[1:] or case.__name__ in sys.argv[1:]:
            print(f"-- {case.__name__}", file=sys.stderr, flush=True)
            ended[case.__name__] = run_forked(case)
    print(json.dumps(ended))
