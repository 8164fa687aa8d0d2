"""For authors of other packs: a cache of yours in the books, shown, and asked for its bytes when memory runs short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from .errors import InvalidInput
from .manager.default import default_manager
from .manager.manager import MemoryManager
from .manager.registered import Amounts, RegisteredComponent
from .options.placement import parse_device

__all__ = ["Registration", "register_component"]


class Registration:
    """One registered cache, until `unregister`. All methods may be called in any thread, and never wait.

    `register_component` returns it.
    """

    def __init__(self, component: RegisteredComponent, told: ToldBytes, manager: MemoryManager) -> None:
        self.component = component
        self.told = told
        self.manager = manager

    @property
    def id(self) -> str:
        """Its name in the report: that which was given, with ``#2`` behind it where that is taken."""
        return self.component.id

    def used(self) -> None:
        """Say that it is used now: what was used longest ago is evicted first, where nothing else is known."""
        hosting = self.manager.hosting
        hosting.lock.run_or_defer(lambda: hosting.note_use(self.component))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Say that it is used in the body: none of its bytes are asked for meanwhile."""
        with self.component.in_use():
            self.used()
            yield

    def resize(self, num_bytes: Amounts | Callable[[], Amounts]) -> None:
        """Say what it holds from now on, as for `register_component`. Raises as that; then nothing changes."""
        self.told.take(num_bytes)

    def unregister(self) -> None:
        """Take it out of the books; what it holds stays. Idempotent."""
        hosting = self.manager.hosting
        hosting.lock.run_or_defer(lambda: hosting.unregister(self.component))


class ToldBytes:
    """The bytes of a cache as its owner tells them: numbers, or a function that returns them."""

    def __init__(self, place_of: Callable[[object], str], num_bytes: Amounts | Callable[[], Amounts]) -> None:
        self.place_of = place_of
        self.now: Amounts | Callable[[], Amounts] = 0
        self.num_told = 0
        self.take(num_bytes)

    def take(self, num_bytes: Amounts | Callable[[], Amounts]) -> None:
        if not callable(num_bytes):
            amounts = num_bytes if isinstance(num_bytes, Mapping) else {None: num_bytes}
            if any(
                isinstance(amount, bool) or not isinstance(amount, int) or amount < 0 for amount in amounts.values()
            ):
                raise InvalidInput(
                    f"bytes {num_bytes!r}: allowed: a number of bytes, a number for each device, a function"
                )
            found: Counter[str] = Counter()
            for device, amount in amounts.items():
                found[self.place_of(device)] += amount
            num_bytes = found
        self.now = num_bytes
        self.num_told += 1

    def read(self) -> Amounts:
        return self.now() if callable(self.now) else self.now

    def note_evicted(self, device: str, before: int) -> None:
        """Numbers of which nothing new was told since count as gone from a device."""
        if self.num_told == before and isinstance(self.now, Mapping):
            self.now = {place: amount for place, amount in self.now.items() if place != device}


def register_component(
    name: str,
    num_bytes: Amounts | Callable[[], Amounts],
    *,
    evict: Callable[[str, int], object],
    node_id: str | None = None,
    kind: str = "cache",
    manager: MemoryManager | None = None,
) -> Registration:
    """Register a cache of your own: it is in the report and the panel, and is evicted in turn with everything else.

    Costs a call of ``num_bytes`` wherever bytes are counted, several in each run: it should only add numbers.

    Args:
        name: what users read.
        num_bytes: the bytes that it holds, of the first accelerator or by device (``gpu:0``, ``cuda:0``, a
            `torch.device`; ``cpu`` is RAM, which is only shown), or a function that returns that. Numbers that are not
            told anew (`Registration.resize`) count as gone from a device when they were asked for.
        evict: called with a device (``gpu:0``) and a number of bytes: frees at least so many, or all that it can now;
            what it returns does not count. It may be called in any thread, and must not run a model. What it raises is
            logged, and nothing was freed then.
        node_id: the node that shows it; None is the one that runs now, if any.
        kind: what it is, in a word.
        manager: None is the process's own.

    Raises:
        InvalidInput: no name, a negative number of bytes, or a device that does not exist.
    """
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise InvalidInput(f"name {name!r}: allowed: a line of text that users can read")
    if not callable(evict):
        raise InvalidInput(f"evict {evict!r}: allowed: a function that takes a device and a number of bytes")
    manager = manager or default_manager()
    place_of = partial(place_among, [*manager.devices])
    told = ToldBytes(place_of, num_bytes)

    def free(device: str, amount: int) -> None:
        before = told.num_told
        evict(device, amount)
        told.note_evicted(device, before)

    running = manager.measures.node
    if node_id is None and running is not None:
        node_id = running.node_id
    component = RegisteredComponent(
        name, kind, told.read, free, place_of, node_id=node_id, workflow_id=manager.workflow_id
    )
    manager.hosting.register(component)
    return Registration(component, told, manager)


def place_among(names: Sequence[str], device: object) -> str:
    """Return what the manager calls a device; None is the first accelerator, or RAM where there is none."""
    if device is None:
        return next((name for name in names if name != "cpu"), "cpu")
    return parse_device(str(device), names, what="bytes")
