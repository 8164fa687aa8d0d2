"""Tiny pipelines with random weights: real diffusers classes, no download, small enough for any machine.

Most of the bytes lie in the diffusion model, in several equal blocks, so that residency, streaming and eviction
show at 20 to 40 MB. The sizes are chosen beside the widths that the architectures demand (rope axes that sum to
the head width, group counts that divide the channels). The tokenizers know single characters only.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..file_names import naming_path

__all__ = ["ensure_pipelines"]

RECIPE = 1  # raise it when a recipe below changes, so that folders built earlier are built again
STAMP = "highwater.json"
PRINTABLE = [chr(code) for code in range(32, 127)]


def ensure_pipelines(directory: str | Path, names: Iterable[str] | None = None) -> dict[str, Path]:
    """Return the folder of each tiny pipeline, building what is missing or from another recipe (about 10 s).

    A folder appears complete or not at all: it is written beside its place and renamed.

    Args:
        names: which ones, by default all.
    """
    directory = Path(directory)
    folders = {name: directory / name for name in (RECIPES if names is None else names)}
    missing = [name for name, folder in folders.items() if not is_current(folder)]
    if not missing:
        return folders
    directory.mkdir(parents=True, exist_ok=True)
    for name in missing:
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=directory) as scratch:
            built = Path(scratch) / name
            with naming_path(built):
                build_pipeline(name, built, Path(scratch))
            replace_folder(built, folders[name], Path(scratch) / "old")
    return folders


def is_current(folder: Path) -> bool:
    """Whether the folder was built by this recipe; costs one small read."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return bool(stamp == current_stamp())


def current_stamp() -> dict[str, Any]:
    """Tokenizer files differ between the major versions of transformers, so these belong to the recipe."""
    from importlib.metadata import PackageNotFoundError, version

    from .diffusers_pipelines import import_diffusers

    try:
        majors = {package: version(package).split(".")[0] for package in ("diffusers", "transformers")}
    except PackageNotFoundError:
        import_diffusers()  # says what to install
        raise
    return {"recipe": RECIPE, **majors}


def replace_folder(built: Path, target: Path, old: Path) -> None:
    """Move the built folder to its place; another process that was faster with the same recipe wins."""
    if is_current(target):
        return
    if target.exists():
        target.rename(old)
    try:
        built.rename(target)
    except OSError:
        if not is_current(target):
            raise


def build_pipeline(name: str, folder: Path, scratch: Path) -> None:
    """Build one pipeline with seeded weights and save it; leaves torch's random state as it was."""
    import torch

    from .diffusers_pipelines import import_diffusers, quiet_libraries

    import_diffusers()
    seed = 1 + list(RECIPES).index(name)
    with quiet_libraries(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        RECIPES[name](scratch).save_pretrained(folder, safe_serialization=True)
    (folder / STAMP).write_text(json.dumps(current_stamp()), encoding="utf-8")


def build_flux(scratch: Path) -> Any:
    """FluxPipeline in bf16: 4 double blocks of 4.5 MiB, 8 single blocks of 1.9 MiB."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import T5Config, T5EncoderModel

    transformer = FluxTransformer2DModel(
        in_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=64,
        num_attention_heads=4,
        joint_attention_dim=128,
        pooled_projection_dim=64,
        guidance_embeds=True,
        axes_dims_rope=(16, 24, 24),
    )
    vae = build_vae(AutoencoderKL, latent_channels=16, shift_factor=0.1159, scaling_factor=0.3611)
    text_encoder_2 = T5EncoderModel(t5_config(T5Config))
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=build_clip(),
        tokenizer=clip_tokenizer(scratch),
        text_encoder_2=text_encoder_2,
        tokenizer_2=t5_tokenizer(scratch),
        transformer=transformer,
    )
    return pipe.to(dtype=torch.bfloat16)


def build_sd(scratch: Path) -> Any:
    """StableDiffusionPipeline in fp32: a three-level UNet, no safety checker."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    unet = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(56, 112, 112),
        layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
    )
    return StableDiffusionPipeline(
        vae=build_vae(AutoencoderKL, latent_channels=4, scaling_factor=0.18215),
        text_encoder=build_clip(),
        tokenizer=clip_tokenizer(scratch),
        unet=unet,
        scheduler=DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def build_wan(scratch: Path) -> Any:
    """WanPipeline in bf16 with 10 equal blocks; the VAE stays fp32 as in the released folders."""
    import torch
    from diffusers import (
        AutoencoderKLWan,
        FlowMatchEulerDiscreteScheduler,
        WanPipeline,
        WanTransformer3DModel,
    )
    from transformers import UMT5Config, UMT5EncoderModel

    transformer = WanTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=56,
        text_dim=128,
        freq_dim=64,
        ffn_dim=896,
        num_layers=10,
        rope_max_seq_len=64,
    )
    vae = AutoencoderKLWan(base_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    return WanPipeline(
        tokenizer=t5_tokenizer(scratch),
        text_encoder=UMT5EncoderModel(t5_config(UMT5Config)).to(torch.bfloat16),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=transformer.to(torch.bfloat16),
    )


RECIPES: dict[str, Callable[[Path], Any]] = {
    "tiny-flux": build_flux,
    "tiny-sd": build_sd,
    "tiny-wan": build_wan,
}


def build_vae(vae_class: type, **options: Any) -> Any:
    """An image VAE with four levels, so that 64 pixels become 8 latents as in the real ones."""
    return vae_class(
        block_out_channels=(32, 32, 64, 64),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        sample_size=64,
        use_quant_conv=options["latent_channels"] == 4,
        use_post_quant_conv=options["latent_channels"] == 4,
        **options,
    )


def build_clip() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=514,
            hidden_size=64,
            intermediate_size=256,
            projection_dim=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=77,
            bos_token_id=512,
            eos_token_id=513,
            pad_token_id=513,
        )
    )


def t5_config(config_class: type) -> Any:
    return config_class(
        vocab_size=128,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=4,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=1,
    )


def clip_tokenizer(scratch: Path) -> Any:
    """256 byte characters, the same with an end-of-word mark, a start and an end; no merges."""
    from transformers import CLIPTokenizer

    folder = scratch / "clip_tokenizer"
    folder.mkdir(exist_ok=True)
    words = [*byte_characters(), *(f"{symbol}</w>" for symbol in byte_characters())]
    words += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: index for index, word in enumerate(words)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    return CLIPTokenizer.from_pretrained(folder, model_max_length=77, local_files_only=True)


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level BPE (as in GPT-2's encoder)."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def t5_tokenizer(scratch: Path) -> Any:
    """A unigram model over printable ASCII; id 0 pads, 1 ends, 2 is unknown, as in T5."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import T5TokenizerFast

    folder = scratch / "t5_tokenizer"
    folder.mkdir(exist_ok=True)
    letters = [letter for letter in PRINTABLE if letter != " "]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((s, -3.0) for s in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return T5TokenizerFast.from_pretrained(folder, extra_ids=0, model_max_length=64, local_files_only=True)
