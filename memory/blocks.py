"""Finding blocks by structure: which weights of a model move together, and in which order they run.

The outermost numbered parts of the weights' names (``layers.0``, ``layers.1``) are the repeated layers of every
transformer that we know. A numbered part that is too large to move as one, such as a stage of a UNet, gives way to
the numbered parts inside it; what lies between those stays with the rest. What belongs to no block is the *rest*:
embedders, norms, output layers. It stays where the component computes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

__all__ = ["LARGEST_BLOCK_BYTES", "find_blocks", "has_skips"]

# A larger block is cut into those inside it unless it is a small part of its component.
LARGEST_BLOCK_BYTES = 256 << 20
LARGEST_BLOCK_SHARE = 1 / 24
# A stack smaller than this part of its component is not worth streaming: it joins the rest.
SMALLEST_STACK_SHARE = 0.05
# A part is cut only if the parts inside hold so much of it: what is left over joins the rest, which never streams.
SMALLEST_INNER_SHARE = 0.6
# Early, middle, late: UNets and VAEs (down, mid, up; encoder, decoder) and the two stacks of Flux and its like.
STAGES = (
    re.compile(r"(^|\.)(encoder|down_?blocks?|down|input_blocks|double_?\w*|doubles|transformer_blocks)(\.|$)"),
    re.compile(r"(^|\.)(mid_?\w*|middle_?\w*)(\.|$)"),
    re.compile(r"(^|\.)(decoder|up_?blocks?|up|output_blocks|single_\w*|singles)(\.|$)"),
)

# Stages between whose blocks the model itself computes: it joins the outputs of early blocks with those of late ones.
STAGES_WITH_SKIPS = re.compile(r"(^|\.)(down_?blocks?|mid_?blocks?|up_?blocks?|(input|middle|output)_blocks?)(\.|$)")

Callable_at = Callable[[str], bool]


def find_blocks(
    weights: Mapping[str, int],
    callable_at: Callable_at,
    *,
    largest_bytes: int | None = None,
    pattern: str | None = None,
) -> dict[str, list[str]]:
    """Return the names of the weights of each block, by the block's path, in the order in which such models run.

    A file has no order of definition and a UNet defines its middle last, so stacks go by what their names say (down
    before mid before up), then by appearance; within a stack the numbers decide.

    Args:
        weights: the bytes of every weight that may be in a block, by name; the others belong to the rest.
        callable_at: whether calling the module at a path is what runs its weights.
        largest_bytes: cut larger blocks; by default what is more than 256 MiB and a 24th of the whole.
        pattern: the paths of the blocks themselves, as a glob such as ``layers.*.attention``; nothing is cut then.
    """
    total_bytes = sum(weights.values())
    if pattern is not None:
        return collect(weights, lambda name: matching_path(name, pattern, callable_at))
    if largest_bytes is None:
        largest_bytes = max(LARGEST_BLOCK_BYTES, int(LARGEST_BLOCK_SHARE * total_bytes))
    blocks = collect(weights, lambda name: numbered_path(name, "", callable_at))
    while True:
        cut = {path: cut_block(path, names, weights, callable_at, largest_bytes) for path, names in blocks.items()}
        if all(inner is None for inner in cut.values()):
            break
        blocks = {
            inner_path: names
            for path, inner in cut.items()
            for inner_path, names in (inner or {path: blocks[path]}).items()
        }
    worth = worth_streaming(blocks, weights, total_bytes)
    blocks = {path: names for path, names in blocks.items() if path in worth}
    order = {stack: place for place, stack in enumerate(dict.fromkeys(map(stack_of, blocks)))}
    return {
        path: blocks[path]
        for path in sorted(blocks, key=lambda path: (stage_of(path), order[stack_of(path)], numbers_of(path)))
    }


def has_skips(path: str) -> bool:
    """Whether the model computes with the outputs of such a block beside handing them on, as UNets do."""
    return STAGES_WITH_SKIPS.search(path) is not None


def collect(weights: Mapping[str, int], path_of: Callable[[str], str | None]) -> dict[str, list[str]]:
    blocks: dict[str, list[str]] = {}
    for name in weights:
        path = path_of(name)
        if path is not None:
            blocks.setdefault(path, []).append(name)
    return blocks


def worth_streaming(blocks: Mapping[str, list[str]], weights: Mapping[str, int], total_bytes: int) -> set[str]:
    """Return the paths of those blocks whose stack has two or more of them and enough bytes."""
    stacks: dict[str, list[str]] = {}
    for path in blocks:
        stacks.setdefault(stack_of(path), []).append(path)
    return {
        path
        for paths in stacks.values()
        if len(paths) > 1
        and sum(weights[name] for path in paths for name in blocks[path]) >= SMALLEST_STACK_SHARE * total_bytes
        for path in paths
    }


def cut_block(
    path: str, names: list[str], weights: Mapping[str, int], callable_at: Callable_at, largest_bytes: int
) -> dict[str, list[str]] | None:
    """Return the numbered parts inside a block that is too large; None if it is not, or has none to speak of."""
    block_bytes = sum(weights[name] for name in names)
    if block_bytes <= largest_bytes:
        return None
    inner = collect({name: weights[name] for name in names}, lambda name: numbered_path(name, path, callable_at))
    inner_bytes = sum(weights[name] for inside in inner.values() for name in inside)
    return inner if len(inner) > 1 and inner_bytes >= SMALLEST_INNER_SHARE * block_bytes else None


def numbered_path(name: str, outer: str, callable_at: Callable_at) -> str | None:
    """Return the outermost numbered part below ``outer`` that can be called: ``layers.3`` of ``layers.3.q.bias``."""
    parts = name.split(".")
    begin = len(outer.split(".")) if outer else 0
    for index in range(begin, len(parts) - 1):
        path = ".".join(parts[: index + 1])
        if parts[index].isdigit() and callable_at(path):
            return path
    return None


def matching_path(name: str, pattern: str, callable_at: Callable_at) -> str | None:
    """Return the outermost part of a weight's name that the pattern matches; a star stands for one part."""
    parts, wanted = name.split("."), pattern.split(".")
    path = ".".join(parts[: len(wanted)])
    matches = len(parts) > len(wanted) and all(map(fnmatchcase, parts, wanted))
    return path if matches and callable_at(path) else None


def stack_of(path: str) -> str:
    """Return what stands before the first number of a block's path: ``input_blocks`` of ``input_blocks.4.0``."""
    parts = path.split(".")
    return ".".join(parts[: next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))])


def numbers_of(path: str) -> list[int]:
    return [int(part) for part in path.split(".") if part.isdigit()]


def stage_of(path: str) -> int:
    """Return 0, 1 or 2 for a stack that runs early, in the middle or late, by the words in its name."""
    for stage, words in enumerate(STAGES):
        if words.search(stack_of(path)):
            return stage
    return 1
