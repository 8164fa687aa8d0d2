"""Advice: what limits the last run, and what to change, in two sentences made of a report alone.

The first that holds is said: memory ran out; something computes on the CPU beside an accelerator; weights are read from
disk in each pass; computing waits for weights that stream; weights are loaded again because components take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..memory.errors import NO_PLAN
from ..memory.units import MIB, align_up, format_bytes, format_seconds
from .last_run import CPU, LastRun, Part, Room, Share, read_last_run
from .remedies import elsewhere, hold_all, in_mib, keep_in_ram, place_elsewhere, say, short_name, stream_less
from .texts import Text

__all__ = ["advise"]

# Less than this part of a run's seconds, or of the weights that it used, is no limit.
LEAST_SHARE = 0.05
# Of a component that a host brings page by page so much counts as all of it.
ALL_OF_IT = 0.98
PROMISE = "the next run "
"""How the part of a failure's reason begins that says what comes of it."""

Advice = tuple[Text, Text]
"""What limits a run, and what to change."""


def advise(report: Mapping[str, Any]) -> list[Text]:
    """Return what limits the last run and what to change, two texts; arithmetic only.

    Args:
        report: the manager's report, or the parts of it that are known.
    """
    run = read_last_run(report)
    return [say("nothing_known"), say("run_one")] if run is None else [*next(limits(run))]


def limits(run: LastRun) -> Iterator[Advice]:
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


def of_run(run: LastRun, key: str, /, **values: object) -> Text:
    return say(f"{'this' if run.is_open else 'last'}_run_{key}", **values)


def in_blocks(part: Part, share: Share) -> dict[str, object]:
    return {"name": short_name(part.id), "streamed": share.num_streamed, "blocks": share.num_blocks}


def failures(run: LastRun) -> Iterator[Advice]:
    for event in reversed(run.errors):
        reason = str(event.get("reason") or "out of memory")
        what, _, _ = reason.partition("; ")
        if event.get("kind") == "recover":
            yield say("repeated", what=what), say("repeated_change")
            return
        _, _, helps = reason.partition(NO_PLAN)
        _, promises, promise = reason.partition(PROMISE)
        if helps:
            change = say("what_helps", change=helps.partition("; ")[0])
        elif promises:
            change = say("run_again", promise=f"{PROMISE}{promise}")
        else:
            change = say("smaller")
        yield of_run(run, "failed", what=what), change
        return


def on_cpu(run: LastRun) -> Iterator[Advice]:
    parts = [part for part in run.used if part.device == CPU]
    if not parts:
        return
    part = max(parts, key=lambda part: part.needed_bytes)
    name = short_name(part.id)
    if not run.rooms:
        yield say("no_gpu", name=name), say("no_gpu_change")
        return
    room = elsewhere(run, part, part.needed_bytes)
    change = place_elsewhere(part, room, part.needed_bytes) if room is not None else say("no_change")
    yield say("on_cpu", name=name), change


def reads(run: LastRun, streaming: list[tuple[Part, Share]]) -> Iterator[Advice]:
    for part, share in streaming:
        if share.read_bytes:
            amount = format_bytes(share.read_bytes)
            change = keep_in_ram(run, part) or stream_less(run, part, share)
            lack = format_bytes(max(0, part.total_bytes - part.ram_bytes - run.ram_bytes))
            yield (
                of_run(run, "read", amount=amount, **in_blocks(part, share)),
                change or say("ram_lacks", lack=lack, name=short_name(part.id)),
            )
            return


def waits(run: LastRun, streaming: list[tuple[Part, Share]]) -> Iterator[Advice]:
    if not streaming:
        return
    part, share = streaming[0]
    name, where = short_name(part.id), {"device": share.device, **in_blocks(part, share)}
    lack = format_bytes(max(0, share.missing_bytes))
    change = stream_less(run, part, share) or say("device_lacks", device=share.device, lack=lack, name=name)
    if run.waited_s >= LEAST_SHARE * run.seconds and run.waited_s > 0:
        yield of_run(run, "waited", **waited(run), **where), change
    elif part.locked_bytes < share.streamed_bytes:
        # The host waits for such copies itself: no one measures for how long.
        if part.total_bytes - part.locked_bytes <= min(run.lockable_bytes, run.ram_bytes):
            change = say("pin", placement=f"{part.device}:pinned", name=name)
        yield say("pageable", **where), change


