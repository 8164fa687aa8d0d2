"""Bytes: exact books, capacity, torch.OutOfMemoryError, pinned memory, failures on demand."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

MIB = 1 << 20


def used(sim: ModuleType, index: int = 1) -> int:
    return sim.stats(index).used_bytes


# --- Device memory


def test_books_are_exact(hardware: ModuleType) -> None:
    tensor = torch.empty(1000, 1000, device="sim:1")
    assert used(hardware) == 4_000_000
    half = tensor[:500]
    del tensor
    assert used(hardware) == 4_000_000, "a view keeps the whole storage"
    del half
    assert used(hardware) == 0
    assert hardware.stats(1).peak_bytes == 4_000_000
    assert used(hardware, 0) == used(hardware, 2) == 0


def test_a_forward_returns_its_bytes(hardware: ModuleType) -> None:
    module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)).to("sim:1")
    inputs = torch.randn(4, 8, device="sim:1")
    before = used(hardware)
    weight_bytes = sum(p.nbytes for p in module.parameters())
    assert before == weight_bytes + inputs.nbytes
    for _ in range(3):
        with torch.no_grad():
            module(inputs)
    module(inputs).sum()
    assert used(hardware) == before
    module.to("cpu")
    assert used(hardware) == inputs.nbytes


def test_outputs_that_share_memory_are_charged_once(hardware: ModuleType) -> None:
    source = torch.randn(64, 64, device="sim:1")
    before = used(hardware)
    real, imaginary = torch.view_as_real(torch.fft.fft(source)).unbind(-1)
    assert real.untyped_storage().data_ptr() == imaginary.untyped_storage().data_ptr()
    assert used(hardware) == before + 64 * 64 * 8


def test_attention_allocates_its_output_only(hardware: ModuleType) -> None:
    query = torch.randn(1, 8, 512, 64, device="sim:1")
    torch.accelerator.reset_peak_memory_stats(1)
    output = F.scaled_dot_product_attention(query, query, query)
    assert hardware.stats(1).peak_bytes == query.nbytes + output.nbytes


def test_the_last_byte_fits_and_one_more_does_not(hardware: ModuleType) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=rf"sim:1 out of memory.*{64 * MIB + 1} bytes"):
        torch.empty(64 * MIB + 1, dtype=torch.uint8, device="sim:1")
    everything = torch.empty(64 * MIB, dtype=torch.uint8, device="sim:1")
    assert torch.accelerator.get_memory_info(1) == (0, 64 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, dtype=torch.uint8, device="sim:1")
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(1).to("sim:1")
    torch.empty(10, device="sim:0")
    del everything
    assert torch.accelerator.get_memory_info(1) == (64 * MIB, 64 * MIB)
    assert hardware.stats(1).num_ooms == 3


def test_an_operator_that_runs_out_leaves_nothing_behind(hardware: ModuleType) -> None:
    small = torch.ones(60, device="sim:1")
    filler = torch.empty(64 * MIB - 300, dtype=torch.uint8, device="sim:1")
    before = used(hardware)
    for fails in (lambda: small + 1, lambda: nn.Linear(64, 64).to("sim:1"), lambda: torch.fft.fft(small)):
        with pytest.raises(torch.OutOfMemoryError):
            fails()
        assert used(hardware) == before
    del filler
    assert (small + 1).sum().item() == 120


def test_a_device_of_a_tebibyte_costs_no_host_memory_until_touched(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 40)]):
        weights = torch.empty(40 << 30, dtype=torch.uint8, device="sim:0")
        assert used(sim, 0) == 40 << 30
        del weights
        with pytest.raises(torch.OutOfMemoryError, match="sim:0"):
            torch.empty(2 << 40, dtype=torch.uint8, device="sim:0")
        assert used(sim, 0) == 0


def test_reserve_and_rounding(sim: ModuleType) -> None:
    spec = sim.SimDeviceSpec(total_bytes=4 * MIB, reserve_bytes=MIB, round_to=512)
    with sim.cluster([spec]):
        assert torch.accelerator.get_memory_info(0) == (3 * MIB, 4 * MIB)
        tensors = [torch.empty(n, dtype=torch.uint8, device="sim:0") for n in (1, 512, 513)]
        assert used(sim, 0) == 512 + 512 + 1024
        assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)
        assert tensors[2].untyped_storage().nbytes() == 513
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * MIB, dtype=torch.uint8, device="sim:0")
        tensors.clear()


def test_copies_through_a_temporary_need_room_for_it(sim: ModuleType) -> None:
    """As on CUDA, a strided device tensor crosses the bus through a contiguous copy on the device."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=3 * MIB)]):
        matrix = torch.zeros(512, 1024, device="sim:0")
        matrix.t().cpu()
        assert sim.stats(0).peak_bytes == 2 * MIB, "transposed but dense: one transfer"
        half = matrix[:, :512]
        half.cpu()
        assert sim.stats(0).peak_bytes == 3 * MIB
        filler = torch.empty(1, device="sim:0")
        with pytest.raises(torch.OutOfMemoryError):
            half.cpu()
        del matrix, half, filler


