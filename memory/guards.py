"""What others do with a managed module's weights: read them, load over them, move them, ask for gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from .entries import Entry, read_weights
from .errors import UnsafeState
from .residency import Unit
from .source import WeightsSource

__all__ = ["StateGuard", "refuse_backward"]


class StateGuard:
    """Makes ``state_dict()`` complete, refuses loading over weights that rest elsewhere, and undoes ``Module.to``.

    Args:
        rests: where the weights are that ``state_dict()`` would not have, for people; None if there are none.
    """

    def __init__(
        self, owner: str, module: nn.Module, units: Sequence[Unit], source: WeightsSource | None, *, rests: str | None
    ) -> None:
        self.owner = owner
        self.module = module
        self.units = list(units)
        self.source = source
        self.rests = rests
        self.changed_dtype: torch.dtype | None = None
        """What somebody changed the weights to, and was not told yet that it was taken back."""

    def hook(self) -> Iterator[RemovableHandle]:
        """Yield the handles of the hooks on the module and its parts."""
        if self.rests is not None:
            for path, module in self.module.named_modules():
                # torch marks the function it is given, which a bound method does not allow.
                complete = partial(self.complete_state_dict, f"{path}." if path else "")
                yield module.register_state_dict_post_hook(complete)
                yield module.register_load_state_dict_pre_hook(self.refuse_loading)

    def put_back(self) -> None:
        """Undo what ``Module.to`` and its like did to the weights. Takes about a microsecond per block to see nothing.

        The caller holds the manager's lock.
        """
        if any(unit.is_moved() for unit in self.units):
            for unit in self.units:  # a block's buffers are in another unit than its weights
                self.changed_dtype = unit.put_back() or self.changed_dtype

    def refuse_changed_dtype(self) -> None:
        """Tell, once, whoever changed the dtype of the weights. Raises `UnsafeState`."""
        if self.changed_dtype is not None:
            dtype, self.changed_dtype = self.changed_dtype, None
            raise UnsafeState(
                f"{self.owner}: its weights were changed to {dtype}, which has been undone: "
                "release it before changing its dtype"
            )

    def complete_state_dict(
        self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        """Put real weights where shapes without memory, or eight bits without their scale, would be.

        Costs their bytes in RAM, and one reading of what rests in files.

        Args:
            path: where the module is in ours, with a dot behind it.
        """
        if module is not self.module and prefix:
            return  # whoever asked a module around it completes the whole
        bare: dict[str, tuple[Entry, list[str]]] = {}
        for unit in self.units:
            for entry in unit.entries:
                names = [name for name in (entry.spec.name, *entry.spec.other_names) if name.startswith(path)]
                keys = [key for key in (prefix + name[len(path) :] for name in names) if key in state]
                if keys and state[keys[0]].is_meta:
                    bare[entry.spec.name] = entry, keys
                elif keys and entry.scale is not None:
                    state[keys[0]] = unit.wide(entry.spec.name, torch.device("cpu"))
        weights = read_weights([entry for entry, _ in bare.values()], self.source, drop_pages=True)
        for (_, keys), weight in zip(bare.values(), weights, strict=True):
            state.update(dict.fromkeys(keys, weight))

    def refuse_loading(self, *_: Any) -> None:
        raise UnsafeState(f"{self.owner} rests {self.rests}: release it before loading other weights into it")


def refuse_backward(output: Any, block: str) -> None:
    """Let a backward pass that reaches these outputs fail: the memory of the weights will hold another block's."""

    def refuse(gradient: torch.Tensor) -> None:
        raise UnsafeState(f"{block} streams or is widened to compute: a backward pass would read other weights")

    for tensor in tree_leaves(output):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]
