"""The timeline: each component's bytes on each device over time, kept as changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .report import Sample

__all__ = ["Timeline"]


@dataclass(frozen=True, slots=True)
class Point:
    """One moment on one device."""

    t_s: float
    device: str
    changes: Mapping[str, int]
    """The bytes of the components that had others at the point before; 0 where they are gone."""
    allocated_bytes: int
    peak_bytes: int


NO_CHANGES: Mapping[str, int] = {}
NO_DEVICES: Mapping[str, Mapping[str, int]] = {}


class Timeline:
    """The latest points of all devices, at most ``max_points``.

    A point is left out where components have as many bytes as at the last one, and no more was allocated since than
    that point says; the next point takes over its peak.
    """

    def __init__(
        self, max_points: int, points: Iterable[Point] = (), before: Mapping[str, Mapping[str, int]] = NO_DEVICES
    ) -> None:
        self.max_points = max_points
        self.points = deque(points)
        self.before = {device: dict(held) for device, held in before.items()}
        """The components' bytes on each device before the first point that is kept."""
        self.now: dict[str, Mapping[str, int]] = {}
        """Their bytes at the last point."""
        self.last_peaks: dict[str, int] = {}
        self.left_out_peaks: dict[str, int] = {}
        """The most that was allocated on a device since its last point, where later ones were left out."""

    def add(
        self,
        t_s: float,
        device: str,
        component_bytes: Mapping[str, int],
        allocated_bytes: int,
        peak_bytes: int,
        *,
        always: bool = False,
    ) -> None:
        """Enter a point if anything changed, or ``always``.

        Args:
            component_bytes: must not change from now on; the same object as before costs nothing.
            peak_bytes: the most that was allocated since this was called last.
        """
        peak_bytes = max(peak_bytes, self.left_out_peaks.pop(device, 0))
        changes = find_changes(self.now.get(device, NO_CHANGES), component_bytes)
        if device in self.now and not always and not changes and peak_bytes <= self.last_peaks[device]:
            self.left_out_peaks[device] = peak_bytes
            return
        while len(self.points) >= self.max_points:
            oldest = self.points[0]
            apply(oldest.changes, self.before.setdefault(oldest.device, {}))
            self.points.popleft()  # last: interrupted before, the same is done again
        self.points.append(Point(t_s, device, changes, allocated_bytes, peak_bytes))
        self.now[device], self.last_peaks[device] = component_bytes, peak_bytes

    def copy(self) -> Timeline:
        """Return the timeline up to now; takes as long as it has points."""
        return Timeline(self.max_points, self.points, self.before)

    def samples(self, after_s: float = -1.0) -> list[Sample]:
        """Return the points after a time in full; neighbours without a change share one dict."""
        held = {device: dict(before) for device, before in self.before.items()}
        found = []
        for point in self.points:
            if point.changes or point.device not in held:
                held[point.device] = dict(held.get(point.device, NO_CHANGES))
                apply(point.changes, held[point.device])
            if point.t_s <= after_s:
                continue
            found.append(
                Sample(
                    t_s=point.t_s,
                    device=point.device,
                    component_bytes=held[point.device],
                    allocated_bytes=point.allocated_bytes,
                    peak_bytes=point.peak_bytes,
                )
            )
        return found


def find_changes(before: Mapping[str, int], now: Mapping[str, int]) -> Mapping[str, int]:
    """Return the bytes that differ from those before; 0 for what is gone."""
    if now is before:
        return NO_CHANGES
    changes = {name: num_bytes for name, num_bytes in now.items() if before.get(name) != num_bytes}
    return changes | dict.fromkeys(before.keys() - now.keys(), 0)


def apply(changes: Mapping[str, int], held: dict[str, int]) -> None:
    """Apply the changes of one point to the bytes by component."""
    held.update(changes)
    for name, num_bytes in changes.items():
        if not num_bytes:
            held.pop(name, None)
