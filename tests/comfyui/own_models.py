# ruff: noqa: E402 - the folder and the flags of the host come first
"""ComfyUI's own model classes, small, over one and two simulated devices: a script for its Python, not a test.

Prints a line of JSON per model: its name, and what went wrong in which place.

    python own_models.py COMFYUI_DIRECTORY [NAME ...]
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

sys.path.insert(0, sys.argv[1])

import comfy.cli_args

comfy.cli_args.args.cpu = True
comfy.cli_args.args.use_pytorch_cross_attention = True

import comfy.ops
import torch
from torch import nn, randn
from torch.utils._pytree import tree_leaves, tree_map_only

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile

MIB = 1 << 20
DEVICES = ["cpu", "gpu:0", "gpu:1"]
KIND: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
Inputs = dict[str, Any]


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.05
    for buffer in model.buffers():
        if buffer.is_floating_point() and not buffer.isfinite().all():
            buffer.zero_()
    return model.eval().requires_grad_(False)


def options(**patches: Any) -> Inputs:
    """Return what core's sampler hands to every block."""
    return {
        "sigmas": torch.tensor([0.7]),
        "cond_or_uncond": [0, 1],
        "sample_sigmas": torch.linspace(1, 0, 4),
        "patches": {},
        "patches_replace": {"dit": {}},
        "uuids": [1],
    } | patches


FLUX: Inputs = {
    "in_channels": 4, "out_channels": 4, "vec_in_dim": 32, "context_in_dim": 32, "hidden_size": 32, "mlp_ratio": 2.0,
    "num_heads": 2, "depth": 3, "depth_single_blocks": 4, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2,
    "qkv_bias": True, "guidance_embed": True, "txt_ids_dims": [],
}  # fmt: skip


def louder(arguments: Inputs, extra: Inputs) -> Inputs:
    output: Inputs = extra["original_block"](arguments)
    output["img"] = output["img"] * 1.5 + arguments["img"]
    return output


def left_out(arguments: Inputs, extra: Inputs) -> Inputs:
    return arguments


def written(arguments: Inputs) -> Inputs:
    """Write into the image between blocks, as the ControlNet of DiffSynth for Qwen-Image does."""
    arguments["img"][:, :4] += arguments["img"][:, :4] * 0.1
    return arguments


def flux() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.flux.model import Flux

    return Flux(**FLUX, **KIND), {
        "x": randn(2, 4, 8, 8), "timestep": torch.tensor([0.5, 0.5]), "context": randn(2, 6, 32), "y": randn(2, 32),
        "guidance": torch.tensor([3.5, 3.5]), "transformer_options": options(),
        "control": {"input": [randn(2, 16, 32) for _ in range(3)], "output": [randn(2, 16, 32) for _ in range(4)]},
    }  # fmt: skip


def flux_patched() -> tuple[nn.Module, Inputs]:
    model, inputs = flux()
    replaced = {("double_block", 1): louder, ("double_block", 2): louder, ("single_block", 2): louder}
    return model, inputs | {
        "transformer_options": options(patches={"double_block": [written]}, patches_replace={"dit": replaced})
    }


def flux2() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.flux.model import Flux

    config = {"global_modulation": True, "mlp_silu_act": True, "ops_bias": False, "vec_in_dim": None, "qkv_bias": False}
    axes = {"axes_dim": [4, 4, 4, 4], "txt_ids_dims": [3]}
    _, inputs = flux()
    del inputs["y"], inputs["control"]
    return Flux(**FLUX | config | axes, **KIND), inputs


def chroma() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.chroma.model import Chroma

    config = {name: value for name, value in FLUX.items() if name != "guidance_embed"} | {
        "in_channels": 16, "out_channels": 16, "vec_in_dim": None, "in_dim": 64, "out_dim": 32, "hidden_dim": 32,
        "n_layers": 2,
    }  # fmt: skip
    return Chroma(**config, **KIND), {
        "x": randn(1, 4, 8, 8), "timestep": torch.tensor([0.5]), "context": randn(1, 6, 32),
        "guidance": torch.tensor([0.0]), "transformer_options": options(),
    }  # fmt: skip


def sd3() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 256}}
    model = OpenAISignatureMMDITWrapper(
        input_size=None, patch_size=2, in_channels=4, depth=4, adm_in_channels=32, context_embedder_config=embedder,
        pos_embed_max_size=16, qk_norm="rms", x_block_self_attn_layers=[0, 1], num_patches=256, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 8, 8), "timesteps": torch.tensor([0.5]), "context": randn(1, 6, 32), "y": randn(1, 32),
        "transformer_options": options(), "control": {"output": [randn(1, 16, 256), randn(1, 16, 256)]},
    }  # fmt: skip


