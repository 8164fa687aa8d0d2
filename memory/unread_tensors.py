"""Tensors of a file that are read only if another library uses them otherwise than to fill a weight that is kept.

A library may convert a file's tensors as it fills its weights with them. Of such a weight the converted form is kept,
and the library chooses the dtype by the file's: it must get tensors in that one. Their bytes are read when an operator
takes them (`torch`'s dispatch modes see each), or when something has them at the end of the loading.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch.utils._pytree import tree_leaves

from .weights.file_reader import WeightsFile
from .weights.quantized_leaves import leaves_of
from .weights.tensor_holders import count_tensors

__all__ = ["LEAST_UNREAD_BYTES", "UnreadTensors"]

# Smaller ones are read at once: a library may look into them by means that no mode sees.
LEAST_UNREAD_BYTES = 1 << 16


class UnreadTensors:
    """The tensors of files that have memory, but no bytes of their file in it yet."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[torch.Tensor, WeightsFile, str]] = {}
        """By the address of their memory."""

    def add(self, file: WeightsFile, tensors: Mapping[str, torch.Tensor]) -> None:
        """Leave tensors of a file, by their names there, unread for now. Each has memory of its own."""
        self.waiting |= {tensor.untyped_storage().data_ptr(): (tensor, file, name) for name, tensor in tensors.items()}

    def add_clone(self, clone: torch.Tensor, source: torch.Tensor) -> None:
        """Leave a clone of an unread tensor unread, too."""
        _, file, name = self.waiting[source.untyped_storage().data_ptr()]
        self.add(file, {name: clone})

    def is_unread(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are not there yet."""
        return bool(self.waiting) and tensor.untyped_storage().data_ptr() in self.waiting

    def read_for(self, values: object) -> None:
        """Read what an operator takes, by its arguments. Raises `InvalidInput` if the file has changed."""
        if self.waiting:
            given = [leaf for each in tree_leaves(values) if isinstance(each, torch.Tensor) for leaf in leaves_of(each)]
            self.read({leaf.untyped_storage().data_ptr() for leaf in given if is_in_host_memory(leaf)})

    def read(self, addresses: Iterable[int]) -> None:
        """Read the tensors at these addresses that are not read yet. Raises `InvalidInput` if a file has changed."""
        for at in addresses:
            found = self.waiting.pop(at, None)
            if found is not None:
                tensor, file, name = found
                file.read_into([(name, tensor)])

    def end(self) -> list[torch.Tensor]:
        """Read what something has still, and return it; the others are gone.

        The caller has given up its own references. Raises `InvalidInput` if a file has changed.
        """
        read = []
        for at in list(self.waiting):
            tensor, file, name = self.waiting.pop(at)
            left: torch.Tensor | None = tensor
            if count_tensors(tensor) == 1:  # else another object has its memory
                known = weakref.ref(tensor)
                del tensor, left
                left = known()
            if left is not None:
                file.read_into([(name, left)])
                read.append(left)
        return read


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided
