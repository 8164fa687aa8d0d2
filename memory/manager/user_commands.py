"""What users ask for: keep, release, move, free and lend, limits and marks; also while other threads compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..errors import InvalidInput, UnsafeState
from ..options.idle_limits import IdleLimits
from ..options.marks import Marks
from ..options.placement import parse_placement
from ..planner.plan import ComponentPlan
from ..transfer.host_heap import give_back_heap
from .caretaker import Caretaker
from .claims.kept import EVERYTHING_KEPT, KeepLimit
from .claims.loans import Loan
from .departures import Departure, Departures
from .leases import Leases
from .lending import LendingReport
from .member import Member
from .registry import Registry
from .steered import SteeredComponent
from .watermark import WatermarkReport

__all__ = ["UserCommands"]


class UserCommands:
    """Does what users ask for. Takes the manager's lock; what its caretaker knows of runs says what may move now.

    Methods whose names end in ``between_runs`` are for other threads than the one that runs prompts.
    """

    def __init__(self, leases: Leases, registry: Registry, caretaker: Caretaker) -> None:
        self.lock = leases.lock
        self.leases = leases
        self.registry = registry
        self.caretaker = caretaker
        self.lending = caretaker.lending
        self.idle = caretaker.idle
        self.sharing = caretaker.sharing
        self.admission = leases.admission
        self.capacity = self.admission.capacity
        self.departures = Departures(self.admission)

    def find(self, component_id: str) -> Member | SteeredComponent:
        """Return a component by its id in the report. Raises `InvalidInput`."""
        with self.lock.exclusive():
            return self.departures.find(component_id)

    def keep(
        self, components: Iterable[Member | SteeredComponent], kept: bool, limit: KeepLimit = EVERYTHING_KEPT
    ) -> None:
        """Evict components last (True) or in the usual order (False); hosts that move components are told, too.

        Args:
            limit: up to how many bytes of a device each of them is kept.

        Raises:
            InvalidInput: the limit exceeds a device of one of them; nothing changes then.
        """
        with self.lock.exclusive():
            found = list(components)
            for component in found if kept else ():
                self.departures.refuse_limit(component, limit)
            for component in found:
                component.keep(kept, limit)
            self.admission.order_steered()

    # -- release and move

    def release_from(
        self, component: Member | SteeredComponent, device: str | None = None, *, reason: str
    ) -> list[Departure]:
        """Take one component off a device, or off all, now; it stays under management (`Departures.release`)."""
        with self.lock.exclusive():
            self.leases.recover_abandoned(None)
            return self.departures.release(component, device, reason=reason)

    def release_between_runs(
        self, component: Member | SteeredComponent | None, device: str | None = None, *, reason: str
    ) -> list[Departure]:
        """As `release_from`, for other threads than the one that runs prompts. No component: all of them.

        Raises:
            UnsafeState: a run is open.
        """
        with self.lock.exclusive():  # a run that begins now waits until this has ended
            self.refuse_in_run()
            if component is not None:
                return self.release_from(component, device, reason=reason)
            self.leases.recover_abandoned(None)
            return self.departures.release_all(device, reason=reason)

    def move_between_runs(self, component: Member | SteeredComponent, placement: str) -> ComponentPlan:
        """Give one component another placement: it leaves its devices, and is loaded there when it is used.

        What loaded it keeps its own placement, which counts again when it is planned anew (`Registry.move`).

        Args:
            placement: as the nodes take it, such as ``gpu:1`` or ``gpu:0&gpu:1@30%``.

        Raises:
            InvalidInput, DoesNotFit: nothing has changed.
            UnsafeState: a run is open, or the component computes now.
        """
        with self.lock.exclusive():
            self.refuse_in_run()
            if not isinstance(component, Member):
                raise InvalidInput(f"{component.id} is moved by its host; choose its device in its loader")
            found = parse_placement(placement, devices=list(self.admission.devices), components=[component.name])
            self.leases.recover_abandoned(None)
            plan = self.registry.move(component, found)[component.name]
            component.mark_again()
            return plan

    def free_between_runs(self, reason: str) -> dict[str, int]:
        """As `free_idle`, for other threads than the one that runs prompts. Raises `UnsafeState`: a run is open."""
        with self.lock.exclusive():
            self.refuse_in_run()
            return self.free_idle(reason)

    def refuse_in_run(self) -> None:
        if self.caretaker.is_in_run():
            raise UnsafeState("a prompt is running; cancel it, or wait until it ends")

    def free_idle(self, reason: str) -> dict[str, int]:
        """Evict every idle component, and return the driver and the system their memory.

        Returns the bytes freed of each accelerator.
        """
        with self.lock.exclusive():
            self.capacity.kept.drop_all(reason)
        freed = {}
        for device in self.admission.devices.values():
            if not device.is_cpu:
                with self.lock.exclusive():
                    freed[device.name] = self.admission.free_memory(
                        device.name, device.total_bytes(), reason, takes_all=True
                    )
                device.empty_cache()
        give_back_heap()
        return freed

    # -- lend

    def lend(self, num_bytes: int, seconds: float, device: str | None = None) -> LendingReport:
        """Keep so many bytes of a device free for another program, for a while (`Lending.lend`).

        While a run is open what its host loads or moves stays; it leaves when the node that runs now ends.
        """
        with self.lock.exclusive():
            self.leases.recover_abandoned(None)
            moves_hosted = not self.caretaker.is_in_run()
            found = self.lending.find_device(device)
            report = self.lending.lend(found, num_bytes, seconds, moves_hosted=moves_hosted)
        self.caretaker.alarm.set(seconds)
        return report

    def take_back(self, device: str | None = None) -> Loan:
        """End what `lend` began, before its time is up (`Lending.give_back`)."""
        with self.lock.exclusive():
            return self.lending.give_back(self.lending.find_device(device))

    # -- limits and marks

    def set_default_watermarks(self, asked: Mapping[str, Marks]) -> dict[str, WatermarkReport]:
        """Set marks for the devices for which no program sets any; replaces those set before.

        A program sets them with `MemoryManager.set_watermark`.

        While a run is open nothing moves; it ends with the new marks. Returns the marks that count now.

        Raises:
            InvalidInput: as there; nothing is set then.
        """
        with self.lock.exclusive():
            changed = self.admission.set_default_watermarks(asked, moves=not self.caretaker.is_in_run())
            self.sharing.exchange()
            return changed

    def set_idle_limits(self, limits: IdleLimits) -> None:
        """Keep so many components loaded, and unload those that were idle for so long; takes effect at once.

        What a host loads or moves leaves between runs only.
        """
        with self.lock.exclusive():
            self.idle.take(limits)
            self.idle.trim(moves_hosted=not self.caretaker.is_in_run())
        self.caretaker.alarm.set(self.caretaker.look())

    def ask_before_moving(self, is_running: Callable[[], bool]) -> None:
        """Move what a host loads only while this says that the host runs nothing; asked beside our own runs."""
        self.caretaker.ask(is_running)
