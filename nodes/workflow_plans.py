"""Plans of whole workflows, from their graphs and the headers of the files that they name: nothing is loaded or moved.

Which models a graph loads and in which order they compute is read in `workflow_reading`. Here these models become
components, their loaders' widgets what was asked for, and their calls the uses of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput
from ..memory.manager.block_sizes import plan_in_blocks
from ..memory.options.placement import (
    AUTO,
    AUTO_GROUPS,
    AUTO_PLACEMENT,
    Placement,
    PlacementItem,
    parse_placement,
)
from ..memory.options.precision import BY_PROFILE
from ..memory.options.profile import parse_profile
from ..memory.planner.plan import Plan
from ..memory.planner.request import PlanRequest, plan_together
from ..memory.planner.run import Use
from ..memory.weights.gguf_header import component_from_gguf, is_gguf
from .applied_loras import ChangedComponent, apply_loras
from .default_profile import from_setting, profile_text
from .device_choices import DEFAULT, missing_devices
from .lora_headers import LoraReader, changes_by_names
from .open_placements import ChosenPlacement, chosen_of, leaves_open, widget_text
from .plan_table import in_a_row, plan_text
from .planned_calls import Predictor, calls_in, use_of
from .plans import describe_files, describe_part, describe_pipeline, describer_of, read_precisions
from .workflow_reading.description import DIFFUSION, PIPELINE, LoadedModel, WorkflowDescription, WorkflowUse
from .workflow_reading.model_paths import find_files

if TYPE_CHECKING:
    from ..memory.planner.capacity import Machine
    from ..memory.planner.run_plan import RunPlan
    from ..memory.weights.component import Component

__all__ = ["WorkflowPlan", "plan_workflow"]

# The precisions to which ComfyUI's own loader casts as it loads, by its words for them.
CORES_CASTS = {"fp8_e4m3fn": "fp8 plain", "fp8_e4m3fn_fast": "fp8 plain", "fp8_e5m2": "e5m2 plain"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowPlan:
    """The plan of each loader of a workflow, by its node, what the run does with them, and what is not in it."""

    plans: Mapping[str, Plan]
    run: RunPlan | None
    machine: Machine
    placements: Mapping[str, str] = field(default_factory=dict)
    """By loader, the text that its widget takes; of a checkpoint's parts an item each."""
    chosen: Mapping[str, ChosenPlacement] = field(default_factory=dict)
    """What was chosen for the loaders of ComfyUI's models that say ``auto``, by the ids of their nodes."""
    notes: tuple[str, ...] = ()
    """What of the workflow is not planned, or planned with less than its nodes will know; a line each."""
    rated: frozenset[str] | None = frozenset()
    """The devices of which was said how fast they compute; None: on this machine that is measured."""

    def text(self) -> str:
        """Return it as tables and lines for people."""
        blocks = [plan_text(self.plans, self.run, self.machine, self.placements, rated=self.rated)]
        if self.notes:
            blocks.append("\n".join(["not in the plan", *(f"  {note}" for note in self.notes)]))
        return "\n\n".join(blocks)

    def to_json(self) -> dict[str, Any]:
        return {
            "plans": {name: plan.to_json() for name, plan in self.plans.items()},
            "run": self.run.to_json() if self.run is not None else None,
            "notes": list(self.notes),
        }


