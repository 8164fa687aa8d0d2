"""Lets the devices of a split diffusion model compute the conditional and the unconditional half of a step at once.

Core gives all conditionings of a step to one function (its CALC_COND_BATCH wrapper), which batches them or calls the
model for one after the other. For a split model of ours it is called for each conditioning alone, and the calls are
micro-batches (`ManagedComponent.run_micro_batches`): the same bits as one after the other. That is left to core where
another node takes part in these calls, since what it keeps between them may not be computed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, get_all_wrappers

from ...memory.errors import InvalidInput
from .guides import KEY
from .hosted import Hosted, hosted_of

__all__ = ["compute_halves_at_once", "compute_halves_in_turn"]

# Wrappers of others of these kinds see the calls of a step.
SEEN_BY = (WrappersMP.CALC_COND_BATCH, WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL)
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
    off = why_off([cond for cond in conds if cond is not None], model_options) or hosted.why_one_by_one()
    hosted.note_micro_batches(off)
    if off:
        return executor(model, conds, x_in, timestep, model_options)
    return calc_alone(hosted.run_micro_batches, executor, model, conds, x_in, timestep, model_options)


def calc_alone(
    run: Callable[[list[Callable[[], torch.Tensor]]], list[torch.Tensor]],
    executor: Any,
    model: Any,
    conds: Sequence[Any],
    x_in: torch.Tensor,
    timestep: Any,
    model_options: Mapping[str, Any],
) -> list[torch.Tensor]:
    """Return what each conditioning gives alone; ``run`` makes the calls, and returns what they return."""

    def compute(index: int) -> torch.Tensor:
        alone = [cond if place == index else None for place, cond in enumerate(conds)]
        computed: torch.Tensor = executor(model, alone, x_in, timestep, model_options)[index]
        return computed

    given = [index for index, cond in enumerate(conds) if cond is not None]
    by_index = dict(zip(given, run([partial(compute, index) for index in given]), strict=True))
    return [by_index[index] if index in by_index else torch.zeros_like(x_in) for index in range(len(conds))]


def compute_halves_in_turn(patcher: ModelPatcher) -> None:
    """Make core compute each conditioning of a step alone, one after the other, to compare with."""
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, calc_in_turn)


def calc_in_turn(executor: Any, *given: Any) -> Any:
    """A CALC_COND_BATCH wrapper of core's."""
    return calc_alone(lambda calls: [call() for call in calls], executor, *given)


def refuse_clones(hosted: Hosted, model_options: Mapping[str, Any]) -> None:
    """Refuse core's clones on other devices for a model that is split over devices."""
    if "multigpu_clones" in model_options:
        raise InvalidInput(
            f"{hosted.name} is split over several devices, and has MultiGPU clones; allowed: one of the two: remove "
            "the MultiGPU node, or set the placement to one device"
        )


def why_off(conds: Sequence[Any], model_options: Mapping[str, Any]) -> str:
    """Return why the conditionings of a step cannot be micro-batches; empty where they can."""
    if len(conds) < 2:
        return "a step has one conditioning"
    if any(entry.get("hooks") is not None for cond in conds for entry in cond):
        return "conditionings have hooks that change weights"
    for kind in SEEN_BY:
        if any(not is_ours(wrapper) for wrapper in get_all_wrappers(kind, model_options, is_model_options=True)):
            return f"another node wraps {kind}"
    if any(name in model_options for name in FUNCTIONS):
        return "another node wraps the model's calls"
    return ""


def is_ours(wrapper: Any) -> bool:
    return getattr(wrapper, "__module__", "").rpartition(".")[0] == __name__.rpartition(".")[0]
