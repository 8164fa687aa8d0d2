"""Layers that others add to a managed module, such as a LoRA's: seen by a look, and joined to their blocks.

[Note: added layers] peft puts a layer of its own in the place of one of ours, which it holds as ``base_layer``, and its
factors beside that: names change, the modules and parameters that we know stay the objects they are. So a look at the
children of every module and at the number of their parameters tells that something was added or taken away. What hangs
in the tree and is none of ours is packed into a slab of its own for each block, and travels with it. What was taken
out of the tree again gets plain memory, and is forgotten.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from ..weights.component import TensorSpec
from ..weights.module_component import SAFETENSORS_NAMES, leaf_bytes
from ..weights.quantized_leaves import form_of, leaves_of
from .encoded_weight import EncodedWeight
from .parameter_slots import ParameterSlot, repoint

__all__ = ["Structure", "Tree", "bring_home", "walk"]


class Structure:
    """Which modules hang where, and how many parameters each has; tells whether that has changed since.

    A look takes about 0.1 microseconds per module.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.modules = list(root.modules())
        self.children = [module._modules for module in self.modules]
        self.parameters = [module._parameters for module in self.modules]
        self.buffers = [module._buffers for module in self.modules]
        # The objects themselves: another one might get the id of one that is gone.
        self.known = self.list_children()
        self.counts = list(map(len, self.parameters))

    def list_children(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(map(dict.values, self.children)))

    def tensors(self) -> Iterator[torch.Tensor | None]:
        """Yield what the modules hold now, as parameters and as buffers, at each of its places."""
        return chain(
            chain.from_iterable(map(dict.values, self.parameters)), chain.from_iterable(map(dict.values, self.buffers))
        )

    def has_changed(self) -> bool:
        """Whether anything was added or taken away since."""
        # Modules are equal only to themselves.
        return self.list_children() != self.known or list(map(len, self.parameters)) != self.counts


class Tree:
    """The weights of a module as they hang in it now, told apart by ours and others'.

    Args:
        own: the entries that came under management with the module. One that is held at another place too by now gets
            that place.
        blocks: the modules of the blocks, with their numbers.
        known: the modules that were there when the module came under management. Only of others do buffers count:
            modules make and replace buffers as they compute.
        lent: the places of ours that hold weights of others for a while.
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
        """Those of each weight now, by the id of its entry."""
        self.added: list[tuple[int | None, ParameterSlot]] = []
        """What is not ours, each with the number of its block; None for what is beside the blocks."""
        entry_at = {(module, name): slot for slot in own for module, name in slot.owners} | dict(lent)
        entry_of = {id(slot.held): slot for slot in own if slot.owners}
        added: dict[int, tuple[int | None, ParameterSlot]] = {}
        for path, module, home in walk(root, blocks):
            for places, is_buffer in ((module._parameters, False), (module._buffers, True)):
                for name, tensor in places.items():
                    if tensor is None or (is_buffer and module in known and (module, name) not in entry_at):
                        continue
                    slot = entry_at.get((module, name)) or entry_of.get(id(tensor))
                    if slot is None and isinstance(tensor, EncodedWeight):  # another parameter made of one of ours
                        tensor = tensor.plain()
                        places[name] = tensor  # type: ignore[assignment]
                    if slot is None:
                        slot = ParameterSlot(describe(tensor), (), is_buffer, form=form_of(tensor))
                        slot.is_inference = tensor.is_inference()
                        entry_of[id(tensor)] = slot
                        added[id(slot)] = home, slot
                    if (module, name) not in slot.owners and (module, name) not in lent:
                        slot.set_owners((*slot.owners, (module, name)))
                    if id(slot) in added and added[id(slot)][0] != home:
                        added[id(slot)] = None, slot  # of several blocks: it stays beside them
                    self.names[id(slot)].append(f"{path}.{name}" if path else name)
        for home, slot in added.values():
            first, *others = self.names[id(slot)]
            slot.spec = replace(slot.spec, name=first, other_names=tuple(others))
            self.added.append((home, slot))


def walk(root: nn.Module, blocks: Mapping[nn.Module, int]) -> Iterator[tuple[str, nn.Module, int | None]]:
    """Yield every module once, with its path and the number of the block that it is in."""
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


def describe(tensor: torch.Tensor) -> TensorSpec:
    """Return a weight in numbers, without a name: one that is not cast to eight bits, as others compute with it."""
    dtype, shape = SAFETENSORS_NAMES[str(tensor.dtype)], tuple(tensor.shape)
    return TensorSpec(name="", dtype=dtype, shape=shape, leaves=leaf_bytes(tensor))


def bring_home(slots: Iterable[ParameterSlot]) -> None:
    """Move weights that are on a device to host memory; their objects stay where torch allows that."""
    for slot in slots:
        if slot.held.device.type not in ("cpu", "meta"):
            repoint(slot, [leaf.detach().to("cpu") for leaf in leaves_of(slot.held)], lasting=True)
