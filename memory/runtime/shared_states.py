"""State that blocks share beside their arguments: caches of hooks, and stores of attention processors.

Diffusers' hooks stand in a registry on each module (``_diffusers_hook``), and those of a first-block cache or of
MagCache share an object in which one block stores what another one uses. Attention processors collect maps in a store,
which the pipeline reads between the steps. In a split such an object is one more argument of the block: its tensors go
to the block's device and come back.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from .nested_tensors import find_tensors, replace_tensors

__all__ = ["Stores", "exchange", "find_shared_states", "tensors_of"]

# How many objects deep the tensors of a processor are searched.
DEPTH = 3
# A larger container is a vocabulary or the like, not a store of maps.
MAX_ITEMS = 4096
OPAQUE = (nn.Module, type, ModuleType, FunctionType, MethodType, torch.Generator)
Place = tuple[Any, Any, Any]
"""A dict, list or deque, a key in it, and the tensor or tuple there."""


class Stores:
    """The attention processors of blocks that have state.

    Args:
        blocks: those that compute elsewhere than their parent.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.holders = [(block, part) for block in blocks for part in block.modules() if hasattr(part, "processor")]

    def find(self) -> Iterator[tuple[nn.Module, Any]]:
        """Yield each block with each of its processors that has attributes. Costs 0.2 us per attention layer."""
        for block, part in self.holders:
            processor = vars(part).get("processor")
            if getattr(processor, "__dict__", None) and not isinstance(processor, OPAQUE):
                yield block, processor


def find_shared_states(blocks: Iterable[nn.Module]) -> defaultdict[nn.Module, list[Any]]:
    """Return what the hooks of each block hold that those of another block hold, too."""
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
    """Yield the attribute dict of each shared object, or of each state in it if a hook of diffusers keeps several."""
    for holder in shared:
        states = vars(holder).get("_state_cache")
        if isinstance(states, dict):
            yield from (vars(state) for state in states.values() if hasattr(state, "__dict__"))
        else:
            yield vars(holder)


def places_in(shared: Iterable[Any]) -> Iterator[Place]:
    """Yield the places where states hold tensors: in attributes, containers and nested plain objects."""
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
    """Replace tensors that states hold, by their ids."""
    for container, key, held in list(places_in(shared)) if others else ():
        other = replace_tensors(held, others)
        if other is not held:
            container[key] = other
