"""Devices: the name that users read and write, the torch device, and the current memory numbers.

Accelerators are used through torch's device-generic API only, so the same code runs on CUDA, ROCm, XPU and the
simulated devices. Users write ``gpu:N`` for every backend.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import psutil
import torch

from ..options.placement import parse_device
from .device_facts import DeviceFacts, find_doubles, read_facts

__all__ = [
    "CPU",
    "AllocatorBytes",
    "Card",
    "Device",
    "DeviceMemory",
    "HostMemory",
    "find_device",
    "list_devices",
    "list_doubles",
    "peers_of",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostMemory:
    """The RAM that this process may use: the machine's, or the container's limit if that is less."""

    total_bytes: int
    free_bytes: int
    """Bytes that can be allocated now without swapping. Page cache counts as free."""

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """Read the machine's numbers (from psutil, which ignores containers) and the limits of this process's cgroups.

        Args:
            root: the folder that contains ``proc`` and ``sys``.
        """
        machine = psutil.virtual_memory()
        total, free = int(machine.total), int(machine.available)
        for limit, used in read_cgroups(root, below=total):
            total, free = min(total, limit), min(free, limit - used)
        return cls(total_bytes=total, free_bytes=max(0, free))


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupFiles:
    """The names of one cgroup version's memory files (kernel documents ``cgroup-v2`` and ``cgroup-v1/memory``).

    ``memory.high`` counts as a limit, too: above it the kernel throttles a group until enough memory is reclaimed, and
    page-locked memory cannot be reclaimed.
    """

    mount: str
    limits: tuple[str, ...]
    used: str
    caches: tuple[str, ...]
    """The entries of ``memory.stat`` with reclaimable bytes: the two lists of file pages."""


LONGEST_FILE = 1 << 16
"""No file of these is as long; the kernel makes each at one read."""
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
    """Yield limit and used bytes of this process's memory cgroup and of each of its parents.

    Used bytes exclude cached files, which can be dropped, as in ``MemAvailable``. Skips groups whose limit is not below
    ``below`` bytes.
    """
    lines = read_text(f"{root}/proc/self/cgroup").splitlines()  # none where this is not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V1 if controllers else CGROUP_V2
        mount = f"{root}/{files.mount}"
        # Without a cgroup namespace a container reads its path on the host; its own group is then at the mount.
        parts = path.split("/")
        group = [part for part in parts if part] if ".." not in parts else []
        for depth in range(len(group), -1, -1):
            folder = "/".join([mount, *group[:depth]])
            limit = min(
                (found for name in files.limits if (found := read_number(f"{folder}/{name}")) is not None),
                default=below,
            )
            if limit < below:
                used = read_number(f"{folder}/{files.used}") or 0
                yield limit, max(0, used - read_cached(f"{folder}/memory.stat", files.caches))


def read_text(path: str) -> str:
    """Return a file's text, none for a missing one; read at each look at the RAM, so with few calls."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, LONGEST_FILE).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(file)


def read_number(path: str) -> int | None:
    """Return a cgroup file's number; None for ``max`` and for a missing file."""
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def read_cached(path: str, names: tuple[str, ...]) -> int:
    pairs = (line.split() for line in read_text(path).splitlines())
    return sum(int(number) for name, number in pairs if name in names)


class AllocatorBytes(NamedTuple):
    """The bytes of a device that torch's allocator has."""

    reserved: int
    """What torch calls reserved: allocated from the driver, in use or cached. A watermark's reserve is none of it."""
    allocated: int
    """In use by live tensors."""
    peak: int
    """The peak of ``allocated`` since `Device.reset_peak`."""


class DeviceMemory(NamedTuple):
    """A device's memory at one moment, in bytes."""

    total: int
    free: int
    """Bytes that an allocation can get: free in the driver or cached by the allocator."""
    reserved: int
    """As in `AllocatorBytes`, and so are the next two."""
    allocated: int
    peak: int


class Card(NamedTuple):
    """Which card a device is, as every process on the machine sees it."""

    uuid: str
    total_bytes: int


NOTHING_ALLOCATED = AllocatorBytes(0, 0, 0)
# The types of devices whose allocator was put in torch's place, as ComfyUI's comfy-aimdo can do, and counts nothing.
UNCOUNTED: set[str] = set()


