"""Why memory of a device has to be freed, in words; a policy adds why a component is the one that leaves."""

from __future__ import annotations

from ..options.budget import BudgetItem
from ..units import format_bytes

__all__ = ["UNLOADED_BY_HOST", "over_budget", "short_beside_weights", "short_of_memory"]

UNLOADED_BY_HOST = "ComfyUI unloaded it"


def short_of_memory(newcomer: str | None, need_bytes: int, free_bytes: int, reserved_bytes: int) -> str:
    """Say that a device has too little free memory for a newcomer, or less free than the watermark says."""
    need = f"{newcomer} needs {format_bytes(max(0, need_bytes))}" if newcomer else "less than the watermark is free"
    return f"{need}; {format_bytes(free_bytes)} free, {format_bytes(reserved_bytes)} reserved"


def short_beside_weights(component: str, keeps_bytes: int) -> str:
    """Say that a component's forwards need more memory beside its weights than is free."""
    return f"{component} needs more beside its weights, {format_bytes(keeps_bytes)}"


def over_budget(newcomer: str, need_bytes: int, held_bytes: int, budget: BudgetItem) -> str:
    """Say that a newcomer and its idle siblings exceed the budget that they share."""
    return (
        f"{newcomer} needs {format_bytes(need_bytes)}, others {format_bytes(held_bytes)}; "
        f"budget {budget} is for all of them together"
    )
