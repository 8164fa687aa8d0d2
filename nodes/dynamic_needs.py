"""What steering ComfyUI's dynamic VRAM needs of comfy-aimdo, and what is lost in a version that lacks it."""

from __future__ import annotations

__all__ = ["HEADROOM", "METHODS", "what_is_lost"]

METHODS = {
    "set_watermark": "byte budgets of dynamic models have no effect",
    "get_residency": "the pages of dynamic models are not counted",
    "free_memory": "idle dynamic models leave only for ComfyUI itself",
    "deprioritize": "dynamic models leave in ComfyUI's own order",
}
"""The methods of a model's address range (``model_vbar.ModelVBAR``), and what each is for."""
HEADROOM = "the VRAM watermark (keep free) does not hold for dynamic models"
"""What is lost without a way to set the headroom (``control``)."""


def what_is_lost(version: str, *, methods: set[str], sets_headroom: bool) -> list[str]:
    """Return a line for each function that a version of comfy-aimdo lacks; usually none.

    Args:
        methods: those of `METHODS` that it has.
    """
    missing = {f"ModelVBAR.{name}": what for name, what in METHODS.items() if name not in methods}
    if not sets_headroom:
        missing["set_simple_vram_headroom"] = HEADROOM
    return [f"{version} has no {name}: {what}" for name, what in missing.items()]
