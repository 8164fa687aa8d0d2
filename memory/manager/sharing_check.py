"""Whether other processes with this pack are seen on each device, in words, for the doctor; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidInput
from ..transfer.devices import Device
from ..units import format_bytes
from .claims.neighbours import NO_UUID, others_on

__all__ = ["SharingState", "describe_sharing"]

# What the engines of containers leave in them: Docker, Podman, systemd-nspawn and others, Flatpak.
CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container", ".flatpak-info")
# In the control group of a container's first process, where the container sees the host's names of groups.
CONTAINER_GROUPS = ("/docker", "/kubepods", "/lxc", "/libpod", "/containerd")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingState:
    """One line; ``remedy`` says what to do about a warning."""

    text: str
    is_warning: bool = False
    remedy: str = ""


def describe_sharing(devices: Iterable[Device], folder: Path | None, root: Path = Path("/")) -> list[SharingState]:
    """Return a line for each accelerator, and one if this is a container.

    Args:
        folder: where processes share devices (`shared_folder`); None: they do not.
        root: the folder that contains ``proc`` and ``run``.
    """
    accelerators = [device for device in devices if not device.is_cpu]
    if not accelerators:
        return []
    if folder is None:
        text = "off: other processes on the same devices are not seen"
        return [SharingState(text=f"{text}; that needs the package platformdirs, and a runtime folder of your own")]
    states = [describe_device(device, folder) for device in accelerators]
    if is_container(root):
        text = f"this is a container: processes outside of it, or in others, are seen only if they have {folder}, too"
        states.append(SharingState(text=text))
    return states


def describe_device(device: Device, folder: Path) -> SharingState:
    try:
        others = others_on(folder, device)
    except InvalidInput as error:
        if str(error) == NO_UUID:  # so it is on MPS: nothing can be done
            return SharingState(text=f"{device.name}: not shared with other processes: {error}")
        remedy = "two processes on it compete for its memory; run one at a time, or give each a part with a watermark"
        return SharingState(text=f"{device.name}: not shared: {error}", is_warning=True, remedy=remedy)
    if not others:
        return SharingState(text=f"{device.name}: no other process with this pack uses it now (looked in {folder})")
    told = [
        f"pid {other.pid} uses {format_bytes(other.used_bytes)}, {format_bytes(other.idle_bytes)} of it idle"
        for other in others
    ]
    processes = "1 other process" if len(others) == 1 else f"{len(others)} other processes"
    return SharingState(text=f"{device.name}: shared with {processes}: {'; '.join(told)}")


def is_container(root: Path = Path("/")) -> bool:
    """Whether this process runs in a container, as far as Linux tells; a folder of its own may still be shared."""
    if any((root / mark).exists() for mark in CONTAINER_MARKS):
        return True
    try:
        groups = (root / "proc/1/cgroup").read_text(errors="replace")
    except OSError:
        return False
    return any(mark in groups for mark in CONTAINER_GROUPS)
