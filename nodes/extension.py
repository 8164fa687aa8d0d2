"""What users see in ComfyUI: the list of our nodes. Importing it costs no torch and no diffusers."""

from __future__ import annotations

import logging
import sys
from importlib.util import find_spec

from comfy_api.latest import ComfyExtension, io

from .comfy_models.manage import HighwaterManageCLIP, HighwaterManageModel, HighwaterManageVAE
from .comfy_models.models import (
    HighwaterLoadCheckpoint,
    HighwaterLoadCLIPVision,
    HighwaterLoadControlNet,
    HighwaterLoadDiffusionModel,
    HighwaterLoadTextEncoder,
    HighwaterLoadVAE,
)
from .comfy_models.quantize import HighwaterQuantizeFile
from .comfy_models.verify import HighwaterVerify
from .idle_limits import HighwaterLimits
from .image import HighwaterSaveImage
from .keep import HighwaterKeep, HighwaterRelease
from .pipeline_nodes import HighwaterLoadPipeline, HighwaterSamplePipeline
from .pipelines.verify import HighwaterVerifyPipeline
from .plan import HighwaterPlan
from .precision import HighwaterPrecision
from .report import HighwaterMemoryReport
from .watermark import HighwaterWatermark

__all__ = ["MODEL_NODES", "NODE_CLASSES", "HighwaterExtension"]

log = logging.getLogger("highwater")

NODE_CLASSES: tuple[type[io.ComfyNode], ...] = (
    HighwaterLoadPipeline,
    HighwaterSamplePipeline,
    HighwaterVerifyPipeline,
    HighwaterSaveImage,
    HighwaterWatermark,
    HighwaterPrecision,
    HighwaterKeep,
    HighwaterRelease,
    HighwaterLimits,
    HighwaterPlan,
    HighwaterMemoryReport,
)
# For ComfyUI's own models: the headless host has none and does not list them.
MODEL_NODES: tuple[type[io.ComfyNode], ...] = (
    HighwaterLoadDiffusionModel,
    HighwaterLoadTextEncoder,
    HighwaterLoadVAE,
    HighwaterLoadCheckpoint,
    HighwaterLoadControlNet,
    HighwaterLoadCLIPVision,
    HighwaterManageModel,
    HighwaterManageCLIP,
    HighwaterManageVAE,
    HighwaterVerify,
    HighwaterQuantizeFile,
)


def remember_in_host() -> None:
    """Keep what is learned of models and links in the host's folder for its own data, which it serves to no page."""
    import folder_paths

    from ..memory.manager.default import remember_needs_in

    find = getattr(folder_paths, "get_system_user_directory", None)
    if find is not None:
        remember_needs_in(find("highwater"), host=describe_host())


def describe_host() -> str:
    """Return what of the host changes what its models need: its version, and how they compute attention."""
    version = getattr(sys.modules.get("comfyui_version"), "__version__", "")
    attention = getattr(sys.modules.get("comfy.ldm.modules.attention"), "optimized_attention", None)
    return f"comfyui {version}, {getattr(attention, '__name__', '')}"


class HighwaterExtension(ComfyExtension):
    has_joined = False

    async def on_load(self) -> None:
        """Join the host's runs and its server. The nodes work without them; an error here must not lose the nodes."""
        if self.has_joined:
            return
        self.has_joined = True
        remember_in_host()
        try:
            from server import PromptServer

            from . import boundaries, routes
            from .command_answers import sight_of_host
            from .start_line import hidden_lines, start_line

            boundaries.install(PromptServer.instance)
            routes.add_routes(PromptServer.instance)
            log.info(start_line())
            for line in hidden_lines(sight_of_host()):
                log.info(line)
        except Exception as error:
            log.error(
                "Highwater: no memory badges and no run boundaries: joining ComfyUI's server failed: %s",
                error,
                exc_info=error,
            )

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        if "server" in sys.modules:
            await self.on_load()  # ComfyUI 0.8.0 does not call it
        return [*NODE_CLASSES, *(MODEL_NODES if find_spec("comfy") else ())]
