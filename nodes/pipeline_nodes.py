"""The nodes that load a managed pipeline and sample it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from ..memory.options.placement import AUTO
from .default_profile import chosen_profile, profile_fingerprint
from .device_choices import fit_placement, fit_profile
from .pipelines.sampling_inputs import PipelineType
from .precision import options_input
from .schema import make_schema
from .watermark import DeviceWatermark, WatermarkType
from .widget_values import precisions_input, profile_input, read_placement, read_precision, read_profile, seed_input

if TYPE_CHECKING:
    from ..memory.options.precision import Precisions
    from .pipelines.sampling import LoadedPipeline

__all__ = ["HighwaterLoadPipeline", "HighwaterSamplePipeline"]


class HighwaterLoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        from .pipelines.pipeline_folders import pipeline_choices

        return make_schema(
            node_id="HighwaterLoadPipeline",
            display_name="Load Pipeline",
            description=(
                "Loads a diffusers pipeline. Highwater decides on which device and in which precision each part is "
                "kept, and what is evicted when memory runs short. Nothing moves to a device before it is used."
            ),
            search_aliases=["diffusers loader", "offload", "model placement"],
            inputs=[
                io.Combo.Input(
                    "pipeline",
                    options=pipeline_choices(),
                    tooltip=(
                        "A folder in models/diffusers with a model_index.json. tiny-flux, tiny-sd and tiny-wan have "
                        "random weights and are made there when they are first used."
                    ),
                ),
                profile_input(),
                precisions_input(),
                io.String.Input(
                    "placement",
                    default=AUTO,
                    tooltip=(
                        "auto, or a device for each part: diffusion=gpu:0,text=gpu:1. Split over two devices: "
                        "diffusion=gpu:0&gpu:1. Kept in its file until it is used, without RAM: text=gpu:0:disk."
                    ),
                ),
                WatermarkType.Input(
                    "watermark",
                    optional=True,
                    tooltip="From a Watermark node: how much memory stays free while this pipeline is used.",
                ),
                options_input(),
            ],
            outputs=[
                PipelineType.Output(display_name="pipeline", tooltip="The loaded pipeline, managed by Highwater.")
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def validate_inputs(
        cls,
        pipeline: str | None = None,
        profile: str | None = None,
        precision: str | None = None,
        placement: str | None = None,
    ) -> bool | str:
        """Check what a shared workflow may name wrongly, before anything is loaded."""
        from ..memory.errors import InvalidInput
        from .pipelines.pipeline_folders import check_pipeline, find_pipeline, is_to_be_made

        try:
            if is_to_be_made(pipeline):
                return True  # its components are not known yet: the node checks the rest before it loads anything
            if pipeline is not None:
                components = tuple(check_pipeline(find_pipeline(pipeline)))  # reads headers only
                if profile is not None:  # None is a linked widget, read when the node runs
                    read_profile(profile, components)
                if precision is not None:
                    read_precision(precision, components=components)
                if placement is not None:
                    read_placement(placement, components)
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, pipeline: str | None = None, profile: str | None = None, **_: object) -> str:
        """Load again when a file of the pipeline or the default profile has changed."""
        from .pipelines.pipeline_folders import find_pipeline, is_to_be_made, weights_fingerprint

        if pipeline is None or is_to_be_made(pipeline):
            return profile_fingerprint(profile)
        return weights_fingerprint(find_pipeline(pipeline)) + profile_fingerprint(profile)

    @classmethod
    def execute(
        cls,
        pipeline: str,
        profile: str,
        precision: str,
        placement: str,
        watermark: DeviceWatermark | None = None,
        precision_options: Precisions | None = None,
    ) -> io.NodeOutput:
        from ..memory import manage
        from .pipeline_predictions import predict_uses
        from .pipelines.diffusers_pipelines import load_with_sources
        from .pipelines.pipeline_folders import check_pipeline, ready_pipeline
        from .pipelines.sampling import LoadedPipeline
        from .progress import showing_loadings

        folder = ready_pipeline(pipeline)
        components = tuple(check_pipeline(folder))
        fitting_profile, notes = fit_profile(*chosen_profile(profile, components))
        fitting_placement, more_notes = fit_placement(read_placement(placement, components), placement)
        pipe, sources = load_with_sources(folder)
        uses, sizes = predict_uses(cls.hidden.prompt, cls.hidden.unique_id, pipe)
        with showing_loadings():
            managed = manage(
                pipe,
                profile=fitting_profile,
                placement=fitting_placement,
                precision=read_precision(precision, precision_options, components),
                files=sources,
                name=pipeline,
                node_id=cls.hidden.unique_id,
                uses=uses,
            )
        return io.NodeOutput(
            LoadedPipeline(pipe=pipe, managed=managed, watermark=watermark, traced=sizes),
            ui={"text": [*notes, *more_notes]},
        )


class HighwaterSamplePipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        from .pipelines.sampling_inputs import batch_input, guidance_input, size_inputs

        return make_schema(
            node_id="HighwaterSamplePipeline",
            display_name="Sample Pipeline",
            description="Generates images, or the frames of a video, with a loaded pipeline.",
            search_aliases=["generate", "text to image", "text to video", "diffusers sampler", "ksampler"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline."),
                io.String.Input("prompt", multiline=True, default="", tooltip="What the image should show."),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    default="",
                    tooltip="What the image should not show. Guidance-distilled models such as Flux ignore it.",
                ),
                *size_inputs(default_pixels=1024),
                io.Int.Input("steps", default=20, min=1, max=1000, tooltip="Denoising steps."),
                guidance_input(
                    "How strongly the image follows the prompt. At 1 or less the negative prompt is not used."
                ),
                seed_input(
                    "The seed of the noise. The noise is made on the CPU, so it is the same on every device.",
                    control_after_generate=True,
                ),
                batch_input(),
            ],
            outputs=[io.Image.Output(display_name="images", tooltip="The images, or the frames of a video.")],
        )

    @classmethod
    def execute(
        cls,
        pipeline: LoadedPipeline,
        prompt: str,
        negative_prompt: str,
        width: int,
        height: int,
        frames: int,
        steps: int,
        guidance: float,
        seed: int,
        batch_size: int = 1,
    ) -> io.NodeOutput:
        from .pipelines.sampling import Sampling
        from .progress import report_progress, showing_loadings

        sampling = Sampling(
            prompt=prompt,
            negative_prompt=negative_prompt,
            width=width,
            height=height,
            frames=frames,
            steps=steps,
            guidance=guidance,
            seed=seed,
            batch_size=batch_size,
        )
        with showing_loadings():
            return io.NodeOutput(pipeline.sample(sampling, on_step=report_progress))
