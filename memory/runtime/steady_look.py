"""One quick look that tells whether anything was done to a module since a close one.

[Note: steady looks] Others may do anything to a managed module between two forwards: add layers, assign weights, point
``.data`` to other memory, hook it up for an offloader of theirs. Every forward has to see that, and almost none finds
any. So after a close look found nothing, what it found is kept in flat lists, and compared with what is there now by
loops that run in C: which objects are in the module tree, and where the weights lie. Whatever the engine itself puts
into the module is another object, too, and asks for a close look once.

Tensors are known by their ids, without references, because references to weights are counted ([Note: swaps] in
`weight_swaps.py`). An id cannot be another object's: the groups keep what they gave the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, ValuesView
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import nn

from .watched_data import plainly

__all__ = ["SteadyLook"]

ADDRESS = torch.Tensor.data_ptr
STRIDE = torch.Tensor.stride
DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class SteadyLook:
    """What a module tree held when it was looked at closely. A look takes about 0.2 microseconds per weight.

    Args:
        modules: those in the tree.
        marked: the modules on which other offloaders leave their marks (`find_rival`).
        weights: the ids of the plain tensors whose memory is looked at.
        samples: those of one weight for each block, whose dtype tells that of the others.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        marked: Sequence[nn.Module],
        weights: Collection[int],
        samples: Collection[int],
    ) -> None:
        self.empty: list[dict[str, Any]] = []
        children: list[ValuesView[Any]] = []
        tensors: list[ValuesView[Any]] = []
        for module in modules:
            # Forwards may make buffers where there are none.
            tables: tuple[dict[str, Any], ...] = (module._modules, module._parameters)
            for table in (*tables, module._buffers) if module._buffers else tables:
                if not table:
                    self.empty.append(table)
                else:
                    (children if table is module._modules else tensors).append(table.values())
        self.tables = [*children, *tensors]
        self.counts = list(map(len, self.tables))
        self.children = list(chain.from_iterable(children))
        held = self.find_held()
        self.tensors = list(map(id, held[len(self.children) :]))
        numbers = [index for index, each in enumerate(held) if id(each) in weights]
        self.take_weights = taker(numbers)
        self.take_matrices = taker([index for index in numbers if held[index].dim() > 1])
        self.take_samples = taker([index for index in numbers if id(held[index]) in samples])
        self.attributes = [vars(module) for module in marked]
        self.marks = self.find_marks()
        self.places = self.find_places(held)

    def find_held(self) -> list[Any]:
        return list(chain.from_iterable(self.tables))

    def find_marks(self) -> list[Any]:
        return [
            (id(own.get("_hf_hook")), tuple(getattr(own.get("_diffusers_hook"), "hooks", None) or ()))
            for own in self.attributes
            if "_hf_hook" in own or "_diffusers_hook" in own
        ]

    def find_places(self, held: Sequence[Any]) -> list[Any]:
        """Return where weights lie, the strides of matrices, and the dtypes of samples."""
        with plainly():
            return [
                *map(ADDRESS, self.take_weights(held)),
                *map(STRIDE, self.take_matrices(held)),
                *map(DTYPE, self.take_samples(held)),
            ]

    def is_steady(self) -> bool:
        """Whether the tree holds the same objects, at the same places, and no other offloader has marked it."""
        if any(self.empty) or list(map(len, self.tables)) != self.counts:
            return False
        held = self.find_held()
        return (
            all(map(is_, held, self.children))
            and list(map(id, held[len(self.children) :])) == self.tensors
            and self.find_places(held) == self.places
            and self.find_marks() == self.marks
        )


def taker(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that takes the elements at these indices out of a sequence."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda sequence: tuple(sequence[index] for index in indices)
