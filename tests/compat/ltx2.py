"""LTX 2's pipelines, which make a film and its sound at once, and SANA-WM, which has its VAE."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import film, gemma2_text, image, language_sizes, llama_like_tokens
from highwater.tests.compat.recipes import IMAGE, PROMPT, TO_LAYERS, recipe

LAYERS = 3


def gemma3_text() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 16, "patch_size": 8,
    }  # fmt: skip
    text = language_sizes(LAYERS) | {"head_dim": 8}
    tokens = {"image_token_index": 259, "boi_token_index": 260, "eoi_token_index": 261}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens))


def vae() -> Any:
    made = diffusers.AutoencoderKLLTX2Video(
        latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
        decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
        upsample_factor=(1,), patch_size=1, patch_size_t=1,
    )  # fmt: skip
    made.use_framewise_encoding = made.use_framewise_decoding = False
    return made


def transformer(**options: Any) -> Any:
    return diffusers.LTX2VideoTransformer3DModel(
        **{
            "in_channels": 4, "out_channels": 4, "patch_size": 1, "patch_size_t": 1, "num_attention_heads": 2,
            "attention_head_dim": 8, "cross_attention_dim": 16, "audio_in_channels": 4, "audio_out_channels": 4,
            "audio_num_attention_heads": 2, "audio_attention_head_dim": 4, "audio_cross_attention_dim": 8,
            "num_layers": 3, "caption_channels": 32, "rope_double_precision": False, "rope_type": "split", **options,
        }
    )  # fmt: skip


def parts(**options: Any) -> dict[str, Any]:
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    return {
        "transformer": transformer(**options),
        "connectors": LTX2TextConnectors(
            caption_channels=32, text_proj_in_factor=LAYERS + 1, video_connector_num_attention_heads=4,
            video_connector_attention_head_dim=8, video_connector_num_layers=2,
            video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=4,
            audio_connector_attention_head_dim=8, audio_connector_num_layers=2,
            audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_theta=10000.0,
            rope_double_precision=False, causal_temporal_positioning=False, rope_type="split",
        ),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2, resolution=32,
            latent_channels=2, causality_axis="height", mid_block_add_attention=False, mel_bins=8,
        ),
        "vocoder": LTX2Vocoder(
            in_channels=16, hidden_channels=32, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
            resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
        ),
        "vae": vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(), "text_encoder": gemma3_text(),
        "tokenizer": llama_like_tokens(),
    }  # fmt: skip


FILM = {
    "height": 32, "width": 32, "num_frames": 5, "frame_rate": 25.0, "max_sequence_length": 16,
    "spatio_temporal_guidance_blocks": [1], **IMAGE,
}  # fmt: skip


@recipe("LTX2Pipeline", lora=TO_LAYERS, **FILM)
@recipe("LTX2ImageToVideoPipeline", lora=TO_LAYERS, image=image, image_crf=0, **FILM)
def ltx2() -> dict[str, Any]:
    return parts()


@recipe("LTX2Pipeline", "2.3 with a duration head", lora=TO_LAYERS, min_seconds=0.1, max_seconds=3.0,
        **{name: value for name, value in FILM.items() if name != "num_frames"})  # fmt: skip
def ltx23() -> dict[str, Any]:
    """Gated attention, text features for each modality of their own, and a vocoder that widens its band."""
    from diffusers.pipelines.ltx2 import LTX2DurationHead, LTX2TextConnectors, LTX2VocoderWithBWE

    gates = {"gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True}
    gated = transformer(use_prompt_embeddings=False, perturbed_attn=True, rope_type="interleaved", **gates)
    connectors = LTX2TextConnectors(
        caption_channels=32, text_proj_in_factor=LAYERS + 1, video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8, audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=4, connector_rope_base_seq_len=32, per_modality_projections=True,
        video_connector_num_learnable_registers=8, audio_connector_num_learnable_registers=8, video_gated_attn=True,
        audio_gated_attn=True, video_hidden_dim=16, audio_hidden_dim=8,
    )  # fmt: skip
    small = {"resnet_kernel_sizes": [3], "resnet_dilations": [[1, 3, 5]], "hidden_channels": 16}
    vocoder = LTX2VocoderWithBWE(
        in_channels=16, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2], bwe_in_channels=16,
        bwe_upsample_kernel_sizes=[12, 8], bwe_upsample_factors=[6, 4], num_mel_channels=8, filter_length=32,
        hop_length=8, window_length=32, **small, **{f"bwe_{name}": value for name, value in small.items()},
    )  # fmt: skip
    head = LTX2DurationHead(
        video_cross_attention_dim=16, audio_cross_attention_dim=8, pooler_hidden_dim=8, num_pooler_heads=2,
        mlp_hidden_dim=8,
    )  # fmt: skip
    return parts() | {
        "transformer": gated, "connectors": connectors, "vocoder": vocoder, "duration_head": head,
    }  # fmt: skip


def condition() -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition

    return LTX2VideoCondition(frames=image(), index=0, strength=1.0, crf=0)


def reference() -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition

    return LTX2ReferenceCondition(frames=film(5, 32), strength=1.0)


def bright_reference() -> Any:
    from diffusers.pipelines.ltx2.pipeline_ltx2_hdr_lora import LTX2HDRReferenceCondition

    return LTX2HDRReferenceCondition(frames=torch.linspace(0, 1, 3 * 32 * 32).reshape(1, 3, 32, 32), strength=1.0)


@recipe("LTX2ConditionPipeline", lora=TO_LAYERS, conditions=condition, **FILM)
@recipe("LTX2InContextPipeline", lora=TO_LAYERS, conditions=condition, reference_conditions=reference, **FILM)
@recipe("LTX2HDRPipeline", lora=TO_LAYERS, reference_conditions=bright_reference, **FILM)
def ltx2_of_film() -> dict[str, Any]:
    return parts() | {"audio_scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}


def upsampler(**options: Any) -> Any:
    from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel

    return LTX2LatentUpsamplerModel(in_channels=4, mid_channels=32, num_blocks_per_stage=2, **options)


@recipe("LTX2LatentUpsamplePipeline", video=partial(film, 5, 32), height=32, width=32, num_frames=5, output_type="pt")
def ltx2_upsample() -> dict[str, Any]:
    return {"vae": vae(), "latent_upsampler": upsampler()}


SLOTS = {"sigmas": [1.0, 0.5], "prompt": PROMPT, "height": 32, "width": 32, "num_frames": 7, "output_type": "pt",
         "max_sequence_length": 16}  # fmt: skip


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@recipe("LTX2DFRPipeline", lora=TO_LAYERS, conditions=condition, **SLOTS)
def ltx2_slots() -> dict[str, Any]:
    return parts(use_keyframes_abs_pos_embedding=True)


@recipe(
    "LTX2DFRTemporalRefinePipeline", lora=TO_LAYERS, conditions=condition, latents=partial(seeded, 1, 4, 4, 16, 16),
    keyframes_latents=partial(seeded, 1, 4, 1, 16, 16), keyframe_positions=[6],
    audio_latents=partial(seeded, 1, 2, 7, 2), **SLOTS,
)  # fmt: skip
def ltx2_refine() -> dict[str, Any]:
    return ltx2_slots() | {
        "scheduler": diffusers.LTXEulerAncestralRFScheduler(eta=1.0),
        "temporal_latent_upsampler": upsampler(spatial_upsample=False, temporal_upsample=True),
    }  # fmt: skip


@recipe("SanaWMPipeline", image=image, prompt=PROMPT, action="w-4", intrinsics=[40.0, 40.0, 16.0, 16.0], height=32,
        width=32, num_frames=5, num_inference_steps=2, max_sequence_length=16, chi_prompt=["say"],
        output_type="pt")  # fmt: skip
def sana_world() -> dict[str, Any]:
    world = diffusers.SanaWMTransformer3DModel(
        in_channels=4, num_layers=4, hidden_size=32, num_attention_heads=2, linear_head_dim=16, softmax_every_n=2,
        chunk_plucker_channels=12, chunk_plucker_post_attn_blocks=4, image_size=32, caption_channels=32,
    )  # fmt: skip
    return {
        "transformer": world, "vae": vae(), "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(),
        "text_encoder": gemma2_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip
