"""The order in which the blocks of a split module ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import nn

from ...weights.component import Component

__all__ = ["remember_order"]

execution_orders: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""By split module, the names of its blocks in the order in which they ran."""


def remember_order(module: nn.Module, blocks: Sequence[str]) -> None:
    """Remember the order in which blocks ran. The next plan that splits the module uses it."""
    execution_orders[module] = tuple(blocks)


def in_execution_order(component: Component, module: nn.Module) -> Component:
    """Return a component with its blocks in the order in which they ran; unchanged if any block did not run."""
    places = {name: place for place, name in enumerate(execution_orders.get(module, ()))}
    if places.keys() != {block.name for block in component.blocks}:
        return component
    return replace(component, blocks=tuple(sorted(component.blocks, key=lambda block: places[block.name])))
