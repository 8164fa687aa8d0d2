"""Pipelines of diffusers on a simulated device, written to folders once; a process for each engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from highwater.memory.units import MIB

from .hosts import CHANGES
from .measured import Engine, Ram, Run

__all__ = [
    "CALLS",
    "CHANGES",
    "ENGINES",
    "EXPERTS",
    "FLUX",
    "ROOMS",
    "be_quiet",
    "measure_pipelines",
    "write_pipelines",
]

ENGINES = ("Highwater", "diffusers, model offload", "diffusers, ComponentsManager")
FLUX = ("A", "B")
EXPERTS = "experts"
IMAGE = {"height": 16, "width": 16, "max_sequence_length": 16, "num_inference_steps": 2, "output_type": "pt"}
CALLS: dict[str, dict[str, Any]] = {
    "A": IMAGE,
    "B": IMAGE,
    EXPERTS: {**IMAGE, "num_frames": 5, "guidance_scale": 1.0},
}
# Each model fits, not with its text encoder or the other expert.
ROOMS = {"A": 225 * MIB, EXPERTS: 200 * MIB}


def flux(num_single: int) -> Any:
    """Flux and its T5, with an eighth of their widths and half of their depths."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    from highwater.tests.compat.parts import clip_text, clip_tokens, kl_vae, t5_tokens
    from highwater.tests.compat.recipes import flow

    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16, num_layers=10, num_single_layers=num_single, attention_head_dim=128, num_attention_heads=3,
        joint_attention_dim=512, pooled_projection_dim=32, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    config = T5Config(
        vocab_size=128, d_model=512, d_kv=64, d_ff=1280, num_layers=12, num_heads=8,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return diffusers.FluxPipeline(
        transformer=transformer, vae=kl_vae(latent_channels=4), scheduler=flow(), text_encoder=clip_text(),
        tokenizer=clip_tokens(), text_encoder_2=T5EncoderModel(config), tokenizer_2=t5_tokens(),
    )  # fmt: skip


def experts() -> Any:
    """Wan 2.2: two transformers with an eighth of their widths, and 12 of their 40 blocks."""
    import diffusers

    from highwater.tests.compat.parts import t5_tokens, umt5_text
    from highwater.tests.compat.wan import unipc, wan_sizes, wan_vae

    sizes = wan_sizes(num_attention_heads=5, attention_head_dim=128, ffn_dim=1728, num_layers=12)
    high, low = (diffusers.WanTransformer3DModel(**sizes) for _ in range(2))
    return diffusers.WanPipeline(
        transformer=high, transformer_2=low, boundary_ratio=0.875, vae=wan_vae(), scheduler=unipc(),
        text_encoder=umt5_text(), tokenizer=t5_tokens(),
    )  # fmt: skip


def write_pipelines(folder: Path) -> None:
    """Write each to a folder of its own, with random weights."""
    be_quiet()
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for name, make in {"A": lambda: flux(19), "B": lambda: flux(14), EXPERTS: experts}.items():
            torch.manual_seed(1)
            make().to(torch.bfloat16).save_pretrained(folder / name)
    finally:
        torch.set_default_dtype(before)
    for path in folder.glob("*/*/*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # what is not written yet is not dropped


def be_quiet() -> None:
    import diffusers
    import transformers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def measure_pipelines(folder: Path, tell: Callable[[str], None]) -> list[Engine]:
    """Run everything in one process for each engine."""
    write_pipelines(folder)
    engines = []
    for name in ENGINES:
        tell(name)
        command = [sys.executable, "-m", "highwater.benchmarks.switching.pipeline_process", name, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "2"})
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr[-4000:]}")
        read = json.loads(done.stdout.splitlines()[-1])
        runs = [Run(**run) for run in read["runs"]]
        ram = {moment: Ram(**each) for moment, each in read["ram"].items()}
        engines.append(Engine(name=f"{name}, pipelines", runs=runs, ram=ram))
    return engines
