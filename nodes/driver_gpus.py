"""The GPUs that drivers have, whether torch sees them or not, from what Linux lists and NVIDIA's library tells.

Nothing here imports torch or starts a program.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DriverGpu", "driver_gpus", "find_nvml", "from_listing", "from_nvml", "from_proc", "from_sysfs"]

VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
LISTED = re.compile(r"^GPU \d+: (.*?) \(UUID: (GPU-[^)]+)\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverGpu:
    """One GPU of a driver; what is not known is empty."""

    vendor: str
    """``nvidia``, ``amd`` or ``intel``."""
    model: str = ""
    uuid: str = ""
    """As torch writes it: without ``GPU-``."""
    pci_address: str = ""
    """As torch's: without the function, such as ``0000:c1:00``."""


def driver_gpus(root: Path = Path("/"), nvml: Any = None) -> tuple[DriverGpu, ...]:
    """Return them in the order of their addresses, which is that of ``nvidia-smi``; none where nothing tells.

    Args:
        root: the folder that contains ``proc`` and ``sys``.
        nvml: the module ``pynvml``, if there is one.
    """
    nvidia = from_proc(root) or from_nvml(nvml)
    return (*nvidia, *(gpu for gpu in from_sysfs(root) if gpu.vendor != "nvidia"))


def find_nvml() -> Any:
    """Return the module ``pynvml`` if it is installed, else None."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def from_proc(root: Path) -> tuple[DriverGpu, ...]:
    """Return those of NVIDIA's driver on Linux: a folder each, named by its address."""
    found = []
    for folder in sorted(list_folder(root / "proc" / "driver" / "nvidia" / "gpus")):
        lines = dict(line.split(":", 1) for line in read_text(folder / "information").splitlines() if ":" in line)
        told = {name.strip(): value.strip() for name, value in lines.items()}
        found.append(
            DriverGpu(
                vendor="nvidia",
                model=told.get("Model", ""),
                uuid=plain_uuid(told.get("GPU UUID", "")),
                pci_address=plain_address(folder.name),
            )
        )
    return tuple(found)


def from_sysfs(root: Path) -> tuple[DriverGpu, ...]:
    """Return the graphics cards of Linux, of any driver, by their addresses; connectors of screens are none."""
    cards = [folder for folder in list_folder(root / "sys" / "class" / "drm") if re.fullmatch(r"card\d+", folder.name)]
    found = []
    for card in cards:
        vendor = VENDORS.get(read_text(card / "device" / "vendor").strip().lower())
        slot = re.search(r"^PCI_SLOT_NAME=(.+)$", read_text(card / "device" / "uevent"), re.MULTILINE)
        if vendor is not None:
            model = read_text(card / "device" / "product_name").strip()
            found.append(DriverGpu(vendor=vendor, model=model, pci_address=plain_address(slot[1] if slot else "")))
    return tuple(sorted(found, key=lambda gpu: gpu.pci_address))


def from_nvml(nvml: Any) -> tuple[DriverGpu, ...]:
    """Return those that NVIDIA's library lists, as on Windows; none without the library or a driver."""
    if nvml is None:
        return ()
    found = []
    try:
        nvml.nvmlInit()
        try:
            for index in range(nvml.nvmlDeviceGetCount()):
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                model, uuid = (as_text(ask(gpu)) for ask in (nvml.nvmlDeviceGetName, nvml.nvmlDeviceGetUUID))
                address = plain_address(as_text(nvml.nvmlDeviceGetPciInfo(gpu).busId))
                found.append(DriverGpu(vendor="nvidia", model=model, uuid=plain_uuid(uuid), pci_address=address))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ()
    return tuple(found)


def from_listing(text: str) -> tuple[DriverGpu, ...]:
    """Return those in what ``nvidia-smi -L`` prints."""
    return tuple(DriverGpu(vendor="nvidia", model=model, uuid=plain_uuid(uuid)) for model, uuid in LISTED.findall(text))


def plain_uuid(uuid: str) -> str:
    """Return it without ``GPU-``; empty while the driver has not asked the card for it (``GPU-????????``)."""
    return "" if "?" in uuid else uuid.removeprefix("GPU-").lower()


def plain_address(address: str) -> str:
    """Return ``0000:c1:00`` of ``00000000:C1:00.0``; empty for what is no address."""
    match = re.fullmatch(r"([0-9a-f]+):([0-9a-f]{2}):([0-9a-f]{2})(\.[0-9a-f])?", address.strip().lower())
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}" if match else ""


def as_text(value: str | bytes) -> str:
    """Return what NVIDIA's library tells as text: older versions of the module give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def list_folder(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return ()


def read_text(path: Path) -> str:
    """Return what a file says, or nothing if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
