"""One call plans everything: what is there, what the user asks for, and what the run is known to do; plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..options.placement import AUTO_PLACEMENT, Placement, SplitRatio
from ..options.precision import PrecisionRequest
from ..options.profile import OffloadProfile
from ..weights.component import Component
from .capacity import KeptFree, Machine
from .device_choice import choose_devices
from .plan import Plan
from .planning import draft, explain_integrated, plan_components
from .run import Use, largest_activations, usual_uses
from .run_plan import RunPlan, copy_rate, first_and_further, num_hops, run_seconds

__all__ = ["PlanRequest", "plan_request"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Everything that a plan follows from; the same request always gives the same plan."""

    components: tuple[Component, ...]
    machine: Machine
    profile: OffloadProfile = field(default_factory=OffloadProfile)
    placement: Placement = AUTO_PLACEMENT
    precision: PrecisionRequest = None
    """None is what the profile says."""
    uses: tuple[Use, ...] = ()
    """What the run computes, in order; none where that is not known."""
    block_seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By component, what its blocks were measured to compute, in the order in which they ran."""


def plan_request(request: PlanRequest) -> Plan:
    """Return the plan with which the run takes least time; arithmetic, moves nothing.

    What the user named stays. ``auto`` components get the devices of `choose_devices`; what forwards need is kept free
    of their devices, as far as the uses or the machine's needs tell. With uses, the plan has a `RunPlan`.

    Raises:
        InvalidInput, DoesNotFit: as `plan_components`.
    """
    machine = keep_for_uses(request)
    uses = request.uses or usual_uses(request.components)
    placement, reasons = request.placement, {}
    if len(machine.accelerators) > 1:
        parts = [
            draft(component, machine, placement, request.profile, request.precision)[0].sizes
            for component in request.components
        ]
        for name, (devices, reason) in choose_devices(parts, uses, machine, placement, request.profile).items():
            placement = place(placement, name, kind_of(request.components, name), devices)
            reasons[name] = reason
    plan = plan_components(
        request.components,
        machine,
        placement=placement,
        profile=request.profile,
        precision=request.precision,
        block_seconds=request.block_seconds,
        times={use.component: use.times for use in request.uses if use.times},
    )
    components = tuple(
        replace(part, choices=(reasons[part.component], *explain_integrated(machine), *part.choices))
        if part.component in reasons
        else part
        for part in plan.components
    )
    plan = replace(plan, components=components)
    return replace(plan, run=run_of(plan, request.uses, machine)) if request.uses else plan


def kind_of(components: Sequence[Component], name: str) -> str:
    return next(component.kind for component in components if component.name == name)


def place(placement: Placement, name: str, kind: str, devices: Sequence[SplitRatio]) -> Placement:
    """Return a placement in which a component has these devices, and otherwise what it had."""
    item = replace(placement.item_for(name, kind), component=name, devices=tuple(devices))
    return Placement(items=(*(other for other in placement.items if other.component != name), item))


def keep_for_uses(request: PlanRequest) -> Machine:
    """Return the machine that keeps free what the uses of the request say, where their needs were not learned."""
    learned = request.machine.needs

    def needs(component: Component, device: str) -> KeptFree | None:
        kept = learned(component, device) if learned is not None else None
        if kept is not None and kept.is_known:
            return kept
        num_bytes = largest_activations(request.uses, component.name)
        if num_bytes is None:
            return kept
        return KeptFree(num_bytes=num_bytes, why="predicted for this workflow")

    return replace(request.machine, needs=needs) if request.uses else request.machine


def run_of(plan: Plan, uses: Sequence[Use], machine: Machine) -> RunPlan:
    """Return what a run does with a plan ([Note: repeated run] in `run_plan.py`)."""
    shares = {part.component: part.shares for part in plan.components}
    passes: dict[int, float | None] = {}
    for number, use in enumerate(uses):
        of = shares[use.component]
        rates = [copy_rate(machine.device(share.device)) for share in of if share.device != "cpu"]
        hop_s = num_hops(of) * use.carried_bytes / min(rates) if len(of) > 1 and rates else 0.0
        passes[number] = run_seconds(of, use.times, hop_s)
    return first_and_further(shares, uses, machine, pass_s=passes)
