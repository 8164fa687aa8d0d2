"""The node that shows the plan of its own workflow, before anything moves."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .schema import make_schema

__all__ = ["HighwaterPlan"]


class HighwaterPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterPlan",
            display_name="Plan",
            description=(
                "Shows, before it runs, where each model of this workflow will be, in which precision, what streams, "
                "the peak of each device, what is loaded and evicted, how long a step takes, and why. Loads nothing. "
                "Also for GPUs that are not here."
            ),
            search_aliases=["does it fit", "vram estimate", "predict memory", "dry run", "placement plan"],
            inputs=[
                io.String.Input(
                    "devices",
                    default="",
                    tooltip=(
                        "Empty: this machine, as it is now. Or a machine to plan for, such as "
                        "gpu:0=12GiB,gpu:1=8GiB,host=32GiB; the help page says how to add speeds."
                    ),
                ),
            ],
            outputs=[
                io.String.Output(display_name="plan", tooltip="The plan as text: tables, reasons, what to paste."),
                io.Image.Output(display_name="picture", tooltip="A bar for each device and part of the run."),
            ],
            hidden=[io.Hidden.prompt],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, devices: str | None = None) -> bool | str:
        """Check what describes a machine; a linked text is read when the node runs."""
        from ..memory.errors import InvalidInput
        from .described_hardware import parse_hardware

        try:
            if devices is not None and devices.strip():
                parse_hardware(devices)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> float:
        """Other nodes' widgets and free memory change the plan: NaN equals nothing, so it is made every time."""
        return float("nan")

    @classmethod
    def execute(cls, devices: str) -> io.NodeOutput:
        from ..memory.errors import DoesNotFit, InvalidInput
        from .auto_placements import plan_as_chosen
        from .described_hardware import parse_hardware
        from .plan_picture import draw_plan, draw_text

        hardware = parse_hardware(devices) if devices.strip() else None
        try:
            planned = plan_as_chosen(cls.hidden.prompt, hardware)
        except (DoesNotFit, InvalidInput) as error:  # that is the plan: the rest of the workflow says it where it runs
            text, picture = f"cannot be planned: {error}", draw_text(str(error))
        else:
            text, picture = planned.text(), draw_plan(planned.plans, planned.run, planned.machine)
        return io.NodeOutput(text, as_images(picture), ui=ui.PreviewText(text))


def as_images(picture: Any) -> Any:
    """Return a picture as images of the host: [1, H, W, 3], float32 from 0 to 1."""
    import numpy as np
    import torch

    return torch.from_numpy(np.asarray(picture, dtype=np.float32) / 255.0)[None]
