"""The node that samples one step of a pipeline with the engine and without, and says whether they give the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ..schema import make_schema
from .pipeline import PipelineType

if TYPE_CHECKING:
    from .diffusers_pipelines import LoadedPipeline

__all__ = ["HighwaterVerifyPipeline"]


class HighwaterVerifyPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        from .diffusers_pipelines import FRAME_STEP, PIXEL_STEP

        tooltip = f"In pixels, a multiple of {PIXEL_STEP}."
        pixels: Any = {"default": 512, "min": PIXEL_STEP, "max": 16384, "step": PIXEL_STEP, "tooltip": tooltip}
        return make_schema(
            node_id="HighwaterVerifyPipeline",
            display_name="Verify Pipeline",
            category="Highwater",
            description=(
                "Samples one step of a pipeline with the engine and without, and compares bit by bit; names the first "
                "block that differs. Takes three steps, and the weights once on their device."
            ),
            search_aliases=["check pipeline", "compare output", "debug offload", "bit equal", "self test"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline."),
                io.String.Input("prompt", default="a red fox in the snow", tooltip="What the step is made with."),
                io.Int.Input("width", **pixels),
                io.Int.Input("height", **pixels),
                io.Int.Input(
                    "frames",
                    default=1,
                    min=1,
                    max=1025,
                    step=FRAME_STEP,
                    tooltip="1 for an image; 4n + 1 with a video pipeline.",
                ),
                io.Float.Input(
                    "guidance",
                    default=4.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="At 1 and below the step without the prompt is not computed.",
                ),
                io.Int.Input("seed", default=0, min=0, max=0xFFFFFFFFFFFFFFFF, tooltip="The noise of the step."),
            ],
            outputs=[
                PipelineType.Output(display_name="pipeline", tooltip="The pipeline that came in."),
                io.String.Output(display_name="report", tooltip="The verdict, and where the first difference is."),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, pipeline: LoadedPipeline, prompt: str, width: int, height: int, frames: int, guidance: float, seed: int
    ) -> io.NodeOutput:
        from ..progress import showing_loadings
        from .diffusers_pipelines import Sampling

        sampling = Sampling(
            prompt=prompt,
            negative_prompt="",
            width=width,
            height=height,
            frames=frames,
            steps=1,
            guidance=guidance,
            seed=seed,
        )
        with showing_loadings():
            found = pipeline.managed.verify(lambda: pipeline.sample(sampling, on_step=lambda done, steps: None))
        report = found.text()
        return io.NodeOutput(pipeline, report, ui={"text": report.splitlines()})
