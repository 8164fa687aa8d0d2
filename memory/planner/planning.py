"""Components planned together: each one's device, tier, precision and resident blocks, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..options.placement import AUTO, AUTO_GROUPS, Placement, SplitRatio
from ..options.precision import Precision, PrecisionRequest, precision_for
from ..options.profile import LANGUAGE, OffloadProfile, covers
from ..units import format_bytes
from ..weights.component import Component, TensorSpec
from ..weights.form_numbers import AS_THEY_CAME, FormNumbers, Forms, rests_of
from ..weights.known_forms import forms_in_file, numbers_of
from .calls_at_once import WHY_ONE_SCRATCH, WHY_STREAMS, why_in_turn
from .capacity import Machine
from .device_plan import DevicePlan, plan_share
from .device_store import beside_stored
from .form_choice import (
    choose_forms,
    explain_stored,
    explain_unmatched,
    explain_unmeasured,
    explain_wide,
    limit_of,
    refuse_other_compute,
    sort_weights,
)
from .host_tiers import StoreSpec, choose_tiers, lock_pages, may_be_pinned
from .layer_split import count_groups, split_blocks, split_in_turn
from .mixed_tiers import share_ram
from .pipeline import NUM_CALLS
from .plan import ComponentPlan, Plan
from .precision_table import tabulate_precision
from .replanning import refuse_streaming_at_tier_device, replan_shares, rest_to_stream
from .run import Use, longest_use
from .sizes import Sizes, explain_non_block
from .tied_weights import refuse_tied_split
from .workload import find_blocking

__all__ = ["draft", "explain_integrated", "granularity_of", "plan_components", "weights_to_measure"]

# Fewer bytes of non-block weights are not worth a line.
LEAST_NON_BLOCK_BYTES = 256 << 20
# Which blocks stream depends on what is fast in RAM, and that on which stream: so often both are decided in turns.
MOST_ROUNDS = 3
# T5, Llama and their like, by their names or by those of their layers; mmgp looks for the same in module paths.
LANGUAGE_MODELS = re.compile(r"t5|llama|llm|qwen|gemma|mistral", re.IGNORECASE)
LANGUAGE_LAYERS = re.compile(r"\.SelfAttention\.|\.gate_proj\.|\.ffn\.gate\.")


def plan_components(
    components: Sequence[Component],
    machine: Machine,
    *,
    placement: Placement,
    profile: OffloadProfile,
    precision: PrecisionRequest = None,
    block_seconds: Mapping[str, Mapping[int, float]] | None = None,
    uses: Sequence[Use] = (),
) -> Plan:
    """Plan all components: on the devices each as if it were alone, in host memory all together.

    `plan_request` is the call for users of plans: it also chooses devices.

    On a device components compute in turns and evict each other; in host memory all their weights rest at once.

    Args:
        precision: None is what the profile says.
        block_seconds: by component, what each of its blocks was measured to compute, in the order in which they ran.
        uses: what the components compute: how a split is cut for micro-batches.

    Raises:
        InvalidInput: a budget or tier that cannot be met as written; a split of what shares weights.
        DoesNotFit: a component whose least form exceeds what its device can have.
    """
    drafts = [draft(component, machine, placement, profile, precision) for component in components]
    stores = choose_tiers([stores for stores, _, _ in drafts], machine, profile)
    shared = []
    for part, (_, devices, reasons) in zip(stores, drafts, strict=True):
        seconds = (block_seconds or {}).get(part.component.name)
        use = longest_use(uses, part.component.name)
        shares = plan_in_turn(part, devices, machine, profile, reasons, seconds, use)
        if not shares:
            groups = split_blocks(part.sizes, devices, machine, profile, reasons)
            shares = plan_shares(part, devices, groups, machine, profile, seconds)
            if part.item.groups is None and len(shares) > 1 and use is not None and (off := why_in_turn(shares, use)):
                reasons.append(f"micro-batches: off: {off}")
        refuse_tied_split(part.component, shares)
        refuse_streaming_at_tier_device(part.sizes, part.tier, shares)
        shared.append(replace(part, shares=shares))
    for part, (_, _, reasons) in zip(shared, drafts, strict=True):
        if part.cast and part.forms_by_profile:
            reasons.append(f"kept {rests_of(part.cast)}: profile {profile.name}, no precision set")
    for _ in range(MOST_ROUNDS):
        resting = lock_pages(share_ram(shared, machine, profile, spares_ram=profile.name == AUTO), machine, profile)
        left = machine_beside(resting, machine)
        plans: list[ComponentPlan] = []
        for part, drafted, (_, devices, reasons) in zip(resting, shared, drafts, strict=True):
            plan = plan_resting(part, devices, reasons)
            in_file, pinned = rest_to_stream(plan, left, profile)
            is_other = in_file != drafted.in_file
            if plan.store or any(
                share.streamed and (is_other or share.blocking != find_blocking(part.component, share.blocks, pinned))
                for share in plan.shares
            ):
                # Not all blocks rest where they were assumed to: what is shown is what its first pass would plan.
                seconds = (block_seconds or {}).get(part.component.name)
                beside = beside_stored(machine, plans)
                plan = replan_shares(part.component, plan, beside, profile, seconds, ram=left)
            plans.append(plan)
        before, shared = shared, [replace(part, shares=plan.shares) for part, plan in zip(shared, plans, strict=True)]
        if all(map(stream_the_same, shared, before)):
            break
    return Plan(components=tuple(plans), profile=profile)


def plan_shares(
    part: StoreSpec,
    devices: Sequence[SplitRatio],
    groups: Sequence[tuple[int, ...]],
    machine: Machine,
    profile: OffloadProfile,
    seconds: Mapping[int, float] | None,
) -> tuple[DevicePlan, ...]:
    """Return the share of each device, which has a group of blocks."""
    return tuple(
        plan_share(
            part.sizes, split.device, group, machine, profile,
            first=index == 0, in_file=part.in_file, block_seconds=seconds,
            pinned=None if may_be_pinned(part, profile) else frozenset(), keeps_free=part.tier != "device",
        )
        for index, (split, group) in enumerate(zip(devices, groups, strict=True))
    )  # fmt: skip


def plan_in_turn(
    part: StoreSpec,
    devices: Sequence[SplitRatio],
    machine: Machine,
    profile: OffloadProfile,
    reasons: list[str],
    seconds: Mapping[int, float] | None,
    use: Use | None,
) -> tuple[DevicePlan, ...]:
    """Return the shares of a split in groups in turn; none where that was not asked for, or gains nothing."""
    asked = part.item.groups
    if asked is None or len(devices) < 2:
        return ()
    decodes = (NUM_CALLS, 1) if any(part.sizes.widths) else (1,)
    for number in decodes:
        lines: list[str] = []
        beside = replace(part, sizes=part.sizes.decoding(number))
        groups = split_in_turn(beside.sizes, devices, asked, machine, profile, lines, seconds, use)
        shares = () if groups is None else plan_shares(beside, devices, groups, machine, profile, seconds)
        off = why_in_turn(shares, use) or ("" if shares else WHY_STREAMS)
        if not off:
            reasons += lines
            return shares
    does_not_fit = off in (WHY_STREAMS, WHY_ONE_SCRATCH)
    if off == WHY_ONE_SCRATCH:
        off = "there is no room to decode weights for each half of a step"
    reasons.append(f"micro-batches: off: {off}")
    if does_not_fit and asked == AUTO_GROUPS:
        return ()
    reasons += [line for line in lines if line.startswith("split")]
    return shares


def machine_beside(stores: Sequence[StoreSpec], machine: Machine) -> Machine:
    """Return the machine with the RAM, page-locked or not, that these leave of it."""
    taken = sum(part.host_bytes - (part.ram_bytes - part.unread_bytes) for part in stores if part.has_file)
    devices = [
        replace(device, available_bytes=max(0, device.available_bytes - taken)) if device.name == "cpu" else device
        for device in machine.devices
    ]
    locked = sum(part.pinned_bytes for part in stores)
    return replace(machine, devices=tuple(devices), pinned_bytes=max(0, machine.pinned_bytes - locked))


def stream_the_same(part: StoreSpec, before: StoreSpec) -> bool:
    """Whether the same blocks stream on each device."""
    return [share.streamed for share in part.shares] == [share.streamed for share in before.shares]


def plan_resting(part: StoreSpec, devices: Sequence[SplitRatio], reasons: Sequence[str]) -> ComponentPlan:
    """Return the plan of a component for which all is decided."""
    assert part.tier is not None
    has_groups = part.item.groups is not None and len(devices) > 1
    is_tier = not part.in_file or (part.tier == "disk" and not (part.takes_ram_to_stream or part.maps_file))
    return ComponentPlan(
        component=part.component.name,
        kind=part.component.kind,
        weight_bytes=part.ram_bytes,
        shares=part.shares,
        tier=part.tier,
        precision=part.precision if part.cast else Precision.AS_STORED,
        precision_rows=part.precision_rows,
        forms=part.forms,
        # No tier is the name of several: without one the same is chosen again.
        placement=replace(
            part.item,
            component=part.component.name,
            devices=tuple(devices),
            tier=part.store or (part.tier if is_tier else None),
            groups=count_groups([share.blocks for share in part.shares]) if has_groups else None,
        ),
        store=part.store,
        pinned=part.pinned,
        host_bytes=part.host_bytes,
        buffer_bytes=part.host_bytes - part.resting_host_bytes,
        pinned_bytes=part.pinned_bytes,
        in_file=part.in_file,
        file_bytes=part.file_bytes,
        takes_ram_to_stream=part.takes_ram_to_stream,
        maps_file=part.maps_file,
        locks_buffers=part.locks_buffers,
        oversize_bytes=part.oversize_bytes,
        choices=(*reasons, *part.reasons),
    )


def draft(
    component: Component, machine: Machine, placement: Placement, profile: OffloadProfile, request: PrecisionRequest
) -> tuple[StoreSpec, Sequence[SplitRatio], list[str]]:
    """Return what is decided before tiers and shares: forms and devices, with their reasons."""
    reasons: list[str] = [*component.shares, *([profile.origin] if profile.origin else [])]
    item = placement.item_for(component.name, component.kind)
    devices = only_for_blocks(component, item.devices, reasons) or choose_device(machine, reasons, item.tier)
    precision, by_profile = chosen_precision(component, profile, request)
    refuse_other_compute(component, precision)
    forms = choose_forms(component, precision)
    without = without_float8(forms, devices, machine)
    rows = tabulate_precision(component, precision) if forms and not without else ()
    if without:
        stored = forms_in_file(component)
        forms = {name: numbers for name, numbers in forms.items() if not numbers.is_float8} or AS_THEY_CAME
        widened = stored.keys() - forms.keys()
        # What is decoded as it is read rests in RAM, as if no file had it.
        component = replace(component, lacking=component.lacking | widened)
        if widened:
            reasons.append(f"{without} has no float8: {len(widened)} weights are widened as they are read, and rest so")
        else:
            line = "everything stays as stored; precision bf16 or fp16 halves float32"
            reasons.append(f"{without} has no float8: {line}")
    elif (numbers := numbers_of(precision)) is not None:
        if len(forms) == len(component.encoded_as):
            reasons.append(explain_nothing(component, numbers))
        if kept := explain_wide(component, precision):
            reasons.append(kept)
        reasons += [row.text(numbers.rests) for row in rows if row.num_cast]
        reasons += explain_unmatched(component, precision)
        if forms and (range_of := explain_unmeasured(component, precision)):
            reasons.append(range_of)
        if forms and component.from_header:
            reasons.append("planned from a header: which weights its class keeps as stored is not known")
    reasons += explain_stored(component, forms)
    if component.non_block.weight_bytes >= LEAST_NON_BLOCK_BYTES and (line := explain_non_block(component)):
        reasons.append(line)
    stores = StoreSpec(
        sizes=Sizes(component, forms),
        item=item,
        precision=precision,
        precision_rows=rows,
        forms_by_profile=by_profile,
        num_devices=len(devices),
        on_cpu=devices[0].device == "cpu",
    )
    return stores, devices, reasons


def chosen_precision(
    component: Component, profile: OffloadProfile, request: PrecisionRequest
) -> tuple[Precision, bool]:
    """Return the precision of a component, and whether it is the profile's, where none was asked for."""
    asked = precision_for(request, component.name, component.kind)
    by_profile = asked is None and profile_encodes(component, profile)
    return (Precision(profile.form) if by_profile else asked or Precision.AS_STORED), by_profile


