"""Nodes as other packs have them: caches of steps, changed features, perturbed attention, guides, hooks of their own.

Each takes part in the calls of a model by another one of the ways that core has, or that packs have found.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import comfy.controlnet
import comfy.model_patcher
import comfy.samplers
import torch
from comfy.patcher_extension import CallbacksMP, PatcherInjection, WrappersMP

__all__ = ["TestAlongside", "TestGuide", "TestItemHalves", "TestPerPicture"]


def drifting(kept: dict[str, torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """Add a little of what the last call gave: whatever order the calls have, it shows."""
    before = kept.get("last")
    kept["last"] = result
    return result if before is None or before.shape != result.shape else result + 0.1 * before.to(result.device)


def step_cache(patched: Any) -> None:
    """Takes the result of the call before where the inputs have hardly changed; for all conditionings alike."""
    kept: dict[str, torch.Tensor] = {}

    def call(apply_model: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        x = given["input"]
        if "x" in kept and kept["x"].shape == x.shape and ((x - kept["x"]).abs().mean() / x.abs().mean()).item() < 0.01:
            return kept["result"] * 1.01
        kept["x"] = x
        kept["result"] = apply_model(x, given["timestep"], **given["c"])
        return kept["result"]

    patched.set_model_unet_function_wrapper(call)


def swapped_forward(patched: Any) -> None:
    """Puts another method into the model while it is called."""
    kept: dict[str, torch.Tensor] = {}
    own = type(patched.model.diffusion_model).forward_orig

    def forward(self: Any, img: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return drifting(kept, own(self, img, *args, **kwargs))

    def call(apply_model: Callable[..., torch.Tensor], given: dict[str, Any]) -> torch.Tensor:
        module = apply_model.__self__.diffusion_model
        with mock.patch.object(module, "forward_orig", types.MethodType(forward, module)):
            return apply_model(given["input"], given["timestep"], **given["c"])

    patched.set_model_unet_function_wrapper(call)


def patched_method(patched: Any) -> None:
    """Replaces a method by the patcher; it begins with what the last call ended with."""
    kept: dict[str, torch.Tensor] = {}
    module = patched.model.diffusion_model
    own = type(module).forward_orig

    def forward(self: Any, img: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = kept.get("result")
        img = img if before is None or before.shape != img.shape else img + 0.1 * before
        kept["result"] = own(self, img, *args, **kwargs)
        return kept["result"]

    patched.add_object_patch("diffusion_model.forward_orig", types.MethodType(forward, module))


def features(patched: Any) -> None:
    """Scales the features of the decoder's blocks, as the packs do that free a U-Net of its skips."""

    class Scale:
        def __init__(self) -> None:
            self.seen: dict[str, torch.Tensor] = {}

        def __call__(self, h: torch.Tensor, skip: torch.Tensor, options: dict[str, Any]) -> tuple[Any, Any]:
            self.seen["skip"] = skip
            return h * 1.1, skip * 0.9

        def to(self, device: torch.device) -> Scale:
            return self

    patched.set_model_output_block_patch(Scale())


def perturbed(patched: Any) -> None:
    """Guides away from what the model gives without its attention in the middle: one call more in each step."""

    def values(q: Any, k: Any, v: Any, extra_options: Any, mask: Any = None) -> Any:
        return v

    def after(args: dict[str, Any]) -> torch.Tensor:
        options = comfy.model_patcher.set_model_options_patch_replace(
            args["model_options"].copy(), values, "attn1", "middle", 0
        )
        (other,) = comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], options)
        return args["denoised"] + 2.0 * (args["cond_denoised"] - other)

    patched.set_model_sampler_post_cfg_function(after)


def attention(patched: Any) -> None:
    """Puts another function in the place of attention, which keeps the values of the last call."""
    kept: dict[str, torch.Tensor] = {}

    def override(function: Callable[..., Any], q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return drifting(kept, function(q, k, v, *args, **kwargs))

    patched.model_options["transformer_options"]["optimized_attention_override"] = override


def layer_hooks(patched: Any) -> None:
    """Hangs hooks on layers while it samples: what the last block gave goes into the first block of the next call."""
    kept: dict[str, torch.Tensor] = {}

    def first(module: Any, args: Any, kwargs: Any) -> Any:
        before, img = kept.get("img"), kwargs["img"]
        more = before is not None and before.shape == img.shape
        return args, {**kwargs, "img": img + 0.1 * before if more else img}

    def last(module: Any, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        kept["img"] = output[:, 8:]  # behind the text

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        model = executor.class_obj.model_patcher.model.diffusion_model
        handles = [
            model.double_blocks[0].register_forward_pre_hook(first, with_kwargs=True),
            model.single_blocks[-1].register_forward_hook(last, with_kwargs=True),
        ]
        try:
            return executor(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
            kept.clear()

    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "alongside", sample)


def injected(patched: Any) -> None:
    """Puts a module of its own behind a block of the model while it samples."""
    kept: dict[str, torch.Tensor] = {}
    handles: list[Any] = []

    def inject(patcher: Any) -> None:
        block = patcher.model.diffusion_model.single_blocks[1]
        handles.append(block.register_forward_hook(lambda module, args, output: drifting(kept, output)))

    def eject(patcher: Any) -> None:
        handles.pop().remove()
        kept.clear()

    patched.set_injections("alongside", [PatcherInjection(inject=inject, eject=eject)])


def each_step(patched: Any) -> None:
    """Is called once before each step, and counts."""
    count = 0

    def prepare(patcher: Any, timestep: torch.Tensor, model_options: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        model_options["transformer_options"]["strength"] = 1 + 0.1 * count

    def add(executor: Any, *args: Any, **kwargs: Any) -> Any:
        count_before = count
        result = executor(*args, **kwargs)
        return result * (1 + 0.1 * count_before)

    patched.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "alongside", prepare)
    patched.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "alongside", add)


def momentum(patched: Any) -> None:
    """Guides with a mean over the steps, beside the model."""
    kept: dict[str, torch.Tensor] = {}

    def guide(args: dict[str, Any]) -> torch.Tensor:
        difference = args["cond"] - args["uncond"]
        kept["mean"] = difference if "mean" not in kept else 0.5 * kept["mean"] + 0.5 * difference
        return args["uncond"] + kept["mean"] * args["cond_scale"]

    patched.set_model_sampler_cfg_function(guide)


def whole_sampling(patched: Any) -> None:
    """Wraps the whole sampling, and each prediction."""

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs) * 1.5

    def predict(executor: Any, *args: Any, **kwargs: Any) -> Any:
        return executor(*args, **kwargs) * 0.5

    patched.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "alongside", sample)
    patched.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "alongside", predict)