def test_accelerator_devices(hardware: ModuleType) -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator().type == "sim"
    assert accelerator.device_count() == torch.get_device_module("sim").device_count() == 3
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == 1
    assert torch.empty(1, device="sim").device.index == 1
    accelerator.set_device_index(0)
    with accelerator.device_index(2):
        assert torch.empty(1, device="sim").device.index == 2
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device="sim:3")


def test_accelerator_memory(hardware: ModuleType) -> None:
    accelerator, module = torch.accelerator, torch.get_device_module("sim")
    tensor = torch.empty(1000, device="sim:1")
    assert accelerator.memory_allocated(1) == module.memory_allocated("sim:1") == 4000
    assert accelerator.memory_reserved(1) == accelerator.memory_stats(1)["active_bytes.all.current"] == 4000
    assert accelerator.get_memory_info(1) == module.mem_get_info(1) == (64 * MIB - 4000, 64 * MIB)
    del tensor
    assert accelerator.max_memory_allocated(1) == 4000
    accelerator.reset_peak_memory_stats(1)
    accelerator.empty_cache()
    assert accelerator.max_memory_allocated(1) == 0


# --- Backed memory


def test_backed_memory_is_handed_out_again_and_joined(sim: ModuleType) -> None:
    """In whatever order it comes back; what has no room in it is mapped, and both are in the books."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)]), sim.backed_memory(3 * MIB):
        first = torch.empty(3 * MIB, dtype=torch.uint8, device="sim:0")
        begin = first.data_ptr()
        beside = torch.ones(MIB, dtype=torch.uint8, device="sim:0")
        assert not begin <= beside.data_ptr() < begin + 3 * MIB
        assert sim.stats(0).used_bytes == 4 * MIB
        del first, beside
        for freed in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
            parts = [torch.full((MIB - 100,), number, dtype=torch.uint8, device="sim:0") for number in range(3)]
            assert all(begin <= part.data_ptr() < begin + 3 * MIB and part.data_ptr() % 512 == 0 for part in parts)
            assert [part.sum().item() for part in parts] == [0, MIB - 100, 2 * (MIB - 100)]
            for number in freed:
                parts[number] = None
            whole = torch.empty(3 * MIB, dtype=torch.uint8, device="sim:0")
            assert whole.data_ptr() == begin
            del whole


def test_a_tensor_in_backed_memory_outlives_it(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)]):
        with sim.backed_memory(2 * MIB):
            kept = torch.ones(MIB, dtype=torch.uint8, device="sim:0")
        other = torch.zeros(MIB, dtype=torch.uint8, device="sim:0")
        assert (kept == 1).all().item() and (other == 0).all().item()
        del kept, other


# --- Pinned memory


def test_pinning(hardware: ModuleType) -> None:
    plain = torch.randn(4, 8)
    pinned = plain.pin_memory()
    assert pinned.is_pinned() and not plain.is_pinned()
    assert torch.equal(pinned, plain)
    assert pinned[1:].is_pinned() and pinned.view(torch.uint8).is_pinned()
    assert pinned.pin_memory() is pinned
    assert str(torch.empty(4, pin_memory=True).device) == "cpu"
    assert plain.to("sim:1").to("cpu", non_blocking=True).is_pinned(), "as torch does, to make the copy asynchronous"


@pytest.mark.parametrize(("asked", "counted"), [(1, 1), (1000, 1024), (1024, 1024), (1025, 2048), (5 * MIB, 8 * MIB)])
def test_pinned_allocations_round_up_to_a_power_of_two(hardware: ModuleType, asked: int, counted: int) -> None:
    tensor = torch.empty(asked, dtype=torch.uint8, pin_memory=True)
    assert hardware.pinned().used_bytes == counted
    assert tensor.untyped_storage().nbytes() == asked
    del tensor
    assert (hardware.pinned().used_bytes, hardware.pinned().peak_bytes) == (0, counted)


def test_pinned_memory_has_a_cap(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)], pinned_bytes=3 * MIB):
        first = torch.empty(2 * MIB, dtype=torch.uint8, pin_memory=True)
        message = rf"pinned memory. Need {2 * MIB} bytes .*{2 * MIB} in use of {3 * MIB}"
        with pytest.raises(torch.OutOfMemoryError, match=message):
            torch.empty(MIB + 1, dtype=torch.uint8, pin_memory=True)
        second = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
        assert sim.pinned().used_bytes == 3 * MIB
        del first, second


def test_pinned_bytes_stay_until_their_copy_is_done(hardware: ModuleType) -> None:
    source, target = torch.ones(1024, pin_memory=True), torch.empty(1024, device="sim:1")
    target.copy_(source, non_blocking=True)
    del source
    assert hardware.pinned().used_bytes == 4096
    torch.accelerator.current_stream(1).synchronize()
    assert hardware.pinned().used_bytes == 0
    assert target.sum().item() == 1024


# --- Counters and the cluster's own checks


def test_counters(hardware: ModuleType) -> None:
    a = torch.ones(100).to("sim:0")
    b = a.to("sim:1")
    (b + b).cpu()
    torch.accelerator.synchronize(1)
    torch.accelerator.current_stream(1).synchronize()
    first, second = hardware.stats(0), hardware.stats(1)
    assert (first.h2d_bytes, first.num_h2d, first.d2h_bytes, first.num_d2h) == (400, 1, 0, 0)
    assert (second.h2d_bytes, second.num_h2d, second.d2h_bytes, second.num_d2h) == (0, 0, 400, 1)
    assert first.peer_bytes == second.peer_bytes == 400
    assert first.num_peer == second.num_peer == 1
    assert (first.num_kernels, second.num_kernels) == (0, 1)
    assert (first.num_allocs, second.num_allocs) == (1, 2)
    assert (first.num_syncs, second.num_syncs) == (0, 1)
    hardware.reset_stats()
    assert hardware.stats(1).num_kernels == 0
    assert hardware.stats(1).peak_bytes == hardware.stats(1).used_bytes == 400


def test_converting_copies_count_the_bytes_on_the_bus(hardware: ModuleType) -> None:
    halves = torch.ones(100).to("sim:1", torch.bfloat16)
    halves.to("cpu", torch.float32)
    assert (hardware.stats(1).h2d_bytes, hardware.stats(1).d2h_bytes) == (200, 200)


def test_a_device_in_use_cannot_be_removed(hardware: ModuleType) -> None:
    specs = [hardware.SimDeviceSpec(total_bytes=64 * MIB)] * 3
    tensor = torch.empty(10, device="sim:2")
    with pytest.raises(RuntimeError, match=r"cannot remove sim:2: it still holds 40 bytes"):
        hardware.configure(specs[:2])
    del tensor
    hardware.configure(specs[:2])
    assert torch.accelerator.device_count() == 2
    hardware.configure(specs)


def test_cluster_reports_what_is_left(sim: ModuleType) -> None:
    """And the hardware is what it was as soon as nothing is left on it."""
    kept = []
    num_devices = torch.accelerator.device_count()
    assert num_devices > 1
    with (
        pytest.raises(AssertionError, match=r"sim:0 still holds 40 bytes in 1 allocations; 64 bytes are still pinned"),
        sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)]),
    ):
        kept.append(torch.empty(10, device="sim:0"))
        kept.append(torch.empty(64, dtype=torch.uint8, pin_memory=True))
    with pytest.warns(UserWarning, match="104 bytes"), sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)]):
        assert used(sim, 0) == sim.pinned().used_bytes == 0, "the next one starts clean"
        kept.clear()
        assert used(sim, 0) == sim.pinned().used_bytes == 0
    assert torch.accelerator.device_count() == num_devices


def test_cluster_does_not_hide_an_exception(sim: ModuleType) -> None:
    kept = []
    with pytest.raises(ZeroDivisionError), sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)]):
        kept.append(torch.empty(10, device="sim:0"))
        1 / 0  # noqa: B018
    kept.clear()


def test_specs_are_checked(sim: ModuleType) -> None:
    for wrong in ({"reserve_bytes": 2}, {"round_to": 0}, {"h2d_bytes_per_s": 0}, {"launch_s": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sim.SimDeviceSpec(**{"total_bytes": 1, **wrong})
    with pytest.raises(ValueError, match="1 to 8 simulated devices, not 9"):
        sim.configure([sim.SimDeviceSpec(total_bytes=1)] * 9)


def test_the_name_cannot_change(sim: ModuleType) -> None:
    sim.install("sim")
    with pytest.raises(RuntimeError, match="installed as 'sim'"):
        sim.install("npu")


# --- Failures on demand


def test_the_nth_allocation_fails_and_the_next_succeeds(hardware: ModuleType) -> None:
    hardware.fail_alloc(1, 2)
    kept = [torch.empty(1, device="sim:1"), torch.empty(1, device="sim:0")]
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        torch.empty(1, device="sim:1")
    kept.append(torch.empty(1, device="sim:1"))
    assert hardware.stats(1).num_ooms == 1
    assert used(hardware) == 8


def test_every_allocation_of_a_forward_can_fail(hardware: ModuleType) -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).to("sim:1")
    inputs = torch.randn(2, 8, device="sim:1")
    with torch.no_grad():
        reference = module(inputs).cpu()
        before, allocs = used(hardware), hardware.stats(1).num_allocs
        module(inputs)
        for nth in range(1, hardware.stats(1).num_allocs - allocs + 1):
            hardware.fail_alloc(1, nth)
            with pytest.raises(torch.OutOfMemoryError, match="injected"):
                module(inputs)
            assert used(hardware) == before
            assert torch.equal(module(inputs).cpu(), reference)


@pytest.mark.parametrize("kind", ["to device", "to host", "between devices"])
def test_the_nth_copy_fails(hardware: ModuleType, kind: str) -> None:
    source = torch.ones(10, device="sim:1")
    copy = {
        "to device": lambda: torch.ones(10).to("sim:1"),
        "to host": source.cpu,
        "between devices": lambda: source.to("sim:2"),
    }[kind]
    hardware.fail_copy(1, 3)
    copy(), copy()
    with pytest.raises(RuntimeError, match=f"simulated failure of a copy {kind} .sim:1"):
        copy()
    copy()
