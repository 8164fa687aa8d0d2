"""Serialises the forward passes of one module, and closes interrupted ones.

[Note: entries] A component is entered through its own forward or, where programs call parts of it (a VAE's
decoder), through a direct child. The outermost entry takes the lease and its exit gives it back. Only native hooks
are used. torch skips even always-called hooks when a `BaseException` passes, which is what an interrupt is in recent
hosts; so an interrupted pass may stay open. It is recovered by the next entry that cannot be nested in it, and by any
thread that waits for it and finds that its module is not on the stack of its thread (`recover_abandoned`). One pass
runs at a time: a second thread waits for the first.

[Note: interrupts] A signal's exception may come between any two steps. So a pass is open from the one assignment that
takes its place to the one that gives it back, whatever holds for it is held by its name, and ending it may be done
twice.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from ..errors import UnsafeState
from .deferring_lock import DeferringLock
from .input_size import input_size

__all__ = ["CALL_OF_A_MODULE", "Guest", "Leases", "NoLeases", "Pass", "Passes"]

CALL_OF_A_MODULE = nn.Module._wrapped_call_impl.__code__
# How often a waiting thread looks whether the pass that it waits for was abandoned.
LOOK_EVERY_S = 0.5
# After so many checks that find the pass's thread in the same wait, the waiting thread gives up.
LOOKS_UNTIL_STUCK = 10
# Modules in which a thread waits for another one; and the engine's, which wait for a forward in `begin` only.
WAITS, OURS = ("threading", "concurrent.futures", "queue", "multiprocessing.pool"), __name__.rsplit(".", 2)[0]


class Leases(Protocol):
    """What a managed component asks of its manager."""

    @property
    def lock(self) -> DeferringLock:
        """The manager's."""
        ...

    def acquire(self, current: Pass) -> bool:
        """Load the component for a pass, or raise, and hold a lease for it; False if another has its module now."""
        ...

    def give_back(self, current: Pass) -> None:
        """The pass is over, perhaps by an exception. May be called twice."""
        ...

    def lenders(self) -> Sequence[Any]:
        """Return the managed components that own some of its weights, in one order for all borrowers ([Note: sharing]
        in `sharing.py`)."""
        ...

    def note_read(self, num_bytes: int) -> None:
        """A block of so many bytes was read into RAM for other code to use."""
        ...


class NoLeases:
    """Refuses every pass: the module is another managed component's now, or is no longer managed.

    A thread that waited for the lock computes with what the module holds now.
    """

    def __init__(self, lock: DeferringLock) -> None:
        self.lock = lock

    def acquire(self, current: Pass) -> bool:
        return False

    def give_back(self, current: Pass) -> None: ...

    def lenders(self) -> Sequence[Any]:
        return ()

    def note_read(self, num_bytes: int) -> None: ...


class Pass:
    """One pass: the thread that runs it, and the entries that are open, the outermost first."""

    def __init__(self, module: nn.Module, size: tuple[int, ...] = ()) -> None:
        self.thread_id = threading.get_ident()
        self.outermost = module
        self.entered = [module]
        self.size = size
        """What it was entered with, as `input_size` says it."""
        self.handled = sys.exc_info()[1]
        """What the caller was handling when the pass began: nothing that was raised in it."""
        self.is_under_way = False
        """Whether the forward runs: everything is loaded, and the pass has not ended."""
        self.error: BaseException | None = None
        """What ended it, while it is finished."""
        self.is_completed = False
        """Whether it came to its end."""
        self.running = module
        """The module whose call keeps it open."""

    def is_here(self) -> bool:
        """Whether it is a pass of this thread."""
        return self.thread_id == threading.get_ident()

    def waits_at(self) -> tuple[int, int] | None:
        """Return where its thread waits for another one, outside of the engine; equal while it is the same wait."""
        frame = sys._current_frames().get(self.thread_id)
        inner = (frame, frame.f_lasti) if frame is not None else None
        while frame is not None and frame.f_globals.get("__name__", "").startswith(WAITS):
            frame = frame.f_back
        if inner is None or frame is None or frame is inner[0] or frame.f_globals.get("__name__", "").startswith(OURS):
            return None
        return id(inner[0]), inner[1]

    def is_on_stack(self) -> bool:
        """Whether a call of the outermost entry is under way in its thread. Walks that thread's stack."""
        running = self.running
        frame = sys._current_frames().get(self.thread_id)
        while frame is not None:
            # Looking at a frame's variables keeps them alive, so at no others.
            if frame.f_code is CALL_OF_A_MODULE and frame.f_locals.get("self") is running:
                return True
            frame = frame.f_back
        return False


