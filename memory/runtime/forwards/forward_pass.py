"""Serialises the forward passes of one module, and closes interrupted ones.

[Note: entries] A component is entered through its own forward or, if a program calls a part of it (a VAE's decoder),
through a direct child. The outermost entry takes the lease, and its exit gives the lease back. Only native hooks are
used. torch skips even always-called hooks for a `BaseException`, and an interrupt is one in recent hosts. So an
interrupted pass may stay open. It is closed by the next entry that cannot be nested in it, or by a waiting thread that
finds that the pass's module is not on the stack of the pass's thread (`recover_abandoned`). One pass runs at a time: a
second thread waits for the first.

[Note: interrupts] A signal's exception may come between any two steps. So one assignment opens a pass and one closes
it, leases and other holds name the pass that they belong to, and ending a pass twice is harmless.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from ...errors import UnsafeState
from ..blocks.weight_group import WeightGroup
from .deferring_lock import DeferringLock
from .input_size import input_size
from .thread_stacks import modules_called_in, waits_at

__all__ = ["ComponentManager", "FailedTry", "Guest", "NoManager", "Pass", "Passes"]

# A thread that waits for a pass checks at this interval whether the pass was abandoned.
LOOK_EVERY_S = 0.5
# After so many checks that find the pass's thread in the same wait, the waiting thread gives up.
LOOKS_UNTIL_STUCK = 10


class Lender(Protocol):
    """What a borrower needs of a `ManagedComponent` that owns weights of its module; a protocol because that comes
    after this file.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def groups(self) -> Iterable[WeightGroup]: ...

    @property
    def forwards(self) -> Any:
        """Its `Forwards`, which come after this file."""
        ...


class ComponentManager(Protocol):
    """What a managed component asks of its manager.

    A protocol because the manager's room comes after this one: `MemberManager` answers while the module is the
    component's, and `NoManager` stands in for it afterwards.
    """

    @property
    def lock(self) -> DeferringLock:
        """The manager's lock."""
        ...

    def acquire(self, current: Pass) -> bool:
        """Load the component for a pass and hold a lease; False if another managed component has its module now."""
        ...

    def give_back(self, current: Pass) -> None:
        """End the lease of a pass, which may have failed. Idempotent."""
        ...

    def lenders(self) -> Sequence[Lender]:
        """Return the components that own weights which this one borrows ([Note: sharing] in `sharing.py`).

        In the same order for all borrowers.
        """
        ...

    def note_read(self, num_bytes: int, *, is_written: bool = False) -> None:
        """Note that a block of ``num_bytes`` stays in RAM from now on, because other code uses its weights.

        Args:
            is_written: because other code wrote to them while they were on a device.
        """
        ...


class NoManager:
    """Refuses every pass: the module is another managed component's now, or is no longer managed.

    A thread that waited for the lock then computes with the module's current weights.
    """

    def __init__(self, lock: DeferringLock) -> None:
        self.lock = lock

    def acquire(self, current: Pass) -> bool:
        return False

    def give_back(self, current: Pass) -> None: ...

    def lenders(self) -> Sequence[Lender]:
        return ()

    def note_read(self, num_bytes: int, *, is_written: bool = False) -> None: ...


