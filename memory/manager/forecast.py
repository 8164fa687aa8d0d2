"""The forecast: which components are used in the steps to come, as far as hosts tell.

[Note: steps] A step is a node that computes, or what it does with one of its components after another, as a pipeline
does. A host knows the rest of the prompt that runs, and the prompts that wait
behind it; it tells them anew whenever a node begins (`MemoryManager.foresee`). What it does not name has an unknown
next use: it may be never, or behind the last prompt that waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["Forecast", "KnownComponent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownComponent:
    """What hosts find a component by: its id and name, what it is, and the node that loaded it."""

    id: str
    name: str
    kind: str
    node_id: str | None
    workflow_id: str | None
    names_file: bool = True
    """Whether it is called like the file that it was loaded from; else like its class."""
    result: str = ""
    """What the host calls the result of a node in which it showed the component first; "" where it does not tell."""


class Forecast:
    """The components of the steps to come, the step that runs now first."""

    def __init__(self) -> None:
        self.steps: tuple[frozenset[str], ...] = ()
        self.num_running = 0
        """How many of the first steps are of the node that runs now."""
        self.next_uses: dict[str, int] = {}
        self.later_uses: dict[str, int] = {}
        """As the one above, without the step that runs now."""

    def foresee(self, steps: Iterable[Collection[str]], num_running: int = 1) -> bool:
        """Take the components of each step to come, by their ids; returns whether that is another forecast."""
        told = tuple(map(frozenset, steps))
        is_new = told != self.steps
        self.num_running = min(num_running, len(told))
        if is_new:
            self.take(told)
        return is_new

    def take(self, steps: tuple[frozenset[str], ...]) -> None:
        later_uses: dict[str, int] = {}
        for number, components in enumerate(steps[1:], start=1):
            for component in components:
                later_uses.setdefault(component, number)
        self.steps, self.later_uses = steps, later_uses
        self.next_uses = later_uses | dict.fromkeys(steps[0] if steps else (), 0)

    def note_use(self, component: str) -> bool:
        """Note that a component is used now; returns whether that begins another step of the node that runs."""
        for number in range(1, self.num_running):
            if component in self.steps[number] and component not in self.steps[0]:
                self.num_running -= number
                self.take(self.steps[number:])
                return True
        return False

    def next_use(self, component: str) -> int | None:
        """Return the steps until a component is used, 0 for the step that runs now; None where that is not known."""
        return self.next_uses.get(component)

    def use_after(self, component: str) -> int | None:
        """As `next_use`, of a component that is used in the step that runs now: the steps until its use after that."""
        return self.later_uses.get(component)
