"""Random model files that ComfyUI recognises, small where its names allow it; written once per machine.

ComfyUI reads a model's size from the shapes in its file, so a few hundred kilobytes make a Flux or a Wan. CLIP-L, the
vision encoder and SD 1.5's width (320) are fixed there; only the number of SD 1.5's blocks can be made small.
Large matrices are random in their first rows and holes in the file after that: every block matters to the image, and
a file of 3 GiB takes 100 MiB of disk.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from highwater.memory.user_folders import cache_folder
from highwater.nodes import tiny_models
from highwater.nodes.tiny_models import (
    Shapes,
    clip_l,
    clip_layers,
    convolution,
    linear,
    norm,
    prefixed,
    taesd,
)

__all__ = ["FLUX_WIDTH", "MODEL_FILES", "ensure_model_file_in", "ensure_model_files", "models_directory"]

# Rewrite the files when they change: the folder carries this number.
VERSION = 1
FLUX_WIDTH = 128
RANDOM_ROWS = 64
LARGE_ELEMENTS = 1 << 20
FP8 = torch.float8_e4m3fn
DTYPE_WORDS = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", FP8: "F8_E4M3"}
# ComfyUI's older way to say that weights are in eight bits with a scale. Two elements: computed in full precision.
FP8_MARK, FP8_SCALE = "scaled_fp8", ".scale_weight"


def models_directory() -> Path:
    """Return the folder that holds the model files of this version, laid out as ComfyUI's ``models``."""
    return Path(cache_folder(), f"comfyui-models-{VERSION}")


def ensure_model_files(names: list[str] | None = None) -> Path:
    """Write those of the files that are missing (default: all); returns the folder. Any number may do so at once."""
    directory = models_directory()
    for name in MODEL_FILES if names is None else names:
        path = directory / name
        if not path.exists():
            shapes, scale = MODEL_FILES[name]()
            write_random(path, shapes, scale=scale, seed=zlib.crc32(name.encode()))
    return directory


def ensure_model_file_in(dtype: torch.dtype, name: str) -> Path:
    """Write one of the files in another dtype if it is missing, in a folder that no host has by itself; return it."""
    word = DTYPE_WORDS[dtype].lower()
    path = models_directory() / "other_dtypes" / name.replace(".safetensors", f"_{word}.safetensors")
    if not path.exists():
        shapes, scale = MODEL_FILES[name]()
        write_random(path, shapes, scale=scale, seed=zlib.crc32(name.encode()), dtype=dtype)
    return path


