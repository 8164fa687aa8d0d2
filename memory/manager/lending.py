"""Lends memory of a device to another program for a while, and takes it back ([Note: lent] in `claims/loans.py`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import InvalidInput, UnsafeState, require
from ..options.placement import parse_device
from ..transfer.devices import Device
from ..units import format_bytes, format_seconds
from .admission import Admission
from .claims.loans import LONGEST_LOAN_S, Loan

__all__ = ["Lending", "LendingReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LendingReport:
    """What a loan has done. ``freed_bytes`` is what the driver has more of than before, ``free_bytes`` what it has free
    now, and ``missing_bytes`` what of the loan is not free yet: it follows when the node that runs ends."""

    device: str
    lent_bytes: int
    freed_bytes: int
    free_bytes: int
    missing_bytes: int
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Lending:
    """Lends and takes back. The caller holds the manager's lock."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.capacity = admission.capacity
        self.loans = admission.capacity.loans
        self.event_log = admission.event_log

    def find_device(self, named: str | None) -> Device:
        """Return the accelerator with a name, or the only one. Raises `InvalidInput`."""
        accelerators = {name: device for name, device in self.admission.devices.items() if not device.is_cpu}
        if not accelerators:
            raise InvalidInput("this machine has no GPU, so there is no device memory to lend")
        if named is None and len(accelerators) == 1:
            return next(iter(accelerators.values()))
        if named is None:
            raise InvalidInput(f"this machine has several devices; name one: {', '.join(accelerators)}")
        return accelerators[parse_device(named, list(accelerators))]

    def lend(self, device: Device, num_bytes: int, seconds: float, *, moves_hosted: bool) -> LendingReport:
        """Keep bytes of a device free for another program; evicts idle components for them now.

        Args:
            moves_hosted: whether components that a host loads, or moves itself, may be moved now.

        Raises:
            InvalidInput: no amount or time that can be lent.
            UnsafeState: components that compute hold the memory, or the device is lent already.
        """
        require(num_bytes, int, what="lend", allowed="a whole number of bytes")
        require(seconds, (int, float), what="lend for", allowed="a number of seconds")
        if not 1 <= seconds <= LONGEST_LOAN_S:
            raise InvalidInput(f"lend for {seconds:g} s; allowed: 1 s to {LONGEST_LOAN_S / 3600:g} h")
        self.refuse_too_much(device, num_bytes)
        device.empty_cache()
        before = device.driver_free_bytes()
        loan = self.loans.begin(device.name, num_bytes, seconds)
        reason = f"lent to another program for {format_seconds(seconds)}"
        self.event_log.note("lend", "", num_bytes, device.name, reason)
        self.clear(loan, moves_hosted=moves_hosted)
        self.changed()
        return self.report(loan, before)

    def refuse_too_much(self, device: Device, num_bytes: int) -> None:
        """Refuse more bytes than a device has, or than components that compute leave of it."""
        total = device.total_bytes()
        if not 0 < num_bytes <= total:
            raise InvalidInput(
                f"lend {format_bytes(num_bytes)} of {device}: it has {format_bytes(total)}; "
                f"allowed: more than 0, up to {format_bytes(total)}"
            )
        idle = sum(candidate.device_bytes for candidate in self.capacity.candidates(device, None))
        low = self.capacity.joined_mark(device.name).low_bytes
        lent = self.capacity.neighbours.lent_bytes(device.name)
        most = max(0, device.free_bytes() + idle - low - lent)
        if num_bytes > most:
            others = self.capacity.foreign_bytes(device)
            holders = [f"{name} computes with {format_bytes(n)}" for name, n in self.computing(device)]
            holders += [f"{format_bytes(low)} reserved"]
            holders += [f"{format_bytes(lent)} lent by another process"] if lent else []
            holders += [f"{format_bytes(others)} held by other programs"] if others > 0 else []
            raise UnsafeState(
                f"cannot lend {format_bytes(num_bytes)} of {device}: {', '.join(holders)}; "
                f"allowed now: up to {format_bytes(most)}"
            )

    def computing(self, device: Device) -> list[tuple[str, int]]:
        """Return the components that compute, and their bytes of a device."""
        own = self.capacity.computing(device.name, None)
        held = self.capacity.steered.held(device.name)
        return [*own, *((other.id, num_bytes) for other, num_bytes in held if other.is_computing)]

    def clear(self, loan: Loan, *, moves_hosted: bool) -> None:
        """Evict idle components until what is lent is free, and return the driver its memory."""
        device = self.admission.devices[loan.device]
        need_bytes = self.capacity.mark_of(loan.device).low_bytes - device.free_bytes()
        if need_bytes > 0:
            held = [] if moves_hosted else self.capacity.moved_by_hosts()
            cause = f"{format_bytes(loan.num_bytes)} are lent to another program"
            self.admission.free_memory(loan.device, need_bytes, cause, exclude=held)
        device.empty_cache()

    def settle(self) -> None:
        """Free what is lent and not free yet; called between two nodes, in the thread that runs them."""
        for loan in self.loans.running():
            if self.missing_bytes(loan):
                self.clear(loan, moves_hosted=True)
                self.changed()

    def missing_bytes(self, loan: Loan) -> int:
        """Return what is lent, not taken yet, and not free."""
        device = self.admission.devices[loan.device]
        return max(0, self.loans.missing_bytes(loan.device) - device.driver_free_bytes())

    def give_back(self, device: Device) -> Loan:
        """End a loan before its time is up.

        Raises:
            UnsafeState: nothing of the device is lent.
        """
        loan = self.loans.of(device.name)
        if loan is None:
            raise UnsafeState(f"nothing of {device} is lent")
        self.loans.end(device.name)
        self.note_end(loan, "given back")
        return loan

    def end_overdue(self) -> None:
        """End the loans whose time is up."""
        for loan in self.loans.end_overdue():
            self.note_end(loan, "the time is up")

    def note_end(self, loan: Loan, reason: str) -> None:
        self.event_log.note("lend", "", 0, loan.device, f"{format_bytes(loan.num_bytes)} were lent: {reason}")
        self.changed()

    def changed(self) -> None:
        """Tell plans and hosts that another amount is kept free."""
        self.admission.keep_free_in_host()
        self.capacity.outdate_plans()

    def report(self, loan: Loan, free_before: int) -> LendingReport:
        device = self.admission.devices[loan.device]
        free = device.driver_free_bytes()
        return LendingReport(
            device=loan.device,
            lent_bytes=loan.num_bytes,
            freed_bytes=max(0, free - free_before),
            free_bytes=free,
            missing_bytes=self.missing_bytes(loan),
            seconds=round(loan.until_s - self.event_log.now_s, 3),
        )
