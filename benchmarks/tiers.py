"""Where the weights of well-known models rest, and what a pass reads from disk, over cards and amounts of RAM.

Each model is a header-only file of the real names, shapes and dtypes: sparse, so it takes no disk. It is planned as by
`highwater plan FILE --devices gpu:0=...,host=...`, alone on an idle machine with the default watermarks. A pass has to
read what the device does not keep and RAM does not hold beside the buffers that a file is read through: more than that
is read only where a block is too large for what is left of the RAM.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from highwater.headless.commands.hardware import DescribedDevice, Hardware
from highwater.memory.errors import DoesNotFit
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.plan import ComponentPlan
from highwater.memory.planner.planning import plan_components
from highwater.memory.planner.sizes import NUM_BOUNCE_BUFFERS, Sizes
from highwater.memory.units import GIB
from highwater.memory.weights.component import Component, component_from_files
from highwater.memory.weights.module_component import SAFETENSORS_NAMES

from .case import Result
from .shapes import on_meta

__all__ = ["MODELS", "header_only", "least_read_bytes", "measure", "plan_on"]

CARDS_GIB = (6, 8, 12, 16, 24)
RAMS_GIB = (16, 32, 64)


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)


def wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel()


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel()


def t5_xxl() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    return T5EncoderModel(T5Config(**sizes, feed_forward_proj="gated-gelu"))


def sdxl() -> nn.Module:
    from diffusers import UNet2DConditionModel

    from .shapes import SDXL_UNET

    return UNet2DConditionModel(**SDXL_UNET)


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "Flux": ("diffusion", flux),
    "Wan 14B": ("diffusion", wan),
    "Qwen-Image": ("diffusion", qwen_image),
    "T5-XXL": ("text", t5_xxl),
    "SDXL UNet": ("diffusion", sdxl),
}


def header_only(model: nn.Module, path: Path) -> None:
    """Write a safetensors file of a model's weights that is a header and a hole."""
    header: dict[str, object] = {}
    end = 0
    for name, weight in model.named_parameters():
        begin, end = end, end + weight.nbytes
        header[name] = {
            "dtype": SAFETENSORS_NAMES[str(weight.dtype)],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def plan_on(component: Component, card_bytes: int, ram_bytes: int) -> tuple[ComponentPlan, int] | None:
    """Return a component's plan, and the RAM that weights may take; None where it does not fit the card."""
    device = DescribedDevice(name="gpu:0", total_bytes=card_bytes)
    machine = Hardware(devices=(device,), host_bytes=ram_bytes).machine()
    names = {"devices": ["cpu", "gpu:0"], "components": [component.name]}
    try:
        plan = plan_components(
            [component], machine, placement=parse_placement("auto", **names), profile=parse_profile("auto", **names)
        )
    except DoesNotFit:
        return None
    return plan[component.name], machine.host_bytes


def least_read_bytes(component: Component, plan: ComponentPlan, ram_bytes: int) -> int:
    """Return what a pass has to read at least: what streams, less what RAM holds beside the buffers."""
    (share,) = plan.shares
    if plan.weight_bytes <= ram_bytes:
        return 0
    width = Sizes(component, plan.forms).bounce_buffer_bytes(share.blocks, first=True)
    return max(0, share.streamed_bytes - max(0, ram_bytes - NUM_BOUNCE_BUFFERS * width))


def measure() -> Result:
    """Plan every model on every machine; under a minute."""
    rows = []
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, (kind, build) in MODELS.items():
            path = Path(folder) / f"{name}.safetensors"
            header_only(on_meta(build), path)
            component = component_from_files([path], name=name, kind=kind)
            largest = max(Sizes(component, {}).blocks)
            for card in CARDS_GIB:
                for ram in RAMS_GIB:
                    found = plan_on(component, card * GIB, ram * GIB)
                    if found is None:
                        continue
                    plan, free_bytes = found
                    (share,) = plan.shares
                    least = least_read_bytes(component, plan, free_bytes)
                    worst = max(worst, (share.read_bytes - least) / largest)
                    in_ram = plan.weight_bytes - plan.file_bytes
                    locked = min(in_ram, plan.pinned_bytes)
                    rows.append(
                        {
                            "model": name,
                            "GiB": f"{plan.weight_bytes / GIB:.1f}",
                            "card": card,
                            "RAM": ram,
                            "resident": f"{(share.fixed_bytes + share.resident_bytes) / GIB:.1f}",
                            "page-locked": f"{locked / GIB:.1f}",
                            "pageable": f"{(in_ram - locked) / GIB:.1f}",
                            "in file": f"{plan.file_bytes / GIB:.1f}",
                            "read per pass": f"{share.read_bytes / GIB:.2f}",
                            "at least": f"{least / GIB:.2f}",
                            "all of it in its file": f"{(share.streamed_bytes if plan.file_bytes else 0) / GIB:.2f}",
                        }
                    )
    return Result(
        question=(
            "Where weights rest, and what a pass reads from disk, in GiB: header-only files of real shapes, each alone "
            "on an idle machine. At least: what the card does not keep and RAM cannot hold. Last: what a pass would "
            "read if a model that RAM does not hold as a whole rested in its file as a whole."
        ),
        rows=rows,
        ratio=worst,
        meaning="the most that a pass reads beyond what it has to, in blocks of the model, target below 1",
    )
