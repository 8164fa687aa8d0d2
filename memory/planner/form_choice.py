"""Which weights rest in an encoded form, what keeps the others as they came, and what is made of a file's weights."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from ..errors import InvalidInput
from ..options.precision import COMPUTE_WORDS, Precision
from ..units import format_bytes
from ..weights.component import Component, TensorSpec
from ..weights.form_numbers import FormNumbers, Forms, rests_of
from ..weights.known_forms import forms_in_file, numbers_of
from .sizes import Sizes

__all__ = [
    "choose_forms",
    "encoded_bytes",
    "explain_reading",
    "explain_stored",
    "explain_unmatched",
    "explain_unmeasured",
    "explain_wide",
    "limit_of",
    "refuse_other_compute",
    "sort_weights",
]

# Less than this share of what could be encoded is not worth a line of the plan.
WORTH_A_LINE = 0.001
# Layers of positions: an error there shifts the whole picture.
SKIPPED_NAMES = re.compile(r"pos_?emb|position_embed|patch_embed|rope|relative_attention_bias")


def choose_forms(component: Component, precision: Precision) -> Forms:
    """Return the weights that rest in an encoded form, of a precision that `numbers_of` knows.

    Non-block weights never do: embedders, norms and output layers are few bytes and cost the most quality.
    Norm weights and biases inside blocks are vectors and stay too, and so does what `why_wide` says. What a file has in
    a form already rests in that one.
    """
    stored, numbers = forms_in_file(component), numbers_of(precision)
    if numbers is None:
        return stored
    chosen = {tensor.name: numbers for tensor, reason in sort_weights(component, precision, numbers) if not reason}
    return {**stored, **chosen} if stored else chosen


def sort_weights(component: Component, precision: Precision, numbers: FormNumbers) -> Iterator[tuple[TensorSpec, str]]:
    """Yield each weight that could rest in the form, and what keeps it as it came; empty for one that is encoded."""
    usual, errors, limit = (
        usual_dtype(component, numbers),
        component.errors_in(numbers.name),
        limit_of(precision, numbers),
    )
    patterns, stored = precision.patterns, forms_in_file(component)
    for block in component.blocks:
        for tensor in filter(numbers.takes, block.tensors):
            if tensor.name in stored:
                yield tensor, f"{stored[tensor.name].name} in its file"
                continue
            reason = why_wide(tensor, usual, precision, patterns)
            if not reason and not errors.get(tensor.name, 0.0) <= limit:  # also what is not a number
                reason = f"would lose more than {limit:.2g}"
            yield tensor, reason


def limit_of(precision: Precision, numbers: FormNumbers) -> float:
    """Return what a weight may lose to rest in a form."""
    return numbers.error_limit if precision.error_limit is None else precision.error_limit


def refuse_other_compute(component: Component, precision: Precision) -> None:
    """Refuse a precision that names another compute dtype than its component has; see `Precision.compute`.

    Raises:
        InvalidInput: naming both.
    """
    numbers = numbers_of(precision)
    if numbers is None or not precision.compute:
        return
    usual = usual_dtype(component, numbers)
    if usual and usual != precision.compute:
        raise InvalidInput(
            f"precision of {component.name}: compute_dtype {COMPUTE_WORDS[precision.compute]} was asked for, and its "
            f"weights compute in {COMPUTE_WORDS[usual]}; leave it out, or convert the module first, as with module.to()"
        )


def encoded_bytes(component: Component) -> int | None:
    """Return what a whole component takes of one device in `Precision.ENCODED`, with the scratch memory to decode it.

    None where no weight can rest so, as in a file that is fp8 already. Looks at every weight.
    """
    forms = choose_forms(component, Precision.ENCODED)
    if len(forms) == len(component.encoded_as):
        return None
    sizes = Sizes(component, forms)
    return sizes.all_resident_bytes + sizes.scratch_bytes(range(len(sizes.blocks)))


def usual_dtype(component: Component, numbers: FormNumbers) -> str:
    """Return the dtype of most of the weights that can be encoded; empty if there are none."""
    counts: Counter[str] = Counter()
    for block in component.blocks:
        for tensor in block.tensors:
            if numbers.takes(tensor):
                counts[tensor.dtype] += tensor.num_elements
    return max(counts, key=lambda dtype: counts[dtype], default="")


def why_wide(tensor: TensorSpec, usual: str, precision: Precision, patterns: Iterable[re.Pattern[str]]) -> str:
    """Return what of its names, classes and dtype keeps a weight of a block as it came; empty for one that is encoded.

    ComfyUI's classes declare no names: they build what needs precision in float32, in a model of 16 bits.
    """
    for pattern in patterns:
        if pattern.search(tensor.name):
            return f"excluded by {pattern.pattern!r}"
    for kind in precision.exclude_classes:
        if kind in tensor.layer_classes:
            return f"excluded: {kind}"
    if precision.honours_declared:
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
    kept: Counter[str] = Counter()
    total_bytes = 0
    for tensor, reason in sort_weights(component, precision, numbers):
        total_bytes += tensor.weight_bytes
        if reason:
            kept[reason] += tensor.weight_bytes
    if kept.total() < WORTH_A_LINE * total_bytes or not kept:
        return ""
    reasons = ", ".join(f"{reason} {format_bytes(num_bytes)}" for reason, num_bytes in kept.most_common())
    return f"{format_bytes(kept.total())} of the blocks stay as stored: {reasons}"


def explain_unmatched(component: Component, precision: Precision) -> list[str]:
    """Return what was excluded and is in no name and no class of a component's weights; a file knows no classes."""
    weights = [tensor for block in (*component.blocks, component.non_block) for tensor in block.tensors]
    unmatched = [
        f"exclude {pattern.pattern!r}"
        for pattern in precision.patterns
        if not any(map(pattern.search, (tensor.name for tensor in weights)))
    ]
    classes = {name for tensor in weights for name in tensor.layer_classes}
    unmatched += [f"exclude_classes {name!r}" for name in precision.exclude_classes if classes and name not in classes]
    return [f"{each} matches no weight" for each in unmatched]


