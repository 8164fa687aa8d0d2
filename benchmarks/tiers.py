"""Where the weights of well-known models rest, and what a pass reads from disk, over cards and amounts of RAM.

Each file is a header of the real names, shapes and dtypes, and a hole: sparse, so it takes no disk. It is planned as by
`highwater plan FILE --devices gpu:0=...,host=...`, alone on an idle machine with the default watermarks; a checkpoint
as its parts, together. A pass has to read what the device does not keep and RAM does not hold beside the buffers that a
file is read through: more than that is read only where a block is too large for what is left of the RAM.
"""

from __future__ import annotations

import json
import re
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from highwater.memory.errors import DoesNotFit
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.plan import ComponentPlan, Plan
from highwater.memory.planner.planning import plan_components
from highwater.memory.planner.sizes import NUM_BOUNCE_BUFFERS, Sizes
from highwater.memory.units import GIB
from highwater.memory.weights.component import Component, component_from_files
from highwater.memory.weights.module_component import SAFETENSORS_NAMES
from highwater.nodes.described_hardware import DescribedDevice, Hardware
from highwater.nodes.plans import describe_checkpoint

from .case import Result
from .shapes import on_meta

__all__ = ["MODELS", "describe", "header_only", "least_read_bytes", "measure", "plan_on", "sdxl_name"]

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
    """Return the parts of an SDXL checkpoint under the names that such a file gives them."""
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    from .shapes import SDXL_UNET

    large = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    small = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    channels = (128, 256, 512, 512)
    vae = AutoencoderKL(
        block_out_channels=channels,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        layers_per_block=2,
    )
    parts = {
        UNET: UNet2DConditionModel(**SDXL_UNET),
        "conditioner.embedders.0.transformer": CLIPTextModel(CLIPTextConfig(**small)),
        "conditioner.embedders.1.model": CLIPTextModelWithProjection(CLIPTextConfig(**large, projection_dim=1280)),
        "first_stage_model": vae,
    }
    checkpoint = nn.Module()
    for path, part in parts.items():
        *above, name = path.split(".")
        place = checkpoint
        for step in above:
            if not hasattr(place, step):
                place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        place.add_module(name, part)
    return checkpoint


UNET = "model.diffusion_model"
STACK_LENGTH = 3
# The names of a UNet's layers in diffusers, and in a checkpoint, whose stacks are one list. Stacks have two layers and
# a resampler on the way down, three layers on the way up.
UNET_NAMES = (
    (r"^conv_in\.", "input_blocks.0.0."),
    (r"^time_embedding\.linear_1\.", "time_embed.0."),
    (r"^time_embedding\.linear_2\.", "time_embed.2."),
    (r"^add_embedding\.linear_1\.", "label_emb.0.0."),
    (r"^add_embedding\.linear_2\.", "label_emb.0.2."),
    (r"^mid_block\.resnets\.0\.", "middle_block.0."),
    (r"^mid_block\.attentions\.0\.", "middle_block.1."),
    (r"^mid_block\.resnets\.1\.", "middle_block.2."),
    (r"^conv_norm_out\.", "out.0."),
    (r"^conv_out\.", "out.2."),
)
RESNET_NAMES = (
    (r"\.norm1\.(?=\w+$)", ".in_layers.0."),
    (r"\.conv1\.", ".in_layers.2."),
    (r"\.time_emb_proj\.", ".emb_layers.1."),
    (r"\.norm2\.(?=\w+$)", ".out_layers.0."),
    (r"\.conv2\.", ".out_layers.3."),
    (r"\.conv_shortcut\.", ".skip_connection."),
)
IN_STACK = re.compile(r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)\.(.*)")


def sdxl_name(name: str) -> str:
    """Return what an SDXL checkpoint calls a weight of `sdxl`: the UNet's is translated, whose blocks have it."""
    if not name.startswith(f"{UNET}."):
        return name
    own = name.removeprefix(f"{UNET}.")
    for pattern, other in RESNET_NAMES if ".resnets." in own else ():
        own = re.sub(pattern, other, own)
    for pattern, other in UNET_NAMES:
        own = re.sub(pattern, other, own)
    if found := IN_STACK.match(own):
        way, stack, what, number, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
        if what == "downsamplers":
            own = f"input_blocks.{STACK_LENGTH * stack + STACK_LENGTH}.0.{rest.replace('conv.', 'op.')}"
        elif what == "upsamplers":  # behind a layer and its attention, which both stacks with one have
            own = f"output_blocks.{STACK_LENGTH * stack + STACK_LENGTH - 1}.2.{rest}"
        else:
            blocks, first = ("input_blocks", 1) if way == "down" else ("output_blocks", 0)
            own = f"{blocks}.{STACK_LENGTH * stack + number + first}.{int(what == 'attentions')}.{rest}"
    return f"{UNET}.{own}"


