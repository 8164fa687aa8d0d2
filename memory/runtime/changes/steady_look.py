"""A quick check whether other code changed a module since the last full check.

[Note: steady looks] Between two forwards other code may add layers to a managed module, assign weights, assign
``.data``, or add hooks of another offloader. Every forward must detect this, but almost none finds a change. So after a
full check that found none, the objects in the module tree and the addresses of the weights are kept in flat lists. The
quick check compares them with the current ones in loops that run in C. Objects that the engine itself puts into the
module differ as well and cause one full check.

Tensors are compared by their ids and not referenced, because references to weights are counted ([Note: swaps] in
`weight_swaps.py`). An id cannot be reused: the groups keep the tensors that they gave the module.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, ValuesView
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import nn

from ..tensors.absent_weight import AbsentWeight
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.reported_device import plainly

__all__ = ["SteadyLook"]

ADDRESS = torch.Tensor.data_ptr
STRIDE = torch.Tensor.stride
DTYPE: Any = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
ATTRIBUTES = attrgetter("__dict__")


class SteadyLook:
    """The contents of a module tree at the last full check. A quick check takes about 0.2 microseconds per weight.

    Args:
        modules: the modules in the tree.
        marked: the modules on which other offloaders leave marks (`find_rival`).
        weights: the ids of the plain tensors whose addresses are compared.
        samples: the ids of one weight per block, whose dtype stands for that of the block's other weights.
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
            # Empty buffer tables are left out: forwards may create buffers in them.
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
        # A plain parameter on the device is used as it is, until a full check before it leaves that. Elsewhere only its
        # class tells of another order or dtype of the same memory: a watched weight gets another address then.
        at_rest = [index for index in numbers if type(held[index]) is not nn.Parameter or held[index].is_cpu]
        self.take_matrices = taker([index for index in at_rest if held[index].dim() > 1])
        # These have no address, but attributes of their own, which `torch.utils.swap_tensors` exchanges as well.
        placeless = (AbsentWeight, EncodedWeight)
        self.take_placeless = taker([index for index in numbers if isinstance(held[index], placeless)])
        self.take_samples = taker([index for index in at_rest if id(held[index]) in samples])
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
        """Return the addresses of weights, the strides of matrices, the dtypes of samples, and the attributes of
        weights without an address."""
        with plainly():
            return [
                *map(ADDRESS, self.take_weights(held)),
                *map(STRIDE, self.take_matrices(held)),
                *map(DTYPE, self.take_samples(held)),
                *map(id, map(ATTRIBUTES, self.take_placeless(held))),
            ]

    def is_steady(self) -> bool:
        """Whether the tree holds the same objects at the same addresses, with the same marks of other offloaders."""
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
    """Return a function that returns the elements of a sequence at these indices."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda sequence: tuple(sequence[index] for index in indices)
