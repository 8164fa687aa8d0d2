"""What is measured of a run and of a process, in the terms of the tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from highwater.headless.simdevice import SimDeviceSpec
from highwater.memory.units import MIB

from ..loading import resident_share

__all__ = [
    "LINK_BYTES_PER_S",
    "SCALE",
    "Engine",
    "Ram",
    "Run",
    "cached_bytes",
    "disk_bytes",
    "private_bytes",
    "until_steady",
]

SCALE = 64
"""The models have a 64th of the bytes of real ones, over links and memory that are as much slower."""
LINK_BYTES_PER_S = SimDeviceSpec(total_bytes=0).h2d_bytes_per_s / SCALE

MOST_RUNS = 6
# Latents, texts, and what else is not weights.
STEADY_BYTES = 2 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One prompt: virtual seconds, those of the same with everything there, and bytes.

    ``missing_bytes`` is None for an engine that does not tell which copies stay; ``least_bytes`` are those of a `Room`.
    """

    name: str
    seconds: float
    steady_s: float = 0.0
    disk_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    missing_bytes: int | None
    least_bytes: int

    @property
    def switch_s(self) -> float:
        return self.seconds - self.steady_s

    @property
    def over_missing(self) -> float | None:
        """The seconds of the switch over those that the missing bytes take on the link; None if they are unknown."""
        return over_link(self.switch_s, self.missing_bytes) if self.missing_bytes else None

    @property
    def over_least(self) -> float | None:
        """As `over_missing`, of the least bytes; None where those are none."""
        return over_link(self.switch_s, self.least_bytes) if self.least_bytes else None


def over_link(seconds: float, num_bytes: int) -> float:
    return seconds / (num_bytes / LINK_BYTES_PER_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ram:
    """RAM of a process: its own dirty pages beyond those at its start, page-locked bytes, files in the page cache."""

    private_bytes: int
    locked_bytes: int
    cached_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """All that was measured of one engine; ``ram`` by the moment at which it was read."""

    name: str
    runs: list[Run]
    ram: dict[str, Ram]

    def worst(self) -> list[Run]:
        """Return one run of each name: the slowest."""
        slowest: dict[str, Run] = {}
        for run in self.runs:
            if run.name not in slowest or run.switch_s > slowest[run.name].switch_s:
                slowest[run.name] = run
        return list(slowest.values())

    def run_rows(self) -> list[dict[str, str | float]]:
        return [
            {
                "engine": self.name,
                "run": run.name,
                "switch, s": run.switch_s,
                "from disk": f"{run.disk_bytes / MIB:.0f}",
                "to the device": f"{run.to_device_bytes / MIB:.0f}",
                "back": f"{run.to_host_bytes / MIB:.0f}",
                "missing": "" if run.missing_bytes is None else f"{run.missing_bytes / MIB:.0f}",
                "over missing": run.over_missing or "",
                "least": f"{run.least_bytes / MIB:.0f}",
                "over least": run.over_least or "",
            }
            for run in self.worst()
        ]

    def ram_rows(self) -> list[dict[str, str | float]]:
        return [
            {
                "engine": self.name,
                "after": moment,
                "private": f"{ram.private_bytes / MIB:.0f}",
                "page-locked": f"{ram.locked_bytes / MIB:.0f}",
                "cached": f"{ram.cached_bytes / MIB:.0f}",
            }
            for moment, ram in self.ram.items()
        ]


def until_steady(run: Callable[[], Run]) -> Run:
    """Run a prompt again and again until it copies next to nothing: what it takes with everything there.

    Raises:
        RuntimeError: it copies weights each time.
    """
    for _ in range(MOST_RUNS):
        steady = run()
        if steady.to_device_bytes < STEADY_BYTES:
            return steady
    raise RuntimeError(f"a prompt copies {steady.to_device_bytes} bytes each time, with all the device")


def disk_bytes(pid: int | str) -> int:
    """Return the bytes that a process has had read from disks, by calls and through mappings."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["read_bytes"])


def private_bytes(pid: int | str) -> int:
    """Return the bytes of pages that only this process has, and has written to."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}["Private_Dirty"]


def cached_bytes(paths: Iterable[Path]) -> int:
    """Return the bytes of files that the system has in RAM."""
    return sum(round(resident_share(path) * path.stat().st_size) for path in paths)
