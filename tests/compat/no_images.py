"""Pipelines of diffusers that denoise text and proteins."""

from __future__ import annotations

from typing import Any

import diffusers
import torch

from highwater.tests.compat.parts import language_sizes, llama_like_tokens, llama_text, sharpen
from highwater.tests.compat.recipes import PROMPT, TO_LAYERS, recipe

TEXT = {"prompt": PROMPT, "gen_length": 16, "num_inference_steps": 4, "temperature": 1.0, "generator": None}


@recipe("LLaDA2Pipeline", block_length=8, mask_token_id=300, **TEXT)
def llada2() -> dict[str, Any]:
    # The real model brings code of its own; the pipeline takes any that gives logits.
    return {
        "model": sharpen(llama_text()), "scheduler": diffusers.BlockRefinementScheduler(block_length=8),
        "tokenizer": llama_like_tokens(),
    }  # fmt: skip


@recipe("DiffusionGemmaPipeline", confidence_threshold=None, **TEXT)
def diffusion_gemma() -> dict[str, Any]:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    text = language_sizes(3) | {
        "head_dim": 8, "sliding_window": 16, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    }  # fmt: skip
    vision = language_sizes(2) | {"head_dim": 8, "patch_size": 8, "position_embedding_size": 64}
    config = DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision | {"model_type": "gemma4_vision"},
        canvas_length=8,
        boi_token_id=301,
        eoi_token_id=302,
        image_token_id=303,
    )
    model = DiffusionGemmaForBlockDiffusion(config)
    model.set_experts_implementation("eager")  # the fast one needs a kernel that a simulated device lacks
    return {
        "model": sharpen(model),
        "scheduler": diffusers.BlockRefinementScheduler(block_length=8), "processor": llama_like_tokens(),
    }  # fmt: skip


NUM_TOKENS, NUM_RESIDUES, NUM_ATOMS = 6, 8, 37


def protein() -> dict[str, Any]:
    """What RFD4's preparation makes of a structure: a chain of six residues, the last one given."""
    every = torch.ones(1, NUM_TOKENS, dtype=torch.bool)
    given = torch.arange(NUM_TOKENS)[None] == NUM_TOKENS - 1
    return {
        "padding_mask": every, "is_in_context_conditioning": given, "supports_local_latent": every,
        "token_type": torch.zeros(1, NUM_TOKENS, dtype=torch.long),
        "atom37_mask": torch.ones(1, NUM_TOKENS, NUM_ATOMS, dtype=torch.bool),
        "coords_nm": torch.randn(1, NUM_TOKENS, NUM_ATOMS, 3),
        "conditioning_features": {
            "condition_sequence_1_residue": torch.arange(NUM_TOKENS)[None] % 3,
            "molecule_iid": torch.zeros(1, NUM_TOKENS, dtype=torch.long),
        },
    }  # fmt: skip


@recipe("RFD4ProteinaPipeline", lora=TO_LAYERS, partial_t_bb_ca=0.3, partial_t_local_latents=0.3, **{
        name: lambda name=name: protein()[name] for name in protein()})  # fmt: skip
def rfd4() -> dict[str, Any]:
    sizes = {
        "token_dim": 32, "nheads": 2, "pair_repr_dim": 16, "latent_dim": 4, "token_type_emb_dim": 8, "nlayers": 3,
    }  # fmt: skip
    transformer = diffusers.RFD4ProteinaTransformer(
        dim_cond=16, t_emb_dim=16, tri_mult_c=8, num_sequence_classes=NUM_RESIDUES,
        feats_seq=("xt_bb_ca", "xt_local_latents", "token_type"),
        feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents", "recycle_remaining"),
        feats_pair_repr=("xt_bb_ca_pair_dists", "molecule_idx_pair"), **sizes,
    )  # fmt: skip
    vae = diffusers.RFD4ProteinaAutoencoder(
        atom37_mask=[[True] * NUM_ATOMS] * NUM_RESIDUES, allowed_residue_types=[[True] * NUM_RESIDUES] * 7,
        n_residue_types=NUM_RESIDUES, dim_cond=16, encoder_feats_seq=("token_type", "x1_a37coors_nm"), **sizes,
    )  # fmt: skip
    steps = {"noise_mode": "1/t", "tsr_k": 1.0, "tsr_sigma": 1.0, "tail_steps": 1}
    return {
        "transformer": transformer, "vae": vae, "recycle_depths": [2, 1, 1],
        "bb_ca_scheduler": diffusers.RFD4ProteinaScheduler(schedule_mode="log", **steps),
        "local_latents_scheduler": diffusers.RFD4ProteinaScheduler(schedule_mode="power", **steps),
    }  # fmt: skip
