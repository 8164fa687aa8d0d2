"""Small autoencoders that ComfyUI's own loader recognises by their weights. Runs in the host's own Python.

Where the host's code has a size as a default or a constant, a smaller one stands there while the model is made, for
both sides of a comparison; what its loader then decides (devices, what may be offloaded, how pixels are read) is its
own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any
from unittest.mock import patch

import comfy.model_management
import comfy.ops
import comfy.sd
import torch

from highwater.tests.comfyui.sweep.names import RECOGNISED as RECOGNISED_NAMES
from highwater.tests.comfyui.sweep.weights import fill

__all__ = ["RECOGNISED", "Recognised", "build_recognised", "run_recognised"]

LDM = "comfy.ldm"
Tensors = dict[str, torch.Tensor]


def decode_splats(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """Decode as TripoSplat's own node does: the model is loaded and called without the VAE around it."""
    comfy.model_management.load_models_gpu([vae.patcher])
    generator = torch.Generator().manual_seed(3)
    splats = vae.first_stage_model.decode(latent.to(vae.device), num_gaussians=256, level=3, generator=generator)
    values = [value for splat in splats for value in splat.render_tensors() if isinstance(value, torch.Tensor)]
    return torch.cat([value.detach().float().cpu().flatten() for value in values])


def decode_latents(vae: Any, latent: torch.Tensor, **options: Any) -> torch.Tensor:
    decoded: torch.Tensor = vae.decode(latent, vae_options=options)
    return decoded


