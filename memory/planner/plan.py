"""The plan: where each block of each component rests and computes, decided in whole bytes before anything moves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DoesNotFit
from ..options.budget import BudgetItem
from ..options.placement import Placement, PlacementItem, SplitRatio, names_device
from ..options.precision import Precision
from ..options.profile import LANGUAGE, TITLES, OffloadProfile, covers
from ..units import format_bytes
from ..weights.component import Component
from ..weights.form_numbers import Forms, rests_of
from ..weights.known_forms import numbers_of
from .capacity import DeviceCapacity, Machine
from .device_plan import DevicePlan, confirm_share, plan_share, same_to_the_reason
from .form_choice import choose_forms, explain_wide
from .host_tiers import StoreSpec, choose_tiers, lock_pages, may_be_pinned
from .layer_split import split_blocks
from .mixed_tiers import share_ram
from .sizes import Sizes, explain_non_block
from .workload import find_blocking

__all__ = [
    "ComponentPlan",
    "DeviceCapacity",
    "DevicePlan",
    "Machine",
    "Plan",
    "confirm_plan",
    "fresh_plan_holds",
    "plan_components",
    "replan",
]

KEPT_IN = {"device": "on the device", "pinned": "in pinned RAM", "host": "in pageable RAM", "disk": "in its file"}
# Fewer bytes of non-block weights are not worth a line.
LEAST_NON_BLOCK_BYTES = 256 << 20
# T5, Llama and their like, by their names or by those of their layers; mmgp looks for the same in module paths.
LANGUAGE_MODELS = re.compile(r"t5|llama|llm|qwen|gemma|mistral", re.IGNORECASE)
LANGUAGE_LAYERS = re.compile(r"\.SelfAttention\.|\.gate_proj\.|\.ffn\.gate\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ComponentPlan:
    """The decision for one component, and why."""

    component: str
    kind: str
    weight_bytes: int
    shares: tuple[DevicePlan, ...]
    tier: str
    precision: Precision
    forms: Forms
    placement: PlacementItem
    pinned: frozenset[str] = frozenset()
    """The names of the blocks that are page-locked in RAM, and ``""`` for the non-block weights and the buffers."""
    host_bytes: int = 0
    """The bytes of RAM, page-locked or not: of weights, and of the buffers through which a file is read."""
    pinned_bytes: int = 0
    in_file: frozenset[str] = frozenset()
    """What rests in its file, named as in ``pinned``; everything at tier ``disk``."""
    file_bytes: int = 0
    """The bytes of these."""
    locks_buffers: bool = False
    """Whether the buffers through which its file is read are page-locked."""
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
    def streams(self) -> bool:
        return any(share.streamed for share in self.shares)

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
            "tier": self.tier,
            "host_bytes": self.host_bytes,
            "pinned_bytes": self.pinned_bytes,
            "file_bytes": self.file_bytes,
            "placement": str(self.placement),
            "shares": [share.to_json() for share in self.shares],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The decisions for a set of components; `text` prints them, `placement` can be pasted back."""

    components: tuple[ComponentPlan, ...]
    profile: OffloadProfile = field(default_factory=OffloadProfile)

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
        if all(plan.pinned_bytes + plan.oversize_bytes == plan.host_bytes and not plan.in_file for plan in plans):
            return "2" if streams else "1"
        if not streams:
            return "3"
        largest = max(plans, key=lambda plan: plan.weight_bytes)
        return "4" if largest.pinned and not largest.in_file else "5"

    @property
    def explicit_profile(self) -> str:
        """The plan as one profile text that leaves nothing to ``auto``."""
        # A device's budget is for all components together: no budget of each says the same.
        budgets = [item for item in self.profile.budgets if names_device(item.target)]
        for plan in self.components:
            limits = [share.limit_bytes for share in plan.shares if share.limit_bytes is not None]
            budgets.append(BudgetItem(target=plan.component, limit_bytes=max(limits, default=None)))
        pinned = tuple(plan.component for plan in self.components if plan.pinned_bytes)
        on_demand = tuple(plan.component for plan in self.components if plan.tier == "disk")
        return str(replace(self.profile, budgets=tuple(budgets), pinned=pinned, on_demand=on_demand))

    @property
    def reasons(self) -> tuple[str, ...]:
        """What ``auto`` chose for this machine and these components."""
        if self.profile.name != "auto" or not self.like:
            return ()
        streaming = [plan.component for plan in self.components if plan.streams]
        verb = "is" if len(streaming) == 1 else "are"
        form = f"{', '.join(streaming)} {verb} streamed" if streaming else "everything is resident while it computes"
        host_bytes, pinned_bytes = (
            sum(getattr(plan, name) for plan in self.components) for name in ("host_bytes", "pinned_bytes")
        )
        on_disk = [
            plan.component if plan.tier == "disk" else f"{format_bytes(plan.file_bytes)} of {plan.component}"
            for plan in self.components
            if plan.in_file
        ]
        kept = f"; kept on disk: {', '.join(on_disk)}" if on_disk else ""
        return (
            f"like profile {self.like} ({TITLES[self.like]}) without quantization: {form}; "
            f"{format_bytes(pinned_bytes)} of the {format_bytes(host_bytes)} in RAM are page-locked{kept}",
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
        }

    def text(self) -> str:
        """Return the plan as lines for people: a component each with its reasons, then profile and placement."""
        title = f" ({self.profile.title})" if self.profile.title != self.profile.name else ""
        return "\n".join(
            [
                *(plan.text() for plan in self.components),
                f"profile: {self.profile}{title}",
                *(f"  - {reason}" for reason in self.reasons),
                f"placement: {self.placement}",
            ]
        )


