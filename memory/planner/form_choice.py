"""Which weights rest in an encoded form, what keeps the others as they came, and what is made of a file's weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from ..options.precision import Precision
from ..units import format_bytes
from ..weights.component import Component, TensorSpec
from ..weights.form_numbers import AS_THEY_CAME, FormNumbers, Forms, rests_of
from ..weights.known_forms import numbers_of
from .sizes import Sizes

__all__ = ["choose_forms", "encoded_bytes", "explain_reading", "explain_wide"]

# Less than this share of what could be encoded is not worth a line of the plan.
WORTH_A_LINE = 0.001
# Layers of positions: an error there shifts the whole picture.
SKIPPED_NAMES = re.compile(r"pos_?emb|position_embed|patch_embed|rope|relative_attention_bias")


def choose_forms(component: Component, precision: Precision) -> Forms:
    """Return the weights that rest in an encoded form, of a precision that `numbers_of` knows.

    Non-block weights never do: embedders, norms and output layers are few bytes and cost the most quality.
    Norm weights and biases inside blocks are vectors and stay too, and so does what `why_wide` says.
    """
    numbers = numbers_of(precision)
    if numbers is None:
        return AS_THEY_CAME
    usual = usual_dtype(component, numbers)
    return {
        tensor.name: numbers
        for block in component.blocks
        for tensor in block.tensors
        if numbers.takes(tensor) and not why_wide(tensor, usual)
    }


def encoded_bytes(component: Component) -> int | None:
    """Return what a whole component takes of one device in `Precision.ENCODED`, with the scratch memory to decode it.

    None where no weight can rest so, as in a file that is fp8 already. Looks at every weight.
    """
    forms = choose_forms(component, Precision.ENCODED)
    if not forms:
        return None
    sizes = Sizes(component, forms)
    return sizes.all_resident_bytes + max(sizes.widths, default=0)


def usual_dtype(component: Component, numbers: FormNumbers) -> str:
    """Return the dtype of most of the weights that can be encoded; empty if there are none."""
    counts: Counter[str] = Counter()
    for block in component.blocks:
        for tensor in block.tensors:
            if numbers.takes(tensor):
                counts[tensor.dtype] += tensor.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default="")


def why_wide(tensor: TensorSpec, usual: str) -> str:
    """Return what keeps a weight of a block as it came; empty for one that is encoded.

    ComfyUI's classes declare no names: they build what needs precision in float32, in a model of 16 bits.
    """
    if tensor.kept_by:
        return tensor.kept_by
    if SKIPPED_NAMES.search(tensor.name):
        return "positions"
    if tensor.dtype == "F32" and usual != "F32":
        return f"stored in F32 beside {usual}"
    return ""


def explain_wide(component: Component, precision: Precision) -> str:
    """Return how many bytes of the blocks stay as stored although they could be encoded, and why; else empty."""
    numbers = numbers_of(precision)
    if numbers is None:
        return ""
    usual = usual_dtype(component, numbers)
    kept: Counter[str] = Counter()
    total_bytes = 0
    for block in component.blocks:
        for tensor in filter(numbers.takes, block.tensors):
            total_bytes += tensor.weight_bytes
            if reason := why_wide(tensor, usual):
                kept[reason] += tensor.weight_bytes
    if kept.total() < WORTH_A_LINE * total_bytes or not kept:
        return ""
    reasons = ", ".join(f"{reason} {format_bytes(num_bytes)}" for reason, num_bytes in kept.most_common())
    return f"{format_bytes(kept.total())} of the blocks stay as stored: {reasons}"


def explain_reading(component: Component, forms: Forms, in_file: Collection[str]) -> list[str]:
    """Return what is made of weights each time when they are read from their file: casts, and encoded forms.

    Args:
        in_file: the blocks that rest there, by name; ``""`` for the non-block weights.
    """
    stored = dict(component.stored_as)
    blocks = [block for block in (*component.blocks, component.non_block) if block.name in in_file]
    weights = [weight for block in blocks for weight in block.tensors]

    def stored_bytes(some: Iterable[TensorSpec]) -> str:
        return format_bytes(sum(replace(each, dtype=stored.get(each.name, each.dtype)).weight_bytes for each in some))

    casts: dict[tuple[str, str], list[TensorSpec]] = {}
    for weight in weights:
        if weight.name in stored:
            casts.setdefault((stored[weight.name], weight.dtype), []).append(weight)
    reasons = [
        f"{stored_bytes(some)} in its file are cast from {before} to {after} as they are read"
        for (before, after), some in casts.items()
    ]
    encoded = [weight for weight in weights if weight.name in forms]
    if encoded:
        num_bytes = sum(sum(forms[weight.name].leaf_bytes(weight)) for weight in encoded)
        kept = rests_of({weight.name: forms[weight.name] for weight in encoded})
        reasons.append(
            f"{stored_bytes(encoded)} in its file are encoded as they are read: {format_bytes(num_bytes)} {kept}"
        )
    return reasons
