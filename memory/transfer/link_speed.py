"""The speed of copies to a device, from page-locked memory or from another device: measured once, and stored with the
identity of both.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ..user_folders import cache_folder
from .devices import Device, peers_of

__all__ = ["cache_directory", "describe_link", "known_link", "link_bytes_per_s", "remember_links_in", "state_links"]

links_folder: list[Path | None] = []
"""The folder of measured links, if one was set; otherwise the user's cache folder is used."""


stated_links: dict[tuple[str, str], float] = {}
"""By device and where copies come from, another device or nothing for page-locked memory: speeds that were said."""


def state_links(speeds: Mapping[tuple[str, str], float]) -> None:
    """Take these speeds of devices that are only described in place of measured ones, and forget those said before."""
    stated_links.clear()
    stated_links.update(speeds)


def remember_links_in(folder: Path | None, *, keep: bool = False) -> None:
    """Store measured links in this folder; None: store none.

    Args:
        keep: change nothing if this function was called before.
    """
    if not (keep and links_folder):
        links_folder[:] = [folder]


def cache_directory() -> Path | None:
    """Return the folder of measured links, with one file each; it may not exist yet. None if they are not stored."""
    if links_folder:
        return links_folder[0]
    folder = cache_folder()
    return folder / "links" if folder is not None else None


def describe_link(device: Device) -> dict[str, str]:
    """Return the properties on which a link's speed depends: the card, its slot, the driver and torch.

    Equal cards may be in different slots, so a card is identified by uuid and bus number if torch reports them.
    """
    properties = device.module.get_device_properties(device.torch_device)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "")  # no device module has a public function for it
    return {
        "name": str(properties.name),
        "uuid": str(getattr(properties, "uuid", device.name)),
        "bus": ":".join(str(getattr(properties, f"pci_{part}_id", "")) for part in ("domain", "bus", "device")),
        "driver": str(getattr(properties, "driver_version", "") or driver()),
        "torch": torch.__version__,
    }


def describe_way(device: Device, store: Device | None) -> dict[str, str]:
    """Return the properties of the way from another device, or of the link where that is None."""
    link = describe_link(device)
    if store is None:
        return link
    way = "peer" if store.name in peers_of(device) else "host"
    return {**link, "way": way, **{f"from {part}": told for part, told in describe_link(store).items()}}


def known_link(device: Device, store: Device | None = None) -> float | None:
    """Return the stated or stored speed of a device's link in bytes per second; None if it was not measured.

    Args:
        store: the device that the copies come from; None: page-locked memory.
    """
    said = stated_links.get((device.name, store.name if store is not None else ""))
    directory = cache_directory()
    if said is not None or directory is None:
        return said
    link = describe_way(device, store)
    return read_speed(path_of(link, directory), link)


def link_bytes_per_s(
    device: Device, measure: Callable[[], float], *, store: Device | None = None, directory: Path | None = None
) -> float:
    """Return the speed of copies to a device from pinned memory, or from the device ``store``, in bytes per second.

    Calls ``measure`` unless a speed of this link is stored, and stores the result if the cache is writable. A damaged
    file, or a file of another link, is ignored.

    Raises:
        ValueError: the measured speed is not positive and finite.
    """
    directory = directory or cache_directory()
    link = describe_way(device, store)
    known = read_speed(path_of(link, directory), link) if directory is not None else None
    if known is not None:
        return known
    speed = measure()
    if not is_speed(speed):
        raise ValueError(f"wrong measurement of the link to {device}: {speed!r} bytes per second; allowed: more than 0")
    if directory is not None:
        write_speed(path_of(link, directory), link, speed)
    return speed


def path_of(link: dict[str, str], directory: Path) -> Path:
    key = hashlib.sha256(json.dumps(link, sort_keys=True).encode()).hexdigest()[:16]
    return directory / f"{key}.json"


def is_speed(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and math.isfinite(value)


def read_speed(path: Path, link: dict[str, str]) -> float | None:
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):  # no file, not JSON, or not text
        return None
    if not isinstance(stored, dict) or stored.get("link") != link or not is_speed(stored.get("bytes_per_s")):
        return None
    return float(stored["bytes_per_s"])


def write_speed(path: Path, link: dict[str, str], speed: float) -> None:
    # The file is moved into place in one step, so no process reads half of it. Without a writable cache each process
    # measures again.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as workspace:
            finished = Path(workspace, path.name)
            finished.write_text(json.dumps({"link": link, "bytes_per_s": speed}, indent=1))
            os.replace(finished, path)