def plan_components(
    components: Sequence[Component],
    machine: Machine,
    *,
    placement: Placement,
    profile: OffloadProfile,
    precision: Precision | None = None,
    block_seconds: Mapping[str, Mapping[int, float]] | None = None,
) -> Plan:
    """Plan all components: on the devices each as if it were alone, in host memory all together.

    On a device components compute in turns and evict each other; in host memory all their weights rest at once.

    Args:
        precision: None is what the profile says.
        block_seconds: by component, what each of its blocks was measured to compute, in the order in which they ran.

    Raises:
        InvalidInput: a budget or tier that cannot be met as written.
        DoesNotFit: a component whose least form exceeds what its device can have.
    """
    drafts = [draft(component, machine, placement, profile, precision) for component in components]
    stores = choose_tiers([stores for stores, _, _ in drafts], machine, profile)
    shared = []
    for part, (_, devices, reasons) in zip(stores, drafts, strict=True):
        seconds = (block_seconds or {}).get(part.component.name)
        groups = split_blocks(part.sizes, devices, machine, profile, reasons)
        shares = tuple(
            plan_share(
                part.sizes, split.device, group, machine, profile,
                first=index == 0, in_file=part.in_file, block_seconds=seconds,
                pinned=None if may_be_pinned(part, profile) else frozenset(), keeps_free=part.tier != "device",
            )
            for index, (split, group) in enumerate(zip(devices, groups, strict=True))
        )  # fmt: skip
        refuse_streaming_at_tier_device(part.sizes, part.tier, shares)
        shared.append(replace(part, shares=shares))
    plans = []
    resting = lock_pages(share_ram(shared, machine), machine, profile)
    for part, drafted, (_, devices, reasons) in zip(resting, shared, drafts, strict=True):
        assert part.tier is not None
        if part.forms and part.forms_by_profile:
            reasons.append(f"kept {rests_of(part.forms)}: profile {profile.name}, no precision set")
        plan = ComponentPlan(
            component=part.component.name,
            kind=part.component.kind,
            weight_bytes=part.ram_bytes,
            shares=part.shares,
            tier=part.tier,
            precision=part.precision if part.forms else Precision.AS_STORED,
            forms=part.forms,
            # No tier is the name of several: without one the same is chosen again.
            placement=replace(
                part.item,
                component=part.component.name,
                devices=tuple(devices),
                tier=part.tier if part.tier == "disk" or not part.in_file else None,
            ),
            pinned=part.pinned,
            host_bytes=part.host_bytes,
            pinned_bytes=part.pinned_bytes,
            in_file=part.in_file,
            file_bytes=part.file_bytes,
            locks_buffers=part.locks_buffers,
            oversize_bytes=part.oversize_bytes,
            choices=(*reasons, *part.reasons),
        )
        is_other = part.in_file != drafted.in_file
        if any(
            share.streamed and (is_other or share.blocking != pageable(part.component, share, plan))
            for share in plan.shares
        ):
            # Not all of its blocks rest where they were assumed to: what is shown is what its first pass would plan.
            seconds = (block_seconds or {}).get(part.component.name)
            plan = replan(part.component, plan, machine, profile, seconds)
        plans.append(plan)
    return Plan(components=tuple(plans), profile=profile)


def pageable(component: Component, share: DevicePlan, plan: ComponentPlan) -> frozenset[int]:
    """Return the blocks of a share whose copies are synchronous, as the whole plan says."""
    return find_blocking(component, share.blocks, plan.pinned)


def draft(
    component: Component, machine: Machine, placement: Placement, profile: OffloadProfile, precision: Precision | None
) -> tuple[StoreSpec, Sequence[SplitRatio], list[str]]:
    """Return what is decided before tiers and shares: forms and devices, with their reasons."""
    reasons: list[str] = [*component.shares, *([profile.origin] if profile.origin else [])]
    item = placement.item_for(component.name, component.kind)
    devices = only_for_blocks(component, item.devices, reasons) or choose_device(machine, reasons)
    by_profile = precision is None and profile_encodes(component, profile)
    precision = Precision.ENCODED if by_profile else precision or Precision.AS_STORED
    forms = choose_forms(component, precision)
    if (numbers := numbers_of(precision)) is not None:
        if not forms:
            reasons.append(f"no block has weights that can rest {numbers.rests}: everything stays as stored")
        if kept := explain_wide(component, precision):
            reasons.append(kept)
        if forms and component.from_header:
            reasons.append("planned from a header: which weights its class keeps as stored is not known")
    if component.non_block.weight_bytes >= LEAST_NON_BLOCK_BYTES and (line := explain_non_block(component)):
        reasons.append(line)
    stores = StoreSpec(
        sizes=Sizes(component, forms),
        item=item,
        precision=precision,
        forms_by_profile=by_profile,
        num_devices=len(devices),
        on_cpu=devices[0].device == "cpu",
    )
    return stores, devices, reasons


