"""Caches of other code, which frees them when asked: counted, shown, and evicted in turn with everything else.

[Note: registered] Other packs keep tensors of their own on a device: frames of a video, features, a model in a form of
their own. The manager sees them only as memory that is taken. A registered cache has a name, a size and a last use, and
the manager asks for its bytes as it evicts a component: by the same policies, for the same reasons, in the same events.
Its owner frees them. What the owner says of its bytes is believed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .steered import SteeredComponent

__all__ = ["Amounts", "RegisteredCaches", "RegisteredComponent"]

log = logging.getLogger("highwater")

Amounts = int | Mapping[Any, int]
"""Bytes by device (``gpu:0``, ``cuda:0`` or a `torch.device`; ``cpu`` is RAM), or of the first accelerator."""


class RegisteredComponent(SteeredComponent):
    """A cache of other code.

    Args:
        read: returns its bytes now.
        evict: frees at least so many bytes of a device (``gpu:0``), or all that can be freed now.
        place_of: returns what the manager calls a device.
    """

    engine = "registered"
    takes_budgets = False
    is_in_effect = True

    def __init__(
        self,
        name: str,
        kind: str,
        read: Callable[[], Amounts],
        evict: Callable[[str, int], object],
        place_of: Callable[[Any], str],
        *,
        node_id: str | None,
        workflow_id: str | None,
    ) -> None:
        super().__init__(name, kind, node_id=node_id, workflow_id=workflow_id)
        self.read = read
        self.evict = evict
        self.place_of = place_of
        self.uses: list[None] = []
        """One for each use that is under way, in any thread."""
        self.has_failed = False

    @property
    def is_computing(self) -> bool:
        return bool(self.uses)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """In the body none of its bytes leave."""
        self.uses.append(None)
        try:
            yield
        finally:
            self.uses.pop()

    def amounts(self) -> dict[str, int]:
        """Return its bytes by place; nothing where it does not tell."""
        try:
            told = self.read()
            by_device = told.items() if isinstance(told, Mapping) else [(None, told)]
            found: Counter[str] = Counter()
            for device, num_bytes in by_device:
                found[self.place_of(device)] += max(0, int(num_bytes))
        except Exception as error:
            self.tell_failure("did not tell its bytes", error)
            return {}
        return {place: num_bytes for place, num_bytes in found.items() if num_bytes}

    def device_bytes(self) -> Mapping[str, int]:
        return {place: num_bytes for place, num_bytes in self.amounts().items() if place != "cpu"}

    def host_bytes(self) -> Mapping[str, int]:
        num_bytes = self.amounts().get("cpu", 0)
        return {"host": num_bytes} if num_bytes else {}

    def paged_bytes(self, device: str) -> int:
        return 0  # torch's allocator has them

    def describe(self) -> Mapping[str, Any]:
        amounts = self.amounts()
        return {
            "component": self.name,
            "kind": self.kind,
            "engine": self.engine,
            "weight_bytes": sum(amounts.values()),
            "placement": next(iter(amounts), "cpu"),
            "shares": [],
            "reasons": ["registered by other code, which frees it when it is asked to"],
        }

    def free_memory(self, device: str, num_bytes: int) -> int:
        before = self.device_bytes().get(device, 0)
        if self.is_computing or not before:
            return 0
        try:
            self.evict(device, min(num_bytes, before))
        except Exception as error:
            self.tell_failure(f"did not free its bytes of {device}", error)
        return max(0, before - self.device_bytes().get(device, 0))

    def leave_first(self, device: str) -> None:
        """No host of its own moves it."""

    def tell_failure(self, what: str, error: Exception) -> None:
        """Log what its owner's function raised; once, as it is called often."""
        if not self.has_failed:
            log.error("Highwater: %s %s: %s: %s", self.name, what, type(error).__name__, error, exc_info=error)
        self.has_failed = True


class RegisteredCaches:
    """The caches that are registered: a host in the manager's eyes."""

    def __init__(self) -> None:
        self.known: list[RegisteredComponent] = []

    def add(self, component: RegisteredComponent) -> None:
        """Take a cache into the books; the last one counts as used last."""
        self.known.insert(0, component)

    def remove(self, component: RegisteredComponent) -> None:
        """Take it out of the books; idempotent."""
        self.known = [other for other in self.known if other is not component]

    def components(self) -> list[RegisteredComponent]:
        """Return those that are registered, the last used first."""
        return sorted(self.known, key=lambda component: -component.last_use)

    def keep_free(self, num_bytes: int | None) -> None:
        """What caches leave free is theirs to say."""

    def pinned_bytes(self) -> int:
        return 0
