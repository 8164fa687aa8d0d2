"""What hooks of another library keep for several blocks: caches of steps hand tensors from block to block by it.

Diffusers' hooks stand in a registry on each module (``_diffusers_hook``), and those of a first-block cache or of
MagCache share an object in which one block leaves what another one uses. In a split that object is one more argument
of the block: its tensors go where the block computes, and come back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = ["find_shared_states", "open_states"]


def find_shared_states(blocks: Iterable[nn.Module]) -> Mapping[nn.Module, list[Any]]:
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
    found: dict[nn.Module, list[Any]] = defaultdict(list)
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
    """Yield the attributes of what is shared as dicts to be changed, those of each state where there are several."""
    for holder in shared:
        states = vars(holder).get("_state_cache")
        if isinstance(states, dict):
            yield from (vars(state) for state in states.values() if hasattr(state, "__dict__"))
        else:
            yield vars(holder)
