"""Tiny diffusers models, each with its class's own forward, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]
ModelAndInputs = tuple[nn.Module, Inputs]


def flux(num_layers: int = 2, num_single_layers: int = 4) -> ModelAndInputs:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=num_layers, num_single_layers=num_single_layers, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
        guidance_embeds=True,
    )  # fmt: skip
    return model, flux_inputs()


def flux_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.randn(16, 3).round(),
        "txt_ids": torch.zeros(6, 3),
    }


def flux_with_residuals() -> ModelAndInputs:
    """Flux with what a ControlNet adds between its blocks."""
    model, inputs = flux()
    samples = [torch.randn(1, 16, 32) for _ in range(2)]
    return model, inputs | {
        "controlnet_block_samples": samples,
        "controlnet_single_block_samples": [sample * 0.5 for sample in samples],
    }


def flux_controlnet() -> ModelAndInputs:
    from diffusers import FluxControlNetModel

    model = FluxControlNetModel(
        in_channels=4, num_layers=3, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    return model, flux_inputs() | {"controlnet_cond": torch.randn(1, 16, 4)}


def flux2() -> ModelAndInputs:
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    inputs = flux_inputs() | {"img_ids": torch.randn(1, 16, 4).round(), "txt_ids": torch.zeros(1, 6, 4)}
    del inputs["pooled_projections"]
    return model, inputs


def chroma() -> ModelAndInputs:
    from diffusers import ChromaTransformer2DModel

    model = ChromaTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=32,
        approximator_layers=2,
    )  # fmt: skip
    inputs = flux_inputs() | {"attention_mask": torch.ones(1, 22, dtype=torch.bool)}
    del inputs["pooled_projections"], inputs["guidance"]
    return model, inputs


def sd3(num_layers: int = 5) -> ModelAndInputs:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=num_layers, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64,
        out_channels=4, dual_attention_layers=(0, 1), qk_norm="rms_norm",
    )  # fmt: skip
    return model, sd3_inputs()


def sd3_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.tensor([300]),
    }


def sd3_with_residuals() -> ModelAndInputs:
    model, inputs = sd3()
    return model, inputs | {"block_controlnet_hidden_states": [torch.randn(1, 64, 32) for _ in range(3)]}


def sd3_skipping() -> ModelAndInputs:
    model, inputs = sd3()
    return model, inputs | {"skip_layers": [0, 3, 4]}


def sd3_controlnet() -> ModelAndInputs:
    from diffusers import SD3ControlNetModel

    model = SD3ControlNetModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=4, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip
    return model, sd3_inputs() | {"controlnet_cond": torch.randn(1, 4, 8, 8)}


def hidream() -> ModelAndInputs:
    from diffusers import HiDreamImageTransformer2DModel

    model = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=8,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(4, 2, 2), max_resolution=(32, 32), llama_layers=(0, 1, 1, 0, 1),
        force_inference_output=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timesteps": torch.tensor([300]),
        "encoder_hidden_states_t5": torch.randn(1, 8, 32),
        "encoder_hidden_states_llama3": torch.randn(2, 1, 8, 16),
        "pooled_embeds": torch.randn(1, 64),
    }
    return model, inputs


def wan(kind: str = "WanTransformer3DModel", **config: Any) -> ModelAndInputs:
    import diffusers

    model = getattr(diffusers, kind)(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=5, cross_attn_norm=True, rope_max_seq_len=32, **config,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return model, inputs


def wan_vace() -> ModelAndInputs:
    model, inputs = wan("WanVACETransformer3DModel", vace_layers=[0, 2, 4], vace_in_channels=12)
    return model, inputs | {
        "control_hidden_states": torch.randn(1, 12, 2, 8, 8),
        "control_hidden_states_scale": torch.tensor([1.0, 0.5, 0.2]),
    }


def cosmos() -> ModelAndInputs:
    from diffusers import CosmosTransformer3DModel

    model = CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=5, mlp_ratio=2,
        text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), rope_scale=(2.0, 1.0, 1.0),
        extra_pos_embed_type="learnable", concat_padding_mask=False,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 1, 16, 16),
        "timestep": torch.tensor([300.0]),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "attention_mask": torch.ones(1, 6),
        "fps": 30,
    }
    return model, inputs


def hunyuan_video() -> ModelAndInputs:
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=3,
        num_single_layers=3, num_refiner_layers=2, patch_size=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 1, 8, 8),
        "timestep": torch.tensor([300]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "encoder_attention_mask": torch.ones(1, 6),
        "pooled_projections": torch.randn(1, 8),
        "guidance": torch.tensor([6.0]),
    }
    return model, inputs


def ltx() -> ModelAndInputs:
    from diffusers import LTXVideoTransformer3DModel

    model = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=5, caption_channels=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 32, 8),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.tensor([300]),
        "encoder_attention_mask": torch.ones(1, 6),
        "num_frames": 2, "height": 4, "width": 4,
    }  # fmt: skip
    return model, inputs


def qwen_image() -> ModelAndInputs:
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=5, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 6, 16),
        "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.long),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 4, 4)]],
        "controlnet_block_samples": [torch.randn(1, 16, 32) for _ in range(2)],
    }
    return model, inputs


def lumina2() -> ModelAndInputs:
    from diffusers import Lumina2Transformer2DModel

    model = Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=4, num_refiner_layers=2,
        num_attention_heads=3, num_kv_heads=1, multiple_of=2, axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128),
        cap_feat_dim=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool),
    }
    return model, inputs


def auraflow() -> ModelAndInputs:
    from diffusers import AuraFlowTransformer2DModel

    model = AuraFlowTransformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_mmdit_layers=2, num_single_dit_layers=3,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32,
        out_channels=4, pos_embed_max_size=256,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "timestep": torch.tensor([0.5]),
    }
    return model, inputs


def unet() -> ModelAndInputs:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=2, norm_num_groups=4, sample_size=16, in_channels=4,
        out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(1, 4, 16, 16),
        "timestep": torch.tensor([300]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }
    return model, inputs


MODELS: dict[str, Callable[[], ModelAndInputs]] = {
    build.__name__: build
    for build in (
        flux, flux_with_residuals, flux_controlnet, flux2, chroma, sd3, sd3_with_residuals, sd3_skipping,
        sd3_controlnet, hidream, wan, wan_vace, cosmos, hunyuan_video, ltx, qwen_image, lumina2, auraflow, unet,
    )
}  # fmt: skip
