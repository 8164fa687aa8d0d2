"""Tiny parts of pipelines: text encoders, tokenizers that need no download, VAEs. Sizes are chosen, weights random."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from highwater.nodes.pipelines.tiny_pipelines import byte_characters, clip_tokenizer, t5_tokenizer

__all__ = [
    "clip_text",
    "clip_tokens",
    "clip_vision",
    "image",
    "kl_vae",
    "llama_like_tokens",
    "t5_text",
    "t5_tokens",
    "umt5_text",
]

WIDTH = 32


@functools.cache
def scratch() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="highwater-compat-")
    scratch.folder = folder  # type: ignore[attr-defined]  # lives as long as the process
    return Path(folder.name)


@functools.cache
def clip_tokens() -> Any:
    return clip_tokenizer(scratch())


@functools.cache
def t5_tokens() -> Any:
    return t5_tokenizer(scratch())


@functools.cache
def roberta_tokens() -> Any:
    """Single printable characters, with the marks of XLM-R: 0 begins, 1 pads, 2 ends."""
    from transformers import XLMRobertaTokenizer

    marks = [(mark, 0.0) for mark in ("<s>", "<pad>", "</s>", "<unk>")]
    letters = [("▁", -2.0), *((chr(code), -3.0) for code in range(33, 127))]
    return XLMRobertaTokenizer(vocab=[*marks, *letters, ("<mask>", 0.0)], model_max_length=77)


@functools.cache
def byte_level_roberta_tokens() -> Any:
    """Single bytes, with the marks of RoBERTa: 0 begins, 1 pads, 2 ends."""
    from transformers import RobertaTokenizer

    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *byte_characters()]
    return RobertaTokenizer({word: index for index, word in enumerate(words)}, [], model_max_length=77)


@functools.cache
def chat_glm_tokens() -> Any:
    """Single printable characters, from a model that sentencepiece's own trainer makes."""
    from diffusers.pipelines.kolors import ChatGLMTokenizer
    from sentencepiece import SentencePieceTrainer

    path = scratch() / "chat_glm.model"
    with path.open("wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(map(chr, range(32, 127)))]), model_writer=file, model_type="char",
            vocab_size=110, hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
    return ChatGLMTokenizer(str(path), model_max_length=64)


@functools.cache
def llama_like_tokens(*special: str) -> Any:
    """A byte-level tokenizer with a chat template, as Qwen's and Llama's: every byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]
    vocabulary = {symbol: index for index, symbol in enumerate([*byte_characters(), *marks])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=marks[1:2] + list(special),
        model_max_length=512,
        padding_side="right",
    )
    fast.chat_template = (
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return fast


def clip_text(*, projected: bool = False, layers: int = 3, width: int = WIDTH) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=514, hidden_size=width, intermediate_size=2 * width, projection_dim=width, num_hidden_layers=layers,
        num_attention_heads=4, max_position_embeddings=77, bos_token_id=512, eos_token_id=513, pad_token_id=513,
    )  # fmt: skip
    return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config)


def clip_vision(*, size: int = 32) -> Any:
    from transformers import CLIPVisionModelWithProjection

    return CLIPVisionModelWithProjection(clip_vision_config(image_size=size))


def clip_vision_config(**options: Any) -> Any:
    from transformers import CLIPVisionConfig

    return CLIPVisionConfig(
        **{
            "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "projection_dim": WIDTH, "num_hidden_layers": 3,
            "num_attention_heads": 4, "image_size": 32, "patch_size": 8, **options,
        }
    )  # fmt: skip


def clip_pixels(*, size: int = 32) -> Any:
    from transformers import CLIPImageProcessorPil

    return CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size={"height": size, "width": size})


def siglip_vision(*, size: int = 32) -> Any:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    return SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4,
            image_size=size, patch_size=8,
        )
    )  # fmt: skip


def siglip_pixels(*, size: int = 32) -> Any:
    from transformers import SiglipImageProcessorPil

    return SiglipImageProcessorPil(size={"height": size, "width": size})


def t5_text(*, wide: bool = False) -> Any:
    """``wide``: it knows the 384 tokens of ByT5."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(t5_config(T5Config, 384 if wide else 128))


def umt5_text() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(t5_config(UMT5Config))


def t5_config(config_class: Any, vocabulary: int = 128) -> Any:
    return config_class(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=3, num_heads=4,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def kl_vae(latent_channels: int = 4, *, levels: int = 2, **options: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32, 32, 32)[:levels], down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels, norm_num_groups=4, layers_per_block=1, sample_size=32,
        latent_channels=latent_channels, **{"scaling_factor": 0.5, "shift_factor": 0.0, **options},
    )  # fmt: skip


def fill_zeros(module: Any) -> Any:
    """Give what begins as zeros, as the last layers of a ControlNet do, something to say."""
    with torch.no_grad():
        for weight in module.parameters():
            if not weight.any():
                torch.nn.init.normal_(weight, std=0.05)
    return module


def sharpen(model: Any) -> Any:
    """Scale a language model's layers so that its output depends on them: untrained, they add next to nothing."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(10)
    return model


def image(size: int = 32) -> Any:
    """A picture with every shade."""
    import numpy as np
    from PIL import Image

    ramp = np.linspace(0, 255, size * size * 3).reshape(size, size, 3)
    return Image.fromarray(ramp.astype(np.uint8))


def mask(size: int = 32) -> Any:
    """The left half of a picture."""
    from PIL import Image

    half = Image.new("L", (size, size), 0)
    half.paste(255, (0, 0, size // 2, size))
    return half


def hint(size: int = 32) -> torch.Tensor:
    """A picture for a ControlNet, as a tensor of random values."""
    return torch.rand(1, 3, size, size)


def film(frames: int = 5, size: int = 16) -> list[Any]:
    return [image(size).rotate(90 * number) for number in range(frames)]


def qwen3_text(*, layers: int = 3) -> Any:
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**language_sizes(layers), head_dim=8))


def llama_text(*, layers: int = 3) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**language_sizes(layers)))


def llama_model() -> Any:
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**language_sizes(3)))


def gemma2_text(*, layers: int = 3) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**language_sizes(layers), head_dim=8))


def qwen_vl_text() -> Any:
    """Qwen 2.5 VL, its vision tower included."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}}
    vision = {
        "depth": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 4, "out_hidden_size": WIDTH,
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=language_sizes(3) | rope, vision_config=vision, **QWEN_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def language_sizes(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": 320, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    }  # fmt: skip


QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# Where those are in the vocabulary of `llama_like_tokens`: after 256 bytes and three marks.
QWEN_TOKENS = {"vision_start_token_id": 259, "vision_end_token_id": 260, "image_token_id": 261, "video_token_id": 262}
