"""Calls a function after a while, in a thread that does not keep the process alive."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm:
    """Rings once at the time that was set; the earliest counts. It refers to its function's owner weakly.

    Args:
        ring: a method without arguments; returns the seconds until it is to be called again, None for not at all.
    """

    def __init__(self, ring: Callable[[], float | None]) -> None:
        self.ring = weakref.WeakMethod(ring)
        self.lock = threading.Lock()
        self.timer: threading.Timer | None = None
        self.due_s = 0.0

    def set(self, delay_s: float | None) -> None:
        """Ring after so many seconds, if nothing is due before; None: leave it as it is. Takes no lock of others."""
        if delay_s is None:
            return
        due_s = time.monotonic() + max(0.0, delay_s)
        with self.lock:
            if self.timer is not None:
                if self.due_s <= due_s:
                    return
                self.timer.cancel()
            self.due_s = due_s
            timer = self.timer = threading.Timer(max(0.0, delay_s), self.call)
            timer.daemon = True
            timer.name = "highwater-alarm"
            timer.start()

    def call(self) -> None:
        with self.lock:
            if threading.current_thread() is not self.timer:
                return  # another one was set meanwhile
            self.timer = None
        ring = self.ring()
        if ring is not None:
            self.set(ring())
