"""What ComfyUI loads as a ControlNet and moves itself: it has no patcher. Runs in the host's own Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.ldm.cascade.controlnet
import comfy.t2i_adapter.adapter
import torch
from comfy.model_patcher import ModelPatcher

from highwater.tests.comfyui.sweep.weights import fill, hint, operations

__all__ = ["ADAPTERS"]

CHANNELS = [32, 64, 128, 128]


def lora(patcher: ModelPatcher) -> Any:
    """Return a ControlNet that is a LoRA of the model that it guides, and takes that model's weights before a run."""
    config = {key: value for key, value in patcher.model.model_config.unet_config.items() if key != "out_channels"}
    full = comfy.cldm.cldm.ControlNet(hint_channels=3, **{**config, **operations(torch.float32)})
    fill(full, 5)
    generator = torch.Generator().manual_seed(8)
    shared = {name for name, _ in patcher.model.diffusion_model.named_parameters()}
    weights: dict[str, Any] = {"lora_controlnet": torch.tensor([])}
    for name, value in full.state_dict().items():
        if name not in shared:
            weights[name] = value
        elif name.endswith(".weight") and value.ndim > 1:
            path = name.removesuffix(".weight")
            weights[f"{path}.up"] = torch.randn(value.shape[0], 2, generator=generator) * 0.1
            weights[f"{path}.down"] = torch.randn(2, value[0].numel(), generator=generator) * 0.1
    return comfy.controlnet.ControlLora(weights).copy().set_cond_hint(hint(1, 3, 64, 64), 0.9)


def adapter(patcher: ModelPatcher, *, model: Callable[[], torch.nn.Module], channels: int = 3, **options: Any) -> Any:
    made = model().eval()
    fill(made, 5)
    control = comfy.controlnet.T2IAdapter(made, channels, **options)
    return control.copy().set_cond_hint(hint(1, channels, 128, 128), 0.9)


def full_adapter() -> Any:
    return comfy.t2i_adapter.adapter.Adapter(
        cin=192, channels=CHANNELS, nums_rb=2, ksize=1, sk=True, use_conv=False, xl=False
    )


def light_adapter() -> Any:
    return comfy.t2i_adapter.adapter.Adapter_light(cin=192, channels=CHANNELS, nums_rb=2)


def cascade_adapter() -> Any:
    return comfy.ldm.cascade.controlnet.ControlNet(c_in=3, c_proj=32, proj_blocks=[0, 7])


ADAPTERS: dict[str, Callable[[ModelPatcher], Any]] = {
    "lora": lora,
    "adapter": partial(adapter, model=full_adapter, compression_ratio=8, upscale_algorithm="nearest-exact"),
    "light adapter": partial(adapter, model=light_adapter, compression_ratio=8, upscale_algorithm="nearest-exact"),
    "cascade": partial(adapter, model=cascade_adapter, compression_ratio=32, upscale_algorithm="bilinear"),
}
