"""Real model code: tiny diffusers models on a simulated device equal the CPU, within capacity and without races."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

DEVICE = "sim:1"
ModelAndInputs = tuple[nn.Module, dict[str, Tensor]]


def flux() -> ModelAndInputs:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.randn(16, 3).round(),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, inputs


def wan() -> ModelAndInputs:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 5, 16),
    }
    return model, inputs


def unet() -> ModelAndInputs:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(16, 32),
        norm_num_groups=4, cross_attention_dim=16, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(1, 4, 16, 16),
        "timestep": torch.tensor(3),
        "encoder_hidden_states": torch.randn(1, 5, 16),
    }
    return model, inputs


def vae() -> ModelAndInputs:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 32, 32)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [flux, wan, unet, vae])
def test_model_equals_cpu(hardware: ModuleType, build: Callable[[], ModelAndInputs], dtype: torch.dtype) -> None:
    model, inputs = build()
    model = model.eval().to(dtype)
    floating = {"hidden_states", "encoder_hidden_states", "pooled_projections", "guidance", "sample"}
    inputs = {k: v.to(dtype) if k in floating else v for k, v in inputs.items()}
    with torch.inference_mode():
        expected = model(**inputs).sample
        model.to(DEVICE)
        output = model(**{k: v.to(DEVICE) for k, v in inputs.items()}).sample
    assert str(output.device) == DEVICE
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(output.cpu(), expected, atol=tolerance, rtol=tolerance)


@torch.inference_mode()
def test_streamed_weights_give_the_same_bits_as_resident_ones(hardware: ModuleType) -> None:
    """Weights as views at 256-byte steps of one slab, filled by one flat copy on a side stream, block by block."""
    model, inputs = flux()
    model = model.eval().to(torch.bfloat16)
    inputs = {k: v.to(DEVICE, torch.bfloat16 if v.dtype == torch.float32 else v.dtype) for k, v in inputs.items()}
    model.to(DEVICE)
    resident = model(**inputs).sample.cpu()
    model.to("cpu")

    copies, main = torch.Stream(device=DEVICE), torch.accelerator.current_stream(DEVICE)

    def pack(block: nn.Module) -> tuple[Tensor, list[tuple[nn.Module, str, int, Tensor]]]:
        layout, size = [], 0
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    layout.append((module, name, size, parameter))
                    size += -(-parameter.nbytes // 256) * 256
        slab = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        for _, _, offset, parameter in layout:
            slab[offset : offset + parameter.nbytes].copy_(parameter.detach().flatten().view(torch.uint8))
        return slab, layout

    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    packed = {block: pack(block) for block in blocks}
    for name, child in model.named_children():
        if "transformer_blocks" not in name:
            child.to(DEVICE)
    slot_bytes = max(slab.nbytes for slab, _ in packed.values())
    ring = [torch.empty(slot_bytes, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    ready, free = ([torch.Event(device=DEVICE) for _ in ring] for _ in range(2))
    copies.wait_stream(main)

    def fetch(number: int) -> None:
        slot = number % 2
        slab, _ = packed[blocks[number]]
        with copies:
            copies.wait_event(free[slot])
            ring[slot][: slab.nbytes].copy_(slab, non_blocking=True)
            ready[slot].record(copies)

    def before(block: nn.Module, *_: object) -> None:
        number = blocks.index(block)
        main.wait_event(ready[number % 2])
        for module, name, offset, parameter in packed[block][1]:
            raw = ring[number % 2].narrow(0, offset, parameter.nbytes)
            module._parameters[name] = raw.view(parameter.dtype).view(parameter.shape)

    def after(block: nn.Module, *_: object) -> None:
        number = blocks.index(block)
        free[number % 2].record(main)
        if number + 2 < len(blocks):
            fetch(number + 2)

    for block in blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
    for _ in range(2):
        fetch(0)
        fetch(1)
        assert torch.equal(model(**inputs).sample.cpu(), resident)
    assert hardware.stats(1).num_syncs == 0
    for block in blocks:  # the hooks hold this frame, and the frame holds the memory
        block._forward_pre_hooks.clear()
        block._forward_hooks.clear()