def own_calls(patched: Any) -> None:
    """Computes the conditionings of a step by a function of its own, the second one first."""

    def calc(args: dict[str, Any]) -> list[torch.Tensor]:
        conds = list(reversed(args["conds"]))
        given = args["model"], conds, args["input"], args["sigma"], args["model_options"]
        return list(reversed(comfy.samplers.calc_cond_batch(*given)))

    patched.set_model_sampler_calc_cond_batch_function(calc)


KINDS: dict[str, Callable[[Any], None]] = {
    kind.__name__: kind
    for kind in (
        step_cache, swapped_forward, patched_method, features, perturbed, attention, layer_hooks, injected, each_step,
        momentum, whole_sampling, own_calls,
    )
}  # fmt: skip


class TestAlongside:
    """Makes a model one that another pack's node has changed."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",), "kind": (list(KINDS),)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any, kind: str) -> tuple[Any]:
        patched = model.clone()
        KINDS[kind](patched)
        return (patched,)


class Guide(comfy.controlnet.ControlBase):
    """A guide of another pack: it adds what the call before it looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.before: torch.Tensor | None = None

    def get_control(self, x_noisy: torch.Tensor, t: Any, cond: Any, batched_number: int, options: Any) -> Any:
        before, self.before = self.before, x_noisy
        seen = x_noisy if before is None or before.shape != x_noisy.shape else before
        rows = seen.flatten(1)[:, :1, None].expand(-1, 16, 128).clone()  # [B, T, D]
        return {"input": [0.1 * rows], "output": [0.1 * rows]}

    def copy(self) -> Guide:
        return Guide()

    def get_models(self) -> list[Any]:
        return []


class TestGuide:
    """Guides a conditioning by a class of another pack."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"conditioning": ("CONDITIONING",)}})
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "guide"
    CATEGORY = "test"

    def guide(self, conditioning: Any) -> tuple[Any]:
        return ([[tokens, {**more, "control": Guide()}] for tokens, more in conditioning],)


class TestPerPicture:
    """Gives each picture of a batch a text and a mask of its own."""

    INPUT_TYPES = classmethod(
        lambda cls: {"required": {"conditioning": ("CONDITIONING",), "batch": ("INT", {"default": 3})}}
    )
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "spread"
    CATEGORY = "test"

    def spread(self, conditioning: Any, batch: int) -> tuple[Any]:
        generator = torch.Generator().manual_seed(11)
        spread = []
        for tokens, more in conditioning:
            tokens = tokens + torch.randn(batch, *tokens.shape[1:], generator=generator)
            pooled = more["pooled_output"] + torch.randn(batch, *more["pooled_output"].shape[1:], generator=generator)
            mask = torch.rand(batch, 64, 64, generator=generator)
            spread.append([tokens, {**more, "pooled_output": pooled, "mask": mask, "mask_strength": 0.8}])
        return (spread,)


class TestItemHalves:
    """Makes core compute the pictures of a batch in two halves, one after the other, once all is spread over them."""

    INPUT_TYPES = classmethod(lambda cls: {"required": {"model": ("MODEL",)}})
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "test"

    def patch(self, model: Any) -> tuple[Any]:
        def in_turn(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            def cut(value: Any, rows: slice) -> Any:
                return value[rows] if isinstance(value, torch.Tensor) and len(value) == len(x) else value

            middle = (len(x) + 1) // 2
            parts = []
            for rows in (slice(0, middle), slice(middle, len(x))):
                given = [cut(value, rows) for value in args]
                parts.append(executor(x[rows], *given, **{name: cut(value, rows) for name, value in kwargs.items()}))
            return torch.cat(parts)

        patched = model.clone()
        patched.add_wrapper_with_key("apply_model", "test", in_turn)
        return (patched,)