def qwen_image() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=5, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4), **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 1, 8, 8), "timestep": torch.tensor([0.5]), "context": randn(1, 6, 16),
        "transformer_options": options(patches={"double_block": [written]}),
        "control": {"input": [randn(1, 16, 32), randn(1, 16, 32)]},
    }  # fmt: skip


WAN: Inputs = {
    "in_dim": 4, "dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 16, "out_dim": 4, "num_heads": 2, "text_len": 8,
}  # fmt: skip


def wan() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.wan.model import WanModel

    return WanModel(model_type="t2v", num_layers=5, **WAN, **KIND), {
        "x": randn(1, 4, 2, 8, 8), "timestep": torch.tensor([3.0]), "context": randn(1, 6, 16),
        "transformer_options": options(),
    }  # fmt: skip


def wan_vace() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.wan.model import VaceWanModel

    _, inputs = wan()
    return VaceWanModel(num_layers=6, vace_layers=3, vace_in_dim=8, **WAN, **KIND), inputs | {
        "vace_context": randn(1, 2, 8, 2, 8, 8), "vace_strength": [1.0, 0.5],
    }  # fmt: skip


def hidream() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.hidream.model import HiDreamImageTransformer2DModel

    model = HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=4, out_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16,
        num_attention_heads=4, caption_channels=[32, 16], text_emb_dim=64, axes_dims_rope=(8, 4, 4),
        max_resolution=(32, 32), llama_layers=[0, 1, 1, 0, 1], **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 8, 8), "t": torch.tensor([300.0]), "y": randn(1, 64), "context": randn(1, 8, 32),
        "encoder_hidden_states_llama3": randn(1, 2, 8, 16), "transformer_options": options(),
    }  # fmt: skip


def cosmos() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.cosmos.model import GeneralDIT

    model = GeneralDIT(
        max_img_h=32, max_img_w=32, max_frames=8, in_channels=4, out_channels=4, patch_spatial=2, patch_temporal=1,
        model_channels=32, num_blocks=5, num_heads=2, crossattn_emb_channels=32, pos_emb_cls="rope3d",
        use_adaln_lora=True, adaln_lora_dim=8, extra_per_block_abs_pos_emb=True,
        extra_per_block_abs_pos_emb_type="learnable", block_x_format="THWBD", affline_emb_norm=True, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 2, 8, 8), "timesteps": torch.tensor([300.0]), "context": randn(1, 6, 32),
        "transformer_options": options(),
    }  # fmt: skip


def hunyuan_video() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    config = {name: value for name, value in FLUX.items() if name != "txt_ids_dims"} | {
        "depth_single_blocks": 3, "theta": 256, "patch_size": [1, 2, 2], "byt5": False, "meanflow": False,
        "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False,
    }  # fmt: skip
    return HunyuanVideo(**config, **KIND), {
        "x": randn(1, 4, 2, 8, 8), "timestep": torch.tensor([300.0]), "context": randn(1, 6, 32), "y": randn(1, 32),
        "guidance": torch.tensor([6.0]), "transformer_options": options(),
        "control": {"input": [randn(1, 32, 32)], "output": [randn(1, 32, 32)]},
    }  # fmt: skip


def hunyuan_video_without_last_blocks() -> tuple[nn.Module, Inputs]:
    model, inputs = hunyuan_video()
    replaced = {("single_block", 2): left_out, ("double_block", 2): left_out}
    return model, inputs | {"transformer_options": options(patches_replace={"dit": replaced}), "control": None}


def lumina() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.lumina.model import NextDiT

    model = NextDiT(
        patch_size=2, in_channels=4, dim=32, n_layers=5, n_refiner_layers=2, n_heads=2, n_kv_heads=1, cap_feat_dim=32,
        axes_dims=[4, 6, 6], axes_lens=[32, 64, 64], qk_norm=True, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 8, 8), "timesteps": torch.tensor([0.5]), "context": randn(1, 6, 32), "num_tokens": 6,
        "transformer_options": options(),
    }  # fmt: skip


def ltx() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.lightricks.model import LTXVModel

    model = LTXVModel(
        in_channels=8, cross_attention_dim=32, attention_head_dim=8, num_attention_heads=4, caption_channels=32,
        num_layers=5, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 8, 2, 4, 4), "timestep": torch.tensor([0.5]), "context": randn(1, 6, 32), "attention_mask": None,
        "transformer_options": options(),
    }  # fmt: skip


