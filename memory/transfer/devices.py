"""Devices as the engine sees them: a name for people, a torch device, and live bytes.

Accelerators are reached through torch's device-generic API only, so the same code runs on CUDA, ROCm, XPU
and on the simulated devices. People write ``gpu:N`` whatever the backend is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import psutil
import torch

from ..errors import InvalidInput, allowed_values
from ..options.placement import canonical_device

__all__ = [
    "CPU",
    "AllocatorBytes",
    "Device",
    "DeviceMemory",
    "HostMemory",
    "find_device",
    "list_devices",
    "peers_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The RAM that this process may use: the machine's, or its containers' where that is less."""

    total_bytes: int
    free_bytes: int
    """What can be allocated now without swapping; memory that only caches files counts as free."""

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """Read the machine's numbers (psutil, which knows no containers) and the limits of every cgroup around us.

        Args:
            root: where ``proc`` and ``sys`` are.
        """
        machine = psutil.virtual_memory()
        total, free = int(machine.total), int(machine.available)
        for limit, used in read_cgroups(root, below=total):
            total, free = min(total, limit), min(free, limit - used)
        return cls(total_bytes=total, free_bytes=max(0, free))


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupFiles:
    """The names of one cgroup version's memory files: the kernel's ``admin-guide/cgroup-v2`` and ``cgroup-v1/memory``.

    Above ``memory.high`` a group is throttled until enough is reclaimed, which page-locked memory cannot be, so it
    is a limit too.
    """

    mount: str
    limits: tuple[str, ...]
    used: str
    caches: tuple[str, ...]
    """The lines of ``memory.stat`` that tell what reclaiming can give back: the two lists of file pages."""


CGROUP_V1 = CgroupFiles(
    mount="sys/fs/cgroup/memory",
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    caches=("total_active_file", "total_inactive_file"),
)
CGROUP_V2 = CgroupFiles(
    mount="sys/fs/cgroup",
    limits=("memory.max", "memory.high"),
    used="memory.current",
    caches=("active_file", "inactive_file"),
)


def read_cgroups(root: Path, *, below: int) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of this process's memory cgroups, its own and those around it.

    Used are the bytes that cannot be had by dropping cached files, as in ``MemAvailable``. Groups without a limit
    below so many bytes are left out.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V1 if controllers else CGROUP_V2
        mount = root / files.mount
        # A container without a cgroup namespace reads its path on the host, and finds its own group at the mount.
        group = mount / path.lstrip("/") if ".." not in path.split("/") else mount
        for folder in (group, *group.parents):
            limit = min(
                (found for name in files.limits if (found := read_number(folder / name)) is not None), default=below
            )
            if limit < below:
                used = read_number(folder / files.used) or 0
                yield limit, max(0, used - read_cached(folder / "memory.stat", files.caches))
            if folder == mount:
                break


def read_number(path: Path) -> int | None:
    """Return a cgroup file's number, or None where there is none (``max``, or no such file)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def read_cached(path: Path, names: tuple[str, ...]) -> int:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
    except OSError:
        return 0
    return sum(int(number) for name, number in pairs if name in names)


class AllocatorBytes(NamedTuple):
    """What torch's allocator has of a device."""

    reserved: int
    """Taken from the driver, in use or kept for later."""
    allocated: int
    """In live tensors."""
    peak: int
    """The most in live tensors since `Device.reset_peak`."""


class DeviceMemory(NamedTuple):
    """A device's memory at one moment, in bytes."""

    total: int
    free: int
    """What an allocation can get: the driver's free bytes and those that the allocator keeps for later."""
    reserved: int
    allocated: int
    peak: int


NOTHING_ALLOCATED = AllocatorBytes(0, 0, 0)


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

    def memory(self) -> DeviceMemory:
        """Return all of a device's numbers, from one read of the driver's and one of the allocator's.

        For the CPU they are those of the RAM, or the container's limit if smaller; torch does not count its tensors.
        """
        if self.is_cpu:
            host = HostMemory.now()
            return DeviceMemory(host.total_bytes, host.free_bytes, *NOTHING_ALLOCATED)
        driver_free, total = self.module.mem_get_info(self.torch_device)
        torchs = self.allocator_bytes()
        return DeviceMemory(int(total), int(driver_free) + torchs.reserved - torchs.allocated, *torchs)

    def allocator_bytes(self) -> AllocatorBytes:
        """Return what torch's allocator counts, without asking the driver; zeros for the CPU.

        `memory_stats` and what is built on it flatten the same dict by a function that calls itself, which leaves
        cyclic garbage and costs ten times as much.
        """
        stats = {} if self.is_cpu else self.module.memory_stats_as_nested_dict(self.torch_device)
        if not stats:  # nothing was allocated yet
            return NOTHING_ALLOCATED
        allocated = stats["allocated_bytes"]["all"]
        return AllocatorBytes(stats["reserved_bytes"]["all"]["current"], allocated["current"], allocated["peak"])

    def total_bytes(self) -> int:
        """Return the device's memory in bytes; for the CPU the RAM, or the container's limit if smaller."""
        return self.memory().total if self.is_cpu else int(self.module.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        """Return bytes that an allocation can get now: the driver's free and the allocator's cached ones."""
        return self.memory().free

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors; 0 for the CPU, whose tensors torch does not count."""
        return self.allocator_bytes().allocated

    def peak_bytes(self) -> int:
        """Return the most bytes of live tensors since `reset_peak`; 0 for the CPU."""
        return self.allocator_bytes().peak

    def reset_peak(self) -> None:
        if not self.is_cpu:
            self.module.reset_peak_memory_stats(self.torch_device)

    def empty_cache(self) -> None:
        """Return to the driver what torch's allocator keeps for later; nothing for the CPU."""
        if not self.is_cpu:
            self.module.empty_cache()

    def __str__(self) -> str:
        return self.name


CPU = Device("cpu", torch.device("cpu"))


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


def peers_of(device: Device) -> list[str]:
    """Return the devices whose memory this one reads without the host; none for the CPU, or if torch cannot tell."""
    can_access = getattr(device.module, "can_device_access_peer", None)
    if device.is_cpu or can_access is None:
        return []
    others = [other for other in list_devices() if not other.is_cpu and other != device]
    return [other.name for other in others if can_access(device.torch_device, other.torch_device)]
