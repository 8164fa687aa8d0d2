"""The weights of a module matched by name to those that its files store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .errors import InvalidInput
from .runtime.tensors.parameter_slots import split_owner
from .weights.file_reader import torch_dtype
from .weights.source import WeightsSource

__all__ = ["StoredWeight", "match_names"]

# How many names an error lists of each kind.
NUM_LISTED = 3


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight or saved buffer of a module, by all names that the module has for it, and where it is stored."""

    names: list[str]
    held: torch.Tensor
    is_buffer: bool
    stored_name: str
    dtype: torch.dtype

    def replace_in(self, module: nn.Module, tensor: torch.Tensor) -> None:
        """Put another tensor at every place that holds this one; weights from a file ask for no gradients."""
        held = tensor if self.is_buffer else nn.Parameter(tensor, requires_grad=False)
        for name in self.names:
            owner, attribute = split_owner(module, name)
            (owner._buffers if self.is_buffer else owner._parameters)[attribute] = held  # type: ignore[assignment]


def match_names(module: nn.Module, source: WeightsSource, path: Path, *, ignore_unexpected: bool) -> list[StoredWeight]:
    """Find every weight and saved buffer of a module in its files; a tied one by any of its names.

    Raises:
        InvalidInput: one line with the first names that are missing, unexpected, or have another shape.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    saved = parameters.keys() | module.state_dict(keep_vars=True).keys()
    tensors: dict[str, torch.Tensor] = {**parameters, **buffers}
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if name in saved:
            names.setdefault(id(tensor), []).append(name)
    weights, missing, misshapen = [], [], []
    for aliases in names.values():
        held = tensors[aliases[0]]
        stored_name = next((name for name in aliases if name in source.files), None)
        if stored_name is None:
            missing.append(aliases[0])
            continue
        header = source.files[stored_name][1]
        encoding = source.encoded.get(stored_name)
        if encoding is not None:
            misfit = encoding.misfit(stored_name, tuple(held.shape))
            wide = torch_dtype(encoding.dtype)
            if misfit or wide is None:
                misshapen.append(misfit)
            else:
                weights.append(StoredWeight(aliases, held, aliases[0] in buffers, stored_name, wide))
            continue
        dtype = torch_dtype(header.dtype)
        if header.shape != tuple(held.shape) or dtype is None:
            misshapen.append(f"{stored_name} is {header.dtype} {list(header.shape)}, not {list(held.shape)}")
        else:
            weights.append(StoredWeight(aliases, held, aliases[0] in buffers, stored_name, dtype))
    # What a class of transformers or diffusers declares to be in its files without being in the model.
    ignored = [re.compile(pattern) for pattern in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = [
        name
        for name in source.weight_names
        if name not in tensors and not ignore_unexpected and not any(pattern.search(name) for pattern in ignored)
    ]
    wrong = [
        f"{len(found)} {kind} ({', '.join(found[:NUM_LISTED])}{', ...' if len(found) > NUM_LISTED else ''})"
        for kind, found in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if found
    ]
    if wrong:
        raise InvalidInput(
            f"{path}: its weights do not fit {type(module).__name__}: {'; '.join(wrong)}"
            f"{suggest_prefix(missing, source.weight_names)}"
        )
    return weights


def suggest_prefix(missing: Sequence[str], stored: Sequence[str]) -> str:
    """Return the end of an error line: the one prefix under which the file has a missing weight."""
    for name in missing:
        prefixes = {other.removesuffix(name) for other in stored if other.endswith(f".{name}")}
        if len(prefixes) == 1:
            return f"; did you mean prefix={prefixes.pop()!r}?"
    return ""
