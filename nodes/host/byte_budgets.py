"""What a node asks of a dynamic model, and how many bytes that is now."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_management
from comfy.model_patcher import ModelPatcher

from ...memory.hosted_component import device_name
from ...memory.units import format_bytes
from .hosted import Request

__all__ = ["BUDGET", "Budget", "budget_of", "text_of"]

# Under this name a patcher carries what a node of ours asks; its clones carry the same.
BUDGET = "highwater_budget"


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What a node asks of a dynamic model."""

    request: Request
    name: str
    kind: str
    workflow_id: str | None

    def is_other(self, other: Budget) -> bool:
        """Whether another node asks for something else."""
        here = self.request.node_id, self.workflow_id
        return here != (other.request.node_id, other.workflow_id) and self.request.profile != other.request.profile

    def num_bytes(self, patcher: ModelPatcher, paged_bytes: int) -> int | None:
        """Return the most bytes that the model may have of its device now; None where nothing limits them.

        Args:
            paged_bytes: the pages of all dynamic models there; those of others leave for this one.
        """
        device, most = patcher.load_device, self.most(patcher)
        total = int(comfy.model_management.get_total_memory(device))
        left_free = self.request.profile.left_free(device_name(device), self.name, self.kind, total)
        if not left_free:
            return most
        # What never leaves is counted however little memory there is now: that is not the user's to mend.
        small = int(patcher.model.model_loaded_weight_memory)
        room = int(comfy.model_management.get_free_memory(device)) + paged_bytes - left_free
        return min(small + max(0, room), most if most is not None else total)

    def most(self, patcher: ModelPatcher) -> int | None:
        """Return the size that was asked for; None for none, and for what stays free."""
        device = patcher.load_device
        total = int(comfy.model_management.get_total_memory(device))
        items = self.request.profile.budgets_for(device_name(device), self.name, self.kind)
        return min((most for item in items if (most := item.most(total)) is not None), default=None)


def budget_of(patcher: ModelPatcher) -> Budget | None:
    """Return what a node of ours asked for with a patcher, or with the one of which it is a clone."""
    budget: Budget | None = patcher.get_attachment(BUDGET)
    return budget


def text_of(name: str, budget_bytes: int | None, device: str) -> str:
    """Return what moves a model, and the most of it on its device; the name tells a checkpoint's parts apart."""
    most = "" if budget_bytes is None else f"; at most {format_bytes(budget_bytes)} of {name} on {device}"
    return f"engine dynamic: ComfyUI's dynamic VRAM moves the weights{most}"
