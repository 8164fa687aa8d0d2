"""Lets the devices of a split diffusion model compute the conditional and the unconditional half of a step at once.

Core gives all conditionings of a step to one function (its CALC_COND_BATCH wrapper), which batches them or calls the
model for one after the other. For a split model of ours it is called for each conditioning alone, and the calls are
micro-batches (`ManagedComponent.run_micro_batches`): the same bits as one after the other. Where a step has one
conditioning, it is called for each half of the pictures. That is left to core where another pack's code takes part in
these calls, since what it keeps between them may not be computed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP, get_all_wrappers

from ...memory.errors import InvalidInput
from .batch_halves import parts_of, why_not_halved
from .guides import KEY
from .hosted import Hosted, hosted_of
from .strangers import find_in_module, find_stranger

__all__ = ["compute_halves_at_once", "compute_halves_in_turn"]

# Wrappers of others of these kinds see the calls of a step.
SEEN_BY = (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
# So do callbacks of these kinds.
CALLED = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)
# What of core's options for a model are functions of others that see them, too.
FUNCTIONS = ("model_function_wrapper", "sampler_calc_cond_batch_function")


def compute_halves_at_once(patcher: ModelPatcher) -> None:
    """Make the devices of a split diffusion model compute a step's conditionings at the same time. Idempotent."""
    if not patcher.get_wrappers(WrappersMP.CALC_COND_BATCH, KEY):
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, calc_at_once)


def calc_at_once(
    executor: Any, model: Any, conds: Sequence[Any], x_in: torch.Tensor, timestep: Any, model_options: Mapping[str, Any]
) -> Any:
    """A CALC_COND_BATCH wrapper of core's. Raises `InvalidInput` for a split model that has MultiGPU clones."""
    hosted = hosted_of(model)
    if hosted is None or not hosted.is_split:
        return executor(model, conds, x_in, timestep, model_options)
    refuse_clones(hosted, model_options)
    off = why_off(model, conds, x_in, model_options) or hosted.why_one_by_one()
    sampling = model_options.get("transformer_options", {}).get("sample_sigmas")
    num_given = sum(cond is not None for cond in conds)
    if not off or num_given > 1 or not hosted.was_at_once_in(sampling):
        hosted.note_micro_batches(off, sampling)  # else one more call of a guided step, as of perturbed attention
    if off:
        return executor(model, conds, x_in, timestep, model_options)
    return calc_alone(hosted.run_micro_batches, num_given == 1, executor, model, conds, x_in, timestep, model_options)


def calc_alone(
    run: Callable[[list[Callable[[], torch.Tensor]]], list[torch.Tensor]],
    is_halved: bool,
    executor: Any,
    model: Any,
    conds: Sequence[Any],
    x_in: torch.Tensor,
    timestep: Any,
    model_options: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Return what each conditioning, or each half of the only one, gives alone.

    Args:
        run: makes the calls, and returns what they return.
        is_halved: whether the step has one conditioning, and each half of its pictures is computed alone.
    """

    def compute(index: int, cond: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        alone = [cond if place == index else None for place in range(len(conds))]
        computed: torch.Tensor = executor(model, alone, x, t, model_options)[index]
        return computed

    given = [index for index, cond in enumerate(conds) if cond is not None]
    if is_halved:
        parts = parts_of(conds[given[0]], x_in, timestep)
        computed = [torch.cat(run([partial(compute, given[0], *part) for part in parts]))]
    else:
        computed = run([partial(compute, index, conds[index], x_in, timestep) for index in given])
    by_index = dict(zip(given, computed, strict=True))
    return [by_index[index] if index in by_index else torch.zeros_like(x_in) for index in range(len(conds))]


def compute_halves_in_turn(patcher: ModelPatcher) -> None:
    """Make core compute each conditioning of a step alone, one after the other, to compare with."""
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, calc_in_turn)


def calc_in_turn(
    executor: Any, model: Any, conds: Sequence[Any], x_in: torch.Tensor, timestep: Any, model_options: Mapping[str, Any]
) -> Any:
    """A CALC_COND_BATCH wrapper of core's."""
    given = [cond for cond in conds if cond is not None]
    is_halved = len(given) == 1 and not why_not_halved(given[0], len(x_in), model_options)
    return calc_alone(
        lambda calls: [call() for call in calls], is_halved, executor, model, conds, x_in, timestep, model_options
    )


def refuse_clones(hosted: Hosted, model_options: Mapping[str, Any]) -> None:
    """Refuse core's clones on other devices for a model that is split over devices."""
    if "multigpu_clones" in model_options:
        raise InvalidInput(
            f"{hosted.name} is split over several devices, and has MultiGPU clones; allowed: one of the two: remove "
            "the MultiGPU node, or set the placement to one device"
        )


def why_off(model: Any, conds: Sequence[Any], x_in: torch.Tensor, model_options: Mapping[str, Any]) -> str:
    """Return why neither the conditionings of a step nor its pictures can be micro-batches; empty where they can."""
    given = [cond for cond in conds if cond is not None]
    entries = [entry for cond in given for entry in cond]
    if any(entry.get("hooks") is not None for entry in entries):
        return "conditionings have hooks that change weights"
    for kind in SEEN_BY:
        if any(not is_ours(wrapper) for wrapper in get_all_wrappers(kind, model_options, is_model_options=True)):
            return f"another node wraps {kind}"
    if any(name in model_options for name in FUNCTIONS):
        return "another node wraps the model's calls"
    if len(given) < 2 and (why := "".join(why_not_halved(cond, len(x_in), model_options) for cond in given)):
        return why
    return find_others(model, entries, model_options.get("transformer_options", {}))


def find_others(model: Any, entries: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return what code of other packs the blocks call, or is called between the calls of a step; empty without any."""
    patcher = model.current_patcher
    if any(patcher.injections.values()):
        return "another node injects modules"
    if find_stranger([patcher.callbacks.get(kind) for kind in CALLED]) is not None:
        return "another node is called in each step"
    stranger = find_stranger([value for name, value in options.items() if name not in ("wrappers", "callbacks")])
    if stranger is not None:
        return f"another node patches it with {stranger}"
    stranger = find_stranger([[*chain_of(entry.get("control")), entry.get("gligen")] for entry in entries])
    if stranger is not None:
        return f"another node guides it with {stranger}"
    return find_in_module(model.diffusion_model) or ""


def chain_of(control: Any) -> Iterator[Any]:
    """Yield a ControlNet and those before it."""
    while control is not None:
        yield control
        control = getattr(control, "previous_controlnet", None)


def is_ours(wrapper: Any) -> bool:
    return getattr(wrapper, "__module__", "").rpartition(".")[0] == __name__.rpartition(".")[0]