class Guest(Pass):
    """A pass that a borrower's pass keeps open while its forward uses weights of this component ([Note: sharing])."""

    def __init__(self, root: nn.Module, running: nn.Module) -> None:
        super().__init__(root)
        self.running = running
        self.entered = [running]  # the root is nested in it like any other entry


class Hold(Pass):
    """Takes the place of a pass while no forward of the engine's may begin; of no thread, and never abandoned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.thread_id = 0

    def is_on_stack(self) -> bool:
        return True


class Passes:
    """Which pass of a module is open.

    Args:
        finish: called with a pass and whether it was completed when it ends, before another one can begin.
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
        """The pass in whose middle this thread is, if it is in any."""
        current = self.open
        return current if current is not None and current.thread_id == threading.get_ident() else None

    @property
    def outermost(self) -> nn.Module | None:
        """The module through which this thread has entered."""
        current = self.here
        return current.outermost if current is not None else None

    @property
    def depth(self) -> int:
        """How many entries of this thread are inside one another."""
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
        """Wait until no pass is open, then open one and call what has to hold for it.

        Returns whether that agreed; if not, or if it raises, no pass is open.

        Args:
            guest_of: the entry of another component for which the pass is opened (`Guest`).

        Raises:
            UnsafeState: the open pass waits for other threads, so probably for this one.
        """
        size = (self.number_of(module), *input_size(inputs))
        waits_at, num_looks = None, 0
        while True:
            with self.changed:
                if self.changed.wait_for(lambda: self.open is None, timeout=LOOK_EVERY_S):
                    self.open = mine = Pass(module, size) if guest_of is None else Guest(module, guest_of)
                    break
            self.recover_abandoned()
            current = self.open
            was_at, waits_at = waits_at, current.waits_at() if current is not None else None
            num_looks = num_looks + 1 if waits_at is not None and waits_at == was_at else 0
            if num_looks >= LOOKS_UNTIL_STUCK and module is not self.root:
                raise UnsafeState(
                    f"a part of {type(self.root).__name__} is called in thread {threading.current_thread().name!r} "
                    "while its forward waits in another one: a managed module computes in one thread; release it "
                    "before that"
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
        """Keep passes from beginning in the body; waits for the end of one that is open.

        Args:
            hold: takes the place of a pass; `close` gives it back, too.

        Raises:
            UnsafeState: this thread is in the middle of one.
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
                    raise UnsafeState(f"{type(self.root).__name__} computes now, in this very thread; ask after that")
            yield
        finally:
            self.close(hold)

    def number_of(self, module: nn.Module) -> int:
        """Return 0 for the root, and for its children their place from 1."""
        if module is self.root:
            return 0
        return next((place for place, child in enumerate(self.root.children(), 1) if child is module), -1)

    def enter(self, module: nn.Module) -> None:
        """Go one entry deeper into the pass of this thread."""
        current = self.here
        assert current is not None
        current.entered.append(module)

    def leave(self, module: nn.Module) -> bool:
        """Leave an entry, and all inside it; returns whether that was the outermost one. Unknown ones are left alone.

        The pass goes on until `end`.
        """
        current = self.here
        if current is None or module not in current.entered:  # the entry itself failed, or was recovered
            return False
        place = current.entered.index(module)
        if place:
            del current.entered[place:]
        return not place

    def end(self, *, completed: bool) -> None:
        """End the pass of this thread. If that fails it stays open until it is recovered.

        Not ``completed``: called while what was raised is handled.
        """
        current = self.here
        if current is not None:
            raised = None if completed else sys.exc_info()[1]
            current.error = raised if raised is not current.handled else None
            current.is_completed = current.error is None
            try:
                self.finish(current, completed)
            finally:
                current.error = current.handled = None  # their frames may hold tensors
            self.close(current)

    def end_guest(self, current: Pass, *, completed: bool) -> None:
        """End a pass whose borrower's pass has ended. Idempotent."""
        if self.open is current:
            current.is_completed = completed
            self.finish(current, completed)
            self.close(current)

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
        """End the open pass if its entry module is on no stack of its thread."""
        current = self.open
        if current is not None and not current.is_on_stack():
            self.abandon(current)

    def is_busy(self) -> bool:
        """Whether any thread is in the middle of a pass, this one included."""
        current = self.open
        return current is not None and current.is_on_stack()

    def recover_for(self, module: nn.Module | None) -> None:
        """End a pass that an interrupt left open in this thread, if an entry into the module cannot be nested in it.

        Legal nesting is the root, then one of its children; None means that nothing can be running.
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
