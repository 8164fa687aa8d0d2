"""How often a component came back after it had to leave a device, also as another object of the same files."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

__all__ = ["KnownReturns", "Returns"]

MAX_CONTENTS = 1_000


class Returns:
    """What one component lost of its devices since it was loaded last, and the last runs in which it came back."""

    def __init__(self) -> None:
        self.lost_bytes = 0
        """What was evicted of it."""
        self.runs: list[int] = []
        """The numbers of the last runs in which it was loaded again after it had been evicted."""
        self.had: dict[str, int] = {}
        """Of one that its host moves: its bytes of each device at the end of its last use."""
        self.least: dict[str, int] = {}
        """The least of these that it had since then."""

    def note_evicted(self, num_bytes: int) -> None:
        """Note that bytes of it were evicted for others."""
        self.lost_bytes += num_bytes

    def take_lost(self) -> int:
        """Return what was evicted since it was loaded last; it is loaded now."""
        lost, self.lost_bytes = self.lost_bytes, 0
        return lost

    def forget(self) -> None:
        """Forget what left of it: the user asked for that, or for all memory."""
        self.lost_bytes = 0
        self.had, self.least = {}, {}

    def note_return(self, run: int, since: int) -> list[int]:
        """Note a run in which it was loaded after an eviction; returns those runs, not before ``since``."""
        self.runs = [earlier for earlier in self.runs if earlier >= since]
        self.runs.append(run)
        return self.runs

    # -- of a component that its host moves: the host does not tell what it evicts

    def look(self, device: str, held_bytes: int) -> None:
        """Note what it has of a device while others use their memory."""
        if device in self.least:
            self.least[device] = min(self.least[device], held_bytes)

    def excuse(self, device: str, held_bytes: int, before: int | None = None) -> None:
        """Note what it has of a device; what has left since the last look did not leave for want of memory.

        Args:
            before: the least that it had, where looks were taken since it began to leave.
        """
        if device in self.least:
            before = self.least[device] if before is None else before
            self.had[device] -= max(0, before - held_bytes)
            self.least[device] = min(before, held_bytes)

    def has_grown(self, held: Mapping[str, int]) -> bool:
        """Whether weights of it came to a device since its last use, or it was not used before."""
        return not self.had or any(num_bytes > self.least.get(device, 0) for device, num_bytes in held.items())

    def end_use(self, held: Mapping[str, int]) -> dict[str, int]:
        """Note what it has of each device at the end of a use; returns what of it had left before, and came back."""
        back = {
            device: min(self.had[device], held.get(device, 0)) - least
            for device, least in self.least.items()
            if min(self.had[device], held.get(device, 0)) > least
        }
        self.had, self.least = dict(held), dict(held)
        return back


class KnownReturns:
    """The returns of components by content: a host that drops a model loads the same files into another object.

    Of two objects that have the same files at the same time, each counts for itself.
    """

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Returns, Callable[[], bool]]] = {}

    def forget(self) -> None:
        """Forget what left of all of them; the runs in which they came back stay."""
        for returns, _ in self.known.values():
            returns.forget()

    def take(self, content: Hashable | None, is_there: Callable[[], bool]) -> Returns:
        """Return the returns of a newcomer: those of a component that is gone and had the same content, or new ones.

        Args:
            content: what the newcomer was read from; None where that is not known.
            is_there: whether the newcomer still exists; it must not keep it alive.
        """
        if content is None:
            return Returns()
        found = self.known.get(content)
        if found is not None and found[1]():
            return Returns()
        returns = Returns() if found is None else found[0]
        self.known.pop(content, None)  # the oldest come first
        self.known[content] = returns, is_there
        if len(self.known) > MAX_CONTENTS:
            del self.known[next(iter(self.known))]
        return returns
