"""The node that limits how many models stay loaded, and for how long while nothing uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .schema import make_schema

if TYPE_CHECKING:
    from ..memory.options.idle_limits import IdleLimits

__all__ = ["HighwaterLimits"]

SECONDS_PER_MINUTE = 60


class HighwaterLimits(io.ComfyNode):
    """Works alone on the canvas, as an output node. It runs with every prompt, because other ways set limits, too."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ..memory.options.idle_limits import LONGEST_IDLE_S, MOST_LOADED

        return make_schema(
            node_id="HighwaterLimits",
            display_name="Limits",
            description=(
                "Limits how many models stay loaded, and for how many minutes while nothing uses them. What leaves "
                "stays in RAM. The limits count for all workflows until something sets others."
            ),
            search_aliases=["idle unload", "auto unload", "max models", "unload timeout"],
            inputs=[
                io.Int.Input(
                    "max_loaded",
                    default=0,
                    min=0,
                    max=MOST_LOADED,
                    tooltip=(
                        "When another model is loaded, idle ones leave the GPU until no more are loaded. Models of "
                        "ComfyUI leave between runs. 0: any number."
                    ),
                ),
                io.Float.Input(
                    "idle_minutes",
                    default=0.0,
                    min=0.0,
                    max=LONGEST_IDLE_S / SECONDS_PER_MINUTE,
                    step=1.0,
                    round=0.1,
                    tooltip="A model that nothing used for so long leaves the GPU. 0: never.",
                ),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Return NaN, which equals nothing: the node runs again, because the limits may be others by now."""
        return float("nan")

    @classmethod
    def execute(cls, max_loaded: int, idle_minutes: float) -> io.NodeOutput:
        from ..memory import default_manager

        limits = read_limits(max_loaded, idle_minutes)
        default_manager().commands.set_idle_limits(limits)
        return io.NodeOutput(ui={"text": [str(limits)]})


def read_limits(max_loaded: int, idle_minutes: float) -> IdleLimits:
    """Return the limits that two widgets name; 0 stands for none. Raises `InvalidInput` for a number out of range."""
    from ..memory.options.idle_limits import IdleLimits

    return IdleLimits(num_loaded=max_loaded or None, idle_s=idle_minutes * SECONDS_PER_MINUTE if idle_minutes else None)
