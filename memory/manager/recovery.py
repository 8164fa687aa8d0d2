"""Recovery: room for another try, in the middle of a pass that ran out of memory.

[Note: in a pass] A host that can repeat a whole call of a model asks for this between the two tries, when the frames of
the failed one are gone. The pass stays open and keeps its lease, so that nothing else can take the component meanwhile.
What was prefetched is dropped, idle components leave by the policy, as far as their host can still enter them, and then
the component itself streams more: all that its plan can give, because the failure shows only that more is needed than
was free ([Note: needs] in `needs.py`). It is tried once in a pass: a second failure goes on to the caller.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..units import format_bytes
from .calibration import learn_failed_try
from .leases import Leases
from .member import Member

__all__ = ["Recovery"]


class Recovery:
    """Makes room for passes that are to be tried again. The caller holds the manager's lock."""

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self.capacity = leases.capacity
        self.admission = leases.admission
        self.measures = leases.measures

    def computing(self, module: nn.Module) -> Member | None:
        """Return the component whose pass this thread runs and that was entered through a module; takes no lock."""
        for member in list(self.leases.leased.values()):
            current = member.managed.passes.here
            if current is not None and current.outermost is module:
                return member
        return None

    def make_room(self, member: Member, error: BaseException, put_back: Callable[[], None]) -> bool:
        """Make room for another try of this thread's pass; returns whether there is more room than before.

        Args:
            error: what ended the first try. Nothing of it may be alive any more but the exception.
            put_back: called when there is more room; restores what the first try changed.
        """
        managed, current = member.managed, member.managed.passes.here
        if current is None or current.is_second_try or member.lenders or not (member.is_hosted and managed.is_loaded):
            return False
        current.begin_second_try()
        managed.forwards.stop_try()
        needed = self.measures.end_interval(current)
        failed = learn_failed_try(member, self.capacity, current, needed, error)
        if failed is None:
            return False
        names = [share.device.name for share in managed.shares]
        free_before = {name: self.capacity.devices[name].free_bytes() for name in names}
        # What another program took tells nothing of the need, so nothing of it was stored: here it counts all the same.
        if failed.is_excused:
            member.note_failed_load(failed.device)
        try:
            self.admission.give_headroom(member, current.size)
        except torch.OutOfMemoryError:  # even the smaller form could not be loaded: nothing of it is there now
            return False
        finally:
            if failed.is_excused:
                member.forget_failed_load(failed.device)
        freed = self.capacity.devices[failed.device].free_bytes() - free_before[failed.device]
        if freed <= 0:
            return False
        managed.finish_copies()
        put_back()
        for share in managed.shares:  # what was staged may have the failed try's buffers
            share.forget_staged()
        member.note_entry(self.measures.begin_interval(current, names))
        line = f"{failed.line}; {format_bytes(freed)} were freed, and the call is repeated once"
        self.leases.event_log.note("recover", member.id, freed, failed.device, line)
        managed.forwards.begin_try()
        return True
