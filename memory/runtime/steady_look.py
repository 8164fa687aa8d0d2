"""One quick look that tells whether anything was done to a module since a close one.

[Note: steady looks] Others may do anything to a managed module between two forwards: add layers, assign weights, point
``.data`` to other memory, hook it up for an offloader of theirs. Every forward has to see that, and almost none finds
any. So after a close look found nothing, what it found is kept in flat lists, and compared with what is there now by
loops that run in C: which objects are in the module tree, and where the weights lie. Whatever the engine itself puts
into the module is another object, too, and asks for a close look once.

Objects are known by their ids, without references, because references to weights are counted ([Note: swaps] in
`weight_swaps.py`). An id cannot be another object's: the groups keep what they gave the module, and `Structure` keeps
its modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, compress
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
        self.tables: list[dict[str, Any]] = []
        for module in modules:
            self.tables += [module._modules, module._parameters]
            self.tables += [module._buffers] if module._buffers else []  # forwards may make others
        self.counts = list(map(len, self.tables))
        self.filled = [table for table in self.tables if table]
        self.attributes = [vars(module) for module in marked]
        held = self.find_held()
        self.held = list(map(id, held))
        self.is_weight = [number in weights for number in self.held]
        self.is_matrix = [is_own and each.dim() > 1 for is_own, each in zip(self.is_weight, held, strict=True)]
        self.is_sample = [number in samples for number in self.held]
        self.marks = self.find_marks()
        self.places = self.find_places(held)

    def find_held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.filled)))

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
                *map(ADDRESS, compress(held, self.is_weight)),
                *map(STRIDE, compress(held, self.is_matrix)),
                *map(DTYPE, compress(held, self.is_sample)),
            ]

    def is_steady(self) -> bool:
        """Whether the tree holds the same objects, at the same places, and no other offloader has marked it."""
        if list(map(len, self.tables)) != self.counts:
            return False
        held = self.find_held()
        return (
            list(map(id, held)) == self.held
            and self.find_places(held) == self.places
            and self.find_marks() == self.marks
        )
