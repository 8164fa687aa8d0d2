"""What the LoRAs of a workflow add to the components of its plan, and what of them a plan does not count.

To a weight that rests encoded a LoRA's factors are added when it is decoded: they move with its block. Into any other
weight core merges it: the device holds no more bytes, but RAM has the weight as it was, too, or, of one that rests in
its file, as it is now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..memory.errors import InvalidInput, quoted
from ..memory.planner.plan import ComponentPlan
from ..memory.planner.sizes import side_factors
from ..memory.units import format_bytes
from ..memory.weights.component import Component
from ..memory.weights.gguf_header import is_gguf
from .lora_headers import LoraChanges, LoraReader, changes_by_names, joined_ranks
from .workflow_reading.description import AppliedLora, LoadedModel, WorkflowDescription
from .workflow_reading.model_paths import find_loras

__all__ = ["ChangedComponent", "apply_loras"]

BYPASS = "LoraLoaderBypass"
FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedComponent:
    """A component with the LoRAs that a workflow applies to it."""

    component: Component
    files: tuple[str, ...] = ()
    changes: tuple[LoraChanges, ...] = ()
    notes: tuple[str, ...] = ()
    """What the plan does not count, a line each."""

    def lines(self, plan: ComponentPlan) -> Iterator[str]:
        """Yield what the LoRAs take where weights rest as a plan says, for its reasons."""
        changed = {name for change in self.changes for name in (*change.ranks, *change.others)}
        if not changed:
            return
        names = ", ".join(self.files)
        beside = side_factors(self.component, plan.forms)
        if beside:
            specs = [spec for pair in beside.values() for spec in pair]
            again = format_bytes(sum(spec.num_elements for spec in specs) * FLOAT32_BYTES)
            yield (
                f"{names}: {format_bytes(sum(spec.weight_bytes for spec in specs))} move with the blocks, beside "
                f"{len(beside)} encoded weights; RAM has them once more in float32, {again}"
            )
        tensors = [tensor for block in (*self.component.blocks, self.component.non_block) for tensor in block.tensors]
        merged = [tensor for tensor in tensors if tensor.name in changed and tensor.name not in beside]
        if merged:
            kept = format_bytes(sum(tensor.weight_bytes for tensor in merged))
            yield f"{names}: merged into {len(merged)} weights, which takes about {kept} more of RAM"


def apply_loras(
    described: WorkflowDescription,
    model: LoadedModel,
    component: Component,
    paths: Sequence[Path],
    read: LoraReader = changes_by_names,
) -> ChangedComponent:
    """Return a component with what the LoRAs of a workflow change of it: of several calls, with most of them.

    A LoRA whose file is not there or cannot be read is left out, and noted.
    """
    place = described.models.index(model)
    calls = dict.fromkeys(use.loras for use in described.uses if use.model == place and use.loras)
    found: dict[AppliedLora, LoraChanges] = {}
    notes: list[str] = []
    for lora in model.loras:
        missing = find_loras([lora])
        notes += missing.missing
        if missing.missing:
            continue
        (path,) = missing.paths
        about = f"{lora.node.label}: {lora.file}"
        if any(is_gguf(file) for file in paths):
            notes.append(f"{about}: is not in the plan; the pack that loads GGUF files applies it in its own way")
            continue
        try:
            change = read(component, model, paths, path)
        except InvalidInput as error:
            notes.append(f"{lora.node.label}: {error}")
            continue
        if lora.node.class_type.startswith(BYPASS):
            if change.num_layers:
                size = format_bytes(change.file_bytes)
                notes.append(f"{about}: is computed beside the weights, where ComfyUI keeps it; its file has {size}")
            continue
        if change.num_unknown:
            notes.append(
                f"{about}: {change.num_unknown} of its {change.num_layers} layers are called like none of "
                f"{quoted(component.name)}{change.remedy}"
            )
        found[lora] = change
    ranks: dict[str, int] = {}
    for applied in calls or [model.loras]:
        own = joined_ranks([found[lora] for lora in applied if lora in found])
        ranks = max(ranks, own, key=lambda ranks: sum(ranks.values()))
    return ChangedComponent(
        component=replace(component, side_ranks=frozenset(ranks.items() if model.is_ours else ())),
        files=tuple(dict.fromkeys(str(lora.file) for lora in found)),
        changes=tuple(found.values()),
        notes=tuple(notes),
    )
