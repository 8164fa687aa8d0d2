"""The memory timeline as a picture: the memory of each component on each device, run by run, and the watermark.

Points are drawn in their order, equally far apart, one per change of any device: on a scale of seconds the
moments at which memory changes hands would be slivers between long computes. Seconds stand at the runs' beginnings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

from ...memory.units import GIB, MIB

__all__ = ["draw_timeline"]

RUN_COLORS = ("#f2f4f7", "#e4e9f0")
WATERMARK_COLOR = "#c0392b"
PEAK_COLOR = "#2c3e50"
# Distinguishable with the common colour blindnesses (Okabe and Ito).
HUES = ((0.0, 0.45, 0.70), (0.90, 0.62, 0.0), (0.0, 0.62, 0.45), (0.80, 0.47, 0.65), (0.34, 0.71, 0.91))


def draw_timeline(report: dict[str, Any], path: str | Path) -> None:
    """Draw a report's samples, one panel per device that was used, and write the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = report["samples"]
    names = [device["name"] for device in report["devices"] if any(s["device"] == device["name"] for s in samples)]
    times = sorted(sample["t_s"] for sample in samples)
    most = Counter()
    for sample in samples:
        most |= Counter(sample["component_bytes"])  # the maximum of each
    owners = sorted(most, key=lambda owner: (owner.partition("/")[0], -most[owner]))
    colors = color_by_group(owners)
    figure, panels = plt.subplots(
        len(names), 1, figsize=(12, 1.2 + 3.1 * len(names)), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, name in zip(panels[:, 0], names, strict=True):
        device = next(device for device in report["devices"] if device["name"] == name)
        draw_device(panel, device, samples_at(times, samples, name), owners, colors)
        mark_runs(panel, report, times)
        mark_evictions(panel, report, name, times, colors)
    panels[-1, 0].set_xlabel("memory changes in order (not to scale), with the seconds at the start of each run")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colors[owner]) for owner in owners]
    labels = list(owners)
    handles += [
        plt.Line2D([], [], color=PEAK_COLOR, lw=1.2, ls=":"),
        plt.Line2D([], [], color=WATERMARK_COLOR, lw=1.2, ls="--"),
        plt.Line2D([], [], color=WATERMARK_COLOR, lw=0.8, ls=":"),
        plt.Line2D([], [], color=WATERMARK_COLOR, marker="v", ls=""),
    ]
    labels += ["peak, with activations", "watermark (keep free): low", "watermark: high", "eviction"]
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def samples_at(times: list[float], samples: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return a device's sample for each time; where it has none, its last one, with what was allocated as the peak."""
    own = {sample["t_s"]: sample for sample in samples if sample["device"] == name}
    last = {"component_bytes": {}, "allocated_bytes": 0, "peak_bytes": 0}
    found = []
    for time in times:
        last = own.get(time) or last | {"peak_bytes": last["allocated_bytes"]}
        found.append(last)
    return found


def color_by_group(owners: list[str]) -> dict[str, tuple[float, float, float]]:
    """Return a colour per component: a hue per pipeline (the part before the slash), a shade per component of it."""
    groups: dict[str, list[str]] = {}
    for owner in owners:
        groups.setdefault(owner.partition("/")[0], []).append(owner)
    colors = {}
    for index, members in enumerate(groups.values()):
        hue = HUES[index % len(HUES)]
        for shade, owner in enumerate(members):
            whiteness = 0.65 * shade / max(1, len(members) - 1)
            colors[owner] = tuple(channel + (1 - channel) * whiteness for channel in hue)
    return colors


def draw_device(
    panel: Any, device: dict[str, Any], samples: list[dict[str, Any]], owners: list[str], colors: Any
) -> None:
    """Stack the components' bytes over time, below the peak that the allocator saw and the watermark."""
    unit, unit_name = (GIB, "GiB") if device["total_bytes"] >= 4 * GIB else (MIB, "MiB")
    places = list(range(len(samples)))
    below = [0.0] * len(samples)
    for owner in owners:
        above = [
            low + sample["component_bytes"].get(owner, 0) / unit for low, sample in zip(below, samples, strict=True)
        ]
        panel.fill_between(places, below, above, step="post", color=colors[owner], lw=0)
        below = above
    # A point's peak is that of the time before it.
    panel.step(
        places, [sample["peak_bytes"] / unit for sample in samples], where="pre", color=PEAK_COLOR, lw=1.2, ls=":"
    )
    total = device["total_bytes"] / unit
    panel.axhline(total, color="black", lw=1.5)
    low, high = device["watermark"]["low_bytes"] / unit, device["watermark"]["high_bytes"] / unit
    panel.axhspan(total - low, total, color=WATERMARK_COLOR, alpha=0.10, lw=0)
    panel.axhline(total - low, color=WATERMARK_COLOR, lw=1.2, ls="--")
    panel.axhline(total - high, color=WATERMARK_COLOR, lw=0.8, ls=":")
    panel.set_ylim(0, total * 1.14)
    panel.set_xlim(0, max(1, len(samples) - 1))
    panel.set_ylabel(f"{device['name']}, {unit_name}")
    panel.spines[["top", "right"]].set_visible(False)


def mark_runs(panel: Any, report: dict[str, Any], times: list[float]) -> None:
    """Shade every run and write its name above it, and the seconds since the first run below."""
    runs = report["runs"]
    # A run reaches to the next one: between them nothing changes.
    bounds = [bisect_left(times, run["begin_s"]) for run in runs] + [len(times) - 1]
    for index, run in enumerate(runs):
        begin, end = bounds[index], bounds[index + 1]
        panel.axvspan(begin, end, color=RUN_COLORS[index % 2], zorder=-2, lw=0)
        panel.axvline(begin, color="white", lw=1.5, zorder=-1)
        middle = (begin + end) / 2
        panel.annotate(
            run["name"],
            (middle, 0.985),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="top",
            fontsize=9,
            weight="bold",
        )
    panel.set_xticks(bounds[:-1], [f"{run['begin_s'] - runs[0]['begin_s']:.1f} s" for run in runs])


def mark_evictions(panel: Any, report: dict[str, Any], device: str, times: list[float], colors: Any) -> None:
    """Put a triangle where a component gave up bytes, in that component's colour."""
    for event in report["events"]:
        if event["kind"] == "evict" and event["device"] == device:
            panel.plot(
                bisect_left(times, event["t_s"]),
                0.04,
                "v",
                color=colors.get(event["component"], "grey"),
                mec=WATERMARK_COLOR,
                ms=9,
                transform=panel.get_xaxis_transform(),
            )
