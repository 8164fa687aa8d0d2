"""The node that compares a managed model with core's own load of the same model."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..schema import make_schema
from ..widget_values import seed_input

__all__ = ["HighwaterVerify"]

NOTHING = "nothing to verify; connect model with positive and latent_image, or clip, or vae with image or latent_image"


class HighwaterVerify(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterVerify",
            display_name="Verify",
            description=(
                "Runs one step of a managed model with engine blocks, runs the same step with ComfyUI's own load of "
                "the model, and compares the results bit by bit. Names the first block that differs. Reads the model's "
                "file again, which uses its size in RAM once more during the run."
            ),
            search_aliases=["check model", "compare output", "debug offload", "bit equal", "self test"],
            inputs=[
                io.Model.Input("model", optional=True, tooltip="From a Highwater loader or Manage Model."),
                io.Conditioning.Input(
                    "positive", optional=True, tooltip="For the model: the conditioning of its step."
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="For the model. Without it the positive conditioning is used."
                ),
                io.Latent.Input(
                    "latent_image",
                    optional=True,
                    tooltip="For the model's step. If no model or no image is connected, the VAE decodes it.",
                ),
                io.Clip.Input(
                    "clip", optional=True, tooltip="From a Highwater loader or Manage CLIP: it encodes the text."
                ),
                io.Vae.Input(
                    "vae",
                    optional=True,
                    tooltip="From a Highwater loader or Manage VAE: encodes the image, decodes the result.",
                ),
                io.Image.Input("image", optional=True, tooltip="The image for the VAE."),
                io.String.Input("text", default="a red fox in the snow", tooltip="The text for the text encoder."),
                io.Float.Input(
                    "cfg",
                    default=3.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="The guidance of the model's step. At 1 the negative conditioning is not computed.",
                ),
                seed_input("The seed of the noise for the model's step."),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The input model, unchanged."),
                io.Clip.Output(display_name="clip", tooltip="The input text encoder, unchanged."),
                io.Vae.Output(display_name="vae", tooltip="The input VAE, unchanged."),
                io.String.Output(
                    display_name="report", tooltip="Whether the results are equal, and where they first differ."
                ),
            ],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        text: str,
        cfg: float,
        seed: int,
        model: Any = None,
        positive: Any = None,
        negative: Any = None,
        latent_image: dict[str, Any] | None = None,
        clip: Any = None,
        vae: Any = None,
        image: Any = None,
    ) -> io.NodeOutput:
        from ...memory.errors import InvalidInput
        from ..host import verify_clip, verify_model, verify_vae

        decoded = latent_image if model is None or image is None else None
        if model is not None and (positive is None or latent_image is None):
            raise InvalidInput("model needs positive and latent_image; connect both")
        if vae is not None and image is None and decoded is None:
            raise InvalidInput("vae needs image or latent_image; connect one of them")
        found = []
        if clip is not None:
            found.append(verify_clip(clip, text))
        if model is not None:
            conditioning = positive if negative is None else negative
            found.append(verify_model(model, positive, conditioning, latent_image, seed=seed, cfg=cfg))
        if vae is not None:
            found.append(verify_vae(vae, image, decoded))
        if not found:
            raise InvalidInput(NOTHING)
        report = "\n".join(one.text() for one in found)
        return io.NodeOutput(model, clip, vae, report, ui={"text": report.splitlines()})
