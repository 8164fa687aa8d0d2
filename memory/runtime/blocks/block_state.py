"""The state of a group of weights: what its module holds, and what that costs."""

from __future__ import annotations

import enum

__all__ = ["BlockState"]


class BlockState(enum.Enum):
    """What the module of a group holds, registered as its parameters and buffers, and what that costs.

    Between forwards a group is `IN_PLACE`, `HOST`, `IN_FILE` or `RESIDENT`. In a forward a block goes to `COMPUTING`
    and back, unless the module already holds tensors that compute: in a quiet pass ([Note: quiet passes] in
    `forward_blocks.py`), and in place on the CPU. The group of non-block weights keeps its state.
    """

    IN_PLACE = "in place"
    """The module's own tensors, in the memory that they came in, from which the CPU computes; costs nothing more.
    The state before packing and after release, and of groups that compute on the CPU as they are stored."""
    HOST = "host"
    """Views into a slab of host memory (`WeightsAtRest.tensors`): costs the slab in RAM, page-locked or not, and no
    device bytes. A streamed block is here whenever it does not compute."""
    IN_FILE = "in file"
    """Shapes without memory; the bytes are in the file. Costs neither RAM nor device bytes; each use reads them."""
    RESIDENT = "resident"
    """Views into the group's own slab on the device, encoded weights as they rest; costs the slab there, beside the
    weight store."""
    COMPUTING = "computing"
    """Views that its forward can use: the resident slab, staging memory, or on the CPU the host slab; encoded weights
    in the scratch. Costs no memory of its own: it is in the resident slab, the staging slot or the scratch. The module
    must not be read from outside."""
