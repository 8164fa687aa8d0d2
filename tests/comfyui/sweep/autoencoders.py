"""Small autoencoders of ComfyUI's classes, called as its VAE nodes call them. Runs in the host's own Python.

These are classes that the host picks by a file of real size, so `comfy.sd.VAE` is made without a file here: its own
``decode`` runs over a small model, with the buffer on the CPU that some are given to fill. Those that it recognises
when they are small are in `recognised`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import comfy.model_management
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from highwater.tests.comfyui.sweep.names import AUTOENCODERS, CLASSES
from highwater.tests.comfyui.sweep.recognised import RECOGNISED, build_recognised, run_recognised
from highwater.tests.comfyui.sweep.weights import fill

__all__ = ["build_vae", "run_vae"]

KL = "comfy.ldm.models.autoencoder"
GAUSSIAN = {"target": f"{KL}.DiagonalGaussianRegularizer"}
SMALL = {
    "double_z": True, "z_channels": 4, "resolution": 64, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
HUNYUAN = {
    "block_out_channels": [32, 32, 64, 64], "in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "z_channels": 32,
    "ffactor_spatial": 8, "downsample_match_channel": True, "upsample_match_channel": True,
}  # fmt: skip
REFINER = {**HUNYUAN, "ffactor_temporal": 4}
LTX = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "scaling_factor": 1.0, "patch_size": 4,
    "blocks": [["res_x", 2], ["compress_all", 1], ["res_x_y", 1], ["res_x", 1], ["compress_all", 1], ["res_x", 1]],
    "norm_layer": "pixel_norm", "latent_log_var": "uniform", "use_quant_conv": False, "causal_decoder": False,
    "encoder_base_channels": 16, "decoder_base_channels": 16,
}  # fmt: skip
WAN = {
    "dim": 16, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "attn_scales": [], "temperal_downsample": [False, True],
    "dropout": 0.0,
}  # fmt: skip
COSMOS = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 64, "in_channels": 3, "out_channels": 3,
    "channels": 16, "channels_mult": [2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip


def make(path: str, **options: Any) -> torch.nn.Module:
    """Return an object of a class of the host's."""
    module, _, name = path.rpartition(".")
    made: torch.nn.Module = getattr(import_module(module), name)(**options)
    return made


def engine(encoder: str, decoder: str, encoding: dict[str, Any], decoding: dict[str, Any], **more: Any) -> Any:
    return make(
        f"{KL}.AutoencodingEngine",
        regularizer_config=more.get("regularizer", GAUSSIAN),
        encoder_config={"target": encoder, "params": encoding},
        decoder_config={"target": decoder, "params": decoding},
    )


