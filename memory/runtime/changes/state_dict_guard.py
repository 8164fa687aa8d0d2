"""``state_dict()`` and ``load_state_dict()`` of a module whose weights rest encoded or in their file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...errors import UnsafeState
from ...weights.source import WeightsSource
from ..blocks.group_reading import read_resting
from ..blocks.weight_group import WeightGroup
from ..tensors.deep_copies import OwnHook
from ..tensors.parameter_slots import ParameterSlot

__all__ = ["StateGuard"]


class StateGuard:
    """Makes ``state_dict()`` return real weights, and refuses ``load_state_dict()`` of weights at rest.

    Args:
        owner: the component's id.
        rests: how the weights rest, for messages.
    """

    def __init__(
        self, owner: str, module: nn.Module, groups: Sequence[WeightGroup], source: WeightsSource | None, *, rests: str
    ) -> None:
        self.owner = owner
        self.module = module
        self.groups = groups
        self.source = source
        self.rests = rests

    def hook(self) -> Iterator[RemovableHandle]:
        """Hook the module and each submodule, because the state dict of a submodule may be read alone."""
        below = self.list_resting()
        for path, module in self.module.named_modules():
            complete = OwnHook.on(module, self.complete, f"{path}." if path else "", owner=self.owner)
            yield module.register_state_dict_post_hook(complete)
            if path in below:
                refuse = OwnHook.on(module, self.refuse, below[path], owner=self.owner)
                yield module.register_load_state_dict_pre_hook(refuse)

    def list_resting(self) -> dict[str, list[str]]:
        """Return, by module path, the names of the weights below it that rest encoded or in their file.

        Without those that came in a mapping of it: the module could be loaded into, so a block is read for that.
        """
        below: dict[str, list[str]] = defaultdict(list)
        for group in self.groups:
            for slot in group.slots:
                if not slot.is_buffer and group.keeps_apart(slot) and slot.spec.name not in group.at_rest.mapped:
                    for name in (slot.spec.name, *slot.spec.other_names):
                        parts = name.split(".")
                        for depth in range(len(parts)):
                            below[".".join(parts[:depth])].append(".".join(parts[depth:]))
        return below

    def complete(self, path: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace tensors without memory and encoded weights in a state dict by real weights.

        Costs their bytes in RAM, and reads once what rests in files.

        Args:
            path: the path of the submodule in the component's module, with a dot at its end.
        """
        if module is not self.module and prefix:
            return  # called through the hook of a parent, which completes the whole dict
        on_meta: dict[str, tuple[WeightGroup, ParameterSlot, list[str]]] = {}
        for group in self.groups:
            for slot in group.slots:
                names = [name for name in (slot.spec.name, *slot.spec.other_names) if name.startswith(path)]
                keys = [key for key in (prefix + name[len(path) :] for name in names) if key in state]
                if keys and state[keys[0]].is_meta:
                    on_meta[slot.spec.name] = group, slot, keys
                elif keys and slot.encoding is not None:
                    state.update(dict.fromkeys(keys, group.wide(slot.spec.name, torch.device("cpu"))))
        weights = read_resting([(group, slot) for group, slot, _ in on_meta.values()], self.source)
        for (group, slot, keys), weight in zip(on_meta.values(), weights, strict=True):
            state.update(dict.fromkeys(keys, group.as_it_computes(slot, weight, self.source)))

    def refuse(self, names: Sequence[str], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        """Refuse to load weights that rest encoded or in their file. Others, such as a LoRA's, are loaded."""
        if not any(prefix + name in state for name in names):
            return
        raise UnsafeState(f"{self.owner} rests {self.rests}: release it before loading other weights into it")