def waited(run: LastRun) -> dict[str, object]:
    if run.seconds < 1:
        return {"waited": format_seconds(run.waited_s), "all": format_seconds(run.seconds)}
    return {"waited": f"{run.waited_s:.1f}", "all": f"{run.seconds:.1f} s"}


def reloads(run: LastRun) -> Iterator[Advice]:
    num_bytes = sum(run.reloaded_bytes.values())
    if num_bytes <= LEAST_SHARE * sum(part.total_bytes for part in run.used):
        return
    first = max(run.reloaded_bytes, key=lambda name: run.reloaded_bytes[name])
    moved = {"amount": format_bytes(num_bytes), "name": short_name(first)}
    part = run.parts.get(first)
    room = run.rooms.get(part.device) if part is not None else None
    if part is None or room is None:
        yield say("reloaded", **moved), say("no_change")
        return
    sharing = sharing_device(run, part, room)
    if not sharing:
        yield say("reloaded_after", device=room.device, **moved), say("no_change")
        return
    moved |= {"other": short_name(sharing[0].id), "device": room.device}
    more = len(sharing) - 1
    together = [part, *sharing]
    lack = sum(one.needed_bytes for one in together) - room.available_bytes
    yield (
        say("turns_of_more", more=more, **moved) if more else say("turns", **moved),
        say("room_for_all")
        if lack <= 0
        else hold_all(run, together, room, lack) or say("lacks_for_turns", device=room.device, lack=format_bytes(lack)),
    )


def sharing_device(run: LastRun, part: Part, room: Room) -> list[Part]:
    """Return the components that took turns with one on a device: evicted or used in the run, the largest first."""
    names = {*run.evicted, *run.reloaded_bytes, *(used.id for used in run.used)} - {part.id}
    found = [run.parts[name] for name in names if name in run.parts]
    here = [other for other in found if other.device == room.device and other.needed_bytes]
    return sorted(here, key=lambda other: (-other.needed_bytes, other.id))


def paged(run: LastRun) -> Iterator[Advice]:
    """Yield the largest component of which its host's memory manager left a part in RAM."""
    parts = [
        part
        for part in run.used
        if part.engine == "dynamic" and part.device in run.rooms and held(part) < ALL_OF_IT * part.total_bytes
    ]
    if not parts:
        return
    part = max(parts, key=lambda part: part.total_bytes - held(part))
    room, name = run.rooms[part.device], short_name(part.id)
    change = say("no_change")
    other = elsewhere(run, part, part.total_bytes)
    # A page for what does not fill the last one, and for what never leaves.
    enough = align_up(part.total_bytes, part.page_bytes or 1) + part.page_bytes
    if 0 < part.budget_bytes < enough <= room.available_bytes:
        budget, free = in_mib(align_up(enough, MIB)), format_bytes(room.available_bytes)
        change = say("give_budget", name=name, budget=budget, free=free)
    elif other is not None:
        change = place_elsewhere(part, other, part.total_bytes)
    elif part.total_bytes > room.available_bytes:
        lack = format_bytes(part.total_bytes - room.available_bytes)
        change = say("lacks_all", device=room.device, lack=lack)
    need = format_bytes(part.total_bytes)
    yield say("paged", name=name, held=format_bytes(held(part)), need=need, device=room.device), change


def held(part: Part) -> int:
    return part.held_bytes.get(part.device, 0)


def unmanaged(run: LastRun) -> Iterator[Advice]:
    others = unmanaged_parts(run)
    computed = any(room.activation_bytes for room in run.rooms.values())
    if others and computed and not any(part.is_managed for part in run.used):
        largest = max(others, key=lambda part: part.total_bytes)
        key = "none_managed" if len(others) > 1 else "not_managed"
        yield say(key, name=short_name(largest.id)), say("manage")


def unmanaged_parts(run: LastRun) -> list[Part]:
    return [part for part in run.parts.values() if part.engine in ("core", "dynamic") and not part.is_managed]


def nothing(run: LastRun, streaming: list[tuple[Part, Share]]) -> Advice:
    if not run.used:
        return say("no_model"), say("no_change")
    if streaming:
        return say("streams_beside", **in_blocks(*streaming[0]), **waited(run)), say("no_change")
    which = "managed" if unmanaged_parts(run) else "all"
    if run.bytes_moved:
        stays = all(part.is_in_effect for part in run.used)
        moved = say(f"{which}_after_load", amount=format_bytes(run.bytes_moved))
        return moved, say("finds_them") if stays else say("no_change")
    return say(f"{which}_resident"), say("no_change")
