"""One call plans everything: what is there, what the user asks for, and what the run is known to do; plan out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import DoesNotFit, InvalidInput
from ..options.budget import BudgetItem
from ..options.placement import AUTO, AUTO_PLACEMENT, Placement, SplitRatio
from ..options.precision import PrecisionRequest
from ..options.profile import OffloadProfile
from ..units import format_bytes
from ..weights.component import Component
from .budget_choice import LEAST_GAIN, Budgeted, Settled, choose_budgets
from .capacity import KeptFree, Machine
from .clones import explain_clones
from .device_choice import Part, choose_devices
from .device_plan import DevicePlan
from .device_store import beside_stored, rate_from
from .launched_passes import launched_pass_seconds
from .plan import ComponentPlan, Plan
from .planning import draft, explain_integrated, plan_components
from .replanning import replan_shares
from .run import BlockTimes, Use, largest_activations, longest_use, usual_uses, with_slack
from .run_plan import RunPlan, first_and_further, hop_seconds, run_seconds, tiled_seconds
from .sizes import Sizes
from .step_seconds import compute_at_once, devices_by_block, pipeline_of, step_seconds
from .tiles import Tiles

__all__ = ["PlanRequest", "plan_request", "plan_together"]


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
    plans, run = plan_together([request], request.uses)
    return replace(plans[0], run=run)


def plan_together(requests: Sequence[PlanRequest], uses: Sequence[Use]) -> tuple[list[Plan], RunPlan | None]:
    """Plan what several loaders bring for one run, each as it was asked for: a plan each, and the run of all.

    All are for one machine, the first one's, whose RAM they share in their order; no two components have one name.
    Raises as `plan_request`.
    """
    uses = [matching(use, requests) for use in uses]
    machine = keep_for_uses(requests[0].machine, uses)
    placements = [request.placement for request in requests]
    reasons: dict[str, str] = {}
    if len(machine.accelerators) > 1:
        parts = [
            Part(sizes=drafted.sizes, item=drafted.item, profile=request.profile, may_split=bool(uses))
            for request in requests
            # What shares weights has to be together: all of it is where one component alone would be.
            if not any(component.shares for component in request.components)
            for component in request.components
            for drafted, _, _ in [draft(component, machine, request.placement, request.profile, request.precision)]
        ]
        expected = uses or usual_uses(part.sizes.component for part in parts)
        for name, (item, reason) in choose_devices(parts, expected, machine).items():
            reasons[name] = reason
            for number, request in enumerate(requests):
                if any(component.name == name for component in request.components):
                    placements[number] = placements[number].with_item(item)
    profiles = [request.profile for request in requests]
    plans, run = plan_placed(requests, placements, profiles, uses, machine, reasons)
    if run is None:
        return plans, None
    budgets = find_budgets(requests, plans, run, uses, machine)
    if not budgets:
        return plans, run
    for number, request in enumerate(requests):
        of = {part.name: budgets[part.name] for part in request.components if part.name in budgets}
        for name, budgeted in of.items():
            item = plans[number][name].placement
            tier = budgeted.store or request.placement.item_for(name, plans[number][name].kind).tier
            moved = replace(item, devices=(SplitRatio(device=budgeted.device),), tier=tier, groups=None)
            placements[number] = placements[number].with_item(moved)
            reasons[name] = explain_budget(budgeted)
        items = [
            BudgetItem(target=name, limit_bytes=budgeted.budget_bytes, from_profile=True)
            for name, budgeted in of.items()
            if budgeted.budget_bytes is not None
        ]
        profiles[number] = replace(profiles[number], budgets=(*profiles[number].budgets, *items))
    try:
        tuned, shorter = plan_placed(requests, placements, profiles, uses, machine, reasons)
    except (DoesNotFit, InvalidInput):
        return plans, run
    assert shorter is not None and run.seconds is not None
    is_shorter = shorter.seconds is not None and shorter.seconds < run.seconds * (1 - LEAST_GAIN)
    return (tuned, shorter) if is_shorter else (plans, run)


def plan_placed(
    requests: Sequence[PlanRequest],
    placements: Sequence[Placement],
    profiles: Sequence[OffloadProfile],
    uses: Sequence[Use],
    machine: Machine,
    reasons: Mapping[str, str],
) -> tuple[list[Plan], RunPlan | None]:
    """As `plan_together`, with the placement and the profile of each request decided."""
    plans: list[Plan] = []
    for request, placement, profile in zip(requests, placements, profiles, strict=True):
        plan = plan_components(
            request.components,
            beside_stored(machine_beside_plans(machine, plans), [part for done in plans for part in done.components]),
            placement=placement,
            profile=profile,
            precision=request.precision,
            block_seconds=request.block_seconds,
            uses=uses,
        )
        components = tuple(
            replace(part, choices=(reasons[part.component], *explain_integrated(machine), *part.choices))
            if part.component in reasons
            else part
            for part in plan.components
        )
        plans.append(replace(plan, components=components))
    if not uses:
        return plans, None
    by_name = {component.name: component for request in requests for component in request.components}
    settled = {
        part.component: settled_shares(by_name[part.component], part, uses, machine, plan.profile)
        for plan in plans
        for part in plan.components
    }
    for number, plan in enumerate(plans):
        compared = (
            beside_clones(by_name[part.component], part, settled[part.component], uses, machine, plan.profile)
            for part in plan.components
        )
        plans[number] = replace(plan, components=tuple(compared))
    return plans, run_of(plans, settled, uses, machine)


def beside_clones(
    component: Component,
    plan: ComponentPlan,
    shares: Sequence[DevicePlan],
    uses: Sequence[Use],
    machine: Machine,
    profile: OffloadProfile,
) -> ComponentPlan:
    """Return a plan with the line that compares it with clones on several devices, where there may be some.

    Args:
        shares: the settled ones.
    """
    use = longest_use(uses, component.name)
    line = ""
    if use is not None and use.may_clone:
        line = explain_clones(component, plan, use, machine, profile, forward_seconds(shares, use, machine))
    return replace(plan, choices=(*plan.choices, line)) if line else plan


def find_budgets(
    requests: Sequence[PlanRequest], plans: Sequence[Plan], run: RunPlan, uses: Sequence[Use], machine: Machine
) -> dict[str, Budgeted]:
    """Return budgets with which a run is reckoned to take less time ([Note: choosing budgets]); mostly there are none.

    None where a repeated run reloads nothing and tiles nothing, or a time is not known.
    """
    if run.seconds is None or not any(any(use.loaded.values()) or use.in_tiles is not None for use in run.uses):
        return {}
    accelerators = tuple(device.name for device in machine.chosen_from)
    parts: dict[str, Settled] = {}
    for request, plan in zip(requests, plans, strict=True):
        for component, planned in zip(request.components, plan.components, strict=True):
            asked = request.placement.item_for(component.name, component.kind)
            devices = accelerators if not asked.devices else tuple(split.device for split in asked.devices)
            profile = request.profile
            is_open = (
                profile.name == AUTO
                and not profile.budgets
                and not component.shares
                and asked.tier not in ("device", "disk")
                and len(asked.devices) < 2
                and (not planned.in_file or planned.takes_ram_to_stream)
                and planned.shares[0].device != "cpu"
            )
            parts[component.name] = Settled(
                sizes=Sizes(component, planned.forms),
                profile=profile,
                shares=planned.shares,
                pass_s={n: use.pass_s or 0.0 for n, use in enumerate(run.uses) if use.use.component == component.name},
                devices=devices if is_open else (),
                stores=accelerators if asked.tier is None else (),
                store=planned.store or None,
            )
    return choose_budgets(parts, uses, machine)


def explain_budget(budgeted: Budgeted) -> str:
    """Return why a component does not get all that its device has, in one line."""
    where = f"{budgeted.device} and free memory of {budgeted.store}" if budgeted.store else budgeted.device
    if budgeted.budget_bytes is None:
        return f"auto: {where}, with which a run takes least time"
    most = format_bytes(budgeted.budget_bytes)
    return f"auto: at most {most} of {where}: what stays beside it needs no reload, so a run takes least time"


def matching(use: Use, requests: Sequence[PlanRequest]) -> Use:
    """Return a use without times of other blocks than its component has now: it may be cut into smaller ones."""
    sizes = {component.name: len(component.blocks) for request in requests for component in request.components}
    fits = all(len(times.blocks_s) == sizes.get(use.component) for times in use.times.values())
    return use if fits else replace(use, times={})


def machine_beside_plans(machine: Machine, plans: Sequence[Plan]) -> Machine:
    """Return the machine with the RAM, page-locked or not, that these plans leave of it."""
    parts = [part for plan in plans for part in plan.components]
    taken = sum(part.host_bytes for part in parts)
    devices = [
        replace(device, available_bytes=max(0, device.available_bytes - taken)) if device.name == "cpu" else device
        for device in machine.devices
    ]
    locked = sum(part.pinned_bytes for part in parts)
    return replace(machine, devices=tuple(devices), pinned_bytes=max(0, machine.pinned_bytes - locked))


def keep_for_uses(machine: Machine, uses: Sequence[Use]) -> Machine:
    """Return the machine that keeps free what the uses say, where the needs of a component were not learned."""
    learned = machine.needs

    def needs(component: Component, device: str) -> KeptFree | None:
        kept = learned(component, device) if learned is not None else None
        if kept is not None and kept.is_known:
            return kept
        num_bytes = largest_activations(uses, component.name)
        if num_bytes is None:
            return kept
        return KeptFree(num_bytes=with_slack(num_bytes), why="predicted for this workflow")

    def held(component: Component, device: str) -> int:
        found = [use.held_bytes for use in uses if use.component == component.name]
        return max(found, default=0)

    return replace(machine, needs=needs, held=held) if uses else machine


def settled_shares(
    component: Component, plan: ComponentPlan, uses: Sequence[Use], machine: Machine, profile: OffloadProfile
) -> tuple[DevicePlan, ...]:
    """Return the shares that a component has when the times of its blocks were measured, which its first pass does.

    The plan's own where nothing streams, or no times are predicted.
    """
    times = next((use.times for use in uses if use.component == component.name and use.times), {})
    seconds = seconds_where(plan.shares, times)
    if seconds is None or not plan.streams:
        return plan.shares
    found = replan_shares(component, plan, machine, profile, seconds)
    return as_launched(found.shares, found, Sizes(component, plan.forms).blocks, times, machine)


def as_launched(
    shares: tuple[DevicePlan, ...],
    plan: ComponentPlan,
    sizes: Sequence[int],
    times: Mapping[str, BlockTimes],
    machine: Machine,
) -> tuple[DevicePlan, ...]:
    """Return shares with the seconds of a forward as its host launches it, where one device streams all by one link."""
    if len(shares) != 1 or plan.store or not shares[0].streamed or shares[0].blocking or shares[0].read_bytes:
        return shares
    (share,) = shares
    bytes_per_s = machine.device(share.device).link_bytes_per_s
    pass_s = bytes_per_s and launched_pass_seconds(share, times[share.device], sizes, bytes_per_s)
    return (replace(share, pass_s=pass_s),) if pass_s else shares


def seconds_where(shares: Sequence[DevicePlan], times: Mapping[str, BlockTimes]) -> dict[int, float] | None:
    """Return the seconds of all blocks, each on the device where it computes; None where a device has no times."""
    if any(share.device not in times for share in shares):
        return None
    by_device = {share.device: times[share.device].by_block() for share in shares}
    where = {number: share.device for share in shares for number in share.blocks}
    order = [number for number in times[shares[0].device].order if number in where]
    return {number: by_device[where[number]][number] for number in order} or None


def run_of(
    plans: Sequence[Plan], settled: Mapping[str, Sequence[DevicePlan]], uses: Sequence[Use], machine: Machine
) -> RunPlan:
    """Return what a run does with plans ([Note: repeated run] in `run_plan.py`), by the seconds of settled shares."""
    shares = {part.component: part.shares for plan in plans for part in plan.components}
    stores = {part.component: part.store for plan in plans for part in plan.components}

    def pass_s(number: int, tiles: Tiles | None) -> float | None:
        use = uses[number]
        of = settled[use.component]
        if tiles is not None and use.tiling is not None and len(of) == 1:
            return tiled_seconds(of[0], use.tiling, tiles, rate_from(stores[use.component], of[0].device, machine))
        return forward_seconds(of, use, machine)

    return first_and_further(shares, uses, machine, pass_s=pass_s)


def forward_seconds(shares: Sequence[DevicePlan], use: Use, machine: Machine) -> float | None:
    """Return what a forward takes, all its calls together: at the same time where they can be, else in turn."""
    if compute_at_once(shares, use):
        pipeline = pipeline_of(use, [share.device for share in shares], machine)
        return None if pipeline is None else step_seconds(pipeline, devices_by_block(shares))
    hop_s = hop_seconds(shares, use.carried_bytes, machine)
    call_s = None if hop_s is None else run_seconds(shares, use.times, hop_s)
    return None if call_s is None else use.num_calls * call_s
