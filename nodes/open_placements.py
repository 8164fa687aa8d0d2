"""Which loaders of ComfyUI's models leave their devices to the plan, and what it chose, as their widgets take it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..memory.options.placement import AUTO
from .device_choices import DEFAULT
from .workflow_reading.description import CONTROL, PIPELINE, LoadedModel

if TYPE_CHECKING:
    from ..memory.planner.plan import Plan

__all__ = ["ChosenPlacement", "chosen_of", "leaves_open", "widget_text"]

SAYS_CHOSEN = f"{AUTO}: "


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPlacement:
    """Where a loader computes that leaves it to ``auto``; of a checkpoint an item for each part."""

    text: str
    """As its widget takes it."""
    why: tuple[str, ...] = ()


def leaves_open(model: LoadedModel) -> bool:
    """Whether the plan chooses the devices of one of ComfyUI's models.

    Not of a ControlNet, which computes where the model does that it guides, nor where ComfyUI's dynamic VRAM is asked
    for, which splits nothing.
    """
    asked = model.asked
    is_movable = model.is_ours and model.kind not in (PIPELINE, CONTROL) and asked.engine != "dynamic"
    return is_movable and (asked.placement or "").strip() == AUTO


def widget_text(plan: Plan, model: LoadedModel) -> str:
    """Return a placement as the loaders of ComfyUI's models take it: of the places to rest only another GPU."""
    (part,) = plan.components
    if model.kind == CONTROL and model.asked.placement in (None, DEFAULT, AUTO):
        return DEFAULT  # where the model computes that it guides
    name = model.kind if is_part(model) else "*"
    return str(replace(part.placement, component=name, tier=part.store or None, forbids_ram=False))


def is_part(model: LoadedModel) -> bool:
    """Whether one widget places a model together with others: those of a checkpoint without a node of its own."""
    return bool(model.part) and model.managed_by is None


def chosen_of(models: Sequence[LoadedModel], plans: Sequence[Plan]) -> dict[str, ChosenPlacement]:
    """Return what was chosen for the loaders that leave it open, by the ids of the nodes with the widget."""
    found: dict[str, ChosenPlacement] = {}
    for model, plan in zip(models, plans, strict=True):
        if not leaves_open(model):
            continue
        node = model.managed_by or model.node
        (part,) = plan.components
        about = f"{model.kind}: " if is_part(model) else ""
        why = [about + line.removeprefix(SAYS_CHOSEN) for line in part.choices if line.startswith(SAYS_CHOSEN)]
        before = found.get(node.id)
        texts = [before.text] if before is not None else []
        found[node.id] = ChosenPlacement(
            text=",".join([*texts, widget_text(plan, model)]), why=(*(before.why if before else ()), *why[:1])
        )
    return found
