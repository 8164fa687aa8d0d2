"""Cuts one conditioning of a step into two by the pictures of its batch, as core computes each part alone.

Core repeats what a conditioning has once for every picture, and takes what it has for each from the front. So a part
gets the rows of its own pictures. That is left to core where anything may join the pictures of a batch, or where it is
not known which of them a tensor belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from comfy.conds import CONDConstant, CONDCrossAttn, CONDList, CONDNoiseShape, CONDRegular

from .strangers import PATCHES

__all__ = ["parts_of", "why_not_halved"]

# The tensor of such a value is one for all pictures, or has a row for each. Of other classes that is not known.
WITH_ROWS = (CONDRegular, CONDNoiseShape, CONDCrossAttn)


def halves_of(batch: int) -> list[slice]:
    """Return the two halves of a batch; the first one has the odd picture."""
    middle = (batch + 1) // 2
    return [slice(0, middle), slice(middle, batch)]


def why_not_halved(cond: Sequence[Mapping[str, Any]], batch: int, model_options: Mapping[str, Any]) -> str:
    """Return why the pictures of a conditioning are not computed in two calls; empty where they can be."""
    if batch < 2:
        return "a step has one conditioning and one picture"
    options = model_options.get("transformer_options", {})
    if any(options.get(name) for name in PATCHES):
        return "a step has one conditioning, and a patch may join the pictures of a batch"
    if model_options.get("context_handler") is not None:
        return "a step has one conditioning, in context windows"
    for entry in cond:
        if any(entry.get(name) is not None for name in ("control", "gligen")):
            return "a step has one conditioning, and another model guides the batch"
        mask = entry.get("mask")
        if mask is not None and not has_rows(mask, batch):
            return "a step has one conditioning, whose mask is not one for each picture"
        if not all(has_parts(name, value, batch) for name, value in entry.get("model_conds", {}).items()):
            return "a step has one conditioning, and no part of that for each picture"
    return ""


def has_parts(name: str, value: Any, batch: int) -> bool:
    """Whether it is known what of a conditioning's value belongs to which picture."""
    if type(value) is CONDConstant:  # such as the number of pictures that are frames of one video
        return name != "num_video_frames" and has_no_batch(value.cond, batch)
    if type(value) is CONDList:
        return all(has_rows(tensor, batch) for tensor in value.cond)
    return type(value) in WITH_ROWS and has_rows(value.cond, batch)


def has_rows(tensor: torch.Tensor, batch: int) -> bool:
    """Whether a tensor is one for all pictures, or has a row for each."""
    return tensor.ndim > 0 and len(tensor) in (1, batch)


def has_no_batch(value: Any, batch: int) -> bool:
    """Whether a value that core gives to the model as it is has no tensor, nor the number of pictures."""
    if isinstance(value, list | tuple):
        return all(has_no_batch(part, batch) for part in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value != batch
    return value is None or isinstance(value, str | bool)


def cut(cond: Sequence[Mapping[str, Any]], rows: slice, batch: int) -> list[dict[str, Any]]:
    """Return a conditioning for a part of the pictures."""
    return [
        {
            **entry,
            "model_conds": {name: cut_value(value, rows, batch) for name, value in entry["model_conds"].items()},
            **({"mask": cut_rows(entry["mask"], rows, batch)} if entry.get("mask") is not None else {}),
        }
        for entry in cond
    ]


def cut_value(value: Any, rows: slice, batch: int) -> Any:
    if type(value) is CONDConstant:
        return value
    if type(value) is CONDList:
        return CONDList([cut_rows(tensor, rows, batch) for tensor in value.cond])
    return type(value)(cut_rows(value.cond, rows, batch))


def cut_rows(tensor: torch.Tensor, rows: slice, batch: int) -> torch.Tensor:
    """Return the rows of a part of the pictures; all of a tensor that is one for all."""
    return tensor[rows] if len(tensor) == batch else tensor


def parts_of(
    cond: Sequence[Mapping[str, Any]], x_in: torch.Tensor, timestep: torch.Tensor
) -> Iterator[tuple[list[dict[str, Any]], torch.Tensor, torch.Tensor]]:
    """Yield conditioning, latents and time steps of each half."""
    batch = len(x_in)
    for rows in halves_of(batch):
        yield cut(cond, rows, batch), x_in[rows], cut_rows(timestep, rows, batch)
