"""A lock that also runs jobs that could not run while it was held."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...errors import InvalidInput
from .recording_pauses import host_recordings

__all__ = ["DeferringLock"]


class DeferringLock:
    """Serialises changes of the managed components and their places. Reentrant.

    A garbage collection may release a component at any moment, also in the thread that holds the lock. Such a job is
    deferred until the ledger is consistent: the thread that holds the lock runs it when it gives the lock back, before
    another thread gets the lock.
    """

    def __init__(self) -> None:
        self.rlock = threading.RLock()
        self.jobs: deque[Callable[[], None]] = deque()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock in the body."""
        is_nested = self.is_held_here()
        with self.rlock:
            if self.jobs and not is_nested:
                self.run_jobs()
            try:
                yield
            finally:
                if self.jobs and not is_nested:
                    self.run_jobs()

    @contextmanager
    def exclusive_now(self) -> Iterator[bool]:
        """Hold the lock in the body if no other thread holds it; yields whether it does. Never waits."""
        if not self.rlock.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        finally:
            if self.jobs:
                self.run_jobs()
            self.rlock.release()

    def is_held_here(self) -> bool:
        """Whether this thread holds the lock."""
        return self.rlock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def run_or_defer(self, job: Callable[[], None]) -> None:
        """Run a job under the lock: now, or when the holding thread gives the lock back. Never waits."""
        self.jobs.append(job)
        if not self.is_held_here() and self.rlock.acquire(blocking=False):
            try:
                self.run_jobs()
            finally:
                self.rlock.release()

    def run_jobs(self) -> None:
        """Run the deferred jobs; the caller holds the lock. Raises the first `InvalidInput` after the last job."""
        errors = []
        with host_recordings.paused():  # a garbage collection may come in the middle of a block
            while self.jobs:
                try:
                    self.jobs.popleft()()
                except InvalidInput as error:
                    errors.append(error)
        if errors:
            raise errors[0]
