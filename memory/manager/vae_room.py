"""How many bytes a VAE may decode in beside what stays on its device, and the events that tell of its tiles.

[Note: VAE room] A decode may take what is free above the low mark. Idle text encoders, vision models and other VAEs
leave for it: they are done, or brought back in a moment. Nothing of a diffusion model or of what guides it leaves while
smaller tiles would do: its weights are most of what a run copies. Where a plan reckoned that a run is shorter if a
decode has more room, in larger tiles or in one piece, it has that much: it is kept free as the VAE is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from ..errors import DoesNotFit, InvalidInput
from ..planner.plan import ComponentPlan
from .admission import Admission
from .leases import Leases
from .member import Member

__all__ = ["VaePlace", "VaeRoom"]

# The kinds of components that leave before a VAE decodes in tiles.
GIVING_KINDS = frozenset({"text", "vision", "vae"})


@dataclass(frozen=True, kw_only=True, slots=True)
class VaePlace:
    """Where a managed VAE computes."""

    name: str
    """Its id in the books."""
    device: str
    missing_bytes: int
    """What its plan takes of the device, and is not there."""
    tile_bytes: int = 0
    """What is kept free for its tiles as it is loaded, whatever leaves for that; 0: what fits beside the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The bytes of a device that a VAE may use."""

    free_bytes: int
    """Free now, nothing of it kept free."""
    kept_bytes: int
    """Of these the low mark keeps so many free."""
    idle_bytes: int
    """What idle components could give that leave before a VAE decodes in tiles."""
    model_bytes: int = 0
    """What the others could give, that leave only where a plan keeps room for a decode."""

    def tile_bytes(self, place: VaePlace, taken_bytes: int) -> int:
        """Return what a decode may take: what fits beside the model, or what the plan keeps for it if that is there.

        Args:
            taken_bytes: what is to stay free, or comes yet.
        """
        left = self.free_bytes + self.idle_bytes - taken_bytes
        return max(left, min(place.tile_bytes, left + self.kept_bytes + self.model_bytes))


class VaeRoom:
    """Counts and makes room for VAEs. Takes the manager's lock."""

    def __init__(self, leases: Leases) -> None:
        self.lock = leases.lock
        self.admission: Admission = leases.admission
        self.capacity = leases.capacity
        self.event_log = leases.event_log

    def sees(self, device: str) -> bool:
        """Whether a device is an accelerator of this machine that the manager knows."""
        return device in self.capacity.devices and not self.capacity.devices[device].is_cpu

    def place_of(self, module: nn.Module) -> VaePlace | None:
        """Return where a module computes that no host manages; None for one that computes on the CPU, or is split."""
        with self.lock.exclusive():
            member = self.capacity.members.of_module(module)
            shares = member.managed.plan.shares if member is not None else ()
            if member is None or len(shares) != 1 or not self.sees(shares[0].device):
                return None
            device = shares[0].device
            missing = self.planned_now(member).shares[0].device_bytes - self.capacity.ledger.held(member.id, device)
            return VaePlace(name=member.id, device=device, missing_bytes=max(0, missing), tile_bytes=member.tile_bytes)

    def planned_now(self, member: Member) -> ComponentPlan:
        """Return what a member is planned to take by what is known now: it may have computed another size last."""
        try:
            return self.capacity.replan(member)
        except (DoesNotFit, InvalidInput):
            return member.managed.plan

    def beside(self, device: str, vae: str) -> Room:
        """Return what a VAE, by its id in the books, may use of a device; moves nothing."""
        with self.lock.exclusive():
            found = self.capacity.devices[device]
            all_idle = sum(each.device_bytes for each in self.capacity.candidates(found, None) if each.component != vae)
            idle_bytes = sum(num_bytes for _, num_bytes in self.giving(device, vae))
            return Room(
                free_bytes=self.capacity.free_bytes(found),
                kept_bytes=self.capacity.mark_of(device).low_bytes,
                idle_bytes=idle_bytes,
                model_bytes=all_idle - idle_bytes,
            )

    def clear(self, device: str, vae: str, num_bytes: int, reason: str) -> int:
        """Evict what leaves for a VAE until so many bytes of a device are freed; returns what was freed."""
        with self.lock.exclusive():
            giving = {component for component, _ in self.giving(device, vae)}
            others = {each.component for each in self.capacity.candidates(self.capacity.devices[device], None)} - giving
            return self.admission.free_memory(device, num_bytes, reason, exclude=others, allow_unrunnable=False)

    def giving(self, device: str, vae: str) -> Iterator[tuple[str, int]]:
        """Yield the components that leave for a VAE, and the bytes that each could give."""
        members, steered = self.capacity.members, self.capacity.steered
        for candidate in self.capacity.candidates(self.capacity.devices[device], None):
            member, name = members.get(candidate.component), candidate.component
            part = member.managed.component if member is not None else steered.get(name)
            if part is None or part.kind not in GIVING_KINDS or name == vae or candidate.evict_last:
                continue
            num_bytes = candidate.device_bytes - self.capacity.lasting_bytes(device, name)
            if num_bytes > 0:
                yield name, num_bytes

    def note(self, device: str, vae: str, num_bytes: int, line: str, *, is_retry: bool = False) -> None:
        """Enter the tiles that a VAE decodes in, and the bytes of one; ``is_retry``: after it ran out of memory."""
        with self.lock.exclusive():
            self.event_log.note("recover" if is_retry else "plan", vae, num_bytes, device, line, component_kind="vae")
