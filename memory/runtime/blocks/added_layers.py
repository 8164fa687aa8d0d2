"""Layers that other code adds to a managed module, such as a LoRA's: detected, and assigned to their blocks.

[Note: added layers] peft replaces a layer by its own layer, which holds the original as ``base_layer`` and the LoRA's
factors beside it. Names change, but the known modules and parameters stay the same objects. So comparing the children
and the number of parameters of every module shows whether anything was added or removed. Added weights are packed into
one more slab per block, which moves together with the block. Weights that are removed from the tree again get plain
memory, and the engine forgets them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from ...weights.component import TensorSpec
from ...weights.module_component import SAFETENSORS_NAMES, leaf_bytes
from ...weights.quantized_leaves import form_of, leaves_of
from ..tensors.encoded_weight import EncodedWeight
from ..tensors.parameter_slots import ParameterSlot, repoint

__all__ = ["Structure", "Tree", "describe_tensor", "return_to_host", "walk"]


class Structure:
    """The module tree and the number of parameters of each module; detects changes of both.

    A check takes about 0.1 microseconds per module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = list(root.modules())
        self.children = [module._modules for module in self.modules]
        self.parameters = [module._parameters for module in self.modules]
        self.buffers = [module._buffers for module in self.modules]
        # Objects, not ids: a new object may get the id of a freed one.
        self.known = self.list_children()
        self.counts = list(map(len, self.parameters))

    def list_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self.children)))

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """Yield the parameters, then the buffers, that the modules hold now, once for each place."""
        return chain(
            chain.from_iterable(map(dict.values, self.parameters)), chain.from_iterable(map(dict.values, self.buffers))
        )

    def has_changed(self) -> bool:
        """Whether a child or parameter was added or removed since this object was made."""
        # Modules are equal only to themselves.
        return self.list_children() != self.known or list(map(len, self.parameters)) != self.counts


class Tree:
    """The weights in a module tree now: the managed ones, and those that other code added.

    Args:
        own: the slots of the managed weights. A weight that is held in another place as well by now gets that place as
            an owner.
        blocks: the modules of the blocks with their numbers.
        known: the modules that were there when management began. New buffers of these are ignored, because modules
            create and replace buffers while they compute.
        lent: the places of managed weights that hold tensors of other code for a while.
    """

    def __init__(
        self,
        root: nn.Module,
        own: Iterable[ParameterSlot],
        blocks: Mapping[nn.Module, int],
        known: Collection[nn.Module],
        *,
        lent: Mapping[tuple[nn.Module, str], ParameterSlot],
    ) -> None:
        own = list(own)
        self.names: dict[int, list[str]] = defaultdict(list)
        """The names of each weight now, by the id of its slot."""
        self.added: list[tuple[int | None, ParameterSlot]] = []
        """The slots of added weights with the numbers of their blocks; None for those outside all blocks."""
        entry_at = {(module, name): slot for slot in own for module, name in slot.owners} | dict(lent)
        entry_of = {id(slot.held): slot for slot in own if slot.owners}
        added: dict[int, tuple[int | None, ParameterSlot]] = {}
        for path, module, home in walk(root, blocks):
            for places, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for name, tensor in places.items():
                    if tensor is None or (is_buffer and module in known and (module, name) not in entry_at):
                        continue
                    slot = entry_at.get((module, name)) or entry_of.get(id(tensor))
                    if slot is None and isinstance(tensor, EncodedWeight):  # made by other code from one of ours
                        tensor = tensor.plain()
                        places[name] = tensor  # type: ignore[assignment]
                    if slot is None:
                        is_inference = tensor.is_inference()
                        slot = ParameterSlot(
                            describe_tensor(tensor), (), is_buffer, form=form_of(tensor), is_inference=is_inference
                        )
                        entry_of[id(tensor)] = slot
                        added[id(slot)] = home, slot
                    if (module, name) not in slot.owners and (module, name) not in lent:
                        slot.set_owners((*slot.owners, (module, name)))
                    if id(slot) in added and added[id(slot)][0] != home:
                        added[id(slot)] = None, slot  # shared by several blocks: treated as outside all blocks
                    self.names[id(slot)].append(f"{path}.{name}" if path else name)
        for home, slot in added.values():
            first, *others = self.names[id(slot)]
            slot.describe(replace(slot.spec, name=first, other_names=tuple(others)))
            self.added.append((home, slot))


def walk(root: nn.Module, blocks: Mapping[nn.Module, int]) -> Iterator[tuple[str, nn.Module, int | None]]:
    """Yield each module once, with its path and the number of its block, None outside all blocks."""
    seen: set[nn.Module] = set()
    to_visit: list[tuple[str, nn.Module, int | None]] = [("", root, None)]
    while to_visit:
        path, module, home = to_visit.pop()
        if module in seen:
            continue
        seen.add(module)
        home = blocks.get(module, home)
        yield path, module, home
        prefix = f"{path}." if path else ""
        children = [(prefix + name, child, home) for name, child in module._modules.items() if child is not None]
        to_visit += reversed(children)


def describe_tensor(tensor: torch.Tensor) -> TensorSpec:
    """Return a weight's numbers, without a name. Added weights are not cast, because other code computes with them."""
    dtype, shape = SAFETENSORS_NAMES[str(tensor.dtype)], tuple(tensor.shape)
    return TensorSpec(name="", dtype=dtype, shape=shape, leaves=leaf_bytes(tensor))


def return_to_host(slots: Iterable[ParameterSlot]) -> None:
    """Move weights that are on a device to host memory. They stay the same objects where torch allows it."""
    for slot in slots:
        if slot.held.device.type not in ("cpu", "meta"):
            repoint(slot, [leaf.detach().to("cpu") for leaf in leaves_of(slot.held)], lasting=True)
