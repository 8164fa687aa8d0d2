"""Which of a component's weights are not, or may not be, what their file has any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...weights.component import TensorSpec
from ...weights.source import WeightsSource
from ..blocks.weight_group import WeightGroup
from ..tensors.parameter_slots import differs_from_file

__all__ = ["WrittenWeights", "names_in", "renamed"]


class WrittenWeights:
    """Weights that were written to since they were read, by name, and groups by the version of what was packed.

    Args:
        source: the files of the weights.
    """

    def __init__(self, source: WeightsSource | None) -> None:
        self.source = source
        self.names = frozenset[str]()
        """The weights that are not what their file has any more."""
        self.doubtful = frozenset[str]()
        """The weights that were in RAM, and may have been written to there: compared with their file before they rest
        in it."""
        self.unproven = frozenset[str]()
        """The weights that came in RAM of the module's own, of which it is not known whether their file has the same:
        compared as the doubtful ones are. That something has written to them nothing says."""
        self.packed_versions: dict[int, int] = {}
        """The version of each group's weight store in host memory as it was packed, by the group's id."""

    def go_on_from(self, before: WrittenWeights, kept: Iterable[WeightGroup]) -> None:
        """Take over what another packing of the component knew, and of its groups those that stay packed."""
        self.names, self.doubtful, self.unproven = before.names, before.doubtful, before.unproven
        known = [id(group) for group in kept if id(group) in before.packed_versions]
        self.packed_versions = {number: before.packed_versions[number] for number in known}

    def note(self, names: Iterable[str]) -> None:
        """Weights of these names are not what their file has any more."""
        self.names |= frozenset(names)

    def note_unproven(self, groups: Iterable[WeightGroup]) -> None:
        """Note which weights of groups came in RAM of the module's own."""
        source = self.source
        if source is not None:
            slots = [slot for group in groups for slot in group.slots if not slot.is_buffer and not slot.held.is_meta]
            self.unproven |= {slot.spec.name for slot in slots if slot.spec.name not in source.mapped}

    def note_replaced(self, specs: Iterable[TensorSpec]) -> None:
        """The module holds weights of its own for these: what the files have of them is not what they are."""
        if self.source is not None:
            self.note(spec.name for spec in specs if self.source.holds(spec))

    def note_packed(self, group: WeightGroup) -> None:
        """The group is packed, with what is in it now."""
        self.packed_versions[id(group)] = group.at_rest.version

    def note_end(self, in_file: Sequence[WeightGroup], in_ram: Sequence[WeightGroup]) -> None:
        """Note what was, or may have been, written to while these groups were packed.

        Args:
            in_file: those that rested in their file: what is in RAM of them is not what the file has.
        """
        self.note(names_in([group for group in in_file if group.host_slab is not None]))
        self.doubtful |= names_in([group for group in in_file if group.at_rest.store is None])  # given up
        if self.source is not None:
            self.doubtful |= names_in([group for group in in_ram if self.may_be_written(group)])

    def may_be_written(self, group: WeightGroup) -> bool:
        """Whether weights in RAM may have been written to since they were packed; what was never packed may have
        been."""
        return group.at_rest.store is None or self.packed_versions.get(id(group)) != group.at_rest.version

    def is_known_of(self, group: WeightGroup) -> bool:
        """Whether other code is known to have written to a group's weights since they were packed."""
        version = group.at_rest.version
        is_named = not names_in([group], buffers=True).isdisjoint(self.names | self.doubtful)
        return is_named or self.packed_versions.get(id(group), version) != version

    def compare(self, group: WeightGroup) -> None:
        """Compare a group's doubtful weights with their file. Raises `InvalidInput` if that has changed."""
        assert self.source is not None
        here = [slot for slot in group.slots if slot.owners and slot.spec.name in self.doubtful | self.unproven]
        doubtful = [slot for slot in here if self.source.holds(slot.spec)]
        self.note(slot.spec.name for slot in doubtful if differs_from_file(slot, self.source))

    def end_doubts(self, groups: Iterable[WeightGroup]) -> None:
        """These groups were compared."""
        compared = names_in(groups)
        self.doubtful -= compared
        self.unproven -= compared

    def rename(self, names: Mapping[str, str]) -> None:
        """Call weights by other names, by their former ones, and take what the files have under the new ones."""
        self.names = renamed(self.names, names)
        self.doubtful, self.unproven = renamed(self.doubtful, names), renamed(self.unproven, names)
        if self.source is not None:
            stored = self.source.files
            self.note([new for old, new in names.items() if old not in stored and new in stored])
            self.source.rename({old: new for old, new in names.items() if old in stored})


def names_in(groups: Iterable[WeightGroup], *, buffers: bool = False) -> frozenset[str]:
    return frozenset(slot.spec.name for group in groups for slot in group.slots if buffers or not slot.is_buffer)


def renamed(names: Iterable[str], by_former: Mapping[str, str]) -> frozenset[str]:
    """Return these names, as they are by now."""
    return frozenset(by_former.get(name, name) for name in names)
