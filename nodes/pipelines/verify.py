"""The node that compares one step of a pipeline with Highwater and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from ..schema import make_schema
from ..widget_values import seed_input
from .sampling_inputs import PipelineType

if TYPE_CHECKING:
    from .sampling import LoadedPipeline

__all__ = ["HighwaterVerifyPipeline"]


class HighwaterVerifyPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        from .sampling_inputs import guidance_input, size_inputs

        return make_schema(
            node_id="HighwaterVerifyPipeline",
            display_name="Verify Pipeline",
            description=(
                "Samples one step of a pipeline with Highwater and without it, and compares the results bit by bit. "
                "Names the first block that differs. Runs three steps and loads all weights to their device once."
            ),
            search_aliases=["check pipeline", "compare output", "debug offload", "bit equal", "self test"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline."),
                io.String.Input("prompt", default="a red fox in the snow", tooltip="The prompt of the step."),
                *size_inputs(default_pixels=512),
                guidance_input("At 1 or less the step without the prompt is not computed."),
                seed_input("The seed of the noise for the step."),
            ],
            outputs=[
                PipelineType.Output(display_name="pipeline", tooltip="The input pipeline, unchanged."),
                io.String.Output(
                    display_name="report", tooltip="Whether the results are equal, and where they first differ."
                ),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, pipeline: LoadedPipeline, prompt: str, width: int, height: int, frames: int, guidance: float, seed: int
    ) -> io.NodeOutput:
        from ..progress import showing_loadings
        from .sampling import Sampling

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