# Every card of CUDA and ROCm widens float8, Apple's GPUs have no such dtypes; others are tried.
WITH_FLOAT8: dict[str, bool] = {"cpu": True, "cuda": True, "mps": False}
"""By type of device, whether float8 can be widened there."""


def can_widen_float8(device: torch.device) -> bool:
    """Try to; takes a few bytes of the device."""
    try:
        with torch.no_grad():
            codes = torch.zeros(16, dtype=torch.uint8, device=device)
            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                torch.empty(16, dtype=torch.bfloat16, device=device).copy_(codes.view(dtype))
    except torch.OutOfMemoryError:
        return True  # that says nothing of it
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Device:
    """One device for tensors and computing. Equal devices have equal names."""

    name: str
    torch_device: torch.device

    @property
    def module(self) -> ModuleType:
        """Torch's module for this type of device. Older torch has the memory functions only there."""
        module: ModuleType = torch.get_device_module(self.torch_device)
        return module

    @property
    def is_cpu(self) -> bool:
        return self.torch_device.type == "cpu"

    @property
    def is_uncounted(self) -> bool:
        """Whether an allocator that counts nothing was found in the place of torch's."""
        return self.torch_device.type in UNCOUNTED

    @property
    def has_float8(self) -> bool:
        """Whether float8 can be widened there; tried once for each type of device where that is not known."""
        kind = self.torch_device.type
        if kind not in WITH_FLOAT8:
            WITH_FLOAT8[kind] = can_widen_float8(self.torch_device)
        return WITH_FLOAT8[kind]

    def facts(self) -> DeviceFacts:
        """Return what torch tells of the device; for the CPU, and where torch tells nothing, its name alone.

        Allocates no device memory.
        """
        find = getattr(self.module, "get_device_properties", None)
        return read_facts(self.name, None if self.is_cpu or find is None else find(self.torch_device))

    @property
    def is_integrated(self) -> bool:
        """Whether it has no memory of its own; False where torch does not tell."""
        return self.facts().is_integrated

    def card(self) -> Card | None:
        """Return what tells the card from every other, in every process; None if torch reports no uuid of it."""
        facts = self.facts()
        return Card(facts.uuid, facts.total_bytes) if facts.uuid else None

    def model_and_size(self) -> tuple[str, int]:
        """Return what the driver calls the device, such as ``NVIDIA H200``, and its bytes; "" where it has no name.

        Allocates no device memory, where torch tells the properties of a device.
        """
        facts = self.facts()
        return facts.model, facts.total_bytes or self.total_bytes()

    def speed(self) -> float | None:
        """Return how fast it computes beside others of its type: its processors times their clock; None if not known.

        Allocates no device memory.
        """
        find = getattr(self.module, "get_device_properties", None)
        properties = None if self.is_cpu or find is None else find(self.torch_device)
        processors = getattr(properties, "multi_processor_count", None)
        return float(processors * (getattr(properties, "clock_rate", None) or 1)) if processors else None

    def memory(self) -> DeviceMemory:
        """Return all memory numbers of the device, from one query of the driver and one of the allocator.

        For the CPU: the RAM, or the container's limit if smaller. Torch does not count CPU tensors.
        """
        if self.is_cpu:
            host = HostMemory.now()
            return DeviceMemory(host.total_bytes, host.free_bytes, *NOTHING_ALLOCATED)
        driver_free, total = self.module.mem_get_info(self.torch_device)
        torchs = self.allocator_bytes()
        return DeviceMemory(int(total), int(driver_free) + torchs.reserved - torchs.allocated, *torchs)

    def allocator_bytes(self) -> AllocatorBytes:
        """Return the numbers of torch's allocator, without a query of the driver; zeros for the CPU.

        Not from `memory_stats` or functions based on it: these flatten the same dict recursively, which leaves cyclic
        garbage and takes ten times as long.
        """
        if self.is_cpu or self.is_uncounted:
            return NOTHING_ALLOCATED
        try:
            stats = self.module.memory_stats_as_nested_dict(self.torch_device)
        except RuntimeError as error:
            if "PluggableAllocator" not in str(error):
                raise
            UNCOUNTED.add(self.torch_device.type)
            return NOTHING_ALLOCATED
        if not stats:  # nothing was allocated yet
            return NOTHING_ALLOCATED
        allocated = stats["allocated_bytes"]["all"]
        return AllocatorBytes(stats["reserved_bytes"]["all"]["current"], allocated["current"], allocated["peak"])

    def total_bytes(self) -> int:
        """Return the device's memory in bytes; for the CPU the RAM, or the container's limit if that is less."""
        return self.memory().total if self.is_cpu else int(self.module.mem_get_info(self.torch_device)[1])

    def free_bytes(self) -> int:
        """Return the bytes that an allocation can get now: free in the driver or cached by the allocator."""
        return self.memory().free

    def driver_free_bytes(self) -> int:
        """Return the bytes that every program can get now: what the allocator has cached is not among them."""
        return self.memory().free if self.is_cpu else int(self.module.mem_get_info(self.torch_device)[0])

    def allocated_bytes(self) -> int:
        """Return the bytes of live tensors; 0 for the CPU, because torch does not count CPU tensors."""
        return self.allocator_bytes().allocated

    def peak_bytes(self) -> int:
        """Return the peak bytes of live tensors since `reset_peak`; 0 for the CPU."""
        return self.allocator_bytes().peak

    def reset_peak(self) -> None:
        if not (self.is_cpu or self.is_uncounted):
            self.module.reset_peak_memory_stats(self.torch_device)

    def is_recorded(self) -> bool:
        """Whether what is launched on the current stream is recorded for later, as by CUDA graphs."""
        find = None if self.is_cpu else getattr(self.module, "is_current_stream_capturing", None)
        return find is not None and bool(find())

    def empty_cache(self) -> None:
        """Give the cached bytes of torch's allocator back to the driver. Does nothing for the CPU."""
        if not self.is_cpu:
            self.module.empty_cache()

    def defragment(self, num_bytes: int) -> None:
        """Give the cached memory of torch's allocator back if the driver has less than ``num_bytes`` beside it.

        Weights that are allocated next would else lie in pieces of cached memory, of which what is left over is too
        small for the activations that it was allocated for (seen on an H200: 236 MiB cached, 268 MiB refused). Takes a
        millisecond for each cached range, and as long again when it is allocated the next time. The driver waits for
        the device, and the caches of all devices of this type are given back.
        """
        if self.is_cpu:
            return
        memory = self.memory()
        cached = memory.reserved - memory.allocated
        if cached > 0 and memory.free - cached < num_bytes:
            self.empty_cache()

    def __str__(self) -> str:
        return self.name