MODELS: dict[str, tuple[str | None, Callable[[], nn.Module]]] = {
    "Flux": ("diffusion", flux),
    "Wan 14B": ("diffusion", wan),
    "Qwen-Image": ("diffusion", qwen_image),
    "T5-XXL": ("text", t5_xxl),
    "SDXL": (None, sdxl),
}
"""The kind of each, None for a checkpoint, and what builds it."""


def header_only(
    model: nn.Module, path: Path, *, dtype: torch.dtype | None = None, stored_name: Callable[[str], str] = str
) -> None:
    """Write a safetensors file of a model's weights that is a header and a hole.

    Args:
        dtype: of the weights in the file; by default their own.
        stored_name: returns what the file calls a weight.
    """
    header: dict[str, object] = {}
    end = 0
    for name, weight in model.named_parameters():
        stored = weight.to(dtype)
        begin, end = end, end + stored.nbytes
        header[stored_name(name)] = {
            "dtype": SAFETENSORS_NAMES[str(stored.dtype)],
            "shape": list(stored.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def describe(name: str, folder: Path) -> list[Component]:
    """Return a model of `MODELS` as components, described by the header of its file; a checkpoint as its parts."""
    kind, build = MODELS[name]
    path = folder / f"{name}.safetensors"
    if kind is None:
        header_only(on_meta(build), path, dtype=torch.float16, stored_name=sdxl_name)
        return describe_checkpoint(path, path.stem)
    header_only(on_meta(build), path)
    return [component_from_files([path], name=name, kind=kind)]


def plan_on(components: Sequence[Component], card_bytes: int, ram_bytes: int) -> tuple[Plan, int] | None:
    """Return a plan of components, and the RAM that weights may take; None where one does not fit the card."""
    device = DescribedDevice(name="gpu:0", total_bytes=card_bytes)
    machine = Hardware(devices=(device,), host_bytes=ram_bytes).machine()
    names = {"devices": ["cpu", "gpu:0"], "components": [component.name for component in components]}
    try:
        plan = plan_components(
            components, machine, placement=parse_placement("auto", **names), profile=parse_profile("auto", **names)
        )
    except DoesNotFit:
        return None
    return plan, machine.host_bytes


def least_read_bytes(component: Component, plan: ComponentPlan, ram_bytes: int) -> int:
    """Return what a pass has to read at least: what streams, less what RAM holds beside the buffers."""
    (share,) = plan.shares
    if plan.weight_bytes <= ram_bytes:
        return 0
    width = Sizes(component, plan.forms).bounce_buffer_bytes(share.blocks, first=True)
    return max(0, share.streamed_bytes - max(0, ram_bytes - NUM_BOUNCE_BUFFERS * width))


def rows_of(components: Iterable[Component], plan: Plan, ram_bytes: int) -> Iterator[tuple[dict[str, object], float]]:
    """Yield a row for each component, and the blocks that a pass of it reads beyond what it has to."""
    taken_bytes = sum(part.host_bytes for part in plan.components)
    for component in components:
        part = plan[component.name]
        (share,) = part.shares
        least = least_read_bytes(component, part, ram_bytes - (taken_bytes - part.host_bytes))
        in_ram = part.weight_bytes - part.file_bytes
        locked = min(in_ram, part.pinned_bytes)
        yield (
            {
                "model": component.name,
                "GiB": f"{part.weight_bytes / GIB:.1f}",
                "resident": f"{(share.fixed_bytes + share.resident_bytes) / GIB:.1f}",
                "page-locked": f"{locked / GIB:.1f}",
                "pageable": f"{(in_ram - locked) / GIB:.1f}",
                "in file": f"{part.file_bytes / GIB:.1f}",
                "read once": f"{(part.file_bytes - share.read_bytes) / GIB:.1f}",
                "read per pass": f"{share.read_bytes / GIB:.2f}",
                "at least": f"{least / GIB:.2f}",
                "all of it in its file": f"{(share.streamed_bytes if part.file_bytes else 0) / GIB:.2f}",
            },
            (share.read_bytes - least) / max(Sizes(component, part.forms).blocks),
        )


def measure() -> Result:
    """Plan every model on every machine; under a minute."""
    rows = []
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name in MODELS:
            components = describe(name, Path(folder))
            for card in CARDS_GIB:
                for ram in RAMS_GIB:
                    found = plan_on(components, card * GIB, ram * GIB)
                    for row, beyond in rows_of(components, *found) if found is not None else ():
                        worst = max(worst, beyond)
                        rows.append({"model": row.pop("model"), "GiB": row.pop("GiB"), "card": card, "RAM": ram, **row})
    return Result(
        question=(
            "Where weights rest, and what is read from disk, in GiB: header-only files of real shapes, each alone on "
            "an idle machine, a checkpoint as its parts. Read once: when it is loaded, because the card keeps it. At "
            "least: what the card does not keep and RAM cannot hold. Last: what a pass would read if a model that RAM "
            "does not hold as a whole rested in its file as a whole."
        ),
        rows=rows,
        ratio=worst,
        meaning="the most that a pass reads beyond what it has to, in blocks of the model, target below 1",
    )
