"""What weights lose in a storage form: the error of a round trip, relative to their size.

It is that of a weight's rows, the root of the mean of their squares: each row makes one output of a layer, and one
large row would else hide that all others are lost. Measured on a sample of rows, with the scale that the weight has.
Each weight is measured once: while its module lives and nothing writes to it, and once for ever if it is read from its
file (`known_errors`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from .component import TensorSpec
from .file_reader import WeightsFile
from .form_numbers import FormNumbers
from .known_errors import MeasuredFile, note_errors, read_errors
from .known_forms import encoded_form
from .source import WeightsSource
from .storage_form import EncodedForm

__all__ = ["measure_error", "measure_errors"]

# How many elements of a weight are encoded and decoded: the error of a normal weight is then known to a hundredth.
NUM_SAMPLED = 1 << 17

known: WeakKeyDictionary[nn.Module, dict[tuple[str, str], tuple[Any, float]]] = WeakKeyDictionary()
"""By module: what its weights lose in a form, by form and name, each with what the weight was then."""


def measure_errors(
    module: nn.Module, weights: Iterable[TensorSpec], numbers: FormNumbers, source: WeightsSource | None
) -> frozenset[tuple[str, str, float]]:
    """Return what weights of a module lose in a form: name, form and error of each that can be read.

    Costs a pass over each weight that was not measured before; those without memory are read from their file, one at a
    time. What rests encoded has lost already what it loses, and is as it was measured before that.

    Raises:
        InvalidInput: a weight holds NaN or infinity, or its file has changed.
    """
    kind, held = encoded_form(numbers), dict(module.named_parameters(remove_duplicate=False))
    own = known.setdefault(module, {})
    found: dict[str, float] = {}
    in_files: list[TensorSpec] = []
    for spec in weights:
        tensor, key = held[spec.name], (numbers.name, spec.name)
        if getattr(tensor, "rests_narrower", False):
            if key in own:
                found[spec.name] = own[key][1]
        elif tensor.is_meta:
            in_files.append(spec)
        else:
            now = identity_of(tensor)
            if key not in own or own[key][0] != now:
                # In RAM: its device may have no room for what measuring takes.
                own[key] = now, measure_error(kind, tensor.detach().cpu(), name=spec.name)
            found[spec.name] = own[key][1]
    if source is not None and in_files:
        read = measure_files(in_files, held, kind, source)
        own.update({(numbers.name, name): (None, error) for name, error in read.items()})
        found |= read
    return frozenset((name, numbers.name, error) for name, error in found.items())


def identity_of(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return what changes when other code writes to a weight or gives it other memory, as far as torch tells.

    Not seen: a write through ``.data``, or to a tensor of inference mode.
    """
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version, tuple(tensor.shape)


def measure_files(
    specs: Iterable[TensorSpec], held: Mapping[str, torch.Tensor], kind: type[EncodedForm], source: WeightsSource
) -> dict[str, float]:
    """Return what weights lose that are in their files only; keeps what was measured for the next time."""
    form = kind.numbers.name
    by_file: defaultdict[WeightsFile, list[TensorSpec]] = defaultdict(list)
    for spec in specs:
        if source.holds(spec):
            by_file[source.files[spec.name][0]].append(spec)
    found: dict[str, float] = {}
    for file, own in by_file.items():
        told = MeasuredFile(path=file.path, version=file.version, tensors=[*file.tensors.values()])
        before, measured = read_errors(told).get(form, {}), {}
        for spec in own:
            stored_name = source.files[spec.name][1].name
            if stored_name not in before:
                weight = torch.empty(held[spec.name].shape, dtype=held[spec.name].dtype)
                source.read_into([(spec.name, weight)])
                measured[stored_name] = measure_error(kind, weight, name=spec.name)
            found[spec.name] = measured.get(stored_name, before.get(stored_name, 0.0))
        if measured:
            note_errors(told, form, measured)
    return found


@torch.no_grad()
def measure_error(kind: type[EncodedForm], weight: torch.Tensor, *, name: str) -> float:
    """Return what a weight loses in a form, relative to its size; rows of zeros do not count, and lose nothing.

    Raises:
        InvalidInput: it holds NaN or infinity.
    """
    form, part = kind.measure(weight, name=name), sample(weight)
    back = form.decode(form.encode(part), weight.dtype).view(part.shape)
    rows, lost = part.flatten(1).double(), (back.double() - part.double()).flatten(1)
    sizes = rows.norm(dim=1)
    is_filled = sizes > 0
    if not is_filled.any():
        return 0.0
    return float((lost.norm(dim=1)[is_filled] / sizes[is_filled]).square().mean().sqrt())


def sample(weight: torch.Tensor) -> torch.Tensor:
    """Return some of a weight's rows, as many as have `NUM_SAMPLED` elements; at least one, and the same every time.

    They are drawn at random: rows may differ by their place, as where those of two matrices take turns.
    """
    weight = weight.detach()
    if weight.numel() <= NUM_SAMPLED:
        return weight
    num_rows = max(1, NUM_SAMPLED * weight.shape[0] // weight.numel())
    rows = torch.randperm(weight.shape[0], generator=torch.Generator().manual_seed(0))[:num_rows]
    return weight[rows.sort().values.to(weight.device)]