CPU = Device("cpu", torch.device("cpu"))


def seen_devices() -> list[Device]:
    """Return every accelerator that torch sees, a card twice where torch sees it twice."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if accelerator is not None else 0
    return [Device(f"gpu:{index}", torch.device(accelerator.type, index)) for index in range(count) if accelerator]


def list_doubles() -> dict[str, str]:
    """Return the accelerators that are a card which an earlier one is already, and the name of that one."""
    seen = seen_devices()
    return find_doubles(device.facts() for device in seen) if len(seen) > 1 else {}


def list_devices() -> tuple[Device, ...]:
    """Return the CPU, then every accelerator that torch sees; a card that it sees twice only once.

    Allocates no device memory.
    """
    doubles = list_doubles()
    return CPU, *(device for device in seen_devices() if device.name not in doubles)


def find_device(name: str) -> Device:
    """Return the device with this name: ``cpu``, ``gpu``, ``gpu:1``, a torch device name, or what only one begins with.

    Raises:
        InvalidInput: the machine has no such device, or several begin so; lists them.
    """
    devices = {device.name: device for device in list_devices()}
    return devices[parse_device(name, list(devices))]


def peers_of(device: Device) -> list[str]:
    """Return the devices whose memory this one can read directly; none for the CPU, or if torch cannot tell."""
    can_access = getattr(device.module, "can_device_access_peer", None)
    if device.is_cpu or can_access is None:
        return []
    others = [other for other in list_devices() if not other.is_cpu and other != device]
    return [other.name for other in others if can_access(device.torch_device, other.torch_device)]