def write_random(path: Path, shapes: Shapes, *, scale: float, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a safetensors file of random tensors, large ones mostly as holes; it appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dtypes = {name: dtype_of(name, shapes, dtype) for name in shapes}
    header, offset = {}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtypes[name].itemsize
        header[name] = {"dtype": DTYPE_WORDS[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    generator = torch.Generator().manual_seed(seed)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            start = file.tell()
            for name, shape in shapes.items():
                file.seek(start + header[name]["data_offsets"][0])
                # A weight in eight bits is as large as they allow: its scale makes it small.
                has_scale = name == FP8_MARK or f"{name.removesuffix('.weight')}{FP8_SCALE}" in shapes
                values = random_values(name, shape, 1.0 if has_scale else scale, generator)
                values = torch.full((), scale) if name.endswith(FP8_SCALE) else values.to(dtypes[name])
                file.write(values.reshape(-1).view(torch.uint8).numpy().tobytes())
            file.truncate(start + offset)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def dtype_of(name: str, shapes: Shapes, others: torch.dtype) -> torch.dtype:
    if name.endswith(FP8_SCALE):
        return torch.float32
    has_scale = name == FP8_MARK or f"{name.removesuffix('.weight')}{FP8_SCALE}" in shapes
    return FP8 if has_scale and (name == FP8_MARK or name.endswith(".weight")) else others


def random_values(name: str, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> torch.Tensor:
    """Return the values of a tensor, flat; of a large one only those of its first rows."""
    if math.prod(shape) > LARGE_ELEMENTS and "embedding" not in name:
        shape = (RANDOM_ROWS, *shape[1:])
    values = torch.randn(math.prod(shape), generator=generator)
    if len(shape) < 2:
        is_norm = name.endswith("scale") or (name.endswith(".weight") and "norm" in name.rpartition(".")[0])
        return values * 0.02 + (1.0 if is_norm or is_group_norm(name) else 0.0)
    return values * scale


def is_group_norm(name: str) -> bool:
    """SD 1.5 numbers its norms instead of naming them."""
    return name.endswith(("in_layers.0.weight", "out_layers.0.weight")) or name == "out.0.weight"


# -- what the files hold


def flux(num_double: int, num_single: int, width: int = FLUX_WIDTH, text_width: int = 64) -> Shapes:
    """Flux as the pack makes it, narrower."""
    return tiny_models.flux(num_double, num_single, width, text_width)


def with_fp8(shapes: Shapes) -> Shapes:
    """The same with the matrices of the blocks in eight bits, each with its scale."""
    matrices = [name for name, shape in shapes.items() if "_blocks." in name and len(shape) == 2]
    return {**shapes, FP8_MARK: (2,)} | {f"{name.removesuffix('.weight')}{FP8_SCALE}": () for name in matrices}


def flux_lora(num_double: int, num_single: int, width: int = FLUX_WIDTH, rank: int = 4) -> Shapes:
    """A LoRA on one matrix of every block."""
    matrices = {f"double_blocks.{index}.img_attn.qkv": (width, 3 * width) for index in range(num_double)}
    matrices |= {f"single_blocks.{index}.linear1": (width, 7 * width) for index in range(num_single)}
    return prefixed("diffusion_model.", lora(matrices, rank))


def flux_adapter(kind: str, width: int = FLUX_WIDTH, rank: int = 4) -> Shapes:
    """Another kind of adapter than a plain LoRA, on a matrix of a block of either kind."""
    matrices = {"double_blocks.1.img_attn.qkv": (width, 3 * width), "single_blocks.2.linear1": (width, 7 * width)}
    parts: dict[str, Callable[[int, int], Shapes]] = {
        "dora": lambda i, o: {"lora_down.weight": (rank, i), "lora_up.weight": (o, rank), "dora_scale": (o, 1)},
        "loha": lambda i, o: {f"hada_w{n}_{ab}": s for n in (1, 2) for ab, s in (("a", (o, rank)), ("b", (rank, i)))},
        "lokr": lambda i, o: {"lokr_w1": (4, 4), "lokr_w2": (o // 4, i // 4)},
        "oft": lambda i, o: {"oft_blocks": (o // 32, 32, 32)},
        "diff": lambda i, o: {"diff": (o, i), "diff_b": (o,)},
    }
    shapes: Shapes = {}
    for name, (num_in, num_out) in matrices.items():
        shapes |= prefixed(f"diffusion_model.{name}.", parts[kind](num_in, num_out))
    return shapes


def fused_lora(width: int = FLUX_WIDTH, rank: int = 4) -> Shapes:
    """A LoRA in diffusers' names: of queries and values, which in this model are rows of one matrix."""
    matrices = {f"transformer.transformer_blocks.1.attn.{part}": (width, width) for part in ("to_q", "to_v")}
    return lora(matrices, rank) | lora({"transformer.single_transformer_blocks.2.proj_mlp": (width, 4 * width)}, rank)


def lora(matrices: Mapping[str, tuple[int, int]], rank: int) -> Shapes:
    """Two thin matrices for each of these, given as inputs and outputs."""
    shapes: Shapes = {}
    for name, (num_in, num_out) in matrices.items():
        shapes |= {f"{name}.lora_down.weight": (rank, num_in), f"{name}.lora_up.weight": (num_out, rank)}
    return shapes


def wan(num_blocks: int = 6, width: int = 128, text_width: int = 4096) -> Shapes:
    """Wan 2.1, text to video. ``blocks.N.modulation`` and ``head.modulation`` belong to modules that have children."""
    shapes: Shapes = {"patch_embedding.weight": (width, 16, 1, 2, 2), "patch_embedding.bias": (width,)}
    shapes |= linear("text_embedding.0", text_width, width) | linear("text_embedding.2", width, width)
    shapes |= linear("time_embedding.0", 256, width) | linear("time_embedding.2", width, width)
    shapes |= linear("time_projection.1", width, 6 * width)
    for index in range(num_blocks):
        block = f"blocks.{index}"
        shapes[f"{block}.modulation"] = (1, 6, width)
        shapes |= norm(f"{block}.norm3", width)
        for attention in ("self_attn", "cross_attn"):
            for part in ("q", "k", "v", "o"):
                shapes |= linear(f"{block}.{attention}.{part}", width, width)
            shapes |= {f"{block}.{attention}.norm_{part}.weight": (width,) for part in ("q", "k")}
        shapes |= linear(f"{block}.ffn.0", width, 4 * width) | linear(f"{block}.ffn.2", 4 * width, width)
    return shapes | linear("head.head", width, 64) | {"head.modulation": (1, 2, width)}


def autoencoder() -> Shapes:
    """The autoencoder of SD 1.5, in the one size that ComfyUI builds (335 MB)."""
    widths, latent_channels = (128, 256, 512, 512), 4

    def residual(name: str, num_in: int, num_out: int) -> Shapes:
        shapes = norm(f"{name}.norm1", num_in) | convolution(f"{name}.conv1", num_in, num_out)
        shapes |= norm(f"{name}.norm2", num_out) | convolution(f"{name}.conv2", num_out, num_out)
        return shapes | (convolution(f"{name}.nin_shortcut", num_in, num_out, 1) if num_in != num_out else {})

    def middle(width: int) -> Shapes:
        shapes = residual("mid.block_1", width, width) | residual("mid.block_2", width, width)
        shapes |= norm("mid.attn_1.norm", width)
        for part in ("q", "k", "v", "proj_out"):
            shapes |= convolution(f"mid.attn_1.{part}", width, width, 1)
        return shapes

    def ends(num_in: int, first: int, last: int, num_out: int) -> Shapes:
        return convolution("conv_in", num_in, first) | norm("norm_out", last) | convolution("conv_out", last, num_out)

    encoder = ends(3, widths[0], widths[-1], 2 * latent_channels) | middle(widths[-1])
    decoder = ends(latent_channels, widths[-1], widths[0], 3) | middle(widths[-1])
    num_in = widths[0]
    for level, width in enumerate(widths):
        for index in range(2):
            encoder |= residual(f"down.{level}.block.{index}", num_in, width)
            num_in = width
        if level < 3:
            encoder |= convolution(f"down.{level}.downsample.conv", width, width)
    for level, width in reversed(list(enumerate(widths))):
        for index in range(3):
            decoder |= residual(f"up.{level}.block.{index}", num_in, width)
            num_in = width
        if level:
            decoder |= convolution(f"up.{level}.upsample.conv", width, width)
    shapes = prefixed("encoder.", encoder) | prefixed("decoder.", decoder)
    shapes |= convolution("quant_conv", 2 * latent_channels, 2 * latent_channels, 1)
    return shapes | convolution("post_quant_conv", latent_channels, latent_channels, 1)


def clip_vision() -> Shapes:
    """ViT-L/14, the smallest vision encoder that ComfyUI knows (608 MB)."""
    shapes: Shapes = {
        "vision_model.embeddings.class_embedding": (1024,),
        "vision_model.embeddings.patch_embedding.weight": (1024, 3, 14, 14),
        "vision_model.embeddings.position_embedding.weight": (257, 1024),
    }
    shapes |= norm("vision_model.pre_layrnorm", 1024) | norm("vision_model.post_layernorm", 1024)
    return shapes | clip_layers("vision_model.", 24, 1024) | {"visual_projection.weight": (768, 1024)}


SD_WIDTH, SD_TIME, SD_TEXT = 320, 1280, 768


def sd_residual(name: str, num_in: int) -> Shapes:
    shapes = norm(f"{name}.in_layers.0", num_in) | convolution(f"{name}.in_layers.2", num_in, SD_WIDTH)
    shapes |= linear(f"{name}.emb_layers.1", SD_TIME, SD_WIDTH)
    shapes |= norm(f"{name}.out_layers.0", SD_WIDTH) | convolution(f"{name}.out_layers.3", SD_WIDTH, SD_WIDTH)
    return shapes | (convolution(f"{name}.skip_connection", num_in, SD_WIDTH, 1) if num_in != SD_WIDTH else {})


def sd_transformer(name: str) -> Shapes:
    shapes = norm(f"{name}.norm", SD_WIDTH)
    shapes |= convolution(f"{name}.proj_in", SD_WIDTH, SD_WIDTH, 1)
    shapes |= convolution(f"{name}.proj_out", SD_WIDTH, SD_WIDTH, 1)
    block = f"{name}.transformer_blocks.0"
    for attention, width in (("attn1", SD_WIDTH), ("attn2", SD_TEXT)):
        shapes[f"{block}.{attention}.to_q.weight"] = (SD_WIDTH, SD_WIDTH)
        shapes[f"{block}.{attention}.to_k.weight"] = (SD_WIDTH, width)
        shapes[f"{block}.{attention}.to_v.weight"] = (SD_WIDTH, width)
        shapes |= linear(f"{block}.{attention}.to_out.0", SD_WIDTH, SD_WIDTH)
    shapes |= linear(f"{block}.ff.net.0.proj", SD_WIDTH, 8 * SD_WIDTH) | linear(
        f"{block}.ff.net.2", 4 * SD_WIDTH, SD_WIDTH
    )
    for index in (1, 2, 3):
        shapes |= norm(f"{block}.norm{index}", SD_WIDTH)
    return shapes


def sd_encoder(num_blocks: int = 1) -> Shapes:
    """The half that SD 1.5 and its ControlNet share, in one resolution."""
    shapes = linear("time_embed.0", SD_WIDTH, SD_TIME) | linear("time_embed.2", SD_TIME, SD_TIME)
    shapes |= convolution("input_blocks.0.0", 4, SD_WIDTH)
    for index in range(1, num_blocks + 1):
        shapes |= sd_residual(f"input_blocks.{index}.0", SD_WIDTH) | sd_transformer(f"input_blocks.{index}.1")
    shapes |= sd_residual("middle_block.0", SD_WIDTH) | sd_transformer("middle_block.1")
    return shapes | sd_residual("middle_block.2", SD_WIDTH)


def sd_unet(num_blocks: int = 1) -> Shapes:
    shapes = sd_encoder(num_blocks)
    for index in range(num_blocks + 1):
        shapes |= sd_residual(f"output_blocks.{index}.0", 2 * SD_WIDTH) | sd_transformer(f"output_blocks.{index}.1")
    return shapes | norm("out.0", SD_WIDTH) | convolution("out.2", SD_WIDTH, 4)


def sd_checkpoint() -> Shapes:
    """Three models in one file: a shallow SD 1.5, the tiny autoencoder and CLIP-L."""
    return {
        **prefixed("model.diffusion_model.", sd_unet()),
        **prefixed("first_stage_model.", taesd(4)),
        **prefixed("cond_stage_model.transformer.", clip_l()),
    }


def sd_controlnet(num_blocks: int = 1) -> Shapes:
    return sd_encoder(num_blocks) | sd_control_layers(num_blocks)


def sd_control_layers(num_blocks: int) -> Shapes:
    """What a ControlNet has beside its encoder: layers for the image, and one behind every block."""
    shapes: Shapes = {}
    widths = [3, 16, 16, 32, 32, 96, 96, 256, SD_WIDTH]
    for index, (num_in, num_out) in enumerate(itertools.pairwise(widths)):
        shapes |= convolution(f"input_hint_block.{2 * index}", num_in, num_out)
    for index in range(num_blocks + 1):
        shapes |= convolution(f"zero_convs.{index}.0", SD_WIDTH, SD_WIDTH, 1)
    return shapes | convolution("middle_block_out.0", SD_WIDTH, SD_WIDTH, 1)


def sd_control_lora(num_blocks: int, rank: int = 4) -> Shapes:
    """A ControlNet whose encoder is the guided model's own, with a difference of low rank."""
    shapes: Shapes = {"lora_controlnet": ()} | sd_control_layers(num_blocks)
    shapes |= {"time_embed.0.up": (SD_TIME, rank), "time_embed.0.down": (rank, SD_WIDTH)}
    name = "input_blocks.1.0.in_layers.2"
    return shapes | {f"{name}.up": (SD_WIDTH, rank, 1, 1), f"{name}.down": (rank, SD_WIDTH, 3, 3)}


def sd_adapter() -> Shapes:
    """The light kind of T2I adapter; its widths are fixed."""
    shapes: Shapes = {}
    widths = [3 * 64, 320, 640, 1280, 1280]
    for index, (num_in, num_out) in enumerate(itertools.pairwise(widths)):
        inner = num_out // 4
        shapes |= convolution(f"body.{index}.in_conv", num_in, inner, 1)
        for block in range(4):
            for part in ("block1", "block2"):
                shapes |= convolution(f"body.{index}.body.{block}.{part}", inner, inner)
        shapes |= convolution(f"body.{index}.out_conv", inner, num_out, 1)
    return shapes


def sd_lora(num_layers: int = 12, rank: int = 4) -> Shapes:
    """A LoRA on the shallow SD 1.5 and on every layer of its text encoder, in the names of kohya's scripts."""
    blocks = ("input_blocks_1_1", "middle_block_1", "output_blocks_0_1", "output_blocks_1_1")
    matrices = {
        f"lora_unet_{block}_transformer_blocks_0_attn1_to_{part}": (SD_WIDTH, SD_WIDTH)
        for block in blocks
        for part in ("q", "v")
    }
    for index in range(num_layers):
        layer = f"lora_te_text_model_encoder_layers_{index}"
        matrices |= {f"{layer}_self_attn_q_proj": (SD_TEXT, SD_TEXT), f"{layer}_mlp_fc1": (SD_TEXT, 4 * SD_TEXT)}
    return lora(matrices, rank)


def sd_differences(layers: Mapping[str, tuple[int, ...]]) -> Shapes:
    """Whole differences of weights, and of the biases beside them, in the names of kohya's scripts."""
    named = {f"lora_unet_{layer.replace('.', '_')}": shape for layer, shape in layers.items()}
    shapes: Shapes = {f"{name}.diff": shape for name, shape in named.items()}
    return shapes | {f"{name}.diff_b": (SD_WIDTH,) for name in named}


def sd_norm_differences() -> Shapes:
    """On norms of a block in the middle and of the last one."""
    blocks = ("middle_block.1", "output_blocks.1.1")
    return sd_differences({f"{block}.transformer_blocks.0.norm{n}": (SD_WIDTH,) for block in blocks for n in (1, 3)})


def sd_convolution_differences() -> Shapes:
    """On convolutions inside the blocks, and on the first of all, which is outside."""
    inside = ("middle_block.0.in_layers.2", "output_blocks.1.0.out_layers.3")
    kernels = dict.fromkeys(inside, (SD_WIDTH, SD_WIDTH, 3, 3))
    return sd_differences({**kernels, "input_blocks.0.0": (SD_WIDTH, 4, 3, 3)})


def sd_convolution_lora(rank: int = 4) -> Shapes:
    """A LoRA on convolutions of 3x3 and 1x1, beside layers that no model has."""
    shapes: Shapes = {"lora_unet_no_such_block_3.lora_up.weight": (SD_WIDTH, rank), "of_another_program": (3,)}
    kernels = {"middle_block_0_in_layers_2": 3, "output_blocks_1_0_out_layers_3": 3, "middle_block_1_proj_in": 1}
    for layer, size in kernels.items():
        name = f"lora_unet_{layer}"
        shapes[f"{name}.lora_down.weight"] = (rank, SD_WIDTH, size, size)
        shapes[f"{name}.lora_up.weight"] = (SD_WIDTH, rank, 1, 1)
    return shapes


# Path below ComfyUI's models folder -> what it holds, and the standard deviation of its matrices.
MODEL_FILES: dict[str, Callable[[], tuple[Shapes, float]]] = {
    "diffusion_models/tiny_flux.safetensors": lambda: (flux(4, 6), 0.05),
    "diffusion_models/other_flux.safetensors": lambda: (flux(4, 6), 0.05),
    "diffusion_models/tiny_flux_fp8.safetensors": lambda: (with_fp8(flux(4, 6)), 0.05),
    "diffusion_models/big_flux.safetensors": lambda: (flux(12, 36, width=1280), 0.05),  # 2.97 GiB
    "diffusion_models/wide_flux.safetensors": lambda: (flux(2, 6, width=1024), 0.02),  # 335 MiB: 11 pages of 32 MiB
    "diffusion_models/other_wide_flux.safetensors": lambda: (flux(3, 4, width=1024), 0.02),  # 11 pages, too
    "diffusion_models/tiny_wan.safetensors": lambda: (wan(), 0.05),
    "diffusion_models/other_wan.safetensors": lambda: (wan(), 0.05),
    "loras/tiny_flux_lora.safetensors": lambda: (flux_lora(4, 6), 0.1),
    "loras/wide_flux_lora.safetensors": lambda: (flux_lora(2, 6, width=1024), 0.02),
    "loras/other_flux_lora.safetensors": lambda: (flux_lora(4, 6), 0.1),
    **{
        f"loras/flux_{kind}.safetensors": lambda kind=kind: (flux_adapter(kind), 0.1)
        for kind in ("dora", "loha", "lokr", "oft", "diff")
    },
    "loras/flux_fused.safetensors": lambda: (fused_lora(), 0.1),
    "loras/flux_few.safetensors": lambda: (flux_lora(2, 1), 0.1),
    "loras/shallow_sd_lora.safetensors": lambda: (sd_lora(), 0.1),
    "loras/sd_norm_differences.safetensors": lambda: (sd_norm_differences(), 0.1),
    "loras/sd_convolution_differences.safetensors": lambda: (sd_convolution_differences(), 0.01),
    "loras/sd_convolution_lora.safetensors": lambda: (sd_convolution_lora(), 0.1),
    "vae/tiny_vae.safetensors": lambda: (taesd(16), 0.04),
    "vae/autoencoder.safetensors": lambda: (autoencoder(), 0.03),
    "text_encoders/clip_l.safetensors": lambda: (clip_l(), 0.03),
    "clip_vision/clip_vision.safetensors": lambda: (clip_vision(), 0.03),
    "checkpoints/shallow_sd.safetensors": lambda: (sd_checkpoint(), 0.03),
    "checkpoints/only_sd.safetensors": lambda: (prefixed("model.diffusion_model.", sd_unet()), 0.03),
    "controlnet/shallow_sd_control.safetensors": lambda: (sd_controlnet(), 0.03),
    "diffusion_models/deeper_sd.safetensors": lambda: (sd_unet(2), 0.03),
    "controlnet/deeper_sd_control.safetensors": lambda: (sd_controlnet(2), 0.03),
    "controlnet/deeper_sd_control_lora.safetensors": lambda: (sd_control_lora(2), 0.03),
    "controlnet/sd_adapter.safetensors": lambda: (sd_adapter(), 0.03),
}
