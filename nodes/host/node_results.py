"""In which node's result each of core's models came first: nothing else tells it of a model without a file's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from .core_loading import ByModel

__all__ = ["note_result", "result_of"]

results: ByModel[str] = ByModel()


def note_result(result: str, slots: Iterable[Any]) -> None:
    """Note the models in what a node gives that came in no other node's result before.

    Args:
        result: what the result is called.
        slots: by output of the node, the list of its values.
    """
    for slot in slots:
        for value in slot if isinstance(slot, list) else ():
            for patcher in patchers_in(value):
                results.add(patcher.model, result)


def patchers_in(value: Any) -> Iterator[ModelPatcher]:
    """Yield the patcher that a value is, or those that it has as fields: as text encoders, VAEs and ControlNets do."""
    for part in (value, *getattr(value, "__dict__", {}).values()):
        if isinstance(part, ModelPatcher):
            yield part


def result_of(model: torch.nn.Module) -> str:
    """Return the result in which a model came first; "" where that was not seen."""
    return results.get(model) or ""