def aura() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.aura.mmdit import MMDiT

    model = MMDiT(
        in_channels=4, out_channels=4, dim=256, n_layers=4, n_double_layers=2, n_heads=1, global_conddim=256,
        cond_seq_dim=32, max_seq=64, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 8, 8), "timestep": torch.tensor([0.5]), "context": randn(1, 6, 32),
        "transformer_options": options(),
    }  # fmt: skip


def unet() -> tuple[nn.Module, Inputs]:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    model = UNetModel(
        image_size=32, in_channels=4, out_channels=4, model_channels=32, num_res_blocks=[1, 1], channel_mult=[1, 2],
        num_heads=2, transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1], transformer_depth_middle=1,
        context_dim=16, use_spatial_transformer=True, use_linear_in_transformer=True, **KIND,
    )  # fmt: skip
    return model, {
        "x": randn(1, 4, 8, 8), "timesteps": torch.tensor([300]), "context": randn(1, 6, 16),
        "transformer_options": options(patches_replace={}),
        "control": {"input": [randn(1, 32, 8, 8)], "middle": [randn(1, 64, 4, 4)], "output": [randn(1, 64, 4, 4)]},
    }  # fmt: skip


MODELS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    build.__name__: build
    for build in (
        flux, flux_patched, flux2, chroma, sd3, qwen_image, wan, wan_vace, hidream, cosmos, hunyuan_video,
        hunyuan_video_without_last_blocks, lumina, ltx, aura, unet,
    )
}  # fmt: skip


def to(value: Any, device: str) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def outputs_of(model: nn.Module, inputs: Inputs) -> list[torch.Tensor]:
    return [leaf.cpu() for leaf in tree_leaves(model(**inputs)) if isinstance(leaf, torch.Tensor)]


def places(model: nn.Module, manager: MemoryManager) -> dict[str, tuple[str, str]]:
    """Return profile and placement of each place; streamed with room for about half of the blocks."""
    with manage(model, placement="gpu:0&gpu:1", manager=manager) as managed:
        managed_component = managed.members[0].managed
        largest = max(block.weight_bytes for block in managed_component.component.blocks)
        shares = managed_component.plan.shares
    rooms = [share.fixed_bytes + max(1.3 * largest, 0.45 * share.resident_bytes) for share in shares]
    each = ",".join(f"gpu:{index}={room / MIB:.4f}MiB" for index, room in enumerate(rooms))
    return {
        "resident": ("auto", "gpu:0"),
        "streamed": (f"{sum(rooms) / MIB:.4f}MiB", "gpu:0"),
        "split": ("auto", "gpu:0&gpu:1"),
        "split and streamed": (each, "gpu:0&gpu:1"),
    }


def compare(model: nn.Module, inputs: Inputs, manager: MemoryManager) -> dict[str, str]:
    """Return what differs from the unmanaged model, by place, as a host's component and as one of `manage`."""
    plain, here = copy.deepcopy(model).to("sim:0"), to(inputs, "sim:0")
    want = outputs_of(plain, to(inputs, "sim:0"))
    assert all(tensor.isfinite().all() for tensor in want)
    problems = {}
    for place, (profile, placement) in places(model, manager).items():
        for is_hosted in (False, True):
            (member,), _ = manager.add(
                {"model": model},
                kinds={"model": "diffusion"},
                placement=parse_placement(placement, devices=DEVICES),
                profile=parse_profile(profile, devices=DEVICES, components=["model"]),
                precision=None,
                name=None,
                node_id=None,
                is_hosted=is_hosted,
            )
            try:
                if is_hosted:
                    manager.hosting.load(member)
                for given in (here, here) if is_hosted else (inputs, here):
                    got = outputs_of(model, copy.deepcopy(given))
                    if len(got) != len(want) or not all(map(torch.equal, got, want)):
                        problems[f"{place}, hosted" if is_hosted else place] = "differs"
            except Exception as error:
                problems[f"{place}, hosted" if is_hosted else place] = f"{type(error).__name__}: {error}"
            manager.release_all()
    return problems


def main(names: list[str]) -> None:
    simdevice.install("sim", num_devices=2)
    for name in names or MODELS:
        torch.manual_seed(1)
        model, inputs = MODELS[name]()
        filled(model)
        with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=256 * MIB)] * 2), torch.inference_mode():
            manager = MemoryManager()
            manager.set_watermark("*", 0, 0)
            problems = compare(model, inputs, manager)
            del model
            gc.collect()
        print(json.dumps({"name": name, "problems": problems}), flush=True)


if __name__ == "__main__":
    main(sys.argv[2:])