def decode_to_a_grid(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    return decode_latents(vae, latent, num_chunks=200, octree_resolution=8, enable_pbar=False)


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """One class of autoencoder: how it is made small, and what it is called with."""

    make: str
    """The class, or what makes it."""
    latent: tuple[int, ...]
    pixels: tuple[int, ...] | None = None
    """What is encoded, channels last as in the host's nodes; none where it does not encode."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """By what stands in the host's code: a constant's value; or of a class the arguments that it gets instead of its
    own, by name or what makes them of its own ones by place."""
    metadata: Mapping[str, str] | None = None
    """What a file of it says beside its weights."""
    as_file: Callable[[Tensors], Tensors] = dict
    """The tensors as a file has them."""
    decode: Callable[[Any, torch.Tensor], torch.Tensor] = decode_latents


def named(path: str) -> tuple[Any, str]:
    module, _, name = path.rpartition(".")
    return import_module(module), name


@contextmanager
def small(sizes: Mapping[str, Any]) -> Iterator[None]:
    """Give the host's classes and constants other sizes until the end of the block."""
    with ExitStack() as stack:
        for path, size in sizes.items():
            owner, name = named(path)
            if isinstance(getattr(owner, name), type):
                owner, name, size = getattr(owner, name), "__init__", smaller(getattr(owner, name).__init__, size)
            stack.enter_context(patch.object(owner, name, size))
        yield


def smaller(original: Callable[..., None], size: Any) -> Callable[..., None]:
    def __init__(self: Any, *given: Any, **options: Any) -> None:
        if callable(size):
            original(self, *size(*given), **options)
        else:
            original(self, *given, **{**options, **size})

    return __init__


def build_recognised(recipe: Recognised) -> Any:
    """Return core's VAE as it makes it from a file with random weights, the same every time."""
    with small(recipe.sizes):
        module, name = named(recipe.make)
        model = getattr(module, name)(**recipe.arguments).float()
        fill(model, 0)
        tensors = recipe.as_file(model.state_dict())
        vae = comfy.sd.VAE(sd=tensors, dtype=torch.float32, metadata=recipe.metadata)
    loaded = vae.first_stage_model.requires_grad_(False)
    if type(loaded) is not type(model):
        raise AssertionError(f"core made {type(loaded).__name__} of the weights of {type(model).__name__}")
    for (key, value), kept in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        if not torch.equal(value, kept):
            raise AssertionError(f"core did not read {key}")
    # What core estimates for films of real size would leave no room on a small device.
    vae.memory_used_decode = vae.memory_used_encode = lambda shape, dtype: 1 << 20
    return vae


def run_recognised(recipe: Recognised, vae: Any) -> torch.Tensor:
    """Decode and encode with the VAE's own methods; returns all values."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(5)  # some draw noise
    with torch.inference_mode():
        parts = [recipe.decode(vae, torch.randn(recipe.latent, generator=generator))]
        if recipe.pixels is not None:
            parts.append(vae.encode(torch.rand(recipe.pixels, generator=generator)))
        return torch.cat([part.detach().float().cpu().flatten() for part in parts])


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key.replace(old, new): value for key, value in tensors.items()}


def mage_file(tensors: Tensors) -> Tensors:
    names = {"dconv_encoder.": "student.dconv_encoder.", "decoder_model.": "pipeline."}
    return {
        next(new + key.removeprefix(old) for old, new in names.items() if key.startswith(old)): value
        for key, value in tensors.items()
    }


def weight_norm_file(tensors: Tensors) -> Tensors:
    """Rename the two parts of a normed weight as files from before parametrizations have them."""
    for old, new in {"original0": "weight_g", "original1": "weight_v"}.items():
        tensors = renamed(f"parametrizations.weight.{old}", new)(tensors)
    return tensors


def as_metadata(**config: Any) -> dict[str, str]:
    return {"config": json.dumps(config)}


LTX_TENSORS = {
    "_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128,
    "scaling_factor": 1.0, "norm_layer": "pixel_norm", "patch_size": 4, "latent_log_var": "uniform",
    "use_quant_conv": False, "causal_decoder": False, "timestep_conditioning": True, "encoder_base_channels": 16,
    "decoder_base_channels": 16,
}  # fmt: skip
UP, DOWN = {"residual": True, "multiplier": 2}, {"multiplier": 2}
# Without `inject_noise`, which files of this kind have: in a split, blocks draw the random numbers of their device (a
# limit in docs/limits.md), and no comparison with one device is possible. Resident and streamed it was equal with it.
LTX_1 = {
    **LTX_TENSORS,
    "encoder_blocks": [["res_x", {"num_layers": 2}], ["compress_all", {}], ["res_x_y", 1], ["res_x", {"num_layers": 1}],
                       ["compress_all", {}], ["res_x", {"num_layers": 1}]],
    "decoder_blocks": [["res_x", {"num_layers": 2}], ["compress_all", UP],
                       ["res_x", {"num_layers": 1}], ["compress_all", UP],
                       ["res_x", {"num_layers": 1}]],
}  # fmt: skip
LTX_2 = {
    **LTX_TENSORS,
    "encoder_blocks": [["res_x", {"num_layers": 2}], ["compress_space_res", DOWN], ["res_x", {"num_layers": 1}],
                       ["compress_time_res", DOWN], ["res_x", {"num_layers": 1}], ["compress_all_res", DOWN],
                       ["res_x", {"num_layers": 1}]],
    "decoder_blocks": [["res_x", {"num_layers": 2}], ["compress_all", UP], ["res_x", {"num_layers": 1}],
                       ["compress_all", UP], ["res_x", {"num_layers": 1}]],
}  # fmt: skip
LTX_DIFFUSION = {
    "encoder": {
        "blocks": [["res_x", {"num_layers": 2}], ["compress_all_res", DOWN], ["res_x", {"num_layers": 2}],
                   ["compress_all_res", DOWN], ["res_x", {"num_layers": 1}]],
        "base_channels": 16,
    },
    "decoder": {
        "head_dim": 16, "stage_channels": [64, 32, 32], "stage_depths": [2, 2, 3],
        "stage_kernels": [[3, 3, 3], [3, 3, 3], [3, 3, 3]], "upsamples": [[[2, 2, 2], 2], [[2, 2, 2], 1]],
        "stage5_kernel": [3, 3, 3], "t_emb_dim": 32,
    },
}  # fmt: skip
LTX_AUDIO = {
    "audio_vae": {
        "model": {"params": {"sampling_rate": 16000, "ddconfig": {
            "double_z": True, "mel_bins": 64, "z_channels": 8, "resolution": 64, "downsample_time": False,
            "in_channels": 2, "out_ch": 2, "ch": 16, "ch_mult": [1, 2, 2], "num_res_blocks": 1, "attn_resolutions": [],
            "dropout": 0.0, "mid_block_add_attention": False, "norm_type": "pixel", "causality_axis": "height"}}},
        "preprocessing": {"stft": {"filter_length": 1024, "hop_length": 160}},
    },
    "vocoder": {"upsample_initial_channel": 64, "stereo": True},
}  # fmt: skip
MOCHI = {"base_channels": 32, "num_res_blocks": [1, 1, 1, 3, 1]}
FLUX_2 = {
    "double_z": True, "z_channels": 32, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
SPLATS = {"model_channels": 64, "num_heads": 4}

RECOGNISED: dict[str, Recognised] = {
    "VAE MiniMax H3": Recognised(
        make=f"{LDM}.minimax.vae.MiniMaxH3VideoVAE", latent=(1, 24, 7, 3, 3), pixels=(22, 48, 48, 3),
        sizes={
            f"{LDM}.minimax.vae.MiniMaxH3VideoVAE": {
                "ch": 32, "num_res_blocks": 1, "tile_size": 32, "tile_overlap_min": 16},
            f"{LDM}.minimax.vae.ViT3DDecoder": {"num_layers": 4, "heads": 2},
        }),
    "VAE MiniMax H3 audio": Recognised(
        make=f"{LDM}.minimax.audio_vae.MiniMaxH3AudioVAE", latent=(1, 32, 2, 3), pixels=(1, 2400, 2),
        sizes={f"{LDM}.minimax.audio_vae.MiniMaxH3AudioVAE": {
            "encoder_dim": 8, "latent_dim": 64, "decoder_dim": 128}}),
    "VAE MiniMax Music 3": Recognised(
        make=f"{LDM}.minimax_music.dav.MiniMaxMusic3DAV", latent=(1, 128, 2),
        arguments={"operations": comfy.ops.disable_weight_init}, as_file=weight_norm_file),
    "VAE Mochi": Recognised(
        make=f"{LDM}.genmo.vae.model.VideoVAE", latent=(1, 12, 2, 4, 4), pixels=(7, 32, 32, 3),
        sizes={f"{LDM}.genmo.vae.model.Encoder": MOCHI, f"{LDM}.genmo.vae.model.Decoder": MOCHI}),
    "VAE LTX-Video 0.9.5": Recognised(
        make=f"{LDM}.lightricks.vae.causal_video_autoencoder.VideoVAE", latent=(1, 128, 2, 4, 4), pixels=(9, 64, 64, 3),
        arguments={"config": LTX_1}, metadata=as_metadata(vae=LTX_1)),
    "VAE LTX 2": Recognised(
        make=f"{LDM}.lightricks.vae.causal_video_autoencoder.VideoVAE", latent=(1, 128, 2, 4, 4), pixels=(9, 64, 64, 3),
        arguments={"config": LTX_2}, metadata=as_metadata(vae=LTX_2)),
    "VAE LTX 2.4": Recognised(
        make=f"{LDM}.lightricks.vae.na_diffusion_decoder.CausalDiffusionVAE", latent=(1, 128, 2, 4, 4),
        pixels=(9, 64, 64, 3), arguments={"config": LTX_DIFFUSION}, metadata=as_metadata(vae=LTX_DIFFUSION)),
    "VAE LTX audio": Recognised(
        make=f"{LDM}.lightricks.vae.audio_vae.AudioVAE", latent=(1, 8, 4, 16), pixels=(1, 8820, 2),
        arguments={"metadata": as_metadata(**LTX_AUDIO)}, metadata=as_metadata(**LTX_AUDIO),
        as_file=renamed("autoencoder.", "audio_vae.")),
    "VAE Stable Audio 3": Recognised(
        make=f"{LDM}.audio.vae_sa3.SA3AudioVAE", latent=(1, 256, 4), pixels=(1, 16384, 2),
        arguments={"sliding_window": None, "decoder_conv_mapping": True, "chunk_size": 32,
                   "chunk_midpoint_shift": True, "sinusoidal_blocks": 0},
        sizes={f"{LDM}.audio.vae_sa3.SA3AudioVAE": {"channels": 32, "transformer_depths": 4}}),
    "VAE ACE-Step": Recognised(
        make=f"{LDM}.ace.vae.music_dcae_pipeline.MusicDCAE", latent=(1, 8, 16, 2), pixels=(1, 8192, 2),
        arguments={"source_sample_rate": 44100},
        sizes={
            f"{LDM}.ace.vae.autoencoder_dc.AutoencoderDC": {
                "encoder_block_out_channels": (32, 32, 64, 64), "decoder_block_out_channels": (32, 32, 64, 64),
                "encoder_layers_per_block": (1, 1, 2, 2), "decoder_layers_per_block": (2, 2, 2, 2)},
            f"{LDM}.ace.vae.music_vocoder.ADaMoSHiFiGANV1": {
                "depths": [1, 1, 2, 1], "dims": [16, 16, 32, 32], "num_mels": 32, "upsample_initial_channel": 128},
        }),
    "VAE MMAudio": Recognised(
        make=f"{LDM}.mmaudio.vae.autoencoder.AudioAutoencoder", latent=(1, 20, 6), pixels=(1, 44100, 2),
        arguments={"mode": "16k"},
        sizes={
            f"{LDM}.mmaudio.vae.vae.VAE": {"hidden_dim": 32},
            f"{LDM}.mmaudio.vae.bigvgan.BigVGANVocoder": lambda config: ({**config, "upsample_initial_channel": 64},),
        }),
    "VAE Hunyuan3D": Recognised(
        make=f"{LDM}.hunyuan3d.vae.ShapeVAE", latent=(1, 64, 16), decode=decode_to_a_grid,
        sizes={f"{LDM}.hunyuan3d.vae.ShapeVAE": {
            "width": 64, "heads": 4, "num_decoder_layers": 4, "num_encoder_layers": 2}}),
    "VAE SeedVR2": Recognised(
        make=f"{LDM}.seedvr.vae.VideoAutoencoderKLWrapper", latent=(1, 16, 3, 4, 4), pixels=(9, 32, 32, 3),
        sizes={f"{LDM}.seedvr.vae.BYTEDANCE_BLOCK_OUT_CHANNELS": (32, 32, 64, 64)}),
    "VAE Mage": Recognised(
        make=f"{LDM}.mage_flow.vae.MageVAE", latent=(1, 128, 3, 3), pixels=(1, 48, 48, 3), as_file=mage_file,
        sizes={
            f"{LDM}.mage_flow.vae.DConvEncoder": {"hidden_size": 64, "num_blocks": 3, "head_size": 64},
            f"{LDM}.mage_flow.vae.DConvDenoiser": {"hidden_size": 64, "num_blocks": 5, "num_cond_blocks": 3},
        }),
    "VAE TripoSplat": Recognised(
        make=f"{LDM}.triposplat.vae.OctreeGaussianDecoder", latent=(1, 12, 16), decode=decode_splats,
        sizes={
            f"{LDM}.triposplat.vae.OctreeProbabilityFixedlenDecoder": SPLATS,
            f"{LDM}.triposplat.vae.ElasticGaussianFixedlenDecoder": {**SPLATS, "num_blocks": 4},
        }),
    "VAE pixel space": Recognised(
        make="comfy.pixel_space_convert.PixelspaceConversionVAE", latent=(1, 3, 8, 8), pixels=(1, 8, 8, 3)),
    "VAE Flux 2": Recognised(
        make=f"{LDM}.models.autoencoder.AutoencoderKL", latent=(1, 128, 4, 4), pixels=(1, 64, 64, 3),
        arguments={"embed_dim": 32, "ddconfig": {**FLUX_2, "batch_norm_latent": True}},
        sizes={f"{LDM}.modules.diffusionmodules.model.{name}": FLUX_2 for name in ("Encoder", "Decoder")}),
}  # fmt: skip
assert [*RECOGNISED] == RECOGNISED_NAMES
