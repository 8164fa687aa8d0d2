"""Compares managed models with core's own load of them: one step, one encoded text, one image encoded and decoded.

The reference is core's own: the same file read again by core's loader, in core's own patcher with the same patches, on
the same device. It costs the model's bytes of RAM once more while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import comfy.model_management
import comfy.sample
import torch
from comfy.model_patcher import ModelPatcher
from torch.utils._python_dispatch import TorchDispatchMode

from ...memory.errors import InvalidInput
from ...memory.hosted_component import Comparison, Verification, device_name, same_bits
from . import loading
from .adopting import notes_for
from .core_fields import (
    copy_own_state,
    copy_state,
    drop_backups,
    own_patches,
    put_parameter,
    set_clip,
    set_vae,
    take_off,
)
from .core_loading import unload
from .dynamic_models import dynamic_model_of, is_dynamic
from .foreign import class_behind
from .guides import KEY as GUIDES_KEY
from .managing import copy_model, read_again, reload_managed
from .micro_batches import compute_halves_in_turn
from .patcher import HighwaterPatcher
from .private_weights import own_weights
from .tiled_vae import as_core

__all__ = ["verify_clip", "verify_model", "verify_vae"]

# One step of the plainest sampler: the model is called once, or once for each half of the guidance.
SAMPLER, SCHEDULER, STEPS = "euler", "simple", 1


def verify_model(
    model: ModelPatcher, positive: Any, negative: Any, latent: dict[str, Any], *, seed: int, cfg: float
) -> Verification:
    """Run one denoising step with a managed model and with core's own load of it."""

    def sample(patcher: ModelPatcher) -> torch.Tensor:
        start = comfy.sample.fix_empty_latent_channels(patcher, latent["samples"].clone())
        noise = comfy.sample.prepare_noise(start, seed, latent.get("batch_index"))
        result: torch.Tensor = comfy.sample.sample(
            patcher,
            noise,
            STEPS,
            cfg,
            SAMPLER,
            SCHEDULER,
            positive,
            negative,
            start,
            denoise=1.0,
            noise_mask=latent.get("noise_mask"),
            disable_pbar=True,
            seed=seed,
        )
        return result

    return compare_with_core(model, sample)


def verify_clip(clip: Any, text: str) -> Verification:
    """Encode a text with a managed text encoder and with core's own load of it."""

    def encode(patcher: ModelPatcher) -> Any:
        other = clip.clone()
        set_clip(other, patcher)
        return other.encode_from_tokens_scheduled(other.tokenize(text))

    return compare_with_core(clip.patcher, encode)


def verify_vae(vae: Any, image: torch.Tensor | None, latent: dict[str, Any] | None) -> Verification:
    """Encode an image, or decode a latent, or both, with a managed VAE and with core's own load of it."""

    def run(patcher: ModelPatcher) -> list[torch.Tensor]:
        other = as_core(vae)  # in one piece, or in core's own tiles: both alike
        set_vae(other, patcher)
        results = []
        if image is not None:
            results.append(other.encode(image[..., :3].clone()))
        given = results[0] if latent is None else latent["samples"]
        return [*results, other.decode(given.clone())]

    return compare_with_core(vae.patcher, run)


def compare_with_core(patcher: Any, run: Callable[[ModelPatcher], Any]) -> Verification:
    """Run a function with a managed model, recorded and unrecorded, then with core's model; restore the state after.

    Raises:
        InvalidInput: the model is not managed.
    """
    if is_dynamic(patcher):
        raise InvalidInput(
            f"{dynamic_model_of(patcher).name} has engine dynamic, so ComfyUI itself computes with it, and there is "
            "nothing to compare; to verify Highwater's own, set engine blocks in its loader"
        )
    if not isinstance(patcher, HighwaterPatcher):
        notes = notes_for(patcher)
        raise InvalidInput(
            f"{type(getattr(patcher, 'model', patcher)).__name__} is not managed; connect the output of a "
            f"Highwater loader or Manage node{''.join(f' ({note})' for note in notes)}"
        )
    was_loaded = patcher.loaded_size() > 0
    comfy.model_management.load_models_gpu([patcher])
    comparison = patcher.hosted.compare(patcher.model, left_out=CORES_OWN)
    try:
        comparison.run_managed(lambda: run(patcher))
        rests = patcher.hosted.rests
        twin, how = make_twin(patcher, comparison.notes)
        unload(patcher.model)  # which puts the originals back where patches were written
        settle_weights(patcher, twin, comparison)
        try:
            comparison.run_reference(twin.model, lambda: run(twin))
            if getattr(twin.model, "model_lowvram", False):
                how += "; it does not fit as a whole, so ComfyUI casts some layers one by one"
                if twin.patches:
                    comparison.notes.append(
                        "ComfyUI computes LoRAs differently on layers that do not fit: small differences are normal"
                    )
        finally:
            unload(twin.model)
        if rests:
            comparison.notes.append(f"the reference computes with the same weights {rests}, decoded")
        found = comparison.result(how)
    finally:
        comparison.put_back_random()
    if was_loaded:
        comfy.model_management.load_models_gpu([patcher])
    return found


