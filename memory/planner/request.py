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
from .capacity import Machine
from .clones import explain_clones
from .device_choice import Part, choose_devices
from .device_store import beside_stored
from .plan import ComponentPlan, Plan
from .planning import draft, explain_integrated, plan_components
from .predicted_run import PredictedRun, forward_seconds
from .run import Use, longest_use, usual_uses
from .run_plan import RunPlan, UsePlan
from .sizes import Sizes
from .tile_room import keep_for_uses, seconds_with_colors, whole_room, with_room

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
    may_budget: bool = True
    """Whether the loader follows budgets that the plan chooses where the profile is ``auto``."""
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
    settled = find_settled(requests, plans, run, uses, machine)
    best = plans, run
    for chosen in choose_budgets(settled, uses, requests[0].machine) if settled else ():
        tuned = plan_chosen(requests, (plans, placements, reasons), settled, chosen, uses)
        if tuned is not None and is_shorter(tuned[1], best[1]):
            best = tuned
    return best


def is_shorter(run: RunPlan, other: RunPlan) -> bool:
    """Whether a run is predicted to take so much less time that it is worth other devices, budgets or tiles."""
    if run.seconds is None or other.seconds is None:
        return False
    seconds, others = (
        seconds_with_colors(each.seconds or 0.0, (use.in_tiles for use in each.uses)) for each in (run, other)
    )
    return seconds < others * (1 - LEAST_GAIN)


def plan_chosen(
    requests: Sequence[PlanRequest],
    planned: tuple[Sequence[Plan], Sequence[Placement], Mapping[str, str]],
    parts: Mapping[str, Settled],
    chosen: Mapping[str, Budgeted],
    uses: Sequence[Use],
) -> tuple[list[Plan], RunPlan] | None:
    """Return the plans with the choices of `choose_budgets`, and their run; None where they do not fit after all.

    Args:
        planned: the plans so far, with their placements and what was chosen for them.
    """
    plans, placements, reasons = list(planned[0]), list(planned[1]), dict(planned[2])
    profiles = [request.profile for request in requests]
    for number, request in enumerate(requests):
        of = {part.name: chosen[part.name] for part in request.components if part.name in chosen}
        of = {name: budgeted for name, budgeted in of.items() if parts[name].devices}
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
    rooms = {name: budgeted.tile_bytes for name, budgeted in chosen.items() if budgeted.tile_bytes is not None}
    uses = with_room(uses, rooms)
    try:
        tuned, run = plan_placed(
            requests, placements, profiles, uses, keep_for_uses(requests[0].machine, uses), reasons
        )
    except (DoesNotFit, InvalidInput):
        return None
    assert run is not None
    return tuned, run


def plan_placed(
    requests: Sequence[PlanRequest],
    placements: Sequence[Placement],
    profiles: Sequence[OffloadProfile],
    uses: Sequence[Use],
    machine: Machine,
    reasons: Mapping[str, str],
) -> tuple[list[Plan], RunPlan | None]:
    """As `plan_together`, with the placement and the profile of each request decided.

    What is decoded in tiles keeps what these take, so that it decodes in no smaller ones.
    """
    plans, run = plan_as_used(requests, placements, profiles, uses, machine, reasons)
    if run is None or all(use.use.tiling is None or use.use.tile_bytes is not None for use in run.uses):
        return plans, run
    rooms: dict[str, int] = {}
    for use in run.uses:
        name = use.use.component
        rooms[name] = max(rooms.get(name, 0), use.in_tiles.tile_bytes if use.in_tiles else whole_room(use.use))
    uses = with_room(uses, rooms)
    if not any(use.in_tiles for use in run.uses):  # as much is kept for one piece
        first_uses, further_uses = tuple(map(with_use, run.first_uses, uses)), tuple(map(with_use, run.uses, uses))
        return plans, replace(run, first_uses=first_uses, uses=further_uses)
    return plan_as_used(requests, placements, profiles, uses, keep_for_uses(requests[0].machine, uses), reasons)


def with_use(planned: UsePlan, use: Use) -> UsePlan:
    return replace(planned, use=use)


def plan_as_used(
    requests: Sequence[PlanRequest],
    placements: Sequence[Placement],
    profiles: Sequence[OffloadProfile],
    uses: Sequence[Use],
    machine: Machine,
    reasons: Mapping[str, str],
) -> tuple[list[Plan], RunPlan | None]:
    """As `plan_placed`, with nothing but what the uses say kept for tiles."""
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
    predicted = PredictedRun(by_name, plans, uses, machine)
    for number, plan in enumerate(plans):
        compared = (
            beside_clones(by_name[part.component], part, predicted, machine, plan.profile) for part in plan.components
        )
        plans[number] = replace(plan, components=tuple(compared))
    return plans, predicted.run()


def beside_clones(
    component: Component,
    plan: ComponentPlan,
    predicted: PredictedRun,
    machine: Machine,
    profile: OffloadProfile,
) -> ComponentPlan:
    """Return a plan with the line that compares it with clones on several devices, where there may be some."""
    use = longest_use(predicted.uses, component.name)
    line = ""
    if use is not None and use.may_clone:
        forward_s = forward_seconds(predicted.during(use), use, machine)
        line = explain_clones(component, plan, use, machine, profile, forward_s)
    return replace(plan, choices=(*plan.choices, line)) if line else plan


def find_settled(
    requests: Sequence[PlanRequest], plans: Sequence[Plan], run: RunPlan, uses: Sequence[Use], machine: Machine
) -> dict[str, Settled]:
    """Return what may get budgets, or less room for tiles ([Note: choosing budgets]); mostly there is nothing.

    None where a repeated run reloads nothing, and no tiles would save anything, or a time is not known.
    """
    if run.seconds is None or not any(map(may_gain, run.uses)):
        return {}
    accelerators = tuple(device.name for device in machine.chosen_from)
    parts: dict[str, Settled] = {}
    for request, plan in zip(requests, plans, strict=True):
        for component, planned in zip(request.components, plan.components, strict=True):
            asked = request.placement.item_for(component.name, component.kind)
            own = [use for use in run.uses if use.use.component == component.name]
            devices = accelerators if not asked.devices else tuple(split.device for split in asked.devices)
            profile = request.profile
            is_open = (
                request.may_budget
                and profile.name == AUTO
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
                cold_s={n: use.cold_s for n, use in enumerate(run.first_uses) if use.use.component == component.name},
                devices=devices if is_open else (),
                stores=accelerators if asked.tier is None else (),
                store=planned.store or None,
                tile_bytes=max((use.use.tile_bytes or 0 for use in own), default=0) or None,
            )
    return parts


def may_gain(use: UsePlan) -> bool:
    """Whether budgets or less room for tiles may shorten a use: it reloads, is in tiles, or is faster elsewhere."""
    if any(use.loaded.values()) or use.in_tiles is not None or use.pass_s is None:
        return True
    least_s = use.use.num_calls * min((times.pass_s for times in use.use.times.values()), default=0.0)
    return use.pass_s > least_s * (1 + LEAST_GAIN)


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
    return replace(
        machine,
        devices=tuple(devices),
        pinned_bytes=max(0, machine.pinned_bytes - locked),
        lock_limit_bytes=machine.lockable_bytes,
    )