def granularity_of(component: Component, profile: OffloadProfile, request: PrecisionRequest) -> str:
    """Return what of a component is to be widened at once; ``block`` where nothing is."""
    precision, _ = chosen_precision(component, profile, request)
    return "block" if precision.is_as_stored else precision.granularity


def weights_to_measure(
    component: Component, profile: OffloadProfile, request: PrecisionRequest
) -> tuple[FormNumbers | None, list[TensorSpec]]:
    """Return the form that was chosen for a component, and the weights that rest in it unless they lose too much.

    None where there is no form, or no limit to what weights may lose.
    """
    precision, _ = chosen_precision(component, profile, request)
    numbers = numbers_of(precision)
    if numbers is None or math.isinf(limit_of(precision, numbers)):
        return None, []
    return numbers, [tensor for tensor, reason in sort_weights(component, precision, numbers) if not reason]


def without_float8(forms: Forms, devices: Sequence[SplitRatio], machine: Machine) -> str:
    """Return the first of these devices that could not widen weights in their forms; empty where each can."""
    if not any(numbers.is_float8 for numbers in forms.values()):
        return ""
    return next((split.device for split in devices if not machine.device(split.device).has_float8), "")


def explain_nothing(component: Component, numbers: FormNumbers) -> str:
    """Return why no weight rests in a form."""
    said = f"no block has weights that can rest {numbers.rests}: everything stays as stored"
    if not component.blocks and any(map(numbers.takes, component.non_block.tensors)):
        return f"{said}; it has no blocks, and granularity layer casts its layers one by one"
    return said


