"""The node that shows the manager's books as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_api.latest import io, ui

from .schema import make_schema

__all__ = ["HighwaterMemoryReport", "format_report"]

NUM_EVENTS = 10


class HighwaterMemoryReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterMemoryReport",
            display_name="Memory Report",
            description=(
                "Shows where each model part is now, how much memory each node used, and what was evicted and why. "
                "Runs after the node that is linked to it."
            ),
            search_aliases=["vram usage", "memory usage", "debug memory", "show vram"],
            inputs=[
                io.AnyType.Input(
                    "after", optional=True, tooltip="Link any output here: the report runs after that node."
                )
            ],
            outputs=[io.String.Output(display_name="report", tooltip="The report as text, one line per item.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Memory changes without any input changing: NaN equals nothing, so the report is made every time."""
        return float("nan")

    @classmethod
    def execute(cls, after: object = None) -> io.NodeOutput:
        from ..memory import default_manager

        text = format_report(default_manager().report())
        return io.NodeOutput(text, ui=ui.PreviewText(text))


def format_report(report: Mapping[str, Any]) -> str:
    """Return the manager's report as aligned text: devices, components, this run's nodes, and the last events."""
    from ..memory.units import format_bytes

    def per_device(amounts: Mapping[str, int]) -> str:
        return ", ".join(f"{device} {format_bytes(n)}" for device, n in sorted(amounts.items()) if n) or "-"

    devices = [
        [
            device["name"],
            f"{format_bytes(device['free_bytes'])} free of {format_bytes(device['total_bytes'])}",
            f"Highwater {format_bytes(device['reserved_bytes'])}",
            f"other {format_bytes(device['other_bytes'])}",
        ]
        for device in report["devices"]
    ]
    components = [
        [
            component["id"],
            component["precision"],
            per_device(component["tiers"]),
            "as planned" if component["in_effect"] else "NOT as planned",
        ]
        for component in report["components"]
    ]
    nodes = [
        [
            f"{node['node_id']} {node['title']}",
            f"peak {per_device(node['peak_bytes'])}",
            f"weights {per_device(node['weights_bytes'])}",
            f"activations {per_device(node['activation_bytes'])}",
            f"{node['seconds']:.2f} s",
        ]
        for node in report["nodes"]
        if node["run_id"] == report["runs"][-1]["run_id"]
    ]
    events = [
        [f"{event['t_s']:.2f} s", event["kind"], event["component"], event["reason"]]
        for event in report["events"][-NUM_EVENTS:]
    ]
    sections = {"Devices": devices, "Components": components, "Nodes": nodes, "Last events": events}
    return "\n\n".join("\n".join([title, *align_columns(rows)]) for title, rows in sections.items() if rows)


def align_columns(rows: list[list[str]]) -> list[str]:
    """Return the rows with every column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
