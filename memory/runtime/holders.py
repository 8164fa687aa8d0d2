"""Which components, of every manager, hold a module or a weight: found by its identity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from weakref import ref

from torch import nn

from ..errors import UnsafeState
from ..weights.tensor_holders import find_held_elsewhere
from .blocks.added_layers import Structure
from .weight_places import WeightPlaces

__all__ = ["attached", "find_holders", "find_sharers", "refuse_managed"]


class Attached:
    """The weight places of all components with hooks in place, of every manager; weakly referenced.

    Managers have a lock each, and finalizers take none. So a change, and the copy that is iterated, are one step each
    of a plain dict; a `WeakSet` is iterated in many steps, and fails if another thread adds to it meanwhile.
    """

    def __init__(self) -> None:
        self.places: dict[int, ref[WeightPlaces]] = {}

    def add(self, places: WeightPlaces) -> None:
        known, key = self.places, id(places)
        known[key] = ref(places, lambda _: known.pop(key, None))

    def discard(self, places: WeightPlaces) -> None:
        self.places.pop(id(places), None)

    def __iter__(self) -> Iterator[WeightPlaces]:
        return (places for known in list(self.places.values()) if (places := known()) is not None)


attached = Attached()


def find_sharers(modules: Iterable[nn.Module]) -> list[WeightPlaces]:
    """Return all that have hooks in place, of every manager, and may have weights of these modules.

    What hangs in a managed module without having joined it yet is not found: `JoinedLayers.join` looks.
    """
    roots = list(modules)
    trees = [Structure(root) for root in roots]
    if not has_other_holders(trees):
        return []
    ids = {id(tensor) for tree in trees for tensor in tree.tensors() if tensor is not None} | set(map(id, roots))
    return find_holders(ids)


def find_holders(ids: AbstractSet[int]) -> list[WeightPlaces]:
    """Return all that have hooks in place, of every manager, and any of these objects. Looks at each of them."""
    return [places for places in attached if places.has_any(ids)]


def has_other_holders(trees: Iterable[Structure]) -> bool:
    """Whether anything but these module trees refers to a weight in them, as a component that manages it does."""
    return bool(find_held_elsewhere(tensor for tree in trees for tensor in tree.tensors()))


def refuse_managed(module: nn.Module) -> None:
    """Refuse to touch the weights of a module where they are: those of a managed one move, and may rest encoded.

    Raises:
        UnsafeState: any of them is managed.
    """
    weights = {id(parameter) for parameter in module.parameters()}
    for places in attached:
        if any(id(parameter) in weights for parameter in places.module.parameters()):
            raise UnsafeState(f"{places.owner} is managed: release it before loading other weights into it")
