"""The calls that a workflow makes of its models: what is predicted of each, and the use of a run that it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..memory.planner.run import BlockTimes, Use
from .workflow_reading.description import DIFFUSION, PIPELINE, Call, LoadedModel, WorkflowDescription, WorkflowUse

if TYPE_CHECKING:
    from ..memory.planner.run import Tiling
    from ..memory.weights.component import Component

__all__ = [
    "PlannedCall",
    "Prediction",
    "Predictor",
    "calls_in",
    "calls_of",
    "calls_of_step",
    "use_of",
    "usual_passes",
]

# What each call computes with, of a pipeline's parts.
KIND_OF_CALL = {
    Call.ENCODE_TEXT: "text",
    Call.ENCODE_VISION: "vision",
    Call.SAMPLE: "diffusion",
    Call.DECODE: "vae",
    Call.ENCODE: "vae",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What is predicted of one call of a component."""

    num_passes: int = 1
    activation_bytes: int | None = None
    held_bytes: int = 0
    carried_bytes: int = 0
    times: Mapping[str, BlockTimes] = field(default_factory=dict)
    """By device, as far as the rates of devices are known."""
    tiling: Tiling | None = field(default=None, compare=False)
    """How a VAE of ours would compute it in tiles; None: in one piece, or as its node says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCall:
    """One call of one component, as a workflow makes it."""

    component: Component
    model: LoadedModel
    paths: tuple[Path, ...]
    """The model's files; of a pipeline its folder."""
    use: WorkflowUse
    of_node: tuple[WorkflowUse, ...]
    """All that the same node computes."""
    parts: tuple[Component, ...] = ()
    """All components of the model."""


Predictor = Callable[[PlannedCall], Prediction | None]
"""Returns what is predicted of a call; None where nothing is."""


def calls_of(
    described: WorkflowDescription, model: LoadedModel, parts: Sequence[Component], paths: tuple[Path, ...]
) -> list[PlannedCall]:
    """Return all calls of a loaded model's components in a workflow, in order."""
    place = described.models.index(model)
    return [
        call
        for use in described.uses
        if place in (use.model, *use.beside)
        for call in calls_in(described, use, model, parts, paths)
    ]


def calls_in(
    described: WorkflowDescription,
    use: WorkflowUse,
    model: LoadedModel,
    parts: Sequence[Component],
    paths: tuple[Path, ...],
) -> list[PlannedCall]:
    """Return what of a loaded model computes in a call: of a pipeline the parts of that kind; of no steps nothing."""
    if use.call is Call.SAMPLE and use.steps == 0:
        return []
    of_node = tuple(other for other in described.uses if other.node == use.node)
    return [
        PlannedCall(component=part, model=model, paths=paths, use=use, of_node=of_node, parts=tuple(parts))
        for part in parts
        if model.kind != PIPELINE or part.kind == KIND_OF_CALL.get(use.call)
    ]


def use_of(call: PlannedCall, predicted: Prediction | None) -> Use:
    """Return a call as the use of a run."""
    predicted = predicted or Prediction(num_passes=usual_passes(call.use))
    num_calls, one_by_one = calls_of_step(call)
    return Use(
        component=call.component.name,
        kind=call.component.kind,
        num_passes=predicted.num_passes,
        num_calls=num_calls,
        one_by_one=one_by_one,
        may_clone=(call.use.conds or 1) > 1,
        activation_bytes=predicted.activation_bytes,
        held_bytes=predicted.held_bytes,
        tiling=predicted.tiling if may_tile(call) else None,
        carried_bytes=predicted.carried_bytes,
        times=predicted.times,
        what=told(call.use),
    )


def calls_of_step(call: PlannedCall) -> tuple[int, str]:
    """Return of how many calls a step consists that a host can make apart, and why they are not micro-batches.

    Those of a pipeline are its own code's: its parts compute what they are given.
    """
    use = call.use
    if call.model.kind == PIPELINE or use.call is not Call.SAMPLE or call.component.kind != DIFFUSION:
        return 1, ""
    if use.conds is None:
        return 1, "how many conditionings a step has is not known"
    is_batch = use.size is not None and use.size.batch > 1
    if use.conds == 1 and not is_batch:
        return 1, "a step has one conditioning and one picture: a split buys memory, not speed"
    num_calls = max(use.conds, 2)  # of one conditioning the two halves of its batch
    if not call.model.is_ours:
        return num_calls, "another node than Highwater's loads it"
    return num_calls, "conditionings have hooks that change weights" if use.has_hooks else ""


def may_tile(call: PlannedCall) -> bool:
    """Whether a VAE of ours chooses the tiles of a call, and not its node."""
    is_coding = call.component.kind == "vae" and call.use.call in (Call.DECODE, Call.ENCODE)
    return is_coding and call.use.tiling is None and call.model.is_ours


def usual_passes(use: WorkflowUse) -> int:
    """Return how many forwards a call takes: one for each step, of all conditions at once."""
    return max(1, use.steps or 1) if use.call is Call.SAMPLE else 1


def told(use: WorkflowUse) -> str:
    """Return what a call computes, in a few words."""
    size = use.size
    words = [use.call.value]
    if use.call is Call.SAMPLE and use.steps is not None:
        words = [f"{use.steps} step{'s' if use.steps != 1 else ''}"]
    if size is not None:
        words.append(f"at {size.width}x{size.height}")
        words += [f"{size.frames} frames"] if size.frames > 1 else []
        words += [f"batch {size.batch}"] if size.batch > 1 else []
    return ", ".join([" ".join(words[:2]), *words[2:]])
