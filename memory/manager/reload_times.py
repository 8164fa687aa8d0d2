"""How long a byte of a component takes back to a device, as measured."""

from __future__ import annotations

from collections.abc import Mapping

from .member import Member

__all__ = ["ReloadTimes"]


class ReloadTimes:
    """Reload times by the speeds of links; arithmetic only.

    Args:
        links: bytes per second from page-locked memory, by device; entries may come later.
        pageable_links: bytes per second from other host memory, in the same way.
    """

    def __init__(self, links: Mapping[str, float], pageable_links: Mapping[str, float]) -> None:
        self.links = links
        self.pageable_links = pageable_links

    def of(self, member: Member, device: str) -> float | None:
        """Return the seconds per byte of a member; None where a speed that they depend on was not measured."""
        managed = member.managed
        plan = managed.plan
        locked = plan.pinned_bytes / plan.host_bytes if plan.host_bytes else 0.0
        in_ram_s = self.of_part(device, locked) if plan.tier != "disk" else 0.0
        if not plan.file_bytes or in_ram_s is None:
            return in_ram_s
        speed = managed.source.bytes_per_s if managed.source is not None else None
        in_file = plan.file_bytes / plan.weight_bytes
        return in_file / speed + (1 - in_file) * in_ram_s if speed else None

    def of_tiers(self, device: str, host_bytes: Mapping[str, int]) -> float | None:
        """Return the seconds per byte of what has so many bytes of RAM by tier; None where that is not known."""
        total = sum(host_bytes.values())
        return self.of_part(device, host_bytes.get("pinned", 0) / total) if total else None

    def of_part(self, device: str, locked: float) -> float | None:
        """Return the seconds per byte of what has this part of its bytes page-locked."""
        speeds = ((locked, self.links.get(device)), (1 - locked, self.pageable_links.get(device)))
        if any(part > 0 and not speed for part, speed in speeds):
            return None
        return sum(part / speed for part, speed in speeds if speed)
