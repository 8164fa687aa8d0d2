"""Slabs: one flat range of bytes for all tensors of a block, on the host and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..units import slab_offsets
from .devices import Device

__all__ = ["Form", "SlabLayout", "allocate_device"]


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, dtype and strides of a tensor; the strides have no gaps and no overlaps."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Form:
        """Return the form of a dense copy; a dense tensor's own strides. What has no memory is to be contiguous."""
        if tensor.is_meta:
            strides = torch.empty(tensor.shape, device="meta").stride()
        else:
            strides = torch.empty_like(tensor, device="meta").stride()
        return cls(tensor.shape, dtype or tensor.dtype, strides)

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def allocate(self, device: torch.device | None = None) -> torch.Tensor:
        """Return a tensor of this form, its contents undefined."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)

    def bytes_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes of a tensor in the order of this form; copies it if it has other strides."""
        if tensor.stride() != self.strides:
            tensor = torch.empty_strided(self.shape, self.strides, dtype=self.dtype).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """Where the tensors of one block lie in a flat slab of bytes; the same on the host and on a device."""

    forms: tuple[Form, ...]
    offsets: tuple[int, ...]
    slab_bytes: int

    @classmethod
    def of(cls, forms: Sequence[Form]) -> SlabLayout:
        offsets, slab_bytes = slab_offsets(form.num_bytes for form in forms)
        return cls(tuple(forms), tuple(offsets), slab_bytes)

    def end_of(self, place: int) -> int:
        """Return where a tensor ends in the slab."""
        return self.offsets[place] + self.forms[place].num_bytes

    def views(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views into a slab of uint8; allocates nothing.

        Detached ones: they share the slab's version but, unlike views, do not keep its first owner alive once they are
        pointed elsewhere.
        """
        with torch.inference_mode(False), torch.no_grad():
            return [
                slab[offset : offset + form.num_bytes].view(form.dtype).as_strided(form.shape, form.strides).detach()
                for form, offset in zip(self.forms, self.offsets, strict=True)
            ]


def allocate_device(num_bytes: int, device: Device) -> torch.Tensor:
    """Allocate a slab of bytes on a device.

    Never as an inference tensor: those can only be written by the thread mode that made them, and nodes run in
    inference mode while workers do not.

    Raises:
        torch.OutOfMemoryError: the device has not that much; nothing was allocated.
    """
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device.torch_device)