# What core writes on modules as it loads them.
CORES_OWN = frozenset(
    {"comfy_cast_weights", "prev_comfy_cast_weights", "comfy_patched_weights", "weight_function", "bias_function"}
)


# -- core's own load of the same model


def make_twin(patcher: HighwaterPatcher, notes: list[str]) -> tuple[ModelPatcher, str]:
    """Return core's own patcher with the patches of ours, over a model of its own, and how that was made."""
    model = read_model_again(patcher)
    device = device_name(patcher.load_device)
    how = f"ComfyUI's own load of the same file on {device}"
    if model is None:
        unload(patcher.model)
        patcher.leave_host()
        model = copy_model(patcher.model)
        take_off(model)
        how = f"ComfyUI's own load of a copy of the weights on {device}; the loader names no file"
    carried = patcher.clone()
    for kind in list(carried.wrappers):  # what we hang on our models is not core's, and looks for them
        carried.remove_wrappers_with_key(kind, GUIDES_KEY)
    own = class_behind(type(patcher))
    twin = own(model, patcher.load_device, patcher.offload_device, weight_inplace_update=patcher.weight_inplace_update)
    copy_state(twin, carried)
    copy_own_state(twin, carried)
    drop_backups(twin)
    own_patches(twin)
    if patcher.hosted.computes_at_once:
        compute_halves_in_turn(twin)
        notes.append("each conditioning of a step is computed alone, as over several devices at once")
    decode_alike(patcher, twin, notes)
    return twin, how


def decode_alike(patcher: HighwaterPatcher, twin: ModelPatcher, notes: list[str]) -> None:
    """Give the twin our encoded weights, decoded; with the patches that they have already."""
    patched = []
    for key, weight in patcher.hosted.weights.items():
        if not weight.is_encoded:
            continue
        held = parameter_of(twin.model, key)
        with torch.no_grad(), torch.inference_mode(False):
            stored = weight.read_stored().to(patcher.load_device)  # a sum on the CPU may differ by a step
            put_parameter(twin.model, key, weight.add_factors(stored).to(held.device, held.dtype))
        if key in {*patcher.hosted.patched, *patcher.hosted.factored} and twin.patches.pop(key, None) is not None:
            patched.append(key)
    if patched:
        notes.append(
            f"{len(patched)} weights {patcher.hosted.rests} already have their patches: "
            "applying the patches is not compared"
        )


def settle_weights(patcher: HighwaterPatcher, twin: ModelPatcher, comparison: Comparison) -> None:
    """Note the weights of ours that are not what core reads; give the twin those that the file lacks.

    Core leaves weights that a file lacks as the memory was. Reading once more, in memory that was filled, tells which.
    """
    odd = {
        key: weight
        for key, weight in patcher.hosted.weights.items()
        if not weight.is_encoded and not weight.is_same(parameter_of(twin.model, key))
    }
    again = None
    if odd:
        with FilledMemory():
            again = read_model_again(patcher)
    lacking = []
    for key, weight in odd.items():
        read, reread = (parameter_of(model, key) for model in (twin.model, again or twin.model))
        if same_bits(read, reread):
            comparison.note_changed(weight.block, key, f"{key} in RAM differs from what ComfyUI reads from the file")
        else:
            lacking.append(key)
            with torch.no_grad(), torch.inference_mode(False):
                put_parameter(twin.model, key, weight.read_stored())
    comparison.note_lacking(lacking)


class FilledMemory(TorchDispatchMode):
    """Fills the memory of new tensors in the body; only what is then written differs from this."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in EMPTY and type(made) is torch.Tensor and not made.is_meta:
            memory = torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage())
            memory.fill_(FILL_BYTE)
        return made


# Repeated, it is a number far from any weight in every dtype of floating point.
FILL_BYTE = 0x7A
EMPTY = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)


def parameter_of(model: torch.nn.Module, key: str) -> torch.Tensor:
    module, _, name = key.rpartition(".")
    held = model.get_submodule(module)._parameters[name]
    assert held is not None
    return held


def read_model_again(patcher: ModelPatcher) -> torch.nn.Module | None:
    """Return the model of a patcher as core's own loader reads it for static loading; None where nothing says how."""
    source = getattr(patcher, "cached_patcher_init", None)
    if source is None:
        return None
    read = read_patcher_again(*source)
    if read is not None and class_behind(type(patcher)) is ModelPatcher:
        own_weights(read.model, patcher.hosted.kind, is_assigned=is_dynamic(read))
    return None if read is None else read.model


def read_patcher_again(factory: Callable[..., Any], arguments: Sequence[Any], *index: int) -> ModelPatcher | None:
    if factory is reload_managed:
        return read_again(arguments[0])
    readers: dict[Any, Callable[..., Any]] = {
        loading.reload_diffusion_model: loading.read_diffusion_model,
        loading.reload_text_encoder: loading.read_text_encoder,
        loading.reload_vae: loading.read_vae,
        loading.reload_checkpoint: loading.read_checkpoint,
    }
    if factory not in readers:
        return None
    *files, _request = arguments
    made = readers[factory](*files)
    part = made[index[0]] if index else made
    patcher: ModelPatcher = getattr(part, "patcher", part)
    return patcher
