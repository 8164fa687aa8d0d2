"""Does what falls due: ends loans, trims kept weights, unloads what is idle, helps other processes, returns memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ..runtime.forwards.deferring_lock import DeferringLock
from ..transfer.host_heap import give_back_heap
from .card_sharing import CardSharing
from .claims.alarm import Alarm
from .heap_return import HeapReturn
from .idle_unloading import IdleUnloading
from .leases import Leases
from .lending import Lending

__all__ = ["Caretaker"]

# When what is due is looked at again while another thread has the lock, and while a run or a pass goes on.
RETRY_S = 0.2
RETRY_BUSY_S = 5.0


class Caretaker:
    """Looks at what is due when an alarm rings. Nothing moves during a run or a pass; it never waits for the lock."""

    def __init__(
        self, lock: DeferringLock, leases: Leases, lending: Lending, idle: IdleUnloading, sharing: CardSharing
    ) -> None:
        self.lock = lock
        self.sharing = sharing
        self.leases = leases
        self.lending = lending
        self.idle = idle
        self.capacity = lending.capacity
        self.loans = lending.capacity.loans
        self.event_log = lending.event_log
        self.heap = HeapReturn(lambda: len(leases.members) + len(lending.capacity.kept.parts))
        self.alarm = Alarm(self.look)
        self.hosts_running: list[Callable[[], bool]] = []

    def ask(self, is_running: Callable[[], bool]) -> None:
        """Ask this, too, whether a run is open. Idempotent."""
        if is_running not in self.hosts_running:
            self.hosts_running.append(is_running)

    def is_in_run(self) -> bool:
        """Whether a run is open here or in a host."""
        return self.event_log.is_running or any(is_running() for is_running in self.hosts_running)

    def return_heap_soon(self) -> None:
        """Give freed memory back to the system once a host has dropped what it drops now, and nothing runs."""
        self.heap.ask()
        self.alarm.set(RETRY_S)

    def look(self) -> float | None:
        """Do what is due. Returns the seconds until it is to be called again, None where nothing is left to do."""
        with self.lock.exclusive_now() as is_ours:
            if not is_ours:
                return RETRY_S
            self.lending.end_overdue()
            self.capacity.trim_kept()
            dues = [loan.until_s - self.event_log.now_s for loan in self.loans.running()]
            dues += [RETRY_BUSY_S] if self.capacity.kept.parts else []
            if self.idle.limits.idle_s is not None:
                if not self.is_in_run() and not self.leases.leased:
                    self.idle.unload_idle()
                    dues.append(max(RETRY_S, self.idle.due_s() or self.idle.limits.idle_s))
                else:
                    dues.append(min(RETRY_BUSY_S, max(RETRY_S, self.idle.limits.idle_s)))
            shared_due = self.sharing.look(is_idle=not self.is_in_run() and not self.leases.leased)
            dues += [shared_due] if shared_due is not None else []
            returns_heap = False
            if self.heap.is_asked:
                due_s = RETRY_BUSY_S if self.is_in_run() else self.heap.look()
                returns_heap = due_s is None
                dues += [due_s] if due_s is not None else []
        if returns_heap:
            gc.collect()  # a host's models may be in cycles; takes a while, and needs no lock
            give_back_heap()
        return min(dues, default=None)