def finish_nothing(current: Pass, completed: bool) -> None:
    """Finish a pass of weights that are no longer managed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedTry:
    """What was learned as a try of a pass ran out of memory."""

    error: BaseException
    """What ended the try."""
    shown: BaseException
    """That, or its cause: the one whose message tells of the allocation."""
    device: str
    asked_bytes: int
    line: str
    """What happened, for users."""
    is_excused: bool
    """Whether another program took the memory meanwhile: nothing was learned of the need."""


class Pass:
    """One pass: its thread, and its open entries, the outermost first."""

    def __init__(self, module: nn.Module, size: tuple[int, ...] = ()) -> None:
        self.thread_id = threading.get_ident()
        self.outermost = module
        self.entered = [module]
        self.size = size
        """The size of its inputs (`input_size`)."""
        self.handled = sys.exc_info()[1]
        """The exception that the caller was handling when the pass began; it was not raised in the pass."""
        self.is_under_way = False
        """Whether the forward runs: from the end of loading to the end of the pass."""
        self.error: BaseException | None = None
        """The exception that ended the pass; set only while the pass is being finished."""
        self.is_completed = False
        """Whether it ended without an exception."""
        self.failed_try: FailedTry | None = None
        """The last try of it that ran out of memory."""
        self.is_second_try = False
        """Whether its call is repeated, or was refused to be."""
        self.running = module
        """The module whose call keeps the pass open."""

    def begin_forward(self) -> None:
        """What it needs is loaded: the forward runs from now on."""
        self.is_under_way = True

    def end_forward(self) -> None:
        """The forward runs no more."""
        self.is_under_way = False

    def note_end(self, raised: BaseException | None) -> None:
        """Note the exception that is handled as the pass ends; it completed if that is none of its own."""
        self.error = raised if raised is not self.handled else None
        self.is_completed = self.error is None

    def note_completed(self, completed: bool) -> None:
        """Note whether the pass that this one serves completed."""
        self.is_completed = completed

    def note_failed_try(self, failed: FailedTry) -> None:
        """Note a try that ran out of memory."""
        self.failed_try = failed

    def begin_second_try(self) -> None:
        """The call of the pass is repeated from now on, if there is room; there is no third one."""
        self.is_second_try = True

    def forget_errors(self) -> None:
        """Forget exceptions: their frames may hold tensors."""
        self.error = self.handled = self.failed_try = None

    def is_here(self) -> bool:
        """Whether this thread runs the pass."""
        return self.thread_id == threading.get_ident()

    def is_on_stack(self) -> bool:
        """Whether a call of the outermost entry is under way in its thread. Walks that thread's stack."""
        return any(called is self.running for called in modules_called_in(self.thread_id))

    def is_called_in(self, module: nn.Module) -> bool:
        """Whether this thread's newest call, of this module, is inside the call that keeps the pass open."""
        num_calls = sum(called is self.running for called in modules_called_in(self.thread_id))
        return num_calls > (self.running is module)


class Guest(Pass):
    """A pass of a lender, kept open while a borrower's forward uses the lender's weights ([Note: sharing])."""

    def __init__(self, root: nn.Module, running: nn.Module) -> None:
        super().__init__(root)
        self.running = running
        self.entered = [running]  # the root may be nested in it like any other entry


