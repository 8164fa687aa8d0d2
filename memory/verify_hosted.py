"""Compares runs of a hosted component with a run of the same model loaded by the host itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from .errors import UnsafeState
from .runtime.tensors.parameter_slots import ParameterSlot
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
    """The runs of one comparison, and notes for its result. Keeps outputs in host memory.

    Args:
        slots: the managed weights; their buffers are restored where they rest by then.
        left_out: attributes of modules that belong to the host; a run may change them.
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
        """Run the managed component twice, with and without a recording. Restores caches and buffers after each run."""
        recording = Recording(places_of(self.module, self.component), room_bytes=self.room_bytes)
        parts = list(self.module.children())  # attributes of the model itself belong to the host
        snapshot = Snapshot(parts, self.slots, left_out=self.left_out)
        for one in (recording, None):
            try:
                self.managed.append(run_side(run, one, room_bytes=self.room_bytes))
            finally:
                go_through(snapshot.put_back)

    def run_reference(self, module: nn.Module, run: Callable[[], Any]) -> None:
        """Run the same model as loaded by the host, recorded, from the same random state."""
        self.put_back_random()
        recording = Recording(places_of(module, self.component), room_bytes=self.room_bytes)
        self.reference = run_side(run, recording, room_bytes=self.room_bytes)

    def put_back_random(self) -> None:
        self.random.put_back()

    def note_changed(self, block: str, key: str, text: str) -> None:
        """Note a weight in host memory that differs from the host's."""
        self.changed.append(Difference(place=block or key, what="weights", text=text))

    def note_lacking(self, keys: Sequence[str]) -> None:
        """Note weights that the file lacks."""
        if keys:
            names = ", ".join(keys[:NUM_LISTED]) + (", ..." if len(keys) > NUM_LISTED else "")
            self.notes.append(f"missing in the file, so that the reference uses the managed values: {names}")

    def result(self, how: str) -> Verification:
        """Return the result of the comparison. Raises the reference's exception, if it has one.

        Args:
            how: how the reference was computed.
        """
        if len(self.managed) != 2 or self.reference is None:
            raise UnsafeState(f"{self.name}: run the managed component and the reference before the comparison")
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