def plan_workflow(
    described: WorkflowDescription,
    machine: Machine,
    predict: Predictor = lambda call: None,
    *,
    home: str | None = None,
    read_lora: LoraReader = changes_by_names,
) -> WorkflowPlan:
    """Plan what a workflow loads, each loader as its widgets ask, together for one run.

    A loader whose file is not there, or is not named by a widget, is not planned, and the plan says so.

    Args:
        predict: what calls are predicted to take.
        home: the device that a host's loaders use by default; None: the plan chooses.
        read_lora: what LoRAs change of components.

    Raises:
        InvalidInput, DoesNotFit: as `plan_together`; also if nothing of the workflow can be planned.
    """
    notes = [*described.broken, *(f"{node.label}: not known" for node in described.unknown)]
    asked: list[PlanRequest] = []
    labels: list[str] = []
    loaded: dict[int, tuple[tuple[Component, ...], tuple[Path, ...]]] = {}
    taken: set[str] = set()
    changed: dict[str, ChangedComponent] = {}
    for number, model in enumerate(described.models):
        files = find_files(model)
        notes += files.missing
        if files.missing or not files.paths:
            notes += [] if files.missing else [f"{model.node.label}: names no file"]
            continue
        try:
            parts = describe_model(model, files.paths)
        except InvalidInput as error:
            notes.append(f"{model.node.label}: {error}")
            continue
        applied = [apply_loras(described, model, part, files.paths, read_lora) for part in parts if model.loras]
        notes += [line for each in applied for line in each.notes]
        parts = tuple(each.component for each in applied) or parts
        try:
            request = request_of(model, parts, machine, home, notes)
        except InvalidInput as error:
            raise InvalidInput(f"{model.node.label}: {error}") from None
        names = own_names(parts, taken, model.node.id)
        changed |= {names[each.component.name]: each for each in applied}
        parts = tuple(replace(part, name=names[part.name]) for part in parts)
        notes += [told_by([model.node.label], line) for line in model.unknown]
        asked.append(replace(request, components=renamed(request.components, names), placement=placed(request, names)))
        # Where there is a Manage node, that has the widgets.
        labels.append((model.managed_by or model.node).label + (f", {model.part}" if model.part else ""))
        loaded[number] = parts, files.paths
    if not asked:
        why = "; ".join(notes) or "no loader gives an output anything"
        raise InvalidInput(f"nothing of the workflow can be planned: {why}")
    notes += unread_lines(described.uses)
    uses = uses_of(described, loaded, predict)
    for index, (number, (_, paths)) in enumerate(loaded.items()):
        model = described.models[number]
        if model.kind == PIPELINE and not model.loras:
            cut = in_smaller_blocks(asked, index, model, paths[0], uses)
            if cut is not asked[index].components:
                asked[index] = replace(asked[index], components=cut)
                loaded[number] = asked[index].components, paths
                uses = uses_of(described, loaded, predict)
    plans, run = plan_together(asked, uses)
    by_label = {label: told_of(plan, changed) for label, plan in zip(labels, plans, strict=True)}
    models = [described.models[number] for number in loaded]
    placements = {
        label: plan.placement.replace(f" ({model.node.id})", "") if model.kind == PIPELINE else widget_text(plan, model)
        for (label, plan), model in zip(by_label.items(), models, strict=True)
    }
    return WorkflowPlan(
        plans=by_label,
        run=run,
        machine=machine,
        placements=placements,
        chosen=chosen_of(models, plans),
        notes=tuple(dict.fromkeys(notes)),
    )


def uses_of(
    described: WorkflowDescription,
    loaded: Mapping[int, tuple[tuple[Component, ...], tuple[Path, ...]]],
    predict: Predictor,
) -> list[Use]:
    """Return what a workflow computes with the models that are loaded, in order."""
    return [
        use_of(call, predict(call))
        for use in described.uses
        for place in (use.model, *use.beside)
        if place is not None and place in loaded
        for call in calls_in(described, use, described.models[place], *loaded[place])
    ]


def in_smaller_blocks(
    asked: Sequence[PlanRequest], index: int, model: LoadedModel, folder: Path, uses: Sequence[Use]
) -> tuple[Component, ...]:
    """Return the components of a pipeline in blocks as small as its loader will cut them; the same where it will not.

    Raises `InvalidInput` or `DoesNotFit` where blocks of no size fit.
    """
    request = asked[index]
    names = [part.name for part in request.components]
    describe: Callable[[int | None, bool], list[Component]] | None = None

    def smaller(largest_bytes: int, cuts_whole: bool) -> tuple[Component, ...]:
        nonlocal describe
        describe = describe or describer_of(folder)
        return tuple(
            replace(part, name=name, stays_as_stored=not model.is_ours)
            for part, name in zip(describe(largest_bytes, cuts_whole), names, strict=True)
        )

    def plan_of(components: tuple[Component, ...]) -> Plan:
        nonlocal request
        trial = [*asked[:index], replace(request, components=components), *asked[index + 1 :]]
        plan = plan_together(trial, uses)[0][index]
        # On the devices that were chosen for the largest blocks: those the loader will be told.
        for part in plan.components:
            if not request.placement.item_for(part.component, part.kind).devices:
                item = replace(
                    request.placement.item_for(part.component, part.kind),
                    component=part.component,
                    devices=part.placement.devices,
                )
                request = replace(request, placement=request.placement.with_item(item))
        return plan

    return plan_in_blocks(request.components, smaller, plan_of)[0]


def unread_lines(uses: Sequence[WorkflowUse]) -> list[str]:
    """Return what is not known of calls, each thing once with all nodes that lack it."""
    labels: dict[str, dict[str, None]] = {}
    for use in uses:
        for line in use.unknown:
            labels.setdefault(line, {})[use.node.label] = None
    return [told_by(list(nodes), line) for line, nodes in labels.items()]


def told_by(labels: Sequence[str], line: str) -> str:
    """Return a line with the nodes that lack what it says; one that it names itself is not named twice."""
    _, _, without_topic = line.partition(": ")
    if len(labels) == 1 and without_topic.startswith(f"{labels[0]}: "):
        return without_topic
    return f"{in_a_row(labels)}: {line}"


