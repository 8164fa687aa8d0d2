"""What users see in ComfyUI: the list of our nodes. Importing it costs no torch and no diffusers."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .image import HighwaterSaveImage
from .pipeline import HighwaterLoadPipeline, HighwaterSamplePipeline
from .report import HighwaterMemoryReport
from .watermark import HighwaterWatermark

__all__ = ["NODE_CLASSES", "HighwaterExtension"]

NODE_CLASSES: tuple[type[io.ComfyNode], ...] = (
    HighwaterLoadPipeline,
    HighwaterSamplePipeline,
    HighwaterSaveImage,
    HighwaterWatermark,
    HighwaterMemoryReport,
)


class HighwaterExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return list(NODE_CLASSES)