DIFFUSION = "comfy.ldm.modules.diffusionmodules.model"
VIDEO = "comfy.ldm.hunyuan_video"
# By name: what makes the module, the shape of a latent, and that of pixels; none where it does not encode.
Recipe = tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...] | None]
RECIPES: dict[str, Recipe] = {
    "VAE AutoencoderKL": (
        lambda: make(f"{KL}.AutoencoderKL", ddconfig=SMALL, embed_dim=4), (1, 4, 8, 8), (1, 3, 32, 32)),
    "VAE AutoencodingEngine": (
        lambda: engine(f"{DIFFUSION}.Encoder", f"{DIFFUSION}.Decoder", SMALL, SMALL), (1, 4, 8, 8), (1, 3, 32, 32)),
    "VAE SVD": (
        lambda: engine(f"{DIFFUSION}.Encoder", "comfy.ldm.modules.temporal_ae.VideoDecoder", SMALL,
                       {**SMALL, "video_kernel_size": [3, 1, 1], "alpha": 0.0}), (2, 4, 8, 8), (2, 3, 32, 32)),
    "VAE TAESD": (lambda: make("comfy.taesd.taesd.TAESD", latent_channels=4), (1, 4, 8, 8), (1, 3, 64, 64)),
    "VAE TAEHV": (
        lambda: make("comfy.taesd.taehv.TAEHV", latent_channels=16, latent_format=None), (1, 16, 2, 8, 8),
        (1, 3, 5, 64, 64)),
    "VAE Stable Cascade A": (
        lambda: make("comfy.ldm.cascade.stage_a.StageA", bottleneck_blocks=3, c_hidden=32, codebook_size=64),
        (1, 4, 8, 8), (1, 3, 32, 32)),
    "VAE Stable Cascade C": (
        lambda: make("comfy.ldm.cascade.stage_c_coder.StageC_coder"), (1, 16, 4, 4), (1, 3, 64, 64)),
    "VAE HunyuanImage": (
        lambda: engine(f"{VIDEO}.vae.Encoder", f"{VIDEO}.vae.Decoder", HUNYUAN, HUNYUAN), (1, 32, 4, 4),
        (1, 3, 32, 32)),
    "VAE HunyuanVideo 1.5": (
        lambda: engine(f"{VIDEO}.vae_refiner.Encoder", f"{VIDEO}.vae_refiner.Decoder", REFINER, REFINER,
                       regularizer={"target": f"{KL}.EmptyRegularizer"}), (1, 32, 2, 4, 4), (1, 3, 5, 32, 32)),
    "VAE HunyuanVideo": (
        lambda: make(f"{KL}.AutoencoderKL", ddconfig={**SMALL, "conv3d": True, "time_compress": 4}, embed_dim=4),
        (1, 4, 2, 8, 8), (1, 3, 5, 32, 32)),
    "VAE LTX-Video": (
        lambda: make("comfy.ldm.lightricks.vae.causal_video_autoencoder.VideoVAE", config=LTX), (1, 128, 2, 4, 4),
        (1, 3, 9, 64, 64)),
    "VAE CogVideoX": (
        lambda: make("comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX", block_out_channels=(32, 32, 32, 64),
                     layers_per_block=1, groups=8), (1, 16, 2, 4, 4), (1, 3, 5, 32, 32)),
    "VAE Cosmos": (
        lambda: make("comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer", **COSMOS), (1, 16, 2, 4, 4),
        (1, 3, 9, 32, 32)),
    "VAE Wan 2.1": (
        lambda: make("comfy.ldm.wan.vae.WanVAE", z_dim=16, image_channels=3, conv_out_channels=3, **WAN),
        (1, 16, 2, 8, 8), (1, 3, 5, 32, 32)),
    "VAE Wan 2.2": (
        lambda: make("comfy.ldm.wan.vae2_2.WanVAE", z_dim=48, dec_dim=16, **WAN), (1, 48, 2, 4, 4), (1, 3, 5, 64, 64)),
    "VAE Stable Audio": (
        lambda: make("comfy.ldm.audio.autoencoder.AudioOobleckVAE", channels=16, c_mults=[1, 2, 2], strides=[2, 2, 2]),
        (1, 64, 16), (1, 2, 256)),
}  # fmt: skip
assert [*RECIPES] == AUTOENCODERS


def build_vae(name: str) -> Any:
    """Return core's VAE over a small model with the same random weights every time."""
    vae = build_recognised(RECOGNISED[name]) if name in RECOGNISED else build_chosen(name)
    assert type(vae.first_stage_model).__name__ in CLASSES
    return vae


def build_chosen(name: str) -> Any:
    model = RECIPES[name][0]().eval().requires_grad_(False)
    fill(model, 0)
    vae = comfy.sd.VAE.__new__(comfy.sd.VAE)
    device = comfy.model_management.vae_device()
    latent = RECIPES[name][1]
    vae.first_stage_model, vae.device, vae.vae_dtype = model.to(torch.float32), device, torch.float32
    vae.output_device = comfy.model_management.intermediate_device()
    vae.patcher = ModelPatcher(model, device, comfy.model_management.vae_offload_device())
    vae.latent_dim, vae.disable_offload, vae.extra_1d_channel, vae.handles_tiling = len(latent) - 2, False, None, False
    vae.memory_used_decode = vae.memory_used_encode = lambda shape, dtype: 1 << 20
    vae.process_input = vae.process_output = lambda values: values
    vae.size = None
    return vae


def run_vae(name: str, vae: Any) -> torch.Tensor:
    """Decode with the VAE's own method, and encode with the model's; returns all values."""
    if name in RECOGNISED:
        return run_recognised(RECOGNISED[name], vae)
    _, latent_shape, pixel_shape = RECIPES[name]
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(5)  # some draw noise
    with torch.inference_mode():
        parts = [vae.decode(torch.randn(latent_shape, generator=generator))]
        if pixel_shape is not None:
            comfy.model_management.load_models_gpu([vae.patcher])
            pixels = torch.rand(pixel_shape, generator=generator).to(vae.device)
            parts.append(vae.first_stage_model.encode(pixels))
        return torch.cat([part.detach().float().cpu().flatten() for part in parts])