def told_of(plan: Plan, changed: Mapping[str, ChangedComponent]) -> Plan:
    """Return a plan that says among its reasons what LoRAs take."""
    return replace(
        plan,
        components=tuple(
            replace(part, choices=(*part.choices, *changed[part.component].lines(part)))
            if part.component in changed
            else part
            for part in plan.components
        ),
    )


def describe_model(model: LoadedModel, paths: Sequence[Path]) -> tuple[Component, ...]:
    """Return the components of a loaded model, from its files. Raises `InvalidInput` where these cannot be read."""
    if model.kind == PIPELINE:
        return tuple(describe_pipeline(paths[0]))
    if any(is_gguf(path) for path in paths):
        if len(paths) > 1:
            raise InvalidInput(f"{' and '.join(path.name for path in paths)}: one GGUF file at a time is planned")
        return (component_from_gguf(paths[0], name=paths[0].stem, kind=model.kind),)
    if model.part:
        part = describe_part(paths[0], model.part)
        if part is None:
            raise InvalidInput(f"{paths[0].name} has no {model.part}")
        return (part,)
    return (replace(describe_files(paths), kind=model.kind),)


def own_names(parts: Sequence[Component], taken: set[str], node_id: str) -> dict[str, str]:
    """Return for each component a name that no other one of the workflow has; adds them to those that are taken."""
    names = {part.name: part.name if part.name not in taken else f"{part.name} ({node_id})" for part in parts}
    taken.update(names.values())
    return names


def renamed(parts: Sequence[Component], names: Mapping[str, str]) -> tuple[Component, ...]:
    return tuple(replace(part, name=names[part.name]) for part in parts)


def placed(request: PlanRequest, names: Mapping[str, str]) -> Placement:
    """Return the placement of a request for its components under other names."""
    items = (replace(item, component=names.get(item.component, item.component)) for item in request.placement.items)
    return Placement(items=tuple(items))


def request_of(
    model: LoadedModel, parts: tuple[Component, ...], machine: Machine, home: str | None, notes: list[str]
) -> PlanRequest:
    """Return what a loader asks for; what names a device that the machine lacks is left out, and noted.

    Raises:
        InvalidInput: a text that no machine can follow.
    """
    names, asked = [part.name for part in parts], model.asked
    here = [device.name for device in machine.devices]
    own = asked.profile or AUTO
    text = profile_text(own) if model.is_ours else AUTO
    missing = missing_devices(text, here)
    profile = parse_profile(text, devices=[*here, *missing], components=names)
    profile = from_setting(profile, own) if model.is_ours else profile
    if missing:
        notes.append(f"{model.node.label}: profile {text}: there is no {' or '.join(missing)}, so that is left out")
        profile = profile.without(lambda item: item.target in missing)
    cast = CORES_CASTS.get(asked.weight_dtype or "") if not model.is_ours else None
    precision = read_precisions(cast or (BY_PROFILE if asked.precision is None else asked.precision), names)
    return PlanRequest(
        components=tuple(replace(part, stays_as_stored=not model.is_ours and cast is None) for part in parts),
        machine=machine,
        profile=profile,
        placement=placement_of(model, here, names, home, notes),
        precision=precision,
        may_budget=model.kind == PIPELINE,
    )


def placement_of(
    model: LoadedModel, here: Sequence[str], names: Sequence[str], home: str | None, notes: list[str]
) -> Placement:
    """Return where a loader's components are to be, as its node would read it on a machine with these devices."""
    text = model.asked.placement or model.asked.device or DEFAULT
    if leaves_open(model):
        return AUTO_PLACEMENT
    chosen = home if model.kind != PIPELINE and home in here else None
    default = AUTO_PLACEMENT if chosen is None else parse_placement(chosen, devices=here, components=names)
    if text in (DEFAULT, AUTO):
        return default
    missing = missing_devices(text, here)
    placement = parse_placement(text, devices=[*here, *missing], components=names)
    if missing:
        notes.append(f"{model.node.label}: placement {text}: there is no {' or '.join(missing)}, so that is left out")
        placement = placement.without(missing)
        placement = default if placement == AUTO_PLACEMENT else placement
    if chosen is not None and not any(placement.item_for(name, model.kind).devices for name in names):
        return default  # a text for other parts of a checkpoint
    if model.is_ours and model.kind == DIFFUSION:
        # As they are loaded: both halves of a step compute at once.
        placement = Placement(items=tuple(map(in_turn, placement.items)))
    return placement


def in_turn(item: PlacementItem) -> PlacementItem:
    """Return the placement of a hosted model: a split in groups in turn, as many as gain most."""
    return replace(item, groups=AUTO_GROUPS) if len(item.devices) > 1 and item.groups is None else item