def explain_stored(component: Component, forms: Forms) -> list[str]:
    """Return how many weights rest in the form in which their file has them, and what they take."""
    stored = forms_in_file(component)
    lines = []
    for numbers in dict.fromkeys(stored.values()):
        own = [
            tensor
            for block in component.blocks
            for tensor in block.tensors
            if stored.get(tensor.name) is numbers and forms.get(tensor.name) is numbers
        ]
        num_bytes = sum(sum(numbers.leaf_bytes(tensor)) for tensor in own)
        if own:
            lines.append(f"{len(own)} weights rest {numbers.rests}, as in their file: {format_bytes(num_bytes)}")
    return lines


def explain_unmeasured(component: Component, precision: Precision) -> str:
    """Return between which sizes a component may rest, where what its weights lose is not measured; else empty."""
    numbers = numbers_of(precision)
    if numbers is None or math.isinf(limit_of(precision, numbers)):
        return ""
    forms, errors = choose_forms(component, precision), component.errors_in(numbers.name)
    open_bytes = sum(
        tensor.weight_bytes - sum(numbers.leaf_bytes(tensor))
        for block in component.blocks
        for tensor in block.tensors
        if tensor.name in forms and tensor.name not in errors
    )
    if not open_bytes:
        return ""
    least = Sizes(component, forms).all_resident_bytes
    return (
        f"{format_bytes(least)} to {format_bytes(least + open_bytes)}: what its weights lose is measured when they are "
        f"first read, and those above {limit_of(precision, numbers):.2g} stay as stored"
    )


def explain_reading(component: Component, forms: Forms, in_file: Collection[str]) -> list[str]:
    """Return what is made of weights each time when they are read from their file: casts, and encoded forms.

    Args:
        in_file: the blocks that rest there, by name; ``""`` for the non-block weights.
    """
    stored, encoded_there = dict(component.stored_as), forms_in_file(component)
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
    encoded = [weight for weight in weights if weight.name in forms and weight.name not in encoded_there]
    if encoded:
        num_bytes = sum(sum(forms[weight.name].leaf_bytes(weight)) for weight in encoded)
        kept = rests_of({weight.name: forms[weight.name] for weight in encoded})
        reasons.append(
            f"{stored_bytes(encoded)} in its file are encoded as they are read: {format_bytes(num_bytes)} {kept}"
        )
    return reasons
