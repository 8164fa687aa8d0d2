"""Core's dynamic models, steered: they stay core's, and the manager reads their bytes and sets their budgets.

[Note: dynamic VRAM] On NVIDIA core's loaders make a `ModelPatcherDynamic`. Its model has a range of addresses on its
device; pages of it get memory as layers ask for their weights, and lose it under pressure. What a node asks for
becomes calls that core makes itself (`aimdo.py`):

- A byte budget is the watermark of the model's range, above which no page gets memory. Core lifts it at each load, so
  core's ON_LOAD callback sets it again. Small weights are outside of the range: they count first.
- The VRAM watermark (keep free) is the headroom that comfy-aimdo keeps free of every device.
- The order of eviction is the order in which idle models are deprioritised.

A callback travels with the patcher to its clones. They share one range: the clone that was loaded last decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...memory.errors import InvalidInput
from ...memory.hosted_component import device_name, note_steered_unload, note_steered_use, open_workflow_id
from ...memory.units import format_bytes
from . import aimdo
from .byte_budgets import BUDGET, Budget, budget_of, text_of
from .core_fields import NOTE
from .core_loading import set_callbacks
from .dynamic_models import DynamicModel, attach_to_core, core_memory, dynamic_model_of, is_dynamic
from .guides import bring_guides
from .hosted import Request
from .unmanaged import leave_to_core

__all__ = ["steer", "stop_steering"]

KEY = "highwater"
STATIC_COPY = (
    "ComfyUI made a static copy of it, as for hooks and compiling, for which no budget of engine dynamic holds; "
    "choose engine blocks for that"
)


def keep_budget(patcher: ModelPatcher, device: torch.device, *_: Any) -> None:
    """Set the watermark of the model's range, which core has just lifted.

    Raises:
        InvalidInput: the small weights alone, which stay on the device, exceed the budget.
    """
    budget = budget_of(patcher)
    if budget is None:  # another pack took it off
        return
    if not is_dynamic(patcher):
        leave_to_core(patcher, STATIC_COPY, name=budget.name, kind=budget.kind, request=budget.request)
        return
    component = dynamic_model_of(patcher)
    num_bytes = num_bytes_of(budget, patcher)
    component.note_budget(patcher, budget, num_bytes)
    vbar = component.ranges().get(device_name(device))
    if num_bytes is not None and vbar is not None and hasattr(vbar, "set_watermark"):
        small = int(patcher.model.model_loaded_weight_memory)
        if small > num_bytes:
            raise InvalidInput(
                f"budget {format_bytes(num_bytes)} of {budget.name} (profile {budget.request.profile}) is too small: "
                f"its small weights, which ComfyUI keeps on {device_name(device)} all the time, "
                f"have {format_bytes(small)}; allowed: at least that"
            )
        vbar.set_watermark((num_bytes - small) // aimdo.PAGE_BYTES * aimdo.PAGE_BYTES)
        free_of_parts(component, budget, device_name(device), num_bytes)
    note_steered_use(component)


def free_of_parts(component: DynamicModel, budget: Budget, device: str, num_bytes: int) -> None:
    """Take pages from the idle parts of the same file, if with these the parts exceed a budget that they share."""
    if budget.request.profile.is_for_all_together(device):
        idle = [part for part in core_memory.components() if part.is_part_with(component) and not part.is_in_use]
        held = {part: part.device_bytes().get(device, 0) for part in idle}
        pages = -(-component.whole_bytes // aimdo.PAGE_BYTES) + 1  # and one of which it has a part
        excess = sum(held.values()) + min(pages * aimdo.PAGE_BYTES, num_bytes) - num_bytes
        for part in idle:
            if excess > 0 and held[part]:
                excess -= part.free_memory(device, excess)


def num_bytes_of(budget: Budget, patcher: ModelPatcher) -> int | None:
    """Return the most bytes that a budget allows a model now; None where it sets no limit."""
    return budget.num_bytes(patcher, core_memory.paged_bytes(device_name(patcher.load_device)))


def note_sampling(patcher: ModelPatcher) -> None:
    if is_dynamic(patcher):
        dynamic_model_of(patcher).note_running(patcher, True)


def note_sampled(patcher: ModelPatcher) -> None:
    if is_dynamic(patcher):
        dynamic_model_of(patcher).note_running(patcher, False)


def note_detached(patcher: ModelPatcher, unpatch_all: bool) -> None:
    """Tell of a model that core took off its device as a whole."""
    if unpatch_all and is_dynamic(patcher):
        component = dynamic_model_of(patcher)
        before = component.seen_bytes
        now = component.device_bytes()
        note_steered_unload(component, {name: max(0, held - now.get(name, 0)) for name, held in before.items()})


CALLBACKS = {
    CallbacksMP.ON_LOAD: keep_budget,
    CallbacksMP.ON_PRE_RUN: note_sampling,
    CallbacksMP.ON_CLEANUP: note_sampled,
    CallbacksMP.ON_DETACH: note_detached,
}


def stop_steering(patcher: ModelPatcher) -> None:
    """Take off a patcher what `steer` hung on it: its model is a copy that blocks move."""
    patcher.attachments.pop(BUDGET, None)
    for when in CALLBACKS:
        patcher.remove_callbacks_with_key(when, KEY)


def steer(patcher: ModelPatcher, request: Request, *, name: str, kind: str, notes: Iterable[str] = ()) -> ModelPatcher:
    """Give a dynamic patcher, which is changed, a node's budget; the model stays core's. Returns the patcher.

    Nothing moves before core loads the model.
    """
    attach_to_core()
    budget = Budget(request=request, name=name, kind=kind, workflow_id=open_workflow_id())
    patcher.set_attachments(BUDGET, budget)
    set_callbacks(patcher, KEY, CALLBACKS)
    if kind == "diffusion":
        bring_guides(patcher)
    component = dynamic_model_of(patcher)
    component.see(patcher)
    shared = component.ask(patcher, budget)
    device = device_name(patcher.load_device)
    told = text_of(name, num_bytes_of(budget, patcher), device)
    patcher.set_attachments(NOTE, "; ".join([told, *notes, *shared, *aimdo.lost()]))
    return patcher
