"""Tiny models that read pictures and text, with which newer pipelines encode their prompts, and their processors.

transformers' processors of Qwen have a part for videos, which needs torchvision. No pipeline here encodes a video, so
the processors have a part for pictures (without torchvision, by way of PIL) and a tokenizer, and no third.
"""

from __future__ import annotations

from typing import Any

from highwater.tests.compat.parts import QWEN_MARKS, QWEN_TOKENS, WIDTH, language_sizes, llama_like_tokens

__all__ = ["pictures_only", "qwen3_vl_model", "qwen3_vl_text", "qwen_processor", "qwen_tokens"]

ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e6}}


def pictures_only(processor_class: Any) -> Any:
    """Return a processor's class that has no part for videos; all else is its parent's."""

    class PicturesOnly(processor_class):  # type: ignore[misc]
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    return PicturesOnly


def qwen_tokens() -> Any:
    return llama_like_tokens(*QWEN_MARKS)


def qwen_processor(name: str = "Qwen2VLProcessor", *, patch_size: int = 16) -> Any:
    """A processor that makes four tokens of a picture, whatever its size."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    pixels = (4 * patch_size) ** 2
    pictures = Qwen2VLImageProcessorPil(patch_size=patch_size, min_pixels=pixels, max_pixels=pixels)
    tokens = qwen_tokens()
    made = pictures_only(getattr(transformers, name))
    return made(image_processor=pictures, tokenizer=tokens, chat_template=tokens.chat_template)


def qwen3_vl_config(*, layers: int = 3, width: int = WIDTH, patch_size: int = 16) -> Any:
    from transformers import Qwen3VLConfig

    vision = {
        "depth": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 4, "out_hidden_size": width,
        "patch_size": patch_size, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
    }  # fmt: skip
    text = language_sizes(layers) | {"hidden_size": width, "head_dim": 8} | ROPE
    return Qwen3VLConfig(text_config=text, vision_config=vision, **QWEN_TOKENS)


def qwen3_vl_text(**sizes: Any) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration(qwen3_vl_config(**sizes))


def qwen3_vl_model(**sizes: Any) -> Any:
    from transformers import Qwen3VLModel

    return Qwen3VLModel(qwen3_vl_config(**sizes))
