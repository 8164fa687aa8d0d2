"""The plan: where each block of each component rests and computes, decided in whole bytes before anything moves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..options.budget import BudgetItem
from ..options.placement import Placement, PlacementItem, names_device
from ..options.precision import Precision
from ..options.profile import TITLES, OffloadProfile
from ..units import format_bytes
from ..weights.form_numbers import Forms
from .capacity import DeviceCapacity, Machine
from .device_plan import DevicePlan
from .precision_table import PrecisionRow
from .run_plan import RunPlan

__all__ = ["ComponentPlan", "DeviceCapacity", "DevicePlan", "Machine", "Plan"]

KEPT_IN = {"device": "on the device", "pinned": "in pinned RAM", "host": "in pageable RAM", "disk": "in its file"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentPlan:
    """The decision for one component, and why."""

    component: str
    kind: str
    weight_bytes: int
    shares: tuple[DevicePlan, ...]
    tier: str
    precision: Precision
    precision_rows: tuple[PrecisionRow, ...] = ()
    """What that does to its weights, by class of layer."""
    forms: Forms
    placement: PlacementItem
    pinned: frozenset[str] = frozenset()
    """The names of the blocks that are page-locked in RAM, and ``""`` for the non-block weights and the buffers."""
    host_bytes: int = 0
    """The bytes of RAM, page-locked or not: of weights, and of the buffers through which a file is read."""
    buffer_bytes: int = 0
    """Those of the buffers among them."""
    pinned_bytes: int = 0
    in_file: frozenset[str] = frozenset()
    """What rests in its file, named as in ``pinned``; everything at tier ``disk``."""
    file_bytes: int = 0
    """The bytes of these."""
    takes_ram_to_stream: bool = False
    """Whether these get room in RAM as soon as they stream."""
    maps_file: bool = False
    """Whether these stream from a mapping of their file, while RAM has room for its pages."""
    locks_buffers: bool = False
    """Whether the buffers through which its file is read are page-locked."""
    store: str = ""
    """The other device from whose memory blocks stream; empty where they stream from RAM or their file."""
    oversize_bytes: int = 0
    """What is pageable only because its pieces are too large for a slab of page-locked memory."""
    choices: tuple[str, ...] = ()
    """Why this precision, device, tier and split were chosen; the shares say why blocks stream."""

    @property
    def num_blocks(self) -> int:
        return sum(len(share.blocks) for share in self.shares)

    @property
    def device_bytes(self) -> dict[str, int]:
        return {share.device: share.device_bytes for share in self.shares}

    @property
    def total_bytes(self) -> int:
        """The bytes of all weights and buffers in the precision in which they rest, wherever they are."""
        return sum(share.total_bytes for share in self.shares)

    @property
    def stored_bytes(self) -> int:
        """The bytes that rest on the other device."""
        return sum(share.stored_bytes for share in self.shares)

    @property
    def streams(self) -> bool:
        return any(share.streamed for share in self.shares)

    @property
    def is_on_disk(self) -> bool:
        """Whether something of it is read from its file that RAM would be for."""
        streams_from_ram = self.takes_ram_to_stream or self.maps_file or bool(self.store)
        return bool(self.in_file) and (not streams_from_ram or any(share.read_bytes for share in self.shares))

    @property
    def reasons(self) -> tuple[str, ...]:
        return (*self.choices, *(reason for share in self.shares for reason in share.reasons))

    def text(self) -> str:
        """Return the decision as lines for people, the reasons last."""
        kept = KEPT_IN[self.tier]
        if self.tier == "pinned" and self.pinned_bytes < self.host_bytes:
            kept = f"in RAM, {format_bytes(self.pinned_bytes)} of it pinned"
        if self.in_file and self.tier != "disk":
            kept += f", {format_bytes(self.file_bytes)} in its file"
        if self.stored_bytes:
            kept += f", {format_bytes(self.stored_bytes)} of it stored on {self.store}"
        lines = [f"{self.component}: {format_bytes(self.weight_bytes)} {self.precision.name}, kept {kept}"]
        lines += [f"  {share.text()}" for share in self.shares]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "kind": self.kind,
            "weight_bytes": self.weight_bytes,
            "precision": self.precision.name,
            "precision_rows": [row.to_json() for row in self.precision_rows],
            "tier": self.tier,
            "host_bytes": self.host_bytes,
            "buffer_bytes": self.buffer_bytes,
            "pinned_bytes": self.pinned_bytes,
            "file_bytes": self.file_bytes,
            "store": self.store,
            "stored_bytes": self.stored_bytes,
            "placement": str(self.placement),
            "shares": [share.to_json() for share in self.shares],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for a set of components; `text` prints them, `placement` can be pasted back."""

    components: tuple[ComponentPlan, ...]
    profile: OffloadProfile = field(default_factory=OffloadProfile)
    run: RunPlan | None = None
    """What a run does with it; None where nothing is known of what runs."""

    def __getitem__(self, component: str) -> ComponentPlan:
        return next(plan for plan in self.components if plan.component == component)

    @property
    def placement(self) -> str:
        """The plan as one placement text: ``auto`` replaced by what it chose."""
        return str(Placement(items=tuple(plan.placement for plan in self.components)))

    @property
    def like(self) -> str:
        """The number of the profile that this plan is most like; empty where nothing is on an accelerator."""
        plans = [plan for plan in self.components if plan.shares[0].device != "cpu"]
        if not plans:
            return ""
        streams = any(plan.streams for plan in plans)
        if all(plan.pinned_bytes + plan.oversize_bytes == plan.host_bytes and not plan.is_on_disk for plan in plans):
            return "2" if streams else "3" if any(plan.in_file for plan in plans) else "1"
        if not streams:
            return "3"
        largest = max(plans, key=lambda plan: plan.weight_bytes)
        return "4" if largest.pinned and not largest.is_on_disk else "5"

    @property
    def explicit_profile(self) -> str:
        """The plan as one profile text that leaves nothing to ``auto``."""
        # A device's budget is for all components together: no budget of each says the same.
        budgets = [item for item in self.profile.budgets if names_device(item.target)]
        for plan in self.components:
            if len(plan.shares) > 1:  # one number is not the limit of each: what was said of it stays
                said = (plan.component, plan.kind, "*")
                budgets += [item for item in self.profile.budgets if item.target in said and item not in budgets]
                continue
            limits = [share.limit_bytes for share in plan.shares if share.limit_bytes is not None]
            budgets.append(BudgetItem(target=plan.component, limit_bytes=max(limits, default=None)))
        pinned = tuple(plan.component for plan in self.components if plan.pinned_bytes)
        on_demand = tuple(
            plan.component for plan in self.components if plan.tier == "disk" and not (plan.maps_file or plan.store)
        )
        return str(replace(self.profile, budgets=tuple(budgets), pinned=pinned, on_demand=on_demand))

    @property
    def reasons(self) -> tuple[str, ...]:
        """What ``auto`` chose for this machine and these components."""
        if self.profile.name != "auto" or not self.like:
            return ()
        streaming = [plan.component for plan in self.components if plan.streams]
        verb = "is" if len(streaming) == 1 else "are"
        form = f"{', '.join(streaming)} {verb} streamed" if streaming else "everything is resident while it computes"
        host_bytes, pinned_bytes, buffer_bytes = (
            sum(getattr(plan, name) for plan in self.components)
            for name in ("host_bytes", "pinned_bytes", "buffer_bytes")
        )
        buffers = f", with {format_bytes(buffer_bytes)} of buffers to read files," if buffer_bytes else ""
        told = {
            "kept on disk": [plan for plan in self.components if plan.in_file and plan.is_on_disk],
            "read from their files": [plan for plan in self.components if plan.in_file and not plan.is_on_disk],
        }
        kept = "".join(f"; {what}: {', '.join(map(in_file_of, plans))}" for what, plans in told.items() if plans)
        return (
            f"like profile {self.like} ({TITLES[self.like]}) without quantization: {form}; "
            f"{format_bytes(pinned_bytes)} of the {format_bytes(host_bytes)} in RAM{buffers} are page-locked{kept}",
            f"equivalent profile: {self.explicit_profile}",
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "placement": self.placement,
            "profile": {
                "name": self.profile.name,
                "title": self.profile.title,
                "text": str(self.profile),
                "like": self.like,
                "explicit": self.explicit_profile,
                "reasons": list(self.reasons),
            },
            "components": [plan.to_json() for plan in self.components],
        } | ({"run": self.run.to_json()} if self.run is not None else {})

    def text(self) -> str:
        """Return the plan as lines for people: a component each with its reasons, then profile and placement."""
        title = f" ({self.profile.title})" if self.profile.title != self.profile.name else ""
        return "\n".join(
            [
                *(plan.text() for plan in self.components),
                *([self.run.text()] if self.run is not None else []),
                f"profile: {self.profile}{title}",
                *(f"  - {reason}" for reason in self.reasons),
                f"placement: {self.placement}",
            ]
        )


def in_file_of(plan: ComponentPlan) -> str:
    """Return a component, and how much of it rests in its file where that is not all."""
    return plan.component if plan.tier == "disk" else f"{format_bytes(plan.file_bytes)} of {plan.component}"
