"""The node that writes a quantized file of a model, for ComfyUI's own loaders and others."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from ...memory.weights.file_layouts import FILE_FORMS
from ..file_names import name_problem, shown
from ..precision import split
from ..schema import make_schema
from .model_files import SAFETENSORS, files_fingerprint, find_model_file, list_model_files

__all__ = ["HighwaterQuantizeFile"]

FOLDERS = ("diffusion_models", "checkpoints", "text_encoders")
ENDING = ".safetensors"


class HighwaterQuantizeFile(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterQuantizeFile",
            display_name="Quantize File",
            description=(
                "Writes a smaller file of a model beside it, once: the weights of its blocks in eight or four bits, in "
                "a format that others read, too. Load it as any other file; nothing is cast any more."
            ),
            search_aliases=["quantize", "convert to fp8", "convert to int8", "save quantized", "shrink model"],
            inputs=[
                io.Combo.Input(
                    "file",
                    options=quantizable_files(),
                    tooltip=(
                        "The file, with its folder of models. Of a checkpoint the diffusion model is quantized; its "
                        "text encoder and VAE stay as they are."
                    ),
                ),
                io.Combo.Input(
                    "to",
                    options=list(FILE_FORMS),
                    default="int8",
                    tooltip=(
                        "fp8-scaled: half of 16 bits, an error of 0.027 in each weight. int8: half, 0.009. Both are "
                        "for ComfyUI's own loaders, too. qint8, qfloat8: half, 0.009 and 0.027; qint4: 0.27 of 16 "
                        "bits, 0.1. These are optimum-quanto's tensors, for Load Pipeline and Python; qint8 also for "
                        "Load Diffusion Model and Load Text Encoder."
                    ),
                ),
                io.String.Input(
                    "exclude",
                    default="",
                    tooltip=(
                        "Weights that stay as they are: regular expressions that are looked for in their names, with "
                        "commas between, such as attn, blocks\\.[01]\\.."
                    ),
                ),
                io.String.Input(
                    "name",
                    default="",
                    tooltip=(
                        "The new file's name, in the folder of the old one. Empty: the old one's name and the form."
                    ),
                ),
                io.Boolean.Input(
                    "replace",
                    default=False,
                    tooltip=(
                        "Off: a file of that name stays, and the node fails. On: it is replaced when all is written."
                    ),
                ),
            ],
            outputs=[io.String.Output(display_name="name", tooltip="The name of the new file in its folder.")],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None, **_: object) -> str:
        """Write again when the source has changed."""
        folder, _, name = (file or "").partition("/")
        return files_fingerprint(folder, [name]) if folder in FOLDERS else ""

    @classmethod
    def validate_inputs(cls, exclude: str | None = None, name: str | None = None) -> bool | str:
        """Check the texts before the run; None is a linked widget."""
        from ...memory.errors import InvalidInput
        from ...memory.options.precision import Precision

        problem = name_problem(name) if name else None
        if problem is not None:
            return f"name {shown(name)} {problem}; allowed: a name such as flux-int8{ENDING}, or none"
        try:
            Precision("int8", exclude=tuple(split(exclude or "")))
        except InvalidInput as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, file: str, to: str, exclude: str = "", name: str = "", replace: bool = False) -> io.NodeOutput:
        from ...memory.errors import InvalidInput, without_folders
        from ...memory.quantizing import quantize_file
        from ..progress import on_bar, set_progress

        folder, _, own = file.partition("/")
        if folder not in FOLDERS:
            raise InvalidInput(f"file {shown(file)} is in no folder that is offered: {', '.join(FOLDERS)}")
        problem = name_problem(name) if name else None
        if problem is not None:
            raise InvalidInput(f"name {shown(name)} {problem}; allowed: a name such as flux-int8{ENDING}, or none")
        source = Path(find_model_file(folder, own))
        target = source.with_name(target_name(own, to, name))
        if target.exists() and not replace:
            raise InvalidInput(f"{target.name} exists already; name another one, or turn replace on")
        show = on_bar(set_progress)
        made = quantize_file(
            source,
            target,
            to,
            exclude=split(exclude),
            replaces=replace,
            progress=lambda done, total: show("", done, total),
        )
        text = without_folders(made.text())
        return io.NodeOutput(Path(own).with_name(target.name).as_posix(), ui={"text": text.splitlines()})


def quantizable_files() -> list[str]:
    """Return the safetensors files of the folders that have models to quantize, each with its folder."""
    return [
        f"{folder}/{name}"
        for folder in FOLDERS
        for name in list_model_files(folder)
        if name.lower().endswith(SAFETENSORS)
    ]


def target_name(source: str, to: str, name: str) -> str:
    """Return the name of the new file in its folder."""
    if not name:
        return f"{Path(source).stem}-{to}{ENDING}"
    return name if name.lower().endswith(SAFETENSORS) else f"{name}{ENDING}"
