"""Weights that parts of a component share, and what a split over devices makes of them: a weight is on one device.

[Note: tied weights] What several blocks share is in none of them: it is a non-block weight, on the first device. A
layer that has nothing else is called there, from wherever a block computes. One that has other weights on another
device could compute nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput
from ..weights.component import Component, TensorSpec
from .device_plan import DevicePlan

__all__ = ["can_split", "refuse_tied_split"]


def can_split(component: Component) -> bool:
    """Whether blocks of a component may be on any devices: none of them shares a weight with anything else."""
    paths = [f"{block.name}." for block in component.blocks]
    return len(paths) > 1 and not any(
        is_shared(tensor, path, paths)
        for block, path in zip((*component.blocks, component.non_block), (*paths, ""), strict=True)
        for tensor in block.tensors
        if tensor.other_names
    )


def is_shared(tensor: TensorSpec, path: str, paths: Sequence[str]) -> bool:
    """Whether a weight of the block at a path, or of none, is also elsewhere, or in a block."""
    if path:
        return not all(name.startswith(path) for name in names_of(tensor))
    return any(name.startswith(other) for name in names_of(tensor) for other in paths)


def refuse_tied_split(component: Component, shares: Sequence[DevicePlan]) -> None:
    """Refuse a split in which parts on several devices share a weight ([Note: tied weights]). Raises `InvalidInput`."""
    if len(shares) < 2:
        return
    home = shares[0].device
    on = {component.blocks[number].name: share.device for share in shares for number in share.blocks}
    layers: dict[str, set[str]] = {}
    for block in (*component.blocks, component.non_block):
        for tensor in block.tensors:
            for name in names_of(tensor):
                layers.setdefault(name.rpartition(".")[0], set()).add(on.get(block.name, home))
    tensors = [tensor for block in (*component.blocks, component.non_block) for tensor in block.tensors]
    for tensor in [tensor for tensor in tensors if tensor.other_names]:
        names = names_of(tensor)
        used_on = {
            next((device for block, device in on.items() if name.startswith(f"{block}.")), home) for name in names
        }
        if len(used_on) > 1 or any(len(layers[name.rpartition(".")[0]]) > 1 for name in names):
            raise InvalidInput(
                f"{component.name} cannot be split so: {' and '.join(names[:2])} are one weight, which is on one "
                f"device; place it on {home} alone, or leave its placement to auto"
            )


def names_of(tensor: TensorSpec) -> tuple[str, ...]:
    return tensor.name, *tensor.other_names
