"""State that blocks share outside of their arguments: caches of hooks, and stores of attention processors.

Diffusers keeps its hooks in a registry on each module (``_diffusers_hook``). The hooks of a first-block cache or of
MagCache share an object in which one block stores tensors that another block uses. Attention processors collect maps in
a store that the pipeline reads between steps. In a split such an object is treated like one more argument of the block:
its tensors are copied to the block's device and back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..tensors.nested_tensors import OPAQUE, find_tensors, replace_tensors

__all__ = ["Stores", "exchange", "find_shared_states", "tensors_of"]

# The depth of nested objects to which tensors of a processor are searched.
DEPTH = 3
# A larger container is not a store of maps but, for example, a vocabulary.
MAX_ITEMS = 4096
Place = tuple[Any, Any, Any]
"""A dict, list or deque, a key in it, and the tensor or tuple there."""


class Stores:
    """Finds the attention processors with state in some blocks.

    Args:
        blocks: the blocks that compute on another device than their parent.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.holders = [(block, part) for block in blocks for part in block.modules() if hasattr(part, "processor")]

    def find(self) -> Iterator[tuple[nn.Module, Any]]:
        """Yield each block with each of its processors that has attributes. Takes 0.2 us per attention layer."""
        for block, part in self.holders:
            processor = vars(part).get("processor")
            if getattr(processor, "__dict__", None) and not isinstance(processor, OPAQUE):
                yield block, processor


def find_shared_states(blocks: Iterable[nn.Module]) -> defaultdict[nn.Module, list[Any]]:
    """Return, by block, the objects that hooks of this block and of another block both hold."""
    holders: dict[int, set[nn.Module]] = defaultdict(set)
    held: dict[int, Any] = {}
    for block in blocks:
        for part in block.modules():
            for hook in hooks_of(part):
                for value in vars(hook).values():
                    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | type):
                        holders[id(value)].add(block)
                        held[id(value)] = value
    found: defaultdict[nn.Module, list[Any]] = defaultdict(list)
    for number, owners in holders.items():
        for block in owners if len(owners) > 1 else ():
            found[block].append(held[number])
    return found


def hooks_of(module: nn.Module) -> Iterator[Any]:
    registry = vars(module).get("_diffusers_hook")
    hooks = getattr(registry, "hooks", None)
    if isinstance(hooks, dict):
        yield from (hook for hook in hooks.values() if hasattr(hook, "__dict__"))


def open_states(shared: Iterable[Any]) -> Iterator[Any]:
    """Yield the attribute dict of each shared object, or of each of its states if it keeps several, as in diffusers."""
    for holder in shared:
        states = vars(holder).get("_state_cache")
        if isinstance(states, dict):
            yield from (vars(state) for state in states.values() if hasattr(state, "__dict__"))
        else:
            yield vars(holder)


def places_in(shared: Iterable[Any]) -> Iterator[Place]:
    """Yield the places where states hold tensors: attributes, containers and nested plain objects."""
    seen = set()
    waiting: list[tuple[Any, int]] = [(state, 0) for state in open_states(shared)]
    while waiting:
        container, depth = waiting.pop()
        if id(container) in seen or len(container) > MAX_ITEMS:
            continue
        seen.add(id(container))
        for key, held in list(container.items() if isinstance(container, dict) else enumerate(container)):
            if isinstance(held, torch.Tensor | tuple):
                yield container, key, held
            elif isinstance(held, dict | list | deque):
                waiting.append((held, depth))
            elif depth < DEPTH and not isinstance(held, OPAQUE) and isinstance(getattr(held, "__dict__", None), dict):
                waiting.append((vars(held), depth + 1))


def tensors_of(shared: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors that states hold."""
    return find_tensors([held for _, _, held in places_in(shared)])


def exchange(shared: Iterable[Any], others: Mapping[int, Any]) -> None:
    """Replace tensors that states hold by ``others``, whose keys are the ids of the replaced tensors."""
    for container, key, held in list(places_in(shared)) if others else ():
        other = replace_tensors(held, others)
        if other is not held:
            container[key] = other
