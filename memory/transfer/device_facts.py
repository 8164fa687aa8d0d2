"""What torch tells of a device, as plain values: which card it is, its size, and whether it is integrated. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceFacts", "find_doubles", "read_facts"]

# ROCm says ``GPU-XX`` of every card that has no identifier; torch shows the characters as the bytes of a uuid.
NO_IDENTIFIER = "4750552d5858"
PCI = ("pci_domain_id", "pci_bus_id", "pci_device_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """One device, as torch sees it; what torch does not tell is empty."""

    name: str
    """As users write it, such as ``gpu:0``."""
    model: str = ""
    """What the driver calls it, such as ``NVIDIA H200``."""
    uuid: str = ""
    """What tells the card from every other; parts of one card may share it."""
    pci_address: str = ""
    """Where it is plugged in: domain, bus and device in hexadecimal, such as ``0000:c1:00``."""
    total_bytes: int = 0
    is_integrated: bool = False
    """Whether it has no memory of its own: what is copied to it stays in the RAM."""

    def is_card_of(self, other: DeviceFacts) -> bool:
        """Whether both are one card; addresses that differ are two, whatever their drivers say beside."""
        if self.pci_address and other.pci_address and self.pci_address != other.pci_address:
            return False
        if self.uuid and other.uuid:
            return self.uuid == other.uuid and self.total_bytes == other.total_bytes
        return bool(self.pci_address) and self.pci_address == other.pci_address


def read_facts(name: str, properties: Any) -> DeviceFacts:
    """Return what torch's ``get_device_properties`` tells, by the names of CUDA, ROCm and XPU; None tells nothing."""
    uuid = str(getattr(properties, "uuid", ""))
    is_placeholder = uuid.replace("-", "").lower().startswith(NO_IDENTIFIER) or not uuid.strip("0-")
    address = [int(getattr(properties, part)) for part in PCI if hasattr(properties, part)]
    is_integrated = getattr(properties, "is_integrated", None) or getattr(properties, "is_integrated_gpu", None)
    return DeviceFacts(
        name=name,
        model=str(getattr(properties, "name", "")),
        uuid="" if is_placeholder else uuid,
        pci_address="{:04x}:{:02x}:{:02x}".format(*address) if len(address) == len(PCI) else "",
        total_bytes=int(getattr(properties, "total_memory", 0)),
        is_integrated=bool(is_integrated),
    )


def find_doubles(facts: Iterable[DeviceFacts]) -> dict[str, str]:
    """Return the devices that are a card which an earlier one is already, and the name of that one."""
    doubles: dict[str, str] = {}
    first: list[DeviceFacts] = []
    for device in facts:
        same = next((other for other in first if device.is_card_of(other)), None)
        if same is None:
            first.append(device)
        else:
            doubles[device.name] = same.name
    return doubles
