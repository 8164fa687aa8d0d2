"""Small models of diffusers' own classes compute with weights in eight bits, close to as stored.

Each class keeps some of its layers out of eight bits; Z-Image asks one of those for its dtype before it computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils._pytree import tree_leaves, tree_map_only

from highwater.memory import MemoryManager, manage
from highwater.memory.options.precision import Precision
from highwater.memory.planner.form_choice import explain_wide

os.environ.setdefault("HF_HUB_OFFLINE", "1")

Shapes = dict[str, tuple[int, ...]]

# By class: what makes it small, the shapes of its inputs, and inputs that are no random tensors.
MODELS: dict[str, tuple[dict[str, Any], Shapes, dict[str, Any]]] = {
    "FluxTransformer2DModel": (
        {"patch_size": 1, "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": (1, 16, 8), "encoder_hidden_states": (1, 6, 32), "pooled_projections": (1, 16),
         "img_ids": (16, 3), "txt_ids": (6, 3)},
        {"timestep": torch.tensor([0.5])},
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 3, "attention_head_dim": 8,
         "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 16, "out_channels": 4,
         "pooled_projection_dim": 16, "pos_embed_max_size": 16, "dual_attention_layers": (0,), "qk_norm": "rms_norm"},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 5, 16), "pooled_projections": (1, 16)},
        {"timestep": torch.tensor([500])},
    ),
    "HunyuanVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
         "num_single_layers": 2, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16,
         "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)},
        {"hidden_states": (1, 4, 1, 6, 6), "encoder_hidden_states": (1, 5, 16), "pooled_projections": (1, 8)},
        {"timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 5), "guidance": torch.tensor([6.0])},
    ),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 16,
         "text_embed_dim": 16, "num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 1,
         "patch_size": 2, "max_text_seq_length": 6},
        {"hidden_states": (1, 1, 4, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([500])},
    ),
    "MochiTransformer3DModel": (
        {"patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "in_channels": 4,
         "pooled_projection_dim": 16, "qk_norm": "rms_norm", "text_embed_dim": 16, "time_embed_dim": 8,
         "max_sequence_length": 6},
        {"hidden_states": (1, 4, 1, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool)},
    ),
    "Lumina2Transformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 48, "num_layers": 3,
         "num_refiner_layers": 1, "num_attention_heads": 3, "num_kv_heads": 1, "multiple_of": 16, "cap_feat_dim": 16,
         "axes_dim_rope": (4, 6, 6), "axes_lens": (64, 64, 64)},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([0.5]), "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool)},
    ),
    "ZImageTransformer2DModel": (
        {"all_patch_size": (2,), "all_f_patch_size": (1,), "in_channels": 4, "dim": 32, "n_layers": 2,
         "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 6, 6],
         "axes_lens": [64, 32, 32]},
        {},
        {"x": [torch.linspace(-1, 1, 256).reshape(4, 1, 8, 8)], "cap_feats": [torch.linspace(-1, 1, 96).reshape(6, 16)],
         "t": torch.tensor([0.5])},
    ),
    "QwenImageTransformer2DModel": (
        {"patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6)},
        {"hidden_states": (1, 16, 16), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([0.5]), "img_shapes": [(1, 4, 4)],
         "encoder_hidden_states_mask": torch.ones(1, 6, dtype=torch.long)},
    ),
    "WanTransformer3DModel": (
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 48, "num_layers": 3, "rope_max_seq_len": 32},
        {"hidden_states": (1, 4, 1, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([500])},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16,
         "cross_attention_dim": 32, "num_layers": 2, "caption_channels": 16},
        {"hidden_states": (1, 16, 4), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([500]), "encoder_attention_mask": torch.ones(1, 6, dtype=torch.bool),
         "num_frames": 1, "height": 4, "width": 4},
    ),
    "AuraFlowTransformer2DModel": (
        {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 2,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 16,
         "out_channels": 4, "pos_embed_max_size": 64},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([0.5])},
    ),
    "SanaTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
         "num_attention_heads": 4, "num_cross_attention_heads": 4, "cross_attention_head_dim": 8,
         "cross_attention_dim": 32, "caption_channels": 16, "sample_size": 8},
        {"hidden_states": (1, 4, 8, 8), "encoder_hidden_states": (1, 6, 16)},
        {"timestep": torch.tensor([500])},
    ),
}  # fmt: skip


def build(name: str, dtype: torch.dtype) -> nn.Module:
    import diffusers

    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**MODELS[name][0])
    for parameter in model.parameters():  # a gate or an output layer of zeros would hide everything before it
        if float(parameter.detach().std()) == 0.0:
            nn.init.normal_(parameter, std=0.1)
    # Not by `to`, which a class with weights in float32 answers with a warning.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


def call_with_inputs(name: str, dtype: torch.dtype) -> Callable[[nn.Module], list[torch.Tensor]]:
    _, shapes, others = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    inputs = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    inputs |= others
    values = tree_map_only(torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, inputs)

    def call(model: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            output = model(**values, return_dict=False)
        return [leaf.float().flatten() for leaf in tree_leaves(output)]

    return call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_in_eight_bits_is_close_to_as_stored(name: str, dtype: torch.dtype) -> None:
    model, call = build(name, dtype), call_with_inputs(name, dtype)
    wants = call(model)
    with manage(model, placement="cpu", precision="fp8 scaled", manager=MemoryManager()) as managed:
        plan, component = managed.plan.components[0], managed.members[0].managed.component
        assert plan.forms, "nothing was cast"
        kept = explain_wide(component, Precision.ENCODED)
        assert (kept in plan.reasons) if kept else not any("stay as stored" in line for line in plan.reasons)
        for got, want in zip(call(model), wants, strict=True):
            assert torch.isfinite(got).all()
            assert cosine_similarity(got, want, dim=0) > 0.98
            assert not torch.equal(got, want)


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "ZImageTransformer2DModel"])
def test_streamed_eight_bits_are_those_of_resident_ones(machine, name: str) -> None:
    dtype = torch.bfloat16
    call = call_with_inputs(name, dtype)
    outputs = []
    for placement, profile in (("cpu", "auto"), ("gpu:0", "auto"), ("gpu:0", "5")):
        with machine(64) as manager:
            model = build(name, dtype)
            with manage(model, placement=placement, profile=profile, precision="fp8 scaled", manager=manager):
                outputs.append([tensor.cpu() for tensor in call(model)])
            del model  # Z-Image keeps its tables of positions on the device
    for got in outputs[1:]:
        assert all(map(torch.equal, got, outputs[0]))
