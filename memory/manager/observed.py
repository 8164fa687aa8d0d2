"""Models that a host loaded by itself, without a node of ours: they are counted, and nothing is asked of them.

Their bytes are read off the host whenever they are needed. They have no name in the books: one that is managed later
gets the name that it would have had before.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..options.precision import Precision
from .forecast import KnownComponent
from .members import Members
from .report import ComponentReport

__all__ = ["Observed", "ObservedModel"]


class ObservedModel(ABC):
    """One model that a host loaded by itself."""

    name: str
    kind: str
    names_file: bool = True
    """Whether ``name`` is that of its file; else of its class."""
    result: str = ""
    """The result of a node in which the host showed it first (`KnownComponent.result`)."""
    last_use_s: float | None = None
    """When a node ended that used it; None: no node did since the manager sees it, or the host does not tell."""
    last_load: object = None
    """What `find_load` returned last."""

    def find_load(self) -> object:
        """Return what is another object whenever the host has loaded it for a use; None: not loaded, or unknown."""
        return None

    def note_load(self, now_s: float | None) -> None:
        """Look whether it was loaded for a use since the last look, and note when; None: at a time that is not known.

        A use is missed if the host has unloaded it since.
        """
        load = self.find_load()
        if load is not None and load is not self.last_load:
            self.last_load = load
            self.last_use_s = now_s if now_s is not None else self.last_use_s

    @abstractmethod
    def device_bytes(self) -> Mapping[str, int]:
        """Return the bytes of its weights on each device now."""

    @abstractmethod
    def host_bytes(self) -> Mapping[str, int]:
        """Return the bytes of RAM that it has by tier."""

    @abstractmethod
    def describe(self) -> Mapping[str, Any]:
        """Return what is known of it, in the place of a plan: ``weight_bytes`` and ``reasons``."""


class Observed:
    """The models that hosts have loaded by themselves. Takes no lock, and may be read in any thread."""

    def __init__(self, members: Members) -> None:
        self.members = members
        self.readers: list[Callable[[], Iterable[ObservedModel]]] = []

    def watch(self, read: Callable[[], Iterable[ObservedModel]]) -> None:
        """Add what returns a host's models; the same function once."""
        if read not in self.readers:
            self.readers.append(read)

    def models(self) -> list[ObservedModel]:
        return [model for read in self.readers for model in read()]

    def named(self) -> Iterator[tuple[str, ObservedModel]]:
        """Yield each model with a name that nothing else has now."""
        taken: set[str] = set()
        for model in self.models():
            wanted = itertools.chain([model.name], (f"{model.name}#{number}" for number in itertools.count(2)))
            name = next(name for name in wanted if name not in taken and self.members.free_name(name) == name)
            taken.add(name)
            yield name, model

    def held_bytes(self, device: str) -> int:
        """Return the bytes of a device that they have in torch's allocator."""
        return sum(model.device_bytes().get(device, 0) for model in self.models())

    def note_loads(self, now_s: float | None) -> None:
        """Look which of them were used since the last look (`ObservedModel.note_load`)."""
        for model in self.models():
            model.note_load(now_s)

    def known_components(self) -> list[KnownComponent]:
        """Return what hosts find them by."""
        return [
            KnownComponent(
                id=name,
                name=model.name,
                kind=model.kind,
                node_id=None,
                workflow_id=None,
                names_file=model.names_file,
                result=model.result,
            )
            for name, model in self.named()
        ]

    def reports(self) -> list[ComponentReport]:
        """Return what the report says of each."""
        return [observed_report(name, model) for name, model in self.named()]


def observed_report(name: str, model: ObservedModel) -> ComponentReport:
    plan = dict(model.describe())
    return ComponentReport(
        id=name,
        name=model.name,
        kind=model.kind,
        node_id=None,
        workflow_id=None,
        tiers={place: n for place, n in {**model.device_bytes(), **model.host_bytes()}.items() if n},
        precision=Precision.AS_STORED.name,
        in_effect=False,
        leased=False,
        last_use_s=model.last_use_s,
        bytes_moved=None,
        plan=plan,
        engine="core",
        total_bytes=plan.get("weight_bytes"),
    )