def only_for_blocks(
    component: Component, devices: tuple[SplitRatio, ...], reasons: list[str]
) -> tuple[SplitRatio, ...]:
    """Return the first devices of a split, as many as there are blocks, and at least one."""
    used = devices[: max(1, len(component.blocks))]
    if len(used) < len(devices):
        names = " & ".join(split.device for split in used)
        blocks = {0: "no blocks", 1: "1 block"}.get(len(component.blocks), f"{len(component.blocks)} blocks")
        split = "not split" if len(used) == 1 else f"split over {len(used)} of {len(devices)} devices"
        reasons.append(f"{split}: it has {blocks}; computes on {names}")
    return used


def profile_encodes(component: Component, profile: OffloadProfile) -> bool:
    """Whether the profile's ``quantize`` names a component, its kind, or all language models and it is one."""
    kinds = [component.kind]
    if component.kind == "text" and is_language_model(component):
        kinds.append(LANGUAGE)
    return covers(profile.quantize, component.name, *kinds)


def is_language_model(component: Component) -> bool:
    names = (tensor.name for block in component.blocks for tensor in block.tensors)
    return bool(LANGUAGE_MODELS.search(component.name)) or any(LANGUAGE_LAYERS.search(name) for name in names)


def replan(
    component: Component,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    block_seconds: Mapping[int, float] | None = None,
) -> ComponentPlan:
    """Decide anew which blocks are resident, by the memory there is now; devices, split, tier and precision stay.

    Current residents stay where that is about as fast. Raises as `plan_components`.
    """
    sizes = Sizes(component, plan.forms)
    shares = tuple(
        plan_share(
            sizes, share.device, share.blocks, machine, profile,
            first=index == 0, in_file=plan.in_file, block_seconds=block_seconds, current=share,
            pinned=plan.pinned, keeps_free=plan.tier != "device",
        )
        for index, share in enumerate(plan.shares)
    )  # fmt: skip
    refuse_streaming_at_tier_device(sizes, plan.tier, shares)
    return replace(plan, shares=shares)


def confirm_plan(
    component: Component,
    plan: ComponentPlan,
    machine: Machine,
    profile: OffloadProfile,
    block_seconds: Mapping[int, float] | None = None,
) -> ComponentPlan | None:
    """Return what `replan` would return if that moves nothing, with the reasons of now; None if it may move a block.

    Runs no search. The same object where nothing has changed at all.
    """
    sizes = Sizes(component, plan.forms)
    shares = []
    for index, share in enumerate(plan.shares):
        confirmed = confirm_share(
            sizes, share, machine, profile,
            first=index == 0, in_file=plan.in_file, pinned=plan.pinned, block_seconds=block_seconds,
            keeps_free=plan.tier != "device",
        )  # fmt: skip
        if confirmed is None:
            return None
        shares.append(confirmed)
    is_same = all(map(same_to_the_reason, shares, plan.shares))
    return plan if is_same else replace(plan, shares=tuple(shares))


def fresh_plan_holds(component: Component, plan: ComponentPlan, machine: Machine, profile: OffloadProfile) -> bool:
    """Whether `plan_components` would return this plan again: on one named device, page-locked as far as possible.

    False where several devices share the blocks, or where some blocks had to stay pageable or in their file.
    """
    is_locked = (
        plan.tier == "pinned" and not plan.in_file and plan.pinned_bytes + plan.oversize_bytes == plan.host_bytes
    )
    has_room = is_locked and plan.pinned_bytes <= machine.lockable_bytes
    return len(plan.shares) == 1 and has_room and confirm_plan(component, plan, machine, profile) is plan


def refuse_streaming_at_tier_device(sizes: Sizes, tier: str | None, shares: Sequence[DevicePlan]) -> None:
    if tier == "device" and any(share.streamed for share in shares):
        raise DoesNotFit(
            f"{sizes.component.name} at tier 'device' needs {format_bytes(sizes.all_resident_bytes)}, "
            f"which its budget does not hold; choose tier 'pinned' or 'host', or precision {Precision.ENCODED.name!r}"
        )


def choose_device(machine: Machine, reasons: list[str]) -> tuple[SplitRatio, ...]:
    """Return where ``auto`` computes: the accelerator with most available memory, of equals the fastest link."""
    if not machine.accelerators:
        reasons.append("auto: no accelerator found; computes on the CPU")
        return (SplitRatio(device="cpu"),)
    best = max(machine.accelerators, key=lambda device: (device.available_bytes, device.link_bytes_per_s or 0.0))
    if len(machine.accelerators) > 1:
        reasons.append(f"auto: {best.name} has the most memory available, {format_bytes(best.available_bytes)}")
    return (SplitRatio(device=best.name),)
