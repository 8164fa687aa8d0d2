"""Pipelines with Wan's VAE and a transformer of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import gemma2_text, image, llama_like_tokens, t5_text, t5_tokens
from highwater.tests.compat.recipes import TO_LAYERS, recipe
from highwater.tests.compat.wan import VIDEO, wan, wan_sizes


class HarmlessChecker(diffusers.ModelMixin, diffusers.ConfigMixin):
    """In place of Cosmos' guardrail, which has to be downloaded: passes everything."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(1), persistent=False)

    def check_text_safety(self, prompt: str) -> bool:
        return True

    def check_video_safety(self, frames: Any) -> Any:
        return frames

    @property
    def device(self) -> torch.device:
        return self.place.device


def cosmos_transformer(**options: Any) -> Any:
    # With a padding mask among the channels the class needs torchvision, to resize it.
    return diffusers.CosmosTransformer3DModel(
        **{
            "in_channels": 16, "out_channels": 16, "num_attention_heads": 2, "attention_head_dim": 16,
            "num_layers": 3, "mlp_ratio": 2, "text_embed_dim": 32, "adaln_lora_dim": 4, "max_size": (4, 32, 32),
            "patch_size": (1, 2, 2), "rope_scale": (2.0, 1.0, 1.0), "concat_padding_mask": False,
            "extra_pos_embed_type": "learnable", **options,
        }
    )  # fmt: skip


COSMOS = {**VIDEO, "height": 32, "width": 32, "num_frames": 9}


def cosmos1_parts(**options: Any) -> dict[str, Any]:
    vae = diffusers.AutoencoderKLCosmos(
        in_channels=3, out_channels=3, latent_channels=4, encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8), attention_resolutions=(8,), resolution=64, num_layers=2, patch_size=4,
        patch_type="haar", scaling_factor=1.0, spatial_compression_ratio=4, temporal_compression_ratio=4,
    )  # fmt: skip
    scheduler = diffusers.EDMEulerScheduler(
        sigma_min=0.002, sigma_max=80, sigma_data=0.5, sigma_schedule="karras", prediction_type="epsilon",
        final_sigmas_type="sigma_min",
    )  # fmt: skip
    return {
        "transformer": cosmos_transformer(out_channels=4, **options), "vae": vae, "scheduler": scheduler,
        "text_encoder": t5_text(), "tokenizer": t5_tokens(), "safety_checker": HarmlessChecker(),
    }  # fmt: skip


@recipe("CosmosTextToWorldPipeline", lora=TO_LAYERS, **COSMOS)
def cosmos1() -> dict[str, Any]:
    return cosmos1_parts(in_channels=4)


@recipe("CosmosVideoToWorldPipeline", lora=TO_LAYERS, image=image, **COSMOS)
def cosmos1_of_video() -> dict[str, Any]:
    return cosmos1_parts(in_channels=5)


@recipe("Cosmos2TextToImagePipeline", lora=TO_LAYERS, **{k: v for k, v in COSMOS.items() if k != "num_frames"})
def cosmos2() -> dict[str, Any]:
    return wan() | {
        "transformer": cosmos_transformer(), "text_encoder": t5_text(), "safety_checker": HarmlessChecker(),
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True),
    }  # fmt: skip


@recipe("Cosmos2VideoToWorldPipeline", lora=TO_LAYERS, image=image, **COSMOS)
def cosmos2_of_video() -> dict[str, Any]:
    return cosmos2() | {"transformer": cosmos_transformer(in_channels=17)}


def flow_map() -> Any:
    return diffusers.FlowMapEulerDiscreteScheduler(num_train_timesteps=1000, shift=5.0)


def any_flow_sizes(**options: Any) -> dict[str, Any]:
    return {k: v for k, v in wan_sizes(gate_value=0.25, deltatime_type="r", **options).items() if k != "qk_norm"}


@recipe("AnyFlowPipeline", lora=TO_LAYERS, **VIDEO)
def any_flow() -> dict[str, Any]:
    return wan() | {
        "transformer": diffusers.AnyFlowTransformer3DModel(**any_flow_sizes()), "scheduler": flow_map(),
        "text_encoder": t5_text(),
    }  # fmt: skip


