"""A plan as a picture: for each device a bar for each part of the run, of what then lies there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..memory.units import format_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..memory.planner.capacity import Machine
    from ..memory.planner.plan import Plan
    from ..memory.planner.run_plan import RunPlan

__all__ = ["draw_plan", "draw_text"]

WIDTH, MARGIN, LABEL_WIDTH, NUMBER_WIDTH, BAR_HEIGHT, GAP, FONT_SIZE = 1100, 24, 250, 80, 26, 10, 15
PAPER, INK, FAINT, LIMIT, ACTIVATIONS = "#ffffff", "#1d2733", "#e9edf2", "#c0392b", "#8a949f"
# Distinguishable with the common colour blindnesses (Okabe and Ito).
HUES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")

Segment = tuple[str, int]
"""What a part of a bar is, a component or activations, and its bytes."""
BESIDE = "activations"


def draw_plan(plans: Mapping[str, Plan], run: RunPlan | None, machine: Machine) -> Image:
    """Return the picture of plans of one machine, RGB. A bar is as long as its device is large; its end is the limit.

    Args:
        run: with it, a bar for each use; without, one for each component alone.
    """
    from PIL import Image, ImageDraw, ImageFont

    if not any(share.device != "cpu" for plan in plans.values() for part in plan.components for share in part.shares):
        return draw_text("Everything computes on the CPU: there is no accelerator to show.")
    parts = [part for plan in plans.values() for part in plan.components]
    names = list(dict.fromkeys(part.component for part in parts))
    colors = {name: HUES[number % len(HUES)] for number, name in enumerate(names)} | {BESIDE: ACTIVATIONS}
    bars = {
        device.name: list(run_bars(run, device.name) if run is not None else component_bars(plans, device.name))
        for device in machine.accelerators
    }
    bars = {name: rows for name, rows in bars.items() if rows}
    font = ImageFont.load_default(FONT_SIZE)
    # The legend has a line for each name at most; what is not needed is cut off.
    num_lines = sum(len(rows) + 2 for rows in bars.values()) + 1 + len(colors)
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + num_lines * (BAR_HEIGHT + GAP)), PAPER)
    draw = ImageDraw.Draw(image)
    y = MARGIN
    for device in machine.accelerators:
        rows = bars.get(device.name)
        if not rows:
            continue
        title = (
            f"{device.name}: {format_bytes(device.available_bytes)} of {format_bytes(device.total_bytes)} may be used"
        )
        draw.text((MARGIN, y), title, INK, font)
        y += BAR_HEIGHT
        scale = (WIDTH - 2 * MARGIN - LABEL_WIDTH - NUMBER_WIDTH) / max(1, device.total_bytes)
        left = MARGIN + LABEL_WIDTH
        for label, segments in rows:
            draw.text((MARGIN, y + 4), fitting(label, LABEL_WIDTH - GAP, font.getlength), INK, font)
            draw.rectangle((left, y, left + int(device.total_bytes * scale), y + BAR_HEIGHT), FAINT)
            begin = 0
            for name, num_bytes in segments:
                end = begin + num_bytes
                box = (
                    left + int(begin * scale),
                    y,
                    left + max(int(begin * scale), int(end * scale) - 1),
                    y + BAR_HEIGHT,
                )
                draw.rectangle(box, colors[name])
                begin = end
            limit = left + int(device.available_bytes * scale)
            draw.line((limit, y - 3, limit, y + BAR_HEIGHT + 3), LIMIT, 2)
            told = format_bytes(begin)
            draw.text((WIDTH - MARGIN - int(font.getlength(told)), y + 4), told, INK, font)
            y += BAR_HEIGHT + GAP
        y += BAR_HEIGHT
    x = MARGIN
    for name, color in colors.items():
        length = int(font.getlength(name)) + BAR_HEIGHT + 3 * GAP
        if x + length > WIDTH - MARGIN:
            x, y = MARGIN, y + BAR_HEIGHT
        draw.rectangle((x, y + 4, x + 14, y + 18), color)
        draw.text((x + 20, y), name, INK, font)
        x += length
    return image.crop((0, 0, WIDTH, y + BAR_HEIGHT + MARGIN))


def draw_text(text: str) -> Image:
    """Return a picture of a text, in lines as wide as it."""
    import textwrap

    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(FONT_SIZE)
    lines = textwrap.wrap(text, 110) or [""]
    image = Image.new("RGB", (WIDTH, 2 * MARGIN + len(lines) * BAR_HEIGHT), PAPER)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(lines):
        draw.text((MARGIN, MARGIN + number * BAR_HEIGHT), line, INK, font)
    return image


def run_bars(run: RunPlan, device: str) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Yield what lies on a device in each use of a run that needs it."""
    for use in run.uses:
        if device in use.held:
            held = list(use.held[device].items())
            beside = use.activation_bytes(device)
            label = f"{use.use.component}, {use.use.what}" if use.use.what else use.use.component
            yield label, [*held, *([(BESIDE, beside)] if beside else [])]


def component_bars(plans: Mapping[str, Plan], device: str) -> Iterator[tuple[str, Sequence[Segment]]]:
    """Yield what each component takes of a device while it computes."""
    for plan in plans.values():
        for part in plan.components:
            for share in part.shares:
                if share.device == device:
                    yield part.component, [(part.component, share.device_bytes)]


def fitting(text: str, width: int, length_of: Callable[[str], float]) -> str:
    """Return a text cut to a width in pixels."""
    if length_of(text) <= width:
        return text
    while text and length_of(f"{text}…") > width:
        text = text[:-1].rstrip(" ,")
    return f"{text}…"
