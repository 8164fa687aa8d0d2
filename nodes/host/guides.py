"""Makes ControlNets compute on the device of the model that they guide, or refuses them before sampling.

Core sends a ControlNet to its default device. Where the model is elsewhere, core adds what it hears from the ControlNet
in a ``try`` that catches everything: the picture comes out without it. So before each sampling run our diffusion models
look at what guides them (core's PREPARE_SAMPLING wrapper): what is ours follows, what is not is refused.

[Note: dynamic guides] A layer of a dynamic model has its place in the range of the device on which core loaded it
first, and core never gives it another. So a dynamic ControlNet of ours follows a model until it is loaded, then stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...memory.errors import InvalidInput
from ...memory.hosted_component import device_name
from .byte_budgets import budget_of
from .core_fields import cast_in_forwards, move_adapter, move_guide
from .dynamic_models import is_dynamic
from .hosted import Request, hosted_of, is_cpu

__all__ = ["bring_guides", "refuse_inputs_elsewhere"]

KEY = "highwater"


def bring_guides(patcher: ModelPatcher) -> None:
    """Make a diffusion model look at what guides it before each sampling run. Idempotent."""
    for kind, wrapper in ((WrappersMP.PREPARE_SAMPLING, prepare_guides), (WrappersMP.SAMPLER_SAMPLE, cast_shared)):
        if not patcher.get_wrappers(kind, KEY):
            patcher.add_wrapper_with_key(kind, KEY, wrapper)


def prepare_guides(
    executor: Any, model: ModelPatcher, noise_shape: Any, conds: Mapping[str, Any], *args: Any, **options: Any
) -> Any:
    """A PREPARE_SAMPLING wrapper of core's. Raises `InvalidInput` for a guide that cannot compute with the model."""
    guides = list(guides_in(conds))
    for guide in guides:
        bring(guide, model)
    prepared = executor(model, noise_shape, conds, *args, **options)
    if any(reads_weights(guide) for guide in guides):
        refuse_encoded(model)
    hosted = hosted_of(model.model)
    if guides and hosted is not None:
        hosted.finish_copies()  # some read the weights before the model computes, and so waits
    return prepared


def cast_shared(executor: Any, guider: Any, *args: Any, **options: Any) -> Any:
    """A SAMPLER_SAMPLE wrapper of core's: a Control-LoRA has been built, and shares weights that may rest elsewhere."""
    for guide in guides_in(guider.conds):
        if reads_weights(guide):
            cast_in_forwards(guide.control_model)
    return executor(guider, *args, **options)


def guides_in(conds: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Any]:
    """Yield every ControlNet of the conditionings once, with those that it is chained to."""
    seen: set[int] = set()
    for conditionings in conds.values():
        for conditioning in conditionings:
            guide = conditioning.get("control")
            while guide is not None and id(guide) not in seen:
                seen.add(id(guide))
                yield guide
                guide = guide.previous_controlnet


def bring(guide: Any, model: ModelPatcher) -> None:
    """Make a ControlNet compute on the model's device.

    Raises:
        InvalidInput: it was asked to be elsewhere, or is core's, or cannot leave where it is.
    """
    here = model.load_device
    if hasattr(guide, "t2i_model"):  # moved by core itself, to the device that is written on it
        if device_name(guide.device) != device_name(here):
            move_adapter(guide, here)
        return
    patcher = getattr(guide, "control_model_wrapped", None)
    there = patcher.load_device if patcher is not None else comfy.model_management.get_torch_device()
    ours = request_of(patcher)
    first = next(iter(patcher.model.dynamic_vbars), here) if ours is not None and is_dynamic(patcher) else here
    if device_name(there) == device_name(here) == device_name(first):
        return
    if patcher is None:  # a ControlLora: core builds it from the model's weights, on its default device
        remedy = f"set the model's placement to {device_name(there)}"
    elif ours is None:
        remedy = f"load it with Highwater's Load ControlNet, or set the model's placement to {device_name(there)}"
    elif ours.devices:
        remedy = f"set its placement to default or {device_name(here)}"
    elif device_name(first) != device_name(here) or (is_dynamic(patcher) and is_cpu(here)):
        there = first if device_name(first) != device_name(here) else there
        remedy = "set the engine of its Load ControlNet to blocks, which follows every model"
    else:
        move_guide(guide, here, comfy.model_management.unet_manual_cast(guide.control_model.dtype, here))
        return
    places = f"computes on {device_name(there)}, but the model that it guides computes on {device_name(here)}"
    raise InvalidInput(f"{title_of(patcher or guide)} {places}; allowed: the same device; {remedy}")


def request_of(patcher: ModelPatcher | None) -> Request | None:
    """Return what our loader was asked for with a ControlNet; None for core's own and for one without a patcher."""
    if patcher is None:
        return None
    hosted, budget = hosted_of(patcher.model), budget_of(patcher)
    if hosted is not None:
        return hosted.request
    return budget.request if budget is not None else None


def reads_weights(guide: Any) -> bool:
    """Whether core builds this ControlNet from the weights of the model that it guides."""
    return hasattr(guide, "control_weights")


def refuse_encoded(model: ModelPatcher) -> None:
    """Refuse to build a ControlLora from encoded weights: it would read them as they rest."""
    hosted = hosted_of(model.model)
    if hosted is not None and hosted.encoded_names:
        raise InvalidInput(
            f"{hosted.name} is stored {hosted.rests}, and a Control-LoRA reads its weights; "
            "allowed: precision as stored, or by profile with a profile that does not quantize it"
        )


def title_of(owner: Any) -> str:
    """Return what a message calls a ControlNet or a patch: its file's name if it is ours, else its class."""
    model = getattr(owner, "model", None)
    hosted = hosted_of(model)
    if hosted is not None:
        return f"{'ControlNet' if hosted.kind == 'control' else 'model'} {hosted.name}"
    return type(model if model is not None else owner).__name__


def refuse_inputs_elsewhere(module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """A forward pre-hook of a ControlNet of ours: refuses inputs from another device, before it uses them.

    For models that are not ours: those do not look at what guides them. A copy of the module that core loads has the
    hook, too; it then does nothing.
    """
    hosted = hosted_of(module)
    if hosted is None or hosted.loaded_on is None:
        return
    device, noisy = hosted.loaded_on, kwargs.get("x")
    if isinstance(noisy, torch.Tensor) and device_name(noisy.device) != device_name(device):
        raise InvalidInput(
            f"ControlNet {hosted.name} computes on {device_name(device)}, but the model that it guides computes on "
            f"{device_name(noisy.device)}; allowed: the same device; set its placement to {device_name(noisy.device)}, "
            "or load the model with Highwater's Load Diffusion Model"
        )
