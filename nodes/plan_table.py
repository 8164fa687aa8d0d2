"""A plan as tables of text: its components, the devices that they use, and what a run does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..memory.units import format_bytes, format_seconds
from .call_seconds import BY_RATE, MEASURED, STATED

if TYPE_CHECKING:
    from ..memory.planner.capacity import Machine
    from ..memory.planner.plan import ComponentPlan, Plan
    from ..memory.planner.run_plan import RunPlan, UsePlan

__all__ = ["in_a_row", "plan_text"]

COMPONENTS = ("component", "bytes", "precision", "device", "rests", "resident", "streamed", "takes")
USES = ("run", "computes", "forwards", "each", "loads", "in", "evicts", "activations")
DEVICES = ("device", "room", "peak", "remains")
UNKNOWN = "unknown"
SOURCES = {MEASURED: "as measured here", BY_RATE: "by a rate measured here", STATED: "by stated speeds"}
RESTS = {"device": "device", "pinned": "pinned RAM", "host": "RAM", "disk": "file"}


def plan_text(
    plans: Mapping[str, Plan],
    run: RunPlan | None,
    machine: Machine,
    placements: Mapping[str, str] | None = None,
    *,
    rated: Collection[str] | None = (),
) -> str:
    """Return plans of one machine as text: tables first, then the reasons, last what gives the same plan again.

    Args:
        plans: by what they are for, such as the node that loads.
        placements: for some of them, the placement as their node takes it.
        rated: the devices of which was said how fast they compute; None: on this machine that is measured.
    """
    parts = [part for plan in plans.values() for part in plan.components]
    blocks = [table([COMPONENTS, *(row for part in parts for row in component_rows(part))])]
    if run is not None:
        lines = [total_line(run, machine, rated), *sources(run)]
        blocks.append("\n".join([table([USES, *map(use_row, run.uses)]), *lines]))
    rows = [DEVICES, *device_rows(parts, run, machine)]
    limits = budget_column(plans, machine)
    peaks = table([(*row, *limits[index : index + 1]) for index, row in enumerate(rows)])
    if run is not None and any(use.use.activation_bytes is None for use in run.uses):
        peaks += "\nactivations that are unknown are in no peak"
    blocks.append(peaks)
    why = [f"{part.component}: {reason}" for part in parts for reason in (*sums(part), *part.reasons)]
    why += [reason for plan in plans.values() for reason in plan.reasons[:1]]  # the other one is the text to paste
    why += run.turns if run is not None else []
    if why:
        blocks.append("\n".join(["why", *(f"  {reason}" for reason in dict.fromkeys(why))]))
    blocks.append("\n".join(same_again(plans, placements or {})))
    return "\n\n".join(blocks)


def component_rows(part: ComponentPlan) -> Iterator[tuple[str, ...]]:
    """Yield a row for each device of a component."""
    for index, share in enumerate(part.shares):
        first = index == 0
        yield (
            part.component if first else "",
            format_bytes(part.weight_bytes) if first else "",
            part.precision.name if first else "",
            share.device,
            rests_in(part) if first else "",
            f"{len(share.resident)} of {len(share.blocks)}",
            format_bytes(share.streamed_bytes) if share.streamed else "-",
            format_bytes(share.device_bytes),
        )


def sums(part: ComponentPlan) -> Iterator[str]:
    """Yield for each device of which it takes more than one thing what these are."""
    for share in part.shares:
        named = {
            "non-block weights": share.fixed_bytes,
            "resident blocks": share.resident_bytes,
            "staging": share.staging_bytes,
            "to decode weights": share.scratch_bytes,
        }
        parts = [f"{format_bytes(num_bytes)} {name}" for name, num_bytes in named.items() if num_bytes]
        if len(parts) > 1:
            yield f"{format_bytes(share.device_bytes)} on {share.device} = {' + '.join(parts)}"


def rests_in(part: ComponentPlan) -> str:
    """Return where the weights rest, in a few words."""
    if part.store:
        return f"on {part.store}"
    return RESTS[part.tier] if not part.in_file or part.tier == "disk" else f"{RESTS[part.tier]} and file"


def use_row(use: UsePlan) -> tuple[str, ...]:
    loaded = sum(use.loaded.values())
    evicted = [f"{format_bytes(num_bytes)} of {name}" for name, _, num_bytes in use.evicted]
    return (
        use.use.component,
        use.use.what,
        str(use.use.num_passes),
        seconds_text(use.pass_s),
        format_bytes(loaded) if loaded else "-",
        seconds_text(use.load_s) if loaded else "-",
        ", ".join(evicted) or "-",
        activations_text(use),
    )


def activations_text(use: UsePlan) -> str:
    """Return what a use takes beside weights, and in how much it is computed in tiles."""
    if use.use.activation_bytes is None:
        return UNKNOWN
    whole = format_bytes(use.use.activation_bytes)
    if use.in_tiles is None:
        return whole
    return f"{format_bytes(use.in_tiles.tile_bytes)} in tiles of {use.in_tiles.tiles.text()}; whole {whole}"


def seconds_text(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else format_seconds(seconds)


def total_line(run: RunPlan, machine: Machine, rated: Collection[str] | None) -> str:
    """Return what the run takes, in words, or what is missing to say it."""
    if run.seconds is None:
        return f"time unknown: {'; '.join(unknown_times(run, machine, rated))}"
    forwards_s = sum(use.use.num_passes * (use.pass_s or 0.0) for use in run.uses)
    first = f"; the first time {format_seconds(run.first_seconds)}" if run.first_seconds is not None else ""
    return (
        f"a run takes {format_seconds(run.seconds)}: {format_seconds(forwards_s)} of forwards, "
        f"{format_seconds(run.seconds - forwards_s)} of loading{first}"
    )


def sources(run: RunPlan) -> Iterator[str]:
    """Yield, in one line, where the seconds of forwards are from."""
    found: dict[str, dict[str, None]] = {}
    for use in run.uses:
        if use.source:
            found.setdefault(use.source, {})[use.use.component] = None
    told = [f"{in_a_row([*names])} {SOURCES.get(source, source)}" for source, names in found.items()]
    if told:
        yield f"seconds of forwards: {'; '.join(told)}"


def unknown_times(run: RunPlan, machine: Machine, rated: Collection[str] | None) -> Iterator[str]:
    """Yield what is not known without which there are no seconds, in a few words each."""
    unrated: dict[str, None] = {}
    unlinked: dict[str, None] = {}
    untraced: dict[str, None] = {}
    unmeasured: dict[str, None] = {}
    for use in (use for use in run.uses if use.seconds is None):
        devices = list(use.held) or ["cpu"]
        slow = [device for device in devices if rated is not None and device not in rated and use.pass_s is None]
        far = [device for device in use.held if machine.device(device).link_bytes_per_s is None]
        unrated |= dict.fromkeys(slow)
        unlinked |= dict.fromkeys(far)
        if rated is None and use.pass_s is None and any(device not in use.use.times for device in devices):
            unmeasured[use.use.component] = None
        elif use.pass_s is None and not slow and not far:
            untraced[use.use.component] = None
    if untraced:
        yield f"what {in_a_row([*untraced])} compute{'s' * (len(untraced) == 1)} is not known"
    if unmeasured:
        verb = "takes" if len(unmeasured) == 1 else "take"
        yield f"how long {in_a_row([*unmeasured])} {verb} was not measured here yet, which runs do"
    if unrated:
        yield f"how fast {in_a_row([*unrated])} compute{'s' * (len(unrated) == 1)} was neither said nor measured"
    if unlinked:
        yield f"the speed of copies to {in_a_row([*unlinked])} was neither said nor measured"


def in_a_row(words: Sequence[str]) -> str:
    """Return words as a sentence names them: ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def device_rows(parts: Sequence[ComponentPlan], run: RunPlan | None, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Yield each accelerator with what may be taken of it, the most that is, and what remains."""
    for device in machine.accelerators:
        used = [share.device_bytes for part in parts for share in part.shares if share.device == device.name]
        stored_bytes = sum(part.stored_bytes for part in parts if part.store == device.name)
        room = format_bytes(device.available_bytes)
        if run is not None and device.name in run.devices:
            peak, left = run.peak_bytes(device.name), run.remaining_bytes(device.name)
        elif used:
            peak, left = max(used), device.available_bytes - max(used)
        elif stored_bytes:
            left = format_bytes(device.available_bytes - stored_bytes)
            yield device.name, room, format_bytes(stored_bytes), f"{left}, nothing computes there: it stores"
            continue
        else:
            yield device.name, room, "-", f"{room}, nothing computes there"
            continue
        remains = format_bytes(left) if left >= 0 else f"{format_bytes(-left)} too much"
        if left < 0 <= left + device.kept_free_bytes:
            remains = f"0B; activations take {format_bytes(-left)} of what the watermark keeps free"
        yield device.name, room, format_bytes(peak), remains


def budget_column(plans: Mapping[str, Plan], machine: Machine) -> list[str]:
    """Return what profiles let weights take of each accelerator, below a heading; empty where none has a budget."""
    limits = [
        [
            budget.limit(device.total_bytes, device.available_bytes, device.kept_free_bytes)
            for plan in plans.values()
            for budget in plan.profile.budgets
            if budget.target == device.name and not budget.from_profile
        ]
        for device in machine.accelerators
    ]
    if not any(limits):
        return []
    return ["weights at most", *(format_bytes(min(found)) if found else "-" for found in limits)]


def same_again(plans: Mapping[str, Plan], placements: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts to paste into the loaders."""
    for name, plan in plans.items():
        if len(plans) > 1:
            yield name
        title = f" ({plan.profile.title})" if plan.profile.title != plan.profile.name else ""
        own = in_loaders_words(plan, placements.get(name))
        yield f"profile: {own.profile}{title}"
        if plan.reasons and own.explicit_profile != str(own.profile):
            yield f"the same with nothing left to auto: {own.explicit_profile}"
        yield f"placement: {placements.get(name, plan.placement)}"


def in_loaders_words(plan: Plan, placement: str | None) -> Plan:
    """Return a plan with its components named as their loader's widgets take them, in its profile, too.

    Args:
        placement: the text that the loader's widget takes: of one component it has its name there, such as ``text`` of
            a checkpoint, or none.
    """
    # In a plan of several loaders equal names are told apart by their nodes.
    words = {part.component: part.component.partition(" (")[0] for part in plan.components}
    if placement is not None and len(words) == 1:
        name, names_it, _ = placement.partition("=")
        words = dict.fromkeys(words, name if names_it else "*")
    budgets = tuple(replace(item, target=words.get(item.target, item.target)) for item in plan.profile.budgets)
    return replace(
        plan,
        components=tuple(replace(part, component=words[part.component]) for part in plan.components),
        profile=replace(plan.profile, budgets=budgets),
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as text in columns; the first one is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
