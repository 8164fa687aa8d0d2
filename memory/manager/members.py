"""The components under management, and the names that are taken."""

from __future__ import annotations

import itertools
from collections import defaultdict
from weakref import ref

from torch import nn

from .member import Member

__all__ = ["Members"]


class Members(dict[str, Member]):
    """The components under management by id, and found by their module, by their group of names and by relations."""

    def __init__(self) -> None:
        super().__init__()
        self.by_module: dict[int, Member] = {}
        """The members that no host manages, by the ids of their modules."""
        self.prefixed: defaultdict[str, set[str]] = defaultdict(set)
        """The ids of members by the part before the first slash."""
        self.unloading: set[str] = set()
        """The ids of those whose profile unloads something after use."""
        self.others: dict[str, ref[object]] = {}
        """What has a name in the books and is no member, by that name; takes no lock, so each change is one step."""

    def has(self, member: Member) -> bool:
        """Whether a component is under management, and not released."""
        return self.get(member.id) is member

    def enter(self, member: Member) -> None:
        """Add a member whose managed component is attached."""
        self.prefixed[member.id.partition("/")[0]].add(member.id)
        if not member.is_hosted:
            self.by_module[id(member.managed.module)] = member
        if member.profile.unload:
            self.unloading.add(member.id)
        self[member.id] = member

    def strike(self, member: Member) -> None:
        """Remove a member; interrupted in the middle, it can be removed again."""
        prefix = member.id.partition("/")[0]
        self.prefixed[prefix].discard(member.id)
        if not self.prefixed[prefix]:
            del self.prefixed[prefix]
        self.unloading.discard(member.id)
        if self.by_module.get(id(member.managed.module)) is member:
            del self.by_module[id(member.managed.module)]
        del self[member.id]

    def of_module(self, module: nn.Module) -> Member | None:
        """Return the member whose module this is, if no host manages it."""
        return self.by_module.get(id(module))

    def free_name(self, wanted: str) -> str:
        """Return a name that no component, and no group before a slash, has yet."""
        candidates = itertools.chain([wanted], (f"{wanted}#{number}" for number in itertools.count(2)))
        others = {name for name, owner in list(self.others.items()) if owner() is not None}
        return next(name for name in candidates if not (name in self or name in self.prefixed or name in others))

    def name_other(self, wanted: str, owner: object) -> str:
        """Give what is no member a name that nothing else has, as long as it exists; returns the name."""
        mine = ref(owner)
        for name, other in list(self.others.items()):
            if other() is None:
                self.others.pop(name, None)
        while self.others.setdefault(name := self.free_name(wanted), mine) is not mine:
            pass  # another thread took the name meanwhile
        return name

    def siblings(self, member: Member) -> list[Member]:
        """Return the other members that came under management by the same call."""
        return [other for other in member.call if other is not member and self.has(other)]

    def borrowers(self, member: Member) -> list[Member]:
        """Return the members that borrow weights of this one."""
        return [other for other in member.borrowers if self.has(other)]
