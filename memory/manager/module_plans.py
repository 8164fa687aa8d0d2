"""Plans for modules: describes them as components, in blocks as small as their devices need, and plans these."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ..errors import InvalidInput
from ..options.placement import Placement
from ..options.precision import PrecisionRequest
from ..options.profile import OffloadProfile, covers
from ..planner.capacity import Machine
from ..planner.plan import Plan
from ..planner.planning import granularity_of, weights_to_measure
from ..planner.replanning import fresh_plan_holds
from ..planner.request import PlanRequest, plan_request
from ..planner.run import Use
from ..runtime.forwards.execution_order import in_execution_order
from ..weights.component import Component, guess_kind
from ..weights.form_errors import measure_errors
from ..weights.layers import cut_into_layers
from ..weights.module_component import component_from_module
from ..weights.quantized_leaves import leaves_of
from ..weights.sharing import NOTHING_SHARED, Shared
from ..weights.source import WeightsSource
from .block_sizes import plan_in_blocks

__all__ = ["Draft", "bytes_in_ram", "plan_modules", "with_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Components and their plan, made before their modules came under management."""

    described: tuple[Component, ...]
    """The modules as they were then."""
    components: list[Component]
    """The same, cut into blocks as small as their devices ask for."""
    plan: Plan

    def holds(self, described: Sequence[Component], machine: Machine, profile: OffloadProfile) -> bool:
        """Whether planning again would give the same plan."""
        return self.described == tuple(described) and all(
            fresh_plan_holds(component, self.plan[component.name], machine, profile) for component in self.components
        )


def plan_modules(
    modules: Mapping[str, nn.Module],
    machine: Machine,
    *,
    placement: Placement,
    profile: OffloadProfile,
    precision: PrecisionRequest,
    kinds: Mapping[str, str],
    sources: Mapping[str, WeightsSource],
    patterns: Mapping[str, str] | None = None,
    in_file: Collection[str] = (),
    shared: Mapping[str, Shared] | None = None,
    draft: Draft | None = None,
    is_hosted: bool = False,
    uses: Sequence[Use] = (),
) -> Draft:
    """Return modules as components, and their plan; moves nothing.

    The blocks are those of `plan_in_blocks`. Raises as `plan_request`.

    Args:
        kinds: component kinds by name, where they are known; names suggest the others.
        sources: the files of components by name.
        patterns: what a block is, by component, as in `find_blocks`; those are not cut.
        in_file: the components whose weights rest in their file, whatever is on a device now.
        shared: what components share, by name.
        draft: an earlier result for the same placement, profile and precision; returned again where it holds.
        is_hosted: whether their host reads single weights of them, from their file where they rest there.
        uses: what the run to come computes with them, as far as that is known.
    """

    def describe_all(largest_bytes: int | None, cuts_whole: bool) -> list[Component]:
        components = []
        for name, module in modules.items():
            kind = kinds.get(name) or guess_kind(name)
            num_devices = len(placement.item_for(name, kind).devices)
            pattern = (patterns or {}).get(name)
            describe = partial(
                component_from_module,
                module,
                name=name,
                kind=kind,
                cuts_whole=cuts_whole,
                pattern=pattern,
                shared=(shared or {}).get(name, NOTHING_SHARED),
            )
            if num_devices > 1:
                component = in_execution_order(describe_split(describe, num_devices, largest_bytes), module)
            else:
                component = describe(largest_bytes=largest_bytes)
            granularity = granularity_of(component, profile, precision)
            if granularity == "component":
                component = replace(component, widens_whole=True)
            if granularity == "layer" or (granularity == "component" and not component.blocks and pattern is None):
                if num_devices > 1 and granularity == "layer":
                    raise InvalidInput(
                        f"granularity layer of {name}: a split puts whole blocks on its devices; allowed: block"
                    )
                component = cut_into_layers(component, module)
            if pattern is not None and not component.blocks:
                raise InvalidInput(f"blocks {pattern!r}: {name} has no such parts; allowed: paths such as layers.*")
            # Weights that are in RAM may differ from the file's by now: those rest there only where the user says so.
            asked = placement.item_for(name, kind).tier == "disk" or covers(profile.on_demand, name, kind)
            on_meta = name in in_file or any(parameter.is_meta for parameter in module.parameters())
            source = sources.get(name)
            if source is not None:
                source.alias_tied(component)
                component = with_file(component, source, is_trusted=asked or on_meta)
                component = replace(component, stays_as_stored=is_hosted or not source.are_bare(component))
            component = with_errors(component, module, profile, precision, source)
            components.append(component)
        return components

    def plan_of(components: list[Component]) -> Plan:
        request = PlanRequest(
            components=tuple(components),
            machine=machine,
            placement=placement,
            profile=profile,
            precision=precision,
            uses=tuple(use for use in uses if use.component in modules),
        )
        return plan_request(request)

    first = describe_all(None, False)
    described = tuple(first)
    # Planned a second time where the modules, or what their device can give, have changed since the draft.
    if draft is not None and draft.holds(described, machine, profile):
        return draft
    components, plan = plan_in_blocks(first, describe_all, plan_of)
    return Draft(described=described, components=components, plan=plan)


def with_file(component: Component, source: WeightsSource, *, is_trusted: bool) -> Component:
    """Return a component that may rest in its files, or those of its weights may that lie in mappings of them.

    Args:
        is_trusted: whether the files are taken to have what the module has; else that is known of what is mapped only.
    """
    component = replace(component, encoded_as=source.encoded_as(component))
    if is_trusted and source.covers(component):
        can_map, stored_as = source.can_map(component, frozenset()), source.stored_as(component)
        return replace(component, has_file=True, can_map=can_map, stored_as=stored_as)
    lacking = source.find_lacking(component, among_mapped=True)
    weights = [tensor for block in (*component.blocks, component.non_block) for tensor in block.tensors]
    is_none = lacking.issuperset(tensor.name for tensor in weights)
    if is_none:
        return component
    return replace(component, has_file=True, can_map=source.can_map(component, lacking), lacking=lacking)


def with_errors(
    component: Component,
    module: nn.Module,
    profile: OffloadProfile,
    request: PrecisionRequest,
    source: WeightsSource | None,
) -> Component:
    """Return a component with what its weights lose in the form that was chosen, measured if it was not before."""
    numbers, weights = weights_to_measure(component, profile, request)
    if numbers is None:
        return component
    return replace(component, errors=measure_errors(module, weights, numbers, source))


def describe_split(describe: Callable[..., Component], num_devices: int, largest_bytes: int | None) -> Component:
    """Return a component in blocks; they are cut only if there are fewer of them than devices."""
    component = describe(largest_bytes=sys.maxsize)
    return component if len(component.blocks) >= num_devices else describe(largest_bytes=largest_bytes)


def bytes_in_ram(modules: Mapping[str, nn.Module], sources: Mapping[str, WeightsSource]) -> int:
    """Return the bytes of modules' weights that are in host memory now; what lies in mappings of files is not."""
    weights = {
        id(weight): weight
        for component, module in modules.items()
        for name, weight in module.named_parameters()
        if weight.device.type == "cpu" and not (component in sources and name in sources[component].mapped)
    }
    return sum(leaf.numel() * leaf.element_size() for weight in weights.values() for leaf in leaves_of(weight))
