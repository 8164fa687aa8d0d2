"""A device's numbers: one read of the driver's and one of the allocator's, equal to what torch says one by one."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import MemoryManager, manage
from highwater.memory.transfer import devices
from highwater.memory.transfer.devices import CPU, Device, DeviceMemory, find_device
from highwater.memory.units import MIB


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 9000), max_size=6), num_freed=st.integers(0, 6))
def test_they_are_those_of_torch(sim, sizes: list[int], num_freed: int) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)] * 2):
        device, module = find_device("gpu:1"), torch.sim
        tensors = [torch.empty(size, dtype=torch.uint8, device="sim:1") for size in sizes]
        del tensors[:num_freed]
        memory = device.memory()
        free, total = module.mem_get_info(1)
        reserved, allocated = module.memory_reserved(1), module.memory_allocated(1)
        assert memory == (total, free + reserved - allocated, reserved, allocated, module.max_memory_allocated(1))
        assert memory[2:] == device.allocator_bytes()
        assert (device.free_bytes(), device.allocated_bytes(), device.peak_bytes()) == (memory.free, *memory[3:])
        device.reset_peak()
        assert device.memory().peak == allocated
        del tensors


def test_reading_them_leaves_no_garbage(sim) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)]):
        device = find_device("gpu:0")
        tensor = torch.ones(4, device="sim:0")
        gc.collect()
        gc.disable()
        try:
            device.memory(), device.free_bytes(), device.peak_bytes(), device.reset_peak()
            assert gc.collect() == 0
        finally:
            gc.enable()
        del tensor


def test_the_cpus_are_those_of_the_ram() -> None:
    memory = CPU.memory()
    assert 0 < memory.free <= memory.total
    assert memory[2:] == CPU.allocator_bytes() == (0, 0, 0)


def test_an_allocator_that_counts_nothing_is_told_and_breaks_nothing(sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch answers where `torch.cuda.memory.change_current_allocator` was called."""

    def refuse(*_: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(devices, "UNCOUNTED", set())
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)]):
        device = devices.find_device("gpu:0")
        monkeypatch.setattr(device.module, "memory_stats_as_nested_dict", refuse)
        monkeypatch.setattr(device.module, "reset_peak_memory_stats", refuse)
        assert not device.is_uncounted
        manager = MemoryManager()
        manager.begin_node("1", "Sample")
        node = manager.end_node()
        assert device.is_uncounted and not devices.CPU.is_uncounted
        assert node["uncounted"] == ["gpu:0"] and node["activation_bytes"] == {"gpu:0": 0}
        assert device.memory().total == 1 << 20


def test_another_failure_of_the_allocator_is_raised(sim, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)]):
        device = devices.find_device("gpu:0")
        monkeypatch.setattr(device.module, "memory_stats_as_nested_dict", fail)
        with pytest.raises(RuntimeError, match="device lost"):
            device.allocator_bytes()


class CachingDevice(Device):
    """A device on which torch's allocator has cached so much of what is free; simulated devices have no cache."""

    cached = 0
    emptied: list[int] = []  # noqa: RUF012
    """What live tensors had each time that the cache was given back."""

    def memory(self) -> DeviceMemory:
        found = super().memory()
        return found._replace(reserved=found.allocated + self.cached)

    def empty_cache(self) -> None:
        self.emptied.append(self.allocated_bytes())
        type(self).cached = 0


@pytest.mark.parametrize("cached_mib, empties", [(0, False), (1, False), (3.5, True)])
@torch.no_grad()
def test_weights_lie_in_no_pieces_of_cached_memory_where_memory_is_short(
    sim, toys, monkeypatch, cached_mib: float, empties: bool
) -> None:
    monkeypatch.setattr(CachingDevice, "cached", int(cached_mib * MIB))
    monkeypatch.setattr(CachingDevice, "emptied", [])
    net = toys.build_net()
    x = torch.randn(2, 5, 64, device="cpu")
    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 * MIB)]):
        manager = MemoryManager(devices=[CPU, CachingDevice("gpu:0", torch.device("sim:0"))])
        manager.set_watermark("*", 0, 0)
        with manage(net, "unlimited", placement="gpu:0", manager=manager):
            for _ in range(2):
                net(x)
            assert CachingDevice.emptied == ([0] if empties else []), "once, before anything was allocated"
        manager.release_all()


def test_memory_that_forwards_are_known_to_need_counts_as_needed(sim, monkeypatch) -> None:
    monkeypatch.setattr(CachingDevice, "cached", MIB)
    monkeypatch.setattr(CachingDevice, "emptied", [])
    with sim.cluster([sim.SimDeviceSpec(total_bytes=4 * MIB)]):
        device = CachingDevice("gpu:0", torch.device("sim:0"))
        device.defragment(3 * MIB)
        assert not CachingDevice.emptied
        device.defragment(3 * MIB + 1)
        assert len(CachingDevice.emptied) == 1
        device.defragment(1 << 40)
        assert len(CachingDevice.emptied) == 1, "nothing is cached any more"
