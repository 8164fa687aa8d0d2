"""The node that writes images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io, ui

from .schema import make_schema

if TYPE_CHECKING:
    import torch

__all__ = ["HighwaterSaveImage"]


class HighwaterSaveImage(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return make_schema(
            node_id="HighwaterSaveImage",
            display_name="Save Image",
            description="Saves each image as a PNG in the output folder, with the workflow inside the file.",
            search_aliases=["save png", "export image", "write image"],
            inputs=[
                io.Image.Input("images", tooltip="The images to save."),
                io.String.Input(
                    "filename_prefix",
                    default="Highwater",
                    tooltip="The beginning of the file name. folder/name saves in a subfolder.",
                ),
            ],
            outputs=[],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        """Check the prefix before anything is sampled; a linked one is not known yet."""
        from .file_names import prefix_problem, shown

        problem = prefix_problem(filename_prefix) if filename_prefix is not None else None
        if problem is None:
            return True
        allowed = "allowed: a name such as Highwater, or folder/name"
        return f"filename_prefix {shown(filename_prefix)} {problem}; {allowed}"

    @classmethod
    def execute(cls, images: torch.Tensor, filename_prefix: str) -> io.NodeOutput:
        return io.NodeOutput(ui=ui.ImageSaveHelper.get_save_images_ui(images, filename_prefix=filename_prefix, cls=cls))