def helios_parts(**options: Any) -> dict[str, Any]:
    sizes = {k: v for k, v in wan_sizes().items() if k != "rope_max_seq_len"}
    transformer = diffusers.HeliosTransformer3DModel(
        **sizes, rope_dim=(4, 4, 4), has_multi_term_memory_patch=True, guidance_cross_attn=True,
        zero_history_timestep=True, is_amplify_history=False,
    )  # fmt: skip
    return wan() | {"transformer": transformer, "scheduler": diffusers.HeliosScheduler(**options)}


@recipe("HeliosPipeline", lora=TO_LAYERS, guidance_scale=1.0, **VIDEO)
def helios() -> dict[str, Any]:
    return helios_parts(stage_range=[0, 1], stages=1, use_dynamic_shifting=True)


@recipe("HeliosPyramidPipeline", lora=TO_LAYERS, pyramid_num_inference_steps_list=[1, 2],
        **{k: v for k, v in VIDEO.items() if k != "num_inference_steps"} | {"height": 32, "width": 32})  # fmt: skip
def helios_pyramid() -> dict[str, Any]:
    return helios_parts(stage_range=[0, 0.5, 1], stages=2, use_dynamic_shifting=True)


@recipe(
    "SanaVideoPipeline",
    lora=TO_LAYERS,
    frames=5,
    prompt="a red fox",
    num_inference_steps=2,
    output_type="pt",
    height=32,
    width=32,
    max_sequence_length=16,
    use_resolution_binning=False,
    complex_human_instruction=None,
)
@recipe("SanaImageToVideoPipeline", lora=TO_LAYERS, image=image, frames=5, prompt="a red fox", output_type="pt",
        num_inference_steps=2, height=32, width=32, max_sequence_length=16, use_resolution_binning=False,
        complex_human_instruction=None)  # fmt: skip
def sana_video() -> dict[str, Any]:
    transformer = diffusers.SanaVideoTransformer3DModel(
        in_channels=16, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=3,
        num_cross_attention_heads=2, cross_attention_head_dim=12, cross_attention_dim=24, caption_channels=32,
        sample_size=8, patch_size=(1, 2, 2), qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return wan() | {
        "transformer": transformer, "text_encoder": gemma2_text(), "tokenizer": llama_like_tokens(),
    }  # fmt: skip


def motif_parts(**options: Any) -> dict[str, Any]:
    from transformers import T5Gemma2EncoderConfig, T5Gemma2TextConfig
    from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder

    text = T5Gemma2TextConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=128,
        max_position_embeddings=128, head_dim=16, num_key_value_heads=2, dropout_rate=0.0,
    )  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "image_size": 16, "patch_size": 4, "num_channels": 3,
    }  # fmt: skip
    transformer = diffusers.MotifVideoTransformer3DModel(
        in_channels=33, out_channels=16, num_attention_heads=2, attention_head_dim=12, num_layers=2,
        num_single_layers=3, patch_size=1, patch_size_t=1, qk_norm="rms_norm", text_embed_dim=32,
        rope_axes_dim=(4, 4, 4), **options,
    )  # fmt: skip
    return wan() | {
        "transformer": transformer, "guider": diffusers.AdaptiveProjectedGuidance(),
        "text_encoder": T5Gemma2Encoder(T5Gemma2EncoderConfig(text_config=text, vision_config=vision)),
    }  # fmt: skip


@recipe("MotifVideoPipeline", lora=TO_LAYERS, **VIDEO)
def motif() -> dict[str, Any]:
    return motif_parts()


def pixels_from_anywhere() -> Any:
    """Siglip's processor, which without torchvision takes no tensor of a device: it gets a copy on the CPU."""
    from transformers import SiglipImageProcessorPil

    class FromAnywhere(SiglipImageProcessorPil):  # type: ignore[misc]
        def preprocess(self, images: Any, *args: Any, **options: Any) -> Any:
            return super().preprocess(images.cpu(), *args, **options)

    return FromAnywhere(size={"height": 16, "width": 16})


@recipe("MotifVideoImage2VideoPipeline", lora=TO_LAYERS, image=partial(image, 16), **VIDEO)
def motif_of_image() -> dict[str, Any]:
    return motif_parts(image_embed_dim=32) | {"feature_extractor": pixels_from_anywhere()}
