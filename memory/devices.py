"""Devices as the engine sees them: a name for people, a torch device, and live bytes.

Accelerators are reached through torch's device-generic API only, so the same code runs on CUDA, ROCm, XPU
and on the simulated devices. People write ``gpu:N`` whatever the backend is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import psutil
import torch

from .errors import InvalidInput, allowed_values
from .placement import canonical_device

__all__ = ["CPU", "Device", "find_device", "list_devices"]

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


@dataclass(frozen=True, slots=True)
class Device:
    """One place where tensors live and compute; equal devices have equal names."""

    name: str
    torch_device: torch.device

    @property
    def module(self) -> ModuleType:
        """torch's module for this kind of device; older torch has the memory calls only there."""
        module: ModuleType = torch.get_device_module(self.torch_device)
        return module

    @property
    def is_cpu(self) -> bool:
        return self.torch_device.type == "cpu"

    def total_bytes(self) -> int:
        """Return the device's memory in bytes; for the CPU the RAM, or the container's limit if smaller."""
        if self.is_cpu:
            total = int(psutil.virtual_memory().total)
            return min(total, read_cgroup(CGROUP_LIMIT) or total)
        return int(self.module.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        """Return bytes that an allocation can get now: the driver's free and the allocator's cached ones."""
        if self.is_cpu:
            limit = read_cgroup(CGROUP_LIMIT)
            available = int(psutil.virtual_memory().available)
            return available if limit is None else min(available, limit - (read_cgroup(CGROUP_USED) or 0))
        driver_free = int(self.module.mem_get_info(self.torch_device)[0])
        reserved = int(self.module.memory_reserved(self.torch_device))
        return driver_free + reserved - self.allocated_bytes()

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors; 0 for the CPU, whose tensors torch does not count."""
        return 0 if self.is_cpu else int(self.module.memory_allocated(self.torch_device))

    def peak_bytes(self) -> int:
        """Return the most bytes of live tensors since `reset_peak`; 0 for the CPU."""
        return 0 if self.is_cpu else int(self.module.max_memory_allocated(self.torch_device))

    def reset_peak(self) -> None:
        if not self.is_cpu:
            self.module.reset_peak_memory_stats(self.torch_device)

    def __str__(self) -> str:
        return self.name


CPU = Device("cpu", torch.device("cpu"))


def read_cgroup(path: Path) -> int | None:
    """Return the container's number of bytes, or None where there is none (``max``, or no cgroup v2)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def list_devices() -> tuple[Device, ...]:
    """Return the CPU, then every accelerator that torch sees; touches no device memory."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return (CPU,)
    count = torch.accelerator.device_count()
    return CPU, *(Device(f"gpu:{index}", torch.device(accelerator.type, index)) for index in range(count))


def find_device(name: str) -> Device:
    """Return the device that a name means: ``cpu``, ``gpu``, ``gpu:1`` or a torch name.

    Raises:
        InvalidInput: the machine has no such device; lists those it has.
    """
    devices = {device.name: device for device in list_devices()}
    canonical = canonical_device(name)
    if canonical not in devices:
        raise InvalidInput(f"device {name!r} is not here; {allowed_values(name, devices)}")
    return devices[canonical]
