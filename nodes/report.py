"""The node that shows the manager's books as text."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .schema import make_schema

__all__ = ["HighwaterMemoryReport"]


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

    @staticmethod
    def register_component(name: str, num_bytes: Any, **options: Any) -> Any:
        """As `highwater.register_component`: other packs find this class in ``nodes.NODE_CLASS_MAPPINGS``."""
        from ..memory import register_component

        return register_component(name, num_bytes, **options)

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Memory changes without any input changing: NaN equals nothing, so the report is made every time."""
        return float("nan")

    @classmethod
    def execute(cls, after: object = None) -> io.NodeOutput:
        from ..memory import default_manager
        from .report_text import NUM_NODES, describe_now

        text = "\n\n".join(map(str, describe_now(default_manager().recent_report(NUM_NODES + 1))))
        return io.NodeOutput(text, ui=ui.PreviewText(text))
