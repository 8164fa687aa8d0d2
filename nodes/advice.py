"""Advice: what limits the last run, and what to change, in two sentences made of a report alone.

The first that holds is said: memory ran out; something computes on the CPU beside an accelerator; weights are read from
disk in each pass; computing waits for weights that stream; weights are loaded again because components take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..memory.units import MIB, align_up, format_bytes, format_seconds
from .last_run import CPU, LastRun, Part, Room, Share, read_last_run
from .remedies import elsewhere, hold_all, in_mib, keep_in_ram, place_elsewhere, short_name, stream_less

__all__ = ["MAX_LENGTH", "advise"]

MAX_LENGTH = 160
# Less than this part of a run's seconds, or of the weights that it used, is no limit.
LEAST_SHARE = 0.05
# Of a component that a host brings page by page so much counts as all of it.
ALL_OF_IT = 0.98
NO_CHANGE = "Nothing to change."
PROMISES = ("the next run ", "no plan leaves more: ")
"""How the part of a failure's reason begins that says what comes of it."""


def advise(report: Mapping[str, Any]) -> list[str]:
    """Return what limits the last run and what to change, at most `MAX_LENGTH` characters each; arithmetic only.

    Args:
        report: the manager's report, or the parts of it that are known.
    """
    run = read_last_run(report)
    if run is None:
        return [
            "Nothing is known yet: no workflow with a node of Highwater has run.",
            "Run one: then this says what limits it, and what to change.",
        ]
    return [fit(line) for line in next(limits(run))]


def fit(line: str) -> str:
    return line if len(line) <= MAX_LENGTH else f"{line[: MAX_LENGTH - 1].rstrip()}…"


def limits(run: LastRun) -> Iterator[tuple[str, str]]:
    """Yield what limits a run with what to change, the most important first."""
    yield from failures(run)
    yield from on_cpu(run)
    streaming = [(part, share) for part in run.used if (share := part.streaming) is not None]
    streaming.sort(key=lambda found: -found[1].streamed_bytes)
    yield from reads(run, streaming)
    yield from waits(run, streaming)
    yield from reloads(run)
    yield from paged(run)
    yield from unmanaged(run)
    yield nothing(run, streaming)


def subject(run: LastRun) -> str:
    return "This run" if run.is_open else "The last run"


def in_blocks(part: Part, share: Share) -> str:
    return f"{short_name(part.id)}, {share.num_streamed} of {share.num_blocks} blocks"


def failures(run: LastRun) -> Iterator[tuple[str, str]]:
    for event in reversed(run.errors):
        reason = str(event.get("reason") or "out of memory")
        what, _, _ = reason.partition("; ")
        if event.get("kind") == "recover":
            yield f"A call was repeated: {what}", "Nothing to change: the next run keeps more memory free."
            return
        promise = next((f"{start}{reason.partition(start)[2]}" for start in PROMISES if start in reason), "")
        if promise.startswith(PROMISES[0]):
            yield f"{subject(run)} failed: {what}", f"Run it again: {promise}"
        else:
            change = promise.removeprefix(PROMISES[1]) or "choose a smaller size, or fewer frames"
            yield f"{subject(run)} failed: {what}", f"{change[:1].upper()}{change[1:]}"
        return


def on_cpu(run: LastRun) -> Iterator[tuple[str, str]]:
    parts = [part for part in run.used if part.device == CPU]
    if not parts:
        return
    part = max(parts, key=lambda part: part.needed_bytes)
    if not run.rooms:
        yield f"No GPU was found: {short_name(part.id)} computes on the CPU", "Nothing to change on this machine."
        return
    room = elsewhere(run, part, part.needed_bytes)
    change = place_elsewhere(part, room, part.needed_bytes) if room is not None else NO_CHANGE
    yield f"{short_name(part.id)} computes on the CPU, as its placement says", change


def reads(run: LastRun, streaming: list[tuple[Part, Share]]) -> Iterator[tuple[str, str]]:
    for part, share in streaming:
        if part.tier == "disk":
            amount = format_bytes(share.streamed_bytes)
            change = keep_in_ram(run, part) or stream_less(run, part, share)
            lacks = format_bytes(max(0, part.total_bytes - run.ram_bytes))
            yield (
                f"{subject(run)} read {amount} from disk in each pass ({in_blocks(part, share)})",
                change or f"Nothing to change here: the RAM lacks {lacks} to hold {short_name(part.id)}",
            )
            return


def waits(run: LastRun, streaming: list[tuple[Part, Share]]) -> Iterator[tuple[str, str]]:
    if not streaming:
        return
    part, share = streaming[0]
    lacks = format_bytes(max(0, share.missing_bytes))
    change = stream_less(run, part, share) or (
        f"Nothing to change here: {share.device} lacks {lacks} to hold all of {short_name(part.id)}"
    )
    if run.waited_s >= LEAST_SHARE * run.seconds and run.waited_s > 0:
        yield (
            f"{subject(run)} waited {waited(run)} for weights that stream to {share.device} ({in_blocks(part, share)})",
            change,
        )
    elif part.locked_bytes < share.streamed_bytes:
        # The host waits for such copies itself: no one measures for how long.
        if part.total_bytes - part.locked_bytes <= min(run.lockable_bytes, run.ram_bytes):
            change = (
                f"Choose placement {part.device}:pinned for {short_name(part.id)}: copies then run beside computing"
            )
        yield (
            f"Computing stops for each copy from pageable RAM to {share.device} ({in_blocks(part, share)})",
            change,
        )


