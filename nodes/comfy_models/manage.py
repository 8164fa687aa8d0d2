"""The nodes that let Highwater manage a model of another loader.

They are listed where ComfyUI is. The model that comes in stays as it is: what goes out is a clone of its patcher.
"""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from .model_request import ModelNode, answer_with, model_schema

__all__ = ["HighwaterManageCLIP", "HighwaterManageModel", "HighwaterManageVAE"]

COST = (
    "With engine dynamic the model stays ComfyUI's, within your budget. With engine blocks it is a copy, read again "
    "from its file if the loader names one; it uses RAM beside the original. A model that cannot be managed is passed "
    "on unchanged. The node says which of this happened."
)

NOTHING = "not managed: its loader gave no {}; a checkpoint may contain none"


class HighwaterManageModel(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterManageModel",
            display_name="Manage Model",
            description=f"Lets Highwater manage a diffusion model that another node loaded. {COST}",
            search_aliases=["gguf", "offload", "distorch", "adopt model"],
            inputs=[
                io.Model.Input("model", tooltip="From any loader. LoRAs and other patches may already be applied."),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The same model, managed by Highwater.")],
        )

    @classmethod
    def execute(cls, model: Any, **asked: Any) -> io.NodeOutput:
        from .. import host

        return answer_with(cls, lambda request: host.manage_model(model, request), asked)


class HighwaterManageCLIP(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterManageCLIP",
            display_name="Manage CLIP",
            description=f"Lets Highwater manage a text encoder that another node loaded. {COST}",
            search_aliases=["text encoder", "offload", "adopt clip"],
            inputs=[
                io.Clip.Input("clip", tooltip="From any loader. LoRAs and other patches may already be applied."),
            ],
            outputs=[io.Clip.Output(display_name="clip", tooltip="The same text encoder, managed by Highwater.")],
        )

    @classmethod
    def execute(cls, clip: Any, **asked: Any) -> io.NodeOutput:
        from .. import host

        notes = [] if host.patcher_of(clip) is not None else [NOTHING.format("text encoder")]
        return answer_with(cls, lambda request: host.manage_clip(clip, request), asked, notes)


class HighwaterManageVAE(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterManageVAE",
            display_name="Manage VAE",
            description=f"Lets Highwater manage a VAE that another node loaded. {COST}",
            search_aliases=["autoencoder", "taesd", "offload", "adopt vae"],
            inputs=[
                io.Vae.Input("vae", tooltip="From any loader."),
            ],
            outputs=[io.Vae.Output(display_name="vae", tooltip="The same VAE, managed by Highwater.")],
        )

    @classmethod
    def execute(cls, vae: Any, **asked: Any) -> io.NodeOutput:
        from .. import host

        notes = [] if host.patcher_of(vae) is not None else [NOTHING.format("VAE")]
        return answer_with(cls, lambda request: host.manage_vae(vae, request), asked, notes)
