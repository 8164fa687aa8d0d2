"""The nodes that load ComfyUI's own models, managed by Highwater; only ComfyUI lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ..device_choices import accelerator_names
from ..tiny_models import tiny_model_notes, tiny_models
from .model_files import KINDS, check_text_encoders, model_choices, model_path, named_as
from .model_request import ModelNode, answer, answer_with, check_texts, model_schema, read_request

if TYPE_CHECKING:
    from ..host import Request

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


def file_input(widget: str, folder: str, tooltip: str) -> io.Input:
    """Return the input that names a file of one of the host's model folders."""
    return io.Combo.Input(widget, options=model_choices(folder), tooltip=f"{tooltip}{tiny_tooltip(folder)}")


def elsewhere(kind: str) -> str:
    return f".gguf files: load them with ComfyUI-GGUF's loader, and link Manage {kind} after it."


def tiny_tooltip(folder: str) -> str:
    names = tiny_models(folder)
    return f" {' and '.join(names)}: random weights, made when it is first used, to try the nodes." if names else ""


def load_file(folder: str, name: str, load: Callable[[str, Request], Any], request: Request) -> Any:
    """Load a file of one of the host's model folders.

    Raises:
        InvalidInput: it is not there, or not what core can use; names it.
    """
    path = model_path(folder, name)
    with named_as(path, KINDS[folder]):
        return load(path, request)


