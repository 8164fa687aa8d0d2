"""A hosted component's run beside a run of its host's own load: recorded, its changes put back, compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from .errors import UnsafeState
from .runtime.parameter_slots import ParameterSlot
from .verification.findings import (
    NUM_LISTED,
    Difference,
    Side,
    Verification,
    compare_sides,
    kept_bytes,
    run_side,
)
from .verification.recording import Recording, places_of
from .verification.snapshot import RandomState, Snapshot, go_through
from .weights.component import Component

__all__ = ["Comparison"]


class Comparison:
    """Both sides of one comparison, and what was noted meanwhile. Keeps outputs in host memory.

    Args:
        slots: the managed weights, whose buffers are put back where they rest by then.
        left_out: attributes of modules that the host keeps, and a run may change.
    """

    def __init__(
        self,
        name: str,
        component: Component,
        module: nn.Module,
        slots: Iterable[ParameterSlot],
        *,
        left_out: frozenset[str],
    ) -> None:
        self.name = name
        self.component = component
        self.module = module
        self.slots = list(slots)
        self.left_out = left_out
        self.room_bytes = kept_bytes()
        self.random = RandomState()
        self.managed: list[Side] = []
        self.reference: Side | None = None
        self.changed: list[Difference] = []
        self.notes: list[str] = []

    def run_managed(self, run: Callable[[], Any]) -> None:
        """Run the managed component twice, recorded and not; its caches and buffers are put back after each."""
        recording = Recording(places_of(self.module, self.component), room_bytes=self.room_bytes)
        parts = list(self.module.children())  # what the host keeps on the model itself is the host's
        snapshot = Snapshot(parts, self.slots, left_out=self.left_out)
        for one in (recording, None):
            try:
                self.managed.append(run_side(run, one, room_bytes=self.room_bytes))
            finally:
                go_through(snapshot.put_back)

    def run_reference(self, module: nn.Module, run: Callable[[], Any]) -> None:
        """Run the host's own load of the same model, recorded, from the same random state."""
        self.put_back_random()
        recording = Recording(places_of(module, self.component), room_bytes=self.room_bytes)
        self.reference = run_side(run, recording, room_bytes=self.room_bytes)

    def put_back_random(self) -> None:
        self.random.put_back()

    def note_changed(self, block: str, key: str, text: str) -> None:
        """Note a weight in host memory that is not what the host has."""
        self.changed.append(Difference(place=block or key, what="weights", text=text))

    def note_lacking(self, keys: Sequence[str]) -> None:
        """Note weights that the file lacks."""
        if keys:
            names = ", ".join(keys[:NUM_LISTED]) + (", ..." if len(keys) > NUM_LISTED else "")
            self.notes.append(f"{len(keys)} weights that the file lacks are taken as they are: {names}")

    def result(self, how: str) -> Verification:
        """Return what was found. Raises what the reference raised.

        Args:
            how: the reference was computed.
        """
        if len(self.managed) != 2 or self.reference is None:
            raise UnsafeState(f"{self.name}: both sides have to run before they are compared")
        managed, unwatched = self.managed
        return compare_sides(
            self.name,
            managed=managed,
            unwatched=unwatched,
            reference=self.reference,
            weights=self.changed,
            how=how,
            notes=self.notes,
        )
