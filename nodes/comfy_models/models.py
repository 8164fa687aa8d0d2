"""The nodes that load ComfyUI's own models under the manager's care; they are listed where ComfyUI is."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..schema import make_schema
from .model_files import check_text_encoders, find_model_file, list_model_files, named_as
from .model_request import ModelNode, answer, read_request, request_inputs

__all__ = [
    "HighwaterLoadCLIPVision",
    "HighwaterLoadCheckpoint",
    "HighwaterLoadControlNet",
    "HighwaterLoadDiffusionModel",
    "HighwaterLoadTextEncoder",
    "HighwaterLoadVAE",
]

NO_FILE = "none"
# As ComfyUI's loaders for one and for two files offer them. One that is newer: load it there, then Manage CLIP.
CLIP_TYPES = [
    "stable_diffusion", "sdxl", "stable_cascade", "sd3", "stable_audio", "flux", "flux2", "mochi", "ltxv",
    "hunyuan_video", "hunyuan_video_15", "hunyuan_image", "pixart", "cosmos", "lumina2", "wan", "hidream", "chroma",
    "ace", "omnigen2", "qwen_image", "ovis", "kandinsky5", "kandinsky5_image", "newbie", "longcat_image", "cogvideox",
    "lens", "pixeldit", "ideogram4", "boogu", "krea2", "joyimage", "mage", "minimax",
]  # fmt: skip
CLIP_TYPE_WORDS = {"sdxl": "stable_diffusion"}  # two files of it say themselves that they are SDXL's


class HighwaterLoadDiffusionModel(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterLoadDiffusionModel",
            display_name="Load Diffusion Model",
            category="Highwater",
            description=(
                "Loads a diffusion model. As many of its blocks as the budget allows stay on the device, the others "
                "stream through it while it samples. ComfyUI's LoRA, sampler and model nodes work with it."
            ),
            search_aliases=[
                "unet loader", "load unet", "block swap", "offload", "low vram", "multigpu", "distorch", "split model",
            ],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=list_model_files("diffusion_models"), tooltip="The diffusion model's file."
                ),
                *request_inputs(),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model, under the memory manager's care.")],
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def execute(cls, unet_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        path = find_model_file("diffusion_models", unet_name)
        with named_as(path, "a diffusion model"):
            return answer(host.load_diffusion_model(path, request), notes=notes)


class HighwaterLoadTextEncoder(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        files = list_model_files("text_encoders")
        more_files = [
            io.Combo.Input(
                f"clip_name{number}",
                options=[NO_FILE, *files],
                default=NO_FILE,
                optional=True,
                tooltip=f"File {number} of a model with several text encoders, or {NO_FILE}.",
            )
            for number in (2, 3, 4)
        ]
        return make_schema(
            node_id="HighwaterLoadTextEncoder",
            display_name="Load Text Encoder",
            category="Highwater",
            description="Loads the text encoder of a model from one to four files.",
            search_aliases=[
                "clip loader", "dual clip loader", "triple clip loader", "quadruple clip loader", "load clip", "t5",
                "offload", "low vram", "multigpu",
            ],
            inputs=[
                io.Combo.Input("clip_name1", options=files, tooltip="The text encoder's file, or the first of them."),
                io.Combo.Input(
                    "type",
                    options=CLIP_TYPES,
                    default=CLIP_TYPES[0],
                    tooltip="The model that the text is encoded for. Three or four files say it themselves.",
                ),
                *more_files,
                *request_inputs(optional=True),
            ],
            outputs=[io.Clip.Output(display_name="clip", tooltip="The text encoder, under the memory manager's care.")],
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        clip_name1: str,
        type: str,
        clip_name2: str = NO_FILE,
        clip_name3: str = NO_FILE,
        clip_name4: str = NO_FILE,
        **asked: Any,
    ) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        names = [clip_name1, *(name for name in (clip_name2, clip_name3, clip_name4) if name != NO_FILE)]
        paths = [find_model_file("text_encoders", name) for name in names]
        check_text_encoders(paths, type)
        return answer(host.load_text_encoder(paths, CLIP_TYPE_WORDS.get(type, type), request), notes=notes)


class HighwaterLoadVAE(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterLoadVAE",
            display_name="Load VAE",
            category="Highwater",
            description="Loads a VAE, which turns latents into images and back.",
            search_aliases=["vae loader", "autoencoder", "offload", "low vram", "multigpu"],
            inputs=[
                io.Combo.Input("vae_name", options=list_model_files("vae"), tooltip="The VAE's file."),
                *request_inputs(),
            ],
            outputs=[io.Vae.Output(display_name="vae", tooltip="The VAE, under the memory manager's care.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        path = find_model_file("vae", vae_name)
        with named_as(path, "a VAE"):
            return answer(host.load_vae(path, request), notes=notes)


class HighwaterLoadCheckpoint(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterLoadCheckpoint",
            display_name="Load Checkpoint",
            category="Highwater",
            description="Loads a file that holds a diffusion model, and mostly its text encoder and VAE, too.",
            search_aliases=[
                "checkpoint loader", "ckpt", "load model", "block swap", "offload", "low vram", "multigpu", "distorch",
            ],
            inputs=[
                io.Combo.Input("ckpt_name", options=list_model_files("checkpoints"), tooltip="The checkpoint's file."),
                *request_inputs(),
            ],
            outputs=[
                io.Model.Output(display_name="model", tooltip="The diffusion model, under the memory manager's care."),
                io.Clip.Output(display_name="clip", tooltip="Its text encoder; the node says when the file has none."),
                io.Vae.Output(display_name="vae", tooltip="Its VAE; the node says when the file has none."),
            ],
            hidden=[io.Hidden.unique_id],
        )  # fmt: skip

    @classmethod
    def execute(cls, ckpt_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        path = find_model_file("checkpoints", ckpt_name)
        with named_as(path, "a checkpoint"):
            model, clip, vae = host.load_checkpoint(path, request)
        notes += [
            f"{ckpt_name} holds no {part}"
            for part, loaded in (("text encoder", clip), ("VAE", vae))
            if loaded is None
        ]  # fmt: skip
        return answer(model, clip, vae, notes=notes)


class HighwaterLoadControlNet(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterLoadControlNet",
            display_name="Load ControlNet",
            category="Highwater",
            description="Loads a ControlNet, which guides a diffusion model by an image.",
            search_aliases=["controlnet loader", "control net", "offload", "low vram", "multigpu"],
            inputs=[
                io.Combo.Input(
                    "control_net_name", options=list_model_files("controlnet"), tooltip="The ControlNet's file."
                ),
                *request_inputs(),
            ],
            outputs=[
                io.ControlNet.Output(
                    display_name="control_net", tooltip="The ControlNet, under the memory manager's care."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, control_net_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        return answer(host.load_controlnet(find_model_file("controlnet", control_net_name), request), notes=notes)


class HighwaterLoadCLIPVision(ModelNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterLoadCLIPVision",
            display_name="Load CLIP Vision",
            category="Highwater",
            description="Loads a vision encoder, which turns an image into what a model is prompted with.",
            search_aliases=["clip vision loader", "image encoder", "offload", "low vram", "multigpu"],
            inputs=[
                io.Combo.Input(
                    "clip_name", options=list_model_files("clip_vision"), tooltip="The vision encoder's file."
                ),
                *request_inputs(),
            ],
            outputs=[
                io.ClipVision.Output(
                    display_name="clip_vision", tooltip="The vision encoder, under the memory manager's care."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, **asked)
        return answer(host.load_clip_vision(find_model_file("clip_vision", clip_name), request), notes=notes)