class Hold(Pass):
    """Takes the place of a pass to keep passes from beginning. Belongs to no thread, and is never abandoned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.thread_id = 0

    def is_on_stack(self) -> bool:
        return True


class Passes:
    """The open pass of a module.

    Args:
        finish: called at the end of a pass, before another can begin, with the pass and whether it was completed.
        lock: held while a pass is recovered, so that only one of several threads recovers it.
    """

    def __init__(
        self,
        root: nn.Module,
        finish: Callable[[Pass, bool], None],
        lock: DeferringLock,
    ) -> None:
        self.root = root
        self.finish = finish
        self.lock = lock
        self.changed = threading.Condition()
        self.open: Pass | None = None

    @property
    def here(self) -> Pass | None:
        """The open pass, if this thread runs it."""
        current = self.open
        return current if current is not None and current.thread_id == threading.get_ident() else None

    @property
    def outermost(self) -> nn.Module | None:
        """The module through which this thread entered the open pass."""
        current = self.here
        return current.outermost if current is not None else None

    @property
    def depth(self) -> int:
        """The number of nested entries of this thread."""
        current = self.here
        return len(current.entered) if current is not None else 0

    def begin(
        self,
        module: nn.Module,
        acquire: Callable[[Pass], bool],
        inputs: Any = (),
        *,
        guest_of: nn.Module | None = None,
    ) -> bool:
        """Wait until no pass is open, open one and call ``acquire``.

        Returns what ``acquire`` returns. If that is False, or if it raises, no pass is open.

        Args:
            guest_of: opens a `Guest` for this entry of another component.

        Raises:
            UnsafeState: the open pass waits for another thread, which is probably this one.
        """
        size = (self.number_of(module), *input_size(inputs))
        waits, num_looks = None, 0
        while True:
            with self.changed:
                if self.open is None or self.changed.wait_for(lambda: self.open is None, timeout=LOOK_EVERY_S):
                    self.open = mine = Pass(module, size) if guest_of is None else Guest(module, guest_of)
                    break
            self.recover_abandoned()
            current = self.open
            waited, waits = waits, waits_at(current.thread_id) if current is not None else None
            num_looks = num_looks + 1 if waits is not None and waits == waited else 0
            if num_looks >= LOOKS_UNTIL_STUCK and module is not self.root:
                raise UnsafeState(
                    f"a part of {type(self.root).__name__} is called in thread {threading.current_thread().name!r} "
                    "while its forward waits in another thread; a managed module computes in one thread only: release "
                    "it first"
                )
        try:
            agreed = acquire(mine)
        except BaseException:
            self.abandon(mine)
            raise
        if not agreed:
            self.close(mine)
        return agreed

    @contextmanager
    def held(self, hold: Hold | None = None) -> Iterator[None]:
        """In the body, keep passes from beginning. Waits first until no pass is open.

        Args:
            hold: takes the place of the pass; `close` ends it, too.

        Raises:
            UnsafeState: this thread runs the open pass.
        """
        hold = hold or Hold(self.root)
        try:
            while True:
                with self.changed:
                    if self.changed.wait_for(lambda: self.open is None, timeout=0 if self.here else LOOK_EVERY_S):
                        self.open = hold
                        break
                self.recover_abandoned()
                if self.here is not None:
                    raise UnsafeState(
                        f"{type(self.root).__name__} computes now in this thread: do this after its forward"
                    )
            yield
        finally:
            self.close(hold)

    def number_of(self, module: nn.Module) -> int:
        """Return 0 for the root, 1 and up for its children, -1 for other modules."""
        if module is self.root:
            return 0
        return next((place for place, child in enumerate(self.root.children(), 1) if child is module), -1)

    def enter(self, module: nn.Module) -> None:
        """Add a nested entry to this thread's pass."""
        current = self.here
        assert current is not None
        current.entered.append(module)

    def leave(self, module: nn.Module) -> bool:
        """Leave an entry and all inside it; returns whether it was the outermost one. Ignores unknown entries.

        The pass stays open until `end`.
        """
        current = self.here
        if current is None or module not in current.entered:  # entering failed, or the pass was recovered
            return False
        place = current.entered.index(module)
        if place:
            del current.entered[place:]
        return not place

    def end(self, *, completed: bool) -> None:
        """End the pass of this thread. If this raises, the pass stays open until it is recovered.

        If not ``completed``, call it while the exception that ended the forward is handled.
        """
        current = self.here
        if current is not None:
            current.note_end(None if completed else sys.exc_info()[1])
            try:
                self.finish(current, completed)
            finally:
                current.forget_errors()
            self.close(current)

    def end_guest(self, current: Pass, *, completed: bool) -> None:
        """End a guest pass at the end of its borrower's pass. Idempotent."""
        if self.open is current:
            current.note_completed(completed)
            self.finish(current, completed)
            self.close(current)

    def stop_finishing(self) -> None:
        """Do nothing more at the end of a pass."""
        self.finish = finish_nothing

    def close(self, current: Pass) -> None:
        with self.changed:
            if self.open is current:
                self.open = None
                self.changed.notify_all()

    def abandon(self, current: Pass) -> None:
        """End an interrupted pass."""
        with self.lock.exclusive():
            if self.open is current:  # no other thread has ended it
                self.finish(current, False)
                self.close(current)

    def recover_abandoned(self) -> None:
        """End the open pass if its entry module is not on the stack of its thread."""
        current = self.open
        if current is not None and not current.is_on_stack():
            self.abandon(current)

    def is_busy(self) -> bool:
        """Whether a forward of the open pass is running, in any thread."""
        current = self.open
        return current is not None and current.is_on_stack()

    def recover_for(self, module: nn.Module | None) -> None:
        """End a pass that an interrupt left open in this thread, unless an entry into the module can be nested in it.

        Only a child of the root can be nested, in the root's own entry. None: no forward of this thread can be running.
        """
        current = self.here
        if current is None:
            return
        is_guest = isinstance(current, Guest)
        if is_guest and module is not None and current.is_on_stack():
            del current.entered[1:]
        elif is_guest or module is self.root or module is None or current.outermost is not self.root:
            self.abandon(current)
        else:
            del current.entered[1:]
