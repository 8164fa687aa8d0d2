"""The modules of a managed tree that get forward hooks, told apart by what a call of them means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from ...errors import UnsafeState
from ...weights.component import Component
from ...weights.module_component import is_callable
from ..tensors.parameter_slots import ParameterSlot

__all__ = ["HookedModules", "block_modules", "modules_holding"]


@dataclass(frozen=True, kw_only=True, slots=True)
class HookedModules:
    """The modules of a tree by role: entries, blocks, parts of blocks, and others."""

    entries: frozenset[nn.Module]
    """The root and its children, through which a program enters."""
    inner: frozenset[nn.Module]
    """Modules outside of blocks that have weights or blocks: other code may call them directly."""
    blocks: Mapping[nn.Module, int]
    """The modules of the blocks, with their numbers."""
    parts: Mapping[nn.Module, int]
    """The modules that are inside exactly one block, with its number."""

    @classmethod
    def find(
        cls,
        root: nn.Module,
        blocks: Mapping[nn.Module, int],
        holders: Iterable[nn.Module],
        lent: Collection[nn.Module],
    ) -> HookedModules:
        """Look through a tree.

        Args:
            blocks: the modules of the blocks, with their numbers.
            holders: the modules that hold non-block weights.
            lent: the parts that other components own, whose hooks see the calls of these.
        """
        children = (child for child in root.children() if is_callable(child) and child not in lent)
        entries = frozenset((root, *children))
        inside = [(part, number) for block, number in blocks.items() for part in block.modules() if part is not block]
        num_blocks = Counter(part for part, _ in inside)
        holders, own = set(holders), set(root.modules())
        taken = {*entries, *blocks, *num_blocks, *(part for part in lent if part not in holders)}
        beside = own.intersection((*holders, *above_blocks(root, blocks)))
        return cls(
            entries=entries,
            inner=frozenset(part for part in beside if part not in taken and is_callable(part)),
            blocks=blocks,
            parts={
                part: number
                for part, number in inside
                if num_blocks[part] == 1 and is_callable(part) and part not in lent
            },
        )


def above_blocks(root: nn.Module, blocks: Mapping[nn.Module, int]) -> Iterator[nn.Module]:
    """Yield the modules on the way from the root to each block."""
    by_name = dict(root.named_modules())
    for name in [name for name, module in by_name.items() if module in blocks]:
        above = name.split(".")[:-1]
        yield from (by_name[".".join(above[:depth])] for depth in range(1, len(above) + 1))


def block_modules(owner: str, root: nn.Module, component: Component) -> dict[nn.Module, int]:
    """Return the modules of a component's blocks, with their numbers. Raises `UnsafeState` where one is gone."""
    blocks: dict[nn.Module, int] = {}
    for number, block in enumerate(component.blocks):
        try:
            blocks[root.get_submodule(block.name)] = number
        except AttributeError:
            what = f"{owner}: {block.name!r} is gone from its module"
            raise UnsafeState(f"{what}: release it before such changes") from None
    return blocks


def modules_holding(slots: Iterable[ParameterSlot]) -> list[nn.Module]:
    """Return the modules that hold any of these weights themselves."""
    return list(dict.fromkeys(module for slot in slots for module, _ in slot.owners))
