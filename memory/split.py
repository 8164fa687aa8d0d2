"""Layer split: moving what flows between the blocks from device to device.

Hidden states hop once, because every block returns them where it computed. Side inputs that all blocks share
(conditioning, rotary tables) are the same tensor object in every call, so their copies are kept for the pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Hops"]


class Hops:
    """Copies tensors to the device of the block that takes them, once per tensor, device and pass."""

    def __init__(self) -> None:
        self.copies: dict[tuple[int, torch.device], tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.num_hops = 0
        self.bytes_moved = 0

    def move(self, value: Any, device: torch.device) -> Any:
        """Return the value with every tensor inside on the device; the same object if nothing has to move.

        Containers that callees write into (caches of features) therefore stay theirs on a single device.
        """
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if all(tensor.device == device for tensor in tensors):
            return value
        return tree_map_only(torch.Tensor, lambda tensor: self.move_tensor(tensor, device), value)

    def move_tensor(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if tensor.is_inference():  # no version tells whether it was written since: copy every time
            return self.count(tensor.to(device))
        # Holding the source keeps its id from being reused.
        held = self.copies.get((id(tensor), device))
        if held is not None and held[0] is tensor and held[1] == tensor._version:
            return held[2]
        copy = self.count(tensor.to(device))
        self.copies[id(tensor), device] = tensor, tensor._version, copy
        return copy

    def count(self, copy: torch.Tensor) -> torch.Tensor:
        self.num_hops += 1
        self.bytes_moved += copy.nbytes
        return copy

    def forget(self) -> None:
        """Drop the kept copies: the pass is over."""
        self.copies.clear()