def only_for_blocks(
    component: Component, devices: tuple[SplitRatio, ...], reasons: list[str]
) -> tuple[SplitRatio, ...]:
    """Return the first devices of a split, as many as there are blocks, and at least one."""
    used = devices[: max(1, len(component.blocks))]
    if len(used) < len(devices):
        names = " & ".join(split.device for split in used)
        blocks = {0: "no blocks", 1: "1 block"}.get(len(component.blocks), f"{len(component.blocks)} blocks")
        split = "not split" if len(used) == 1 else f"split over {len(used)} of {len(devices)} devices"
        nothing = " & ".join(split.device for split in devices[len(used) :])
        reasons.append(f"{split}: it has {blocks}; computes on {names}, {nothing} gets nothing")
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


def choose_device(machine: Machine, reasons: list[str], store: str | None) -> tuple[SplitRatio, ...]:
    """Return where ``auto`` computes: the accelerator with most available memory, of equals the fastest link.

    An integrated one, whose memory is the RAM, only where there is no other; nor one that is to store the component.
    """
    if not machine.accelerators:
        reasons.append("auto: no accelerator found; computes on the CPU")
        return (SplitRatio(device="cpu"),)
    devices = [device for device in machine.chosen_from if device.name != store] or machine.chosen_from
    best = max(devices, key=lambda device: (device.available_bytes, device.link_bytes_per_s or 0.0))
    if len(devices) > 1:
        reasons.append(f"auto: {best.name} has the most memory available, {format_bytes(best.available_bytes)}")
    reasons += explain_integrated(machine)
    return (SplitRatio(device=best.name),)


def explain_integrated(machine: Machine) -> list[str]:
    """Return the line that says which accelerators ``auto`` leaves alone; none where it chooses from all."""
    left_out = [device.name for device in machine.accelerators if device not in machine.chosen_from]
    return [f"auto: {' and '.join(left_out)} is integrated: used only where a placement names it"] if left_out else []