class HighwaterLoadDiffusionModel(ModelNode):
    FOLDER, FILES = "diffusion_models", ("unet_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterLoadDiffusionModel",
            display_name="Load Diffusion Model",
            description=(
                "Loads a diffusion model. As many blocks as the budget allows stay on the device; the others are "
                "streamed from RAM while it samples. Works with ComfyUI's LoRA, sampler and model nodes."
            ),
            search_aliases=[
                "unet loader", "load unet", "block swap", "offload", "low vram", "fp8", "multigpu", "multi gpu",
                "second gpu", "distorch", "split model",
            ],
            inputs=[
                file_input("unet_name", "diffusion_models", f"The diffusion model's file. {elsewhere('Model')}"),
            ],
            outputs=[io.Model.Output(display_name="model", tooltip="The model, managed by Highwater.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, unet_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        return answer_with(
            cls,
            lambda request: load_file("diffusion_models", unet_name, host.load_diffusion_model, request),
            asked,
            tiny_model_notes("diffusion_models", [unet_name]),
        )


class HighwaterLoadTextEncoder(ModelNode):
    FOLDER, FILES = "text_encoders", ("clip_name1", "clip_name2", "clip_name3", "clip_name4")

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = model_choices("text_encoders")
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
        return model_schema(
            node_id="HighwaterLoadTextEncoder",
            display_name="Load Text Encoder",
            description="Loads the text encoder of a model from one to four files.",
            search_aliases=[
                "clip loader", "dual clip loader", "triple clip loader", "quadruple clip loader", "load clip", "t5",
                "offload",
            ],
            inputs=[
                file_input(
                    "clip_name1", "text_encoders", f"The text encoder's file, or the first one. {elsewhere('CLIP')}"
                ),
                io.Combo.Input(
                    "type",
                    options=CLIP_TYPES,
                    default=CLIP_TYPES[0],
                    tooltip="The model that the text is encoded for. Ignored with three files (SD3) or four (HiDream).",
                ),
                *more_files,
            ],
            optional_request=True,
            outputs=[io.Clip.Output(display_name="clip", tooltip="The text encoder, managed by Highwater.")],
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

        names = [clip_name1, *(name for name in (clip_name2, clip_name3, clip_name4) if name != NO_FILE)]

        def load(request: Request) -> Any:
            paths = [model_path("text_encoders", name) for name in names]
            check_text_encoders(paths, type)
            return host.load_text_encoder(paths, CLIP_TYPE_WORDS.get(type, type), request)

        return answer_with(cls, load, asked, tiny_model_notes("text_encoders", names))


class HighwaterLoadVAE(ModelNode):
    FOLDER, FILES = "vae", ("vae_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterLoadVAE",
            display_name="Load VAE",
            description="Loads a VAE, which turns latents into images and back.",
            search_aliases=["vae loader", "autoencoder", "offload"],
            inputs=[
                file_input(
                    "vae_name",
                    "vae",
                    "The VAE's file. Those in models/vae_approx (such as taesd) and pixel_space: load them with "
                    "ComfyUI's Load VAE, and link Manage VAE after it.",
                ),
            ],
            outputs=[io.Vae.Output(display_name="vae", tooltip="The VAE, managed by Highwater.")],
        )

    @classmethod
    def execute(cls, vae_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        return answer_with(
            cls,
            lambda request: load_file("vae", vae_name, host.load_vae, request),
            asked,
            tiny_model_notes("vae", [vae_name]),
        )


class HighwaterLoadCheckpoint(ModelNode):
    FOLDER, FILES = "checkpoints", ("ckpt_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterLoadCheckpoint",
            display_name="Load Checkpoint",
            description="Loads a checkpoint: a diffusion model and, in most files, its text encoder and VAE.",
            search_aliases=["checkpoint loader", "ckpt", "load model", "offload", "distorch"],
            inputs=[
                file_input("ckpt_name", "checkpoints", "The checkpoint's file."),
            ],
            is_several=True,
            outputs=[
                io.Model.Output(display_name="model", tooltip="The diffusion model, managed by Highwater."),
                io.Clip.Output(display_name="clip", tooltip="Its text encoder. The node says if the file has none."),
                io.Vae.Output(display_name="vae", tooltip="Its VAE. The node says if the file has none."),
            ],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, profile: str | None = None, precision: str | None = None) -> bool | str:
        return check_texts(profile=profile, precision=precision)

    @classmethod
    def execute(cls, ckpt_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        request, notes = read_request(cls, is_several=True, **asked)
        request = replace(request, profile=request.profile.for_all_together(accelerator_names()))
        model, clip, vae = load_file("checkpoints", ckpt_name, host.load_checkpoint, request)
        notes += [
            f"{ckpt_name} contains no {part}"
            for part, loaded in (("text encoder", clip), ("VAE", vae))
            if host.patcher_of(loaded) is None
        ]  # fmt: skip
        return answer(model, clip, vae, notes=notes)


class HighwaterLoadControlNet(ModelNode):
    FOLDER, FILES = "controlnet", ("control_net_name",)
    FOLLOWS_MODEL = True

    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterLoadControlNet",
            display_name="Load ControlNet",
            description="Loads a ControlNet, which guides a diffusion model with an image.",
            search_aliases=["controlnet loader", "control net", "offload"],
            inputs=[
                file_input("control_net_name", "controlnet", "The ControlNet's file."),
            ],
            outputs=[io.ControlNet.Output(display_name="control_net", tooltip="The ControlNet, managed by Highwater.")],
        )

    @classmethod
    def execute(cls, control_net_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        return answer_with(
            cls, lambda request: load_file("controlnet", control_net_name, host.load_controlnet, request), asked
        )


class HighwaterLoadCLIPVision(ModelNode):
    FOLDER, FILES = "clip_vision", ("clip_name",)

    @classmethod
    def define_schema(cls) -> io.Schema:
        return model_schema(
            node_id="HighwaterLoadCLIPVision",
            display_name="Load CLIP Vision",
            description="Loads a vision encoder, which encodes an image as a prompt for a model.",
            search_aliases=["clip vision loader", "image encoder", "offload"],
            inputs=[
                file_input("clip_name", "clip_vision", "The vision encoder's file."),
            ],
            outputs=[
                io.ClipVision.Output(display_name="clip_vision", tooltip="The vision encoder, managed by Highwater.")
            ],
        )

    @classmethod
    def execute(cls, clip_name: str, **asked: Any) -> io.NodeOutput:
        from .. import host

        return answer_with(
            cls, lambda request: load_file("clip_vision", clip_name, host.load_clip_vision, request), asked
        )
