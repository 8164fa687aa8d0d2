"""Draws the registry's banner, 21 to 9, from a report of `highwater demo`: its first device, no invented data.

usage: python scripts/draw_banner.py out/demo/report.json banner.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

WIDTH_INCHES, HEIGHT_INCHES, DPI = 10.5, 4.5, 120
# The icon's colours; one per pipeline.
NIGHT, FOAM, INK = "#0b1f27", "#9fe3f1", "#e6f4f7"
PIPELINES = ("#2389ab", "#7aa394", "#f4b860")


def draw_banner(report: dict[str, Any], path: Path) -> None:
    """Draw each pipeline's memory on the first device, load by load and eviction by eviction, and the watermark."""
    device = next(device for device in report["devices"] if device["name"] != "cpu")
    samples = [sample for sample in report["samples"] if sample["device"] == device["name"]]
    pipelines = list(
        dict.fromkeys(owner.partition("/")[0] for sample in samples for owner in sample["component_bytes"])
    )
    figure = plt.figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), facecolor=NIGHT)
    panel = figure.add_axes((0, 0, 1, 0.72), facecolor=NIGHT)
    places = list(range(len(samples) + 1))
    below = [0.0] * len(places)
    for pipeline, color in zip(pipelines, PIPELINES, strict=False):
        held = [
            sum(count for owner, count in sample["component_bytes"].items() if owner.partition("/")[0] == pipeline)
            for sample in samples
        ]
        above = [low + more / device["total_bytes"] for low, more in zip(below, [*held, held[-1]], strict=True)]
        panel.fill_between(places, below, above, step="post", color=color, lw=0)
        below = above
    mark = 1 - device["watermark"]["low_bytes"] / device["total_bytes"]
    panel.axhspan(mark, 1, color=FOAM, alpha=0.12, lw=0)
    panel.axhline(mark, color=FOAM, lw=3)
    panel.set_xlim(0, len(samples))
    panel.set_ylim(0, 1)
    panel.axis("off")
    figure.text(0.035, 0.84, "Highwater", color=INK, fontsize=38, weight="bold", va="center")
    words = "runs models larger than your VRAM,\nand shows where each part of them is"
    figure.text(0.965, 0.84, words, color=FOAM, fontsize=16, va="center", ha="right", linespacing=1.4)
    figure.text(0.035, 0.675, "VRAM watermark (keep free)", color=FOAM, fontsize=11, va="center")
    note = f"{len(report['runs'])} runs of the demo on a simulated device: {', '.join(pipelines)}"
    figure.text(0.965, 0.05, note, color=NIGHT, fontsize=10, va="center", ha="right")
    figure.savefig(path, dpi=DPI, facecolor=NIGHT)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw_banner(json.loads(source.read_text(encoding="utf-8")), target)