def waited(run: LastRun) -> str:
    if run.seconds < 1:
        return f"{format_seconds(run.waited_s)} of {format_seconds(run.seconds)}"
    return f"{run.waited_s:.1f} of {run.seconds:.1f} s"


def reloads(run: LastRun) -> Iterator[tuple[str, str]]:
    num_bytes = sum(run.reloaded_bytes.values())
    if num_bytes <= LEAST_SHARE * sum(part.total_bytes for part in run.used):
        return
    first = max(run.reloaded_bytes, key=lambda name: run.reloaded_bytes[name])
    part = run.parts.get(first)
    room = run.rooms.get(part.device) if part is not None else None
    if part is None or room is None:
        yield f"{format_bytes(num_bytes)} of weights were loaded again ({short_name(first)})", NO_CHANGE
        return
    sharing = sharing_device(run, part, room)
    moved = f"{format_bytes(num_bytes)} of weights were loaded again"
    if not sharing:
        yield f"{moved}: {short_name(first)} had left {room.device} meanwhile", NO_CHANGE
        return
    others = "" if len(sharing) == 1 else f" and {len(sharing) - 1} more"
    names = f"{short_name(first)} and {short_name(sharing[0].id)}{others}"
    together = [part, *sharing]
    lack = sum(one.needed_bytes for one in together) - room.available_bytes
    change = (
        hold_all(run, together, room, lack) if lack > 0 else "Nothing to change: there is room for all of them now."
    )
    yield (
        f"{moved}: {names} take turns on {room.device}",
        change or f"Nothing to change here: {room.device} lacks {format_bytes(lack)} to hold them at once",
    )


def sharing_device(run: LastRun, part: Part, room: Room) -> list[Part]:
    """Return the components that took turns with one on a device: evicted or used in the run, the largest first."""
    names = {*run.evicted, *run.reloaded_bytes, *(used.id for used in run.used)} - {part.id}
    found = [run.parts[name] for name in names if name in run.parts]
    here = [other for other in found if other.device == room.device and other.needed_bytes]
    return sorted(here, key=lambda other: (-other.needed_bytes, other.id))


def paged(run: LastRun) -> Iterator[tuple[str, str]]:
    """Yield the largest component of which its host's memory manager left a part in RAM."""
    parts = [
        part
        for part in run.used
        if part.engine == "dynamic" and part.device in run.rooms and held(part) < ALL_OF_IT * part.total_bytes
    ]
    if not parts:
        return
    part = max(parts, key=lambda part: part.total_bytes - held(part))
    room, name, need = run.rooms[part.device], short_name(part.id), format_bytes(part.total_bytes)
    change = NO_CHANGE
    other = elsewhere(run, part, part.total_bytes)
    # A page for what does not fill the last one, and for what never leaves.
    enough = align_up(part.total_bytes, part.page_bytes or 1) + part.page_bytes
    if 0 < part.budget_bytes < enough <= room.available_bytes:
        free = format_bytes(room.available_bytes)
        change = f"Give {name} a budget of {in_mib(align_up(enough, MIB))} or more: {free} are available"
    elif other is not None:
        change = place_elsewhere(part, other, part.total_bytes)
    elif part.total_bytes > room.available_bytes:
        lack = format_bytes(part.total_bytes - room.available_bytes)
        change = f"Nothing to change here: {room.device} lacks {lack} to hold all of it"
    now = f"{format_bytes(held(part))} of {need} on {room.device}"
    yield f"{name} has {now}; ComfyUI's dynamic VRAM brings the rest when it computes", change


def held(part: Part) -> int:
    return part.held_bytes.get(part.device, 0)


def unmanaged(run: LastRun) -> Iterator[tuple[str, str]]:
    others = unmanaged_parts(run)
    computed = any(room.activation_bytes for room in run.rooms.values())
    if others and computed and not any(part.is_managed for part in run.used):
        largest = max(others, key=lambda part: part.total_bytes)
        yield (
            f"Not known: ComfyUI itself loads all models ({short_name(largest.id)} and others are not managed)"
            if len(others) > 1
            else f"Not known: ComfyUI itself loads {short_name(largest.id)}, which is not managed",
            "To choose where models are, load them with Highwater's loaders, or add a Manage Model node.",
        )


def unmanaged_parts(run: LastRun) -> list[Part]:
    return [part for part in run.parts.values() if part.engine in ("core", "dynamic") and not part.is_managed]


def nothing(run: LastRun, streaming: list[tuple[Part, Share]]) -> tuple[str, str]:
    if not run.used:
        return "Nothing limits it: no model had to compute.", NO_CHANGE
    if streaming:
        streams = f"Nothing limits it: {in_blocks(*streaming[0])} stream while others compute"
        return f"{streams} (waited {waited(run)})", NO_CHANGE
    weights = "all managed weights" if unmanaged_parts(run) else "all weights"
    if run.bytes_moved:
        moved = f"Nothing limits it: {weights} were resident, after {format_bytes(run.bytes_moved)} were loaded"
        stays = all(part.is_in_effect for part in run.used)
        return moved, "Nothing to change: the next run finds them loaded." if stays else NO_CHANGE
    return f"Nothing limits it: {weights} were resident, and nothing was loaded again.", NO_CHANGE
