"""Small configurations of ComfyUI's diffusion models, and what each is called with. Runs in the host's own Python.

The class, the forward and the conditioning are the host's; only numbers are ours. Both sides of a comparison get the
same: most of these sizes ComfyUI would not recognise in a file, as it writes them down in its code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ARCHITECTURES", "Architecture"]

Extras = Callable[[torch.Generator], dict[str, Any]]


def no_extras(generator: torch.Generator) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One diffusion model: its class in ``comfy.supported_models``, a small configuration, and its inputs."""

    name: str
    model: str
    config: dict[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    """Tokens and their width."""
    pooled: int = 0
    extras: Extras = no_extras
    cfg: float = 2.0
    control: str | None = None
    """The ControlNet of `controls.CONTROLS` that guides it."""
    options: dict[str, Any] = field(default_factory=dict)


def flux(**more: Any) -> dict[str, Any]:
    return {
        "axes_dim": [4, 6, 6], "num_heads": 4, "mlp_ratio": 4.0, "theta": 10000, "out_channels": 16, "qkv_bias": True,
        "txt_ids_dims": [], "in_channels": 16, "hidden_size": 64, "context_in_dim": 32, "patch_size": 2,
        "vec_in_dim": 48, "depth": 3, "depth_single_blocks": 4, "guidance_embed": True, "yak_mlp": False,
        "txt_norm": False, **more,
    }  # fmt: skip


def hunyuan(**more: Any) -> dict[str, Any]:
    return {
        "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "vec_in_dim": 48, "axes_dim": [4, 6, 6],
        "meanflow": False, "context_in_dim": 32, "hidden_size": 64, "mlp_ratio": 4.0, "num_heads": 4, "depth": 3,
        "depth_single_blocks": 4, "theta": 256, "qkv_bias": True, "byt5": False, "guidance_embed": True,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False, **more,
    }  # fmt: skip


def wan(**more: Any) -> dict[str, Any]:
    return {
        "dim": 64, "out_dim": 16, "num_heads": 4, "ffn_dim": 128, "num_layers": 5, "patch_size": (1, 2, 2),
        "freq_dim": 64, "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6, "in_dim": 16,
        "text_dim": 32, "model_type": "t2v", **more,
    }  # fmt: skip


def lumina(**more: Any) -> dict[str, Any]:
    return {
        "patch_size": 2, "in_channels": 16, "dim": 64, "cap_feat_dim": 32, "n_layers": 5, "qk_norm": True,
        "n_heads": 4, "n_kv_heads": 4, "axes_dims": [4, 6, 6], "axes_lens": [300, 512, 512], "rope_theta": 10000.0,
        "ffn_dim_multiplier": 1.0, "multiple_of": 32, **more,
    }  # fmt: skip


def cosmos(**more: Any) -> dict[str, Any]:
    return {
        "max_img_h": 16, "max_img_w": 16, "max_frames": 8, "in_channels": 16, "out_channels": 16, "patch_spatial": 2,
        "patch_temporal": 1, "model_channels": 64, "concat_padding_mask": True, "crossattn_emb_channels": 32,
        "pos_emb_cls": "rope3d", "pos_emb_learnable": False, "pos_emb_interpolation": "crop", "use_adaln_lora": True,
        "adaln_lora_dim": 16, "num_blocks": 5, "num_heads": 4, "extra_per_block_abs_pos_emb": True, **more,
    }  # fmt: skip


def unet(**more: Any) -> dict[str, Any]:
    return {
        "use_checkpoint": False, "image_size": 32, "use_spatial_transformer": True, "legacy": False, "in_channels": 4,
        "out_channels": 4, "model_channels": 32, "num_res_blocks": [1, 1], "channel_mult": [1, 2], "context_dim": 32,
        "num_head_channels": 8, "transformer_depth": [1, 1], "transformer_depth_middle": 1,
        "transformer_depth_output": [1, 1, 1, 1], "use_linear_in_transformer": True, "adm_in_channels": None,
        "use_temporal_attention": False, **more,
    }  # fmt: skip


def i2v_extras(generator: torch.Generator) -> dict[str, Any]:
    return {"concat_latent_image": torch.randn(1, 16, 2, 8, 8, generator=generator)}


def vace_extras(generator: torch.Generator) -> dict[str, Any]:
    frames, mask = (torch.randn(1, channels, 2, 8, 8, generator=generator) for channels in (32, 64))
    return {"vace_frames": [frames], "vace_mask": [mask], "vace_strength": [0.8]}


def llama_extras(generator: torch.Generator) -> dict[str, Any]:
    return {"conditioning_llama3": torch.randn(1, 8, 6, 32, generator=generator)}


def prior_extras(generator: torch.Generator) -> dict[str, Any]:
    return {"stable_cascade_prior": torch.randn(1, 16, 2, 2, generator=generator)}


def byt5_extras(generator: torch.Generator) -> dict[str, Any]:
    return {"conditioning_byt5small": torch.randn(1, 4, 1472, generator=generator)}


def masked(generator: torch.Generator) -> dict[str, Any]:
    return {"attention_mask": torch.ones(1, 6, dtype=torch.long)}


IMAGE, VIDEO = (1, 16, 8, 8), (1, 16, 2, 8, 8)
TEXT = (6, 32)

ARCHITECTURES: dict[str, Architecture] = {
    found.name: found
    for found in (
        Architecture(name="Flux", model="Flux", config={"image_model": "flux", **flux()}, latent=IMAGE, text=TEXT,
                     pooled=48, control="flux"),
        Architecture(name="Flux Schnell", model="FluxSchnell",
                     config={"image_model": "flux", **flux(guidance_embed=False)}, latent=IMAGE, text=TEXT, pooled=48),
        Architecture(name="Flux 2", model="Flux2", config={"image_model": "flux2", **flux(
                         axes_dim=[4, 4, 4, 4], mlp_ratio=3.0, theta=2000, out_channels=128, in_channels=128,
                         global_modulation=True, mlp_silu_act=True, qkv_bias=False, ops_bias=False,
                         default_ref_method="index", ref_index_scale=10.0, txt_ids_dims=[3], patch_size=1,
                         vec_in_dim=None)}, latent=(1, 128, 4, 4), text=TEXT),
        Architecture(name="Chroma", model="Chroma", config={"image_model": "chroma", **{
                         key: value for key, value in flux(in_channels=64, out_channels=64, vec_in_dim=None).items()
                         if key not in ("guidance_embed", "yak_mlp", "txt_norm")},
                         "in_dim": 64, "out_dim": 64, "hidden_dim": 64, "n_layers": 2}, latent=IMAGE, text=TEXT),
        Architecture(name="SD3", model="SD3", config={
                         "in_channels": 16, "patch_size": 2, "out_channels": 16, "depth": 3, "input_size": None,
                         "adm_in_channels": 48, "context_embedder_config": {
                             "target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 192}},
                         "num_patches": 64, "pos_embed_max_size": 8, "qk_norm": "rms", "pos_embed_scaling_factor": None,
                         "x_block_self_attn_layers": [0], "num_blocks": 4},
                     latent=IMAGE, text=TEXT, pooled=48, control="sd3"),
        Architecture(name="Qwen-Image", model="QwenImage", config={
                         "image_model": "qwen_image", "in_channels": 64, "num_layers": 5, "attention_head_dim": 16,
                         "num_attention_heads": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6)},
                     latent=(1, 16, 1, 8, 8), text=TEXT, control="qwen"),
        Architecture(name="Lumina 2", model="Lumina2", config={"image_model": "lumina2", **lumina()}, latent=IMAGE,
                     text=TEXT),
        Architecture(name="Z-Image", model="ZImage", config={"image_model": "lumina2", **lumina(
                         dim=256, axes_dims=[16, 24, 24], z_image_modulation=True, time_scale=1000.0,
                         pad_tokens_multiple=32, rope_theta=256.0)},
                     latent=IMAGE, text=TEXT),
        Architecture(name="HunyuanVideo", model="HunyuanVideo",
                     config={"image_model": "hunyuan_video", **hunyuan()}, latent=VIDEO, text=TEXT, pooled=48),
        Architecture(name="HunyuanVideo 1.5", model="HunyuanVideo15", config={"image_model": "hunyuan_video", **hunyuan(
                         in_channels=65, out_channels=32, patch_size=[1, 1, 1], vec_in_dim=None,
                         use_cond_type_embedding=True, byt5=True, guidance_embed=False, vision_in_dim=24,
                         meanflow_sum=True)}, latent=(1, 32, 2, 4, 4), text=TEXT, extras=byt5_extras),
        Architecture(name="HiDream", model="HiDream", config={
                         "image_model": "hidream", "attention_head_dim": 16, "axes_dims_rope": [8, 4, 4],
                         "caption_channels": [32, 32], "max_resolution": [16, 16], "in_channels": 16,
                         "llama_layers": [0, 1, 2, 3, 4, 5, 6], "num_attention_heads": 4, "num_routed_experts": 4,
                         "num_activated_experts": 2, "num_layers": 3, "num_single_layers": 4, "out_channels": 16,
                         "patch_size": 2, "text_emb_dim": 48},
                     latent=IMAGE, text=TEXT, pooled=48, extras=llama_extras),
        Architecture(name="Cosmos 1", model="CosmosT2V", config={"image_model": "cosmos", **cosmos(
                         block_config="FA-CA-MLP", block_x_format="THWBD", affline_emb_norm=True,
                         extra_per_block_abs_pos_emb_type="learnable")}, latent=VIDEO, text=TEXT),
        Architecture(name="Cosmos Predict2", model="CosmosT2IPredict2",
                     config={"image_model": "cosmos_predict2", **cosmos(pos_emb_learnable=True, min_fps=1, max_fps=30)},
                     latent=VIDEO, text=TEXT),
        Architecture(name="Wan 2.1 t2v", model="WAN21_T2V", config={"image_model": "wan2.1", **wan()}, latent=VIDEO,
                     text=TEXT),
        Architecture(name="Wan 2.1 i2v", model="WAN21_I2V",
                     config={"image_model": "wan2.1", **wan(model_type="i2v", in_dim=36)}, latent=VIDEO, text=TEXT,
                     extras=i2v_extras),
        Architecture(name="Wan 2.1 VACE", model="WAN21_Vace", config={
                         "image_model": "wan2.1",
                         **wan(model_type="vace", num_layers=4, vace_layers=2, vace_in_dim=96)},
                     latent=VIDEO, text=TEXT, extras=vace_extras),
        Architecture(name="LTX-Video", model="LTXV", config={
                         "image_model": "ltxv", "num_layers": 5, "attention_head_dim": 16, "num_attention_heads": 4,
                         "cross_attention_dim": 64, "caption_channels": 32, "in_channels": 128},
                     latent=(1, 128, 2, 4, 4), text=TEXT, extras=masked),
        Architecture(name="Mochi", model="GenmoMochi", config={
                         "image_model": "mochi_preview", "depth": 4, "patch_size": 2, "num_heads": 4,
                         "hidden_size_x": 96, "hidden_size_y": 48, "mlp_ratio_x": 128.0, "mlp_ratio_y": 128.0,
                         "learn_sigma": False, "in_channels": 12, "qk_norm": True, "qkv_bias": False, "out_bias": True,
                         "attn_drop": 0.0, "patch_embed_bias": True, "posenc_preserve_area": True,
                         "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0,
                         "use_t5": True, "t5_feat_dim": 32, "t5_token_length": 6, "rope_theta": 10000.0},
                     latent=(1, 12, 2, 8, 8), text=TEXT, extras=masked),
        Architecture(name="AuraFlow", model="AuraFlow", config={
                         "max_seq": 64, "cond_seq_dim": 32, "n_double_layers": 3, "n_layers": 7, "dim": 64,
                         "n_heads": 4, "global_conddim": 64}, latent=(1, 4, 8, 8), text=TEXT),
        Architecture(name="Stable Cascade C", model="Stable_Cascade_C", config={
                         "stable_cascade_stage": "c", "c_cond": 32, "c_hidden": [32, 32], "nhead": [4, 4],
                         "blocks": [[2, 2], [2, 2]], "c_clip_text": 32, "c_clip_text_pooled": 48},
                     latent=(1, 16, 4, 4), text=TEXT, pooled=48),
        Architecture(name="Stable Cascade B", model="Stable_Cascade_B", config={
                         "stable_cascade_stage": "b", "c_hidden": [16, 32, 32, 32], "nhead": [-1, -1, 4, 4],
                         "blocks": [[1, 2, 2, 1], [1, 2, 2, 1]], "block_repeat": [[1, 1, 1, 1], [2, 2, 2, 2]],
                         "c_cond": 32, "c_clip": 48}, latent=(1, 4, 32, 32), text=TEXT, pooled=48, extras=prior_extras),
        Architecture(name="SDXL", model="SDXL", config=unet(
                         model_channels=64, adm_in_channels=48 + 1536, num_classes="sequential"),
                     latent=(1, 4, 8, 8), text=TEXT, pooled=48, control="unet"),
        Architecture(name="SD 1.5", model="SD15", config=unet(use_linear_in_transformer=False), latent=(1, 4, 8, 8),
                     text=TEXT, control="unet"),
    )
}  # fmt: skip
