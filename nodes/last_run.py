"""The last run as a report tells of it: its nodes, the components it used, and the room on each device.

Reads reports of which parts are missing: what is not there counts as 0, as nothing, or as not known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["CPU", "LastRun", "Part", "Room", "Share", "read_last_run"]

CPU = "cpu"
DEVICE = re.compile(r"gpu:\d+|cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one device has of a component's plan; bytes as in `DevicePlan`."""

    device: str
    num_blocks: int
    num_streamed: int
    streamed_bytes: int
    read_bytes: int
    staging_bytes: int
    whole_bytes: int
    """What it takes of the device if all of its blocks are resident."""
    limit_bytes: int
    budget: str
    """The budget that sets that limit, as its profile writes it; empty where the device does."""
    keeps_bytes: int
    """What it keeps free for activations."""

    @property
    def missing_bytes(self) -> int:
        return self.whole_bytes - self.limit_bytes

    @property
    def block_bytes(self) -> int:
        """The mean of its blocks, rounded up."""
        return -(-self.whole_bytes // max(1, self.num_blocks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A component as the report has it."""

    id: str
    engine: str
    tier: str
    placement: str
    precision: str
    total_bytes: int
    encoded_bytes: int
    """What all of it takes of a device in precision ``fp8 scaled``; 0: not known, or no less."""
    locked_bytes: int
    """What of it is page-locked where it rests."""
    budget_bytes: int
    """The budget of one that its host moves; 0: none."""
    page_bytes: int
    """In pieces of so many bytes its host brings it; 0: it has blocks."""
    is_asked: bool
    """A node of ours loaded it, or asked for something."""
    is_in_effect: bool
    shares: tuple[Share, ...]
    held_bytes: Mapping[str, int]
    """Its bytes by device or tier."""

    @property
    def device(self) -> str:
        """Where it computes first; empty where that is not known."""
        if self.shares:
            return self.shares[0].device
        found = DEVICE.search(self.placement)
        return found[0] if found is not None else ""

    @property
    def ram_bytes(self) -> int:
        """What it takes of the RAM now."""
        return self.held_bytes.get("pinned", 0) + self.held_bytes.get("host", 0)

    @property
    def is_managed(self) -> bool:
        """Whether this manager moves it, or steers its host for a node of ours."""
        return self.engine == "blocks" or (self.engine == "dynamic" and self.is_asked)

    @property
    def needed_bytes(self) -> int:
        """What all of it takes of the device on which it computes first."""
        return self.shares[0].whole_bytes if self.shares else self.total_bytes

    @property
    def streaming(self) -> Share | None:
        """The share that streams most; None if none does."""
        shares = [share for share in self.shares if share.num_streamed and share.device != CPU]
        return max(shares, key=lambda share: share.streamed_bytes, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What of a device weights may take now."""

    device: str
    free_bytes: int
    """Without evicting anything."""
    available_bytes: int
    """When all idle components leave."""
    low_bytes: int
    high_bytes: int
    activation_bytes: int
    """The most that a node of the run allocated there beside weights."""

    def beside(self, keeps_bytes: int) -> int:
        """Return what is available where so much stays free for activations."""
        return max(0, self.available_bytes - max(0, keeps_bytes - max(self.low_bytes, self.activation_bytes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    """The last run; one that has just begun counts from its first node on."""

    is_open: bool
    seconds: float
    waited_s: float
    bytes_moved: int
    reloaded_bytes: Mapping[str, int]
    """By component, what was loaded again after it had been evicted for others."""
    evicted: Mapping[str, int]
    """By component, what was evicted of it in the run."""
    errors: tuple[Mapping[str, Any], ...]
    """The events of failures, and of calls that were repeated after one."""
    parts: Mapping[str, Part]
    """All components, by id."""
    used: tuple[Part, ...]
    """Those with which a node of the run computed, in that order."""
    rooms: Mapping[str, Room]
    """Of the accelerators."""
    ram_bytes: int
    """What of the RAM weights may take now beside its watermark."""
    lockable_bytes: int
    """What of it may be page-locked beside what is."""


def read_last_run(report: Mapping[str, Any]) -> LastRun | None:
    """Return the last run of a report with all that the advice is made of; None where no node has run yet."""
    runs, nodes = rows(report, "runs"), rows(report, "nodes")
    run = next((run for run in reversed(runs) if run.get("end_s") is not None or has_nodes(run, nodes)), None)
    if run is None:
        return None
    run_id, begin_s, end_s = run.get("run_id"), number(run, "begin_s"), run.get("end_s")
    own = [node for node in nodes if node.get("run_id") == run_id]
    events = [event for event in rows(report, "events") if event.get("run_id") == run_id]
    parts = {part.id: part for part in map(read_part, rows(report, "components"))}
    used = dict.fromkeys(name for node in own for name in words(node, "components") if name in parts)
    evicted: dict[str, int] = {}
    for event in events:
        if event.get("kind") == "evict":
            name = word(event, "component")
            evicted[name] = evicted.get(name, 0) + count(event, "bytes")
    devices = {word(device, "name"): device for device in rows(report, "devices")}
    ram = devices.pop(CPU, {})
    pinned = table(ram, "pinned")
    return LastRun(
        is_open=end_s is None,
        seconds=sum(number(node, "seconds") for node in own) if end_s is None else number(run, "end_s") - begin_s,
        waited_s=sum(number(node, "waited_s") for node in own),
        bytes_moved=max(count(run, "bytes_moved"), sum(count(node, "bytes_moved") for node in own)),
        reloaded_bytes=amounts(run, "reloaded_bytes"),
        evicted=evicted,
        errors=tuple(event for event in events if event.get("kind") in ("error", "recover")),
        parts=parts,
        used=tuple(parts[name] for name in used),
        rooms={name: read_room(name, device, own) for name, device in devices.items()},
        ram_bytes=max(0, count(ram, "free_bytes") - count(table(ram, "own_watermark"), "low_bytes")),
        lockable_bytes=max(0, count(pinned, "limit_bytes") - count(pinned, "num_bytes")),
    )


def has_nodes(run: Mapping[str, Any], nodes: list[Mapping[str, Any]]) -> bool:
    return any(node.get("run_id") == run.get("run_id") and node.get("components") for node in nodes)


def read_part(row: Mapping[str, Any]) -> Part:
    plan = table(row, "plan")
    return Part(
        id=word(row, "id"),
        engine=word(row, "engine"),
        tier=word(plan, "tier"),
        placement=word(plan, "placement"),
        precision=word(row, "precision"),
        total_bytes=count(row, "total_bytes"),
        encoded_bytes=count(row, "encoded_bytes"),
        locked_bytes=count(plan, "pinned_bytes"),
        budget_bytes=count(plan, "budget_bytes"),
        page_bytes=count(plan, "page_bytes"),
        is_asked=row.get("node_id") is not None,
        is_in_effect=bool(row.get("in_effect")),
        shares=tuple(map(read_share, rows(plan, "shares"))),
        held_bytes=amounts(row, "tiers"),
    )


def read_share(row: Mapping[str, Any]) -> Share:
    weights = ("fixed_bytes", "resident_bytes", "streamed_bytes", "scratch_bytes")
    return Share(
        device=word(row, "device"),
        num_blocks=count(row, "blocks"),
        num_streamed=count(row, "streamed_blocks"),
        streamed_bytes=count(row, "streamed_bytes"),
        read_bytes=count(row, "read_bytes"),
        staging_bytes=count(row, "staging_bytes"),
        whole_bytes=sum(count(row, name) for name in weights),
        limit_bytes=count(row, "limit_bytes"),
        budget=word(row, "limited_by").partition("budget ")[2],
        keeps_bytes=count(row, "keeps_bytes"),
    )


def read_room(name: str, device: Mapping[str, Any], nodes: list[Mapping[str, Any]]) -> Room:
    mark = table(device, "watermark")
    low = count(mark, "low_bytes")
    activations = max((amounts(node, "activation_bytes").get(name, 0) for node in nodes), default=0)
    kept = max(low, activations) + count(table(device, "lent"), "missing_bytes")
    others = count(device, "other_bytes")
    return Room(
        device=name,
        free_bytes=max(0, count(device, "free_bytes") - kept),
        available_bytes=max(0, count(device, "total_bytes") - others - kept),
        low_bytes=low,
        high_bytes=max(low, count(mark, "high_bytes")),
        activation_bytes=activations,
    )


# -- values that may be missing


def rows(holder: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = holder.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list | tuple) else []


def table(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = holder.get(name)
    return found if isinstance(found, Mapping) else {}


def words(holder: Mapping[str, Any], name: str) -> list[str]:
    found = holder.get(name)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list | tuple) else []


def word(holder: Mapping[str, Any], name: str) -> str:
    found = holder.get(name)
    return found if isinstance(found, str) else ""


def number(holder: Mapping[str, Any], name: str) -> float:
    found = holder.get(name)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else 0.0


def count(holder: Mapping[str, Any], name: str) -> int:
    return max(0, int(number(holder, name)))


def amounts(holder: Mapping[str, Any], name: str) -> dict[str, int]:
    found = table(holder, name)
    return {key: count(found, key) for key in found if isinstance(key, str)}
