"""What a component has from mappings of its files: weights that compute on the CPU, and blocks that stream.

[Note: overwritten files] A mapping shows what its file has now. A program that puts another file in the place of this
one leaves the mapped one as it was; one that overwrites the file changes the weights, and one that cuts it short ends
the process at the next touch. So the files are asked before and after each pass whether they are what they were, and
before weights are taken out of the mapping for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from ..errors import InvalidInput
from ..weights.mapped_files import map_own, may_be_written
from ..weights.source import WeightsSource
from .blocks.weight_group import WeightGroup
from .blocks.weight_store import FileStore
from .tensors.parameter_slots import ParameterSlot, repoint

__all__ = ["MappedWeights"]


class MappedWeights:
    """Maps weights for a component, and refuses files that were changed where they are.

    Args:
        source: the files; without them nothing is mapped.
        before: the mapped weights of the managed component whose place this one takes.
    """

    def __init__(self, source: WeightsSource | None, before: MappedWeights | None = None) -> None:
        self.source = source
        self.in_place: dict[str, int] = dict(before.in_place) if before is not None else {}
        """The addresses, by name, of weights that their module came without and has in a mapping now."""
        self.known: dict[str, torch.Tensor] = dict(before.known) if before is not None else {}
        """Weights by name in a mapping that no module has: it outlives the file, where another takes its place."""
        self.streaming: list[WeightGroup] = []
        """The groups that may stream from a mapping."""

    def for_slots(self, groups: Sequence[WeightGroup]) -> Mapping[str, torch.Tensor]:
        """Return weights that the module came without, by name, where their files can be used as they lie there.

        Raises:
            InvalidInput: a file is gone, or is not what it was, and was not mapped before.
        """
        if self.source is None:
            return {}
        unread = [slot.spec for group in groups for slot in group.slots if slot.held.is_meta and not slot.is_buffer]
        try:
            mapped = map_own(self.source, unread)
        except InvalidInput:
            if not self.known.keys() >= {spec.name for spec in unread}:
                raise
            mapped = {spec.name: self.known.pop(spec.name) for spec in unread}  # its module's from now on
        self.in_place |= {name: weight.data_ptr() for name, weight in mapped.items()}
        return mapped

    def stream(self, groups: Sequence[WeightGroup], *, maps_file: bool) -> None:
        """Say from where groups in a file stream: from a mapping of it (``maps_file``), or through buffers.

        Raises:
            InvalidInput: a file that is not mapped yet is gone, or is not what it was.
        """
        stores = [group.at_rest.store for group in groups]
        if maps_file and self.source is not None:
            resting = {name for group in groups for name in group.at_rest.names_in_file}
            specs = [slot.spec for group in groups for slot in group.slots]
            self.known |= map_own(self.source, (s for s in specs if s.name in resting - self.known.keys()))
        for group, store in zip(groups, stores, strict=True):
            assert isinstance(store, FileStore)
            names = group.at_rest.names_in_file & self.known.keys()
            store.stream_from({name: self.known[name] for name in names} if maps_file else None)
        self.streaming = [*self.streaming, *groups] if maps_file else self.streaming

    def lying(self, groups: Sequence[WeightGroup]) -> Iterator[ParameterSlot]:
        """Yield the weights that their module has in a mapping."""
        for group in groups if self.in_place else ():
            for slot in group.slots:
                address = self.in_place.get(slot.spec.name)
                if address is not None and group.at_rest.store is None and slot.held.data_ptr() == address:
                    yield slot

    def settle(self, groups: Sequence[WeightGroup]) -> None:
        """Forget what the module does not have in a mapping any more."""
        self.in_place = {slot.spec.name: slot.held.data_ptr() for slot in self.lying(groups)}

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights by other names."""
        self.in_place = {names.get(name, name): address for name, address in self.in_place.items()}
        self.known = {names.get(name, name): weight for name, weight in self.known.items()}

    @property
    def check(self) -> Callable[[], None] | None:
        """What is to be called before and after each pass, as `refuse_overwritten`; None where nothing is mapped."""
        return self.refuse_overwritten if self.in_place or self.streaming else None

    def refuse_overwritten(self) -> None:
        """Refuse files that were changed where they are. Raises `InvalidInput`."""
        streams = any(isinstance(group.at_rest.store, FileStore) for group in self.streaming)
        if self.source is not None and (self.in_place or streams):
            self.source.refuse_overwritten()

    def give_memory(self, groups: Sequence[WeightGroup]) -> None:
        """Give the module's weights memory of their own in place of the mapping. Takes as much RAM as they have bytes.

        Raises:
            InvalidInput: a file was changed where it is. They go without memory, as they came; what was written to
                stays.
        """
        slots = list(self.lying(groups))
        self.in_place, unread = {}, {name: held for group in groups for name, held in group.at_rest.on_meta.items()}
        try:
            if slots and self.source is not None:
                self.source.refuse_overwritten()
        except InvalidInput:
            for slot in slots:
                if slot.spec.name in unread and not may_be_written(slot.held):
                    slot.hold(unread[slot.spec.name])
            raise
        for slot in slots:
            with torch.inference_mode(slot.held.is_inference()), torch.no_grad():
                own = slot.held.detach().clone()
            repoint(slot, [own], lasting=True)
