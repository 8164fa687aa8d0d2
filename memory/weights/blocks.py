"""Finding blocks by structure: which weights of a model move together, and in which order they run.

The outermost numbered parts of the weights' names (``layers.0``, ``blocks.block1``) are the repeated layers of every
transformer that we know. A numbered part that is too large to move as one, such as a stage of a UNet, is cut into the
numbered parts inside it; what lies between those belongs to no block. A part that the model's class declares as one
piece is not cut unless nothing else fits. What belongs to no block are the *non-block weights*: embedders, norms,
output layers. They stay where the component computes.

[Note: stacks] Parts with the same path up to the first number are a stack. A stack with enough of the bytes streams.
Then smaller stacks, parts that occur once, and large parts without a number become blocks, too, the largest first,
until few non-block weights are left (`LARGEST_NON_BLOCK_SHARE`). Single layers (an embedding, an output matrix) become
no blocks unless they are numbered in a row, or each of several numbered parts has one, as the levels of a VAE have.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase

__all__ = ["LARGEST_BLOCK_BYTES", "LARGEST_NON_BLOCK_SHARE", "find_blocks", "has_skips"]

# A larger block is cut into those inside it unless it is a small part of its component.
LARGEST_BLOCK_BYTES = 256 << 20
LARGEST_BLOCK_SHARE = 1 / 24
# A stack smaller than this part of its component streams only if the non-block weights are too many without it.
SMALLEST_STACK_SHARE = 0.05
# What never streams should be at most this part of a component.
LARGEST_NON_BLOCK_SHARE = 0.05
# A part without a number and smaller than this part of its component is not worth a block.
SMALLEST_PART_SHARE = 0.01
# A part is cut only if the parts inside hold so much of it: what is left over belongs to no block and never streams.
SMALLEST_INNER_SHARE = 0.6
# A part is a single layer if one of its layers has more than this share of its bytes.
LAYER_SHARE = 0.6
# ``block0``, ``block1``, ``block2``: fewer are names such as ``linear1`` and ``linear2``.
FEWEST_WORDS_WITH_NUMBERS = 3
NUMBER = re.compile(r"\d+")
WORD_WITH_NUMBER = re.compile(r"(\D+)\d+")
# Early, middle, late: UNets and VAEs (down, mid, up; encoder, decoder) and the two stacks of Flux and its like.
STAGES = (
    re.compile(r"(^|\.)(encoder|down_?blocks?|down|input_blocks|double_?\w*|doubles|transformer_blocks)(\.|$)"),
    re.compile(r"(^|\.)(mid_?\w*|middle_?\w*)(\.|$)"),
    re.compile(r"(^|\.)(decoder|up_?blocks?|up|output_blocks|single_\w*|singles)(\.|$)"),
)

# Stages between whose blocks the model itself computes: it joins the outputs of early blocks with those of late ones.
STAGES_WITH_SKIPS = re.compile(r"(^|\.)(down_?blocks?|mid_?blocks?|up_?blocks?|(input|middle|output)_blocks?)(\.|$)")

Callable_at = Callable[[str], bool]
Parts = dict[str, list[str]]
"""The names of the weights in each part, by the part's path."""


def find_blocks(
    weights: Mapping[str, int],
    callable_at: Callable_at,
    *,
    whole: Collection[str] = (),
    largest_bytes: int | None = None,
    cuts_whole: bool = False,
    pattern: str | None = None,
) -> Parts:
    """Return the names of the weights of each block, by the block's path, in the order in which such models run.

    A file has no order of definition and a UNet defines its middle last, so stacks go by what their names say (down
    before mid before up), then by appearance; within a stack the numbers decide.

    Args:
        weights: the bytes of every weight that may be in a block, by name; the others are non-block weights.
        callable_at: whether calling the module at a path is what runs its weights.
        whole: the paths of what is declared to be one piece; where one is inside another, the inner ones count.
        largest_bytes: cut larger blocks; by default what is more than 256 MiB and a 24th of the whole.
        cuts_whole: cut larger blocks even where they are declared to be one piece.
        pattern: the paths of the blocks themselves, as a glob such as ``layers.*.attention``; nothing is cut then.
    """
    if pattern is not None:
        return collect(weights, lambda name: matching_path(name, pattern, callable_at))
    return Finder(weights, callable_at, whole, largest_bytes, cuts_whole).find()


def has_skips(path: str) -> bool:
    """Whether the model also uses the outputs of such a block elsewhere than in the next one, as UNets do."""
    return STAGES_WITH_SKIPS.search(path) is not None


class Finder:
    """One search for blocks, with the arguments of `find_blocks`."""

    def __init__(
        self,
        weights: Mapping[str, int],
        callable_at: Callable_at,
        whole: Collection[str],
        largest_bytes: int | None,
        cuts_whole: bool,
    ) -> None:
        self.weights = weights
        self.callable_at = callable_at
        self.whole = innermost(whole)
        self.total_bytes = sum(weights.values())
        self.cuts_layers = largest_bytes is not None
        self.cuts_whole = cuts_whole
        if largest_bytes is None:
            largest_bytes = max(LARGEST_BLOCK_BYTES, int(LARGEST_BLOCK_SHARE * self.total_bytes))
        self.largest_bytes = largest_bytes
        self.worded = find_worded(weights)

    def find(self) -> Parts:
        parts = self.find_inside("", self.weights)
        chained = parts.keys() - self.without_chains(parts).keys()
        while True:
            cut = {path: self.cut(path, names) for path, names in parts.items()}
            if all(inner is None for inner in cut.values()):
                break
            parts = {
                inner_path: names
                for path, inner in cut.items()
                for inner_path, names in (inner or {path: parts[path]}).items()
            }
        return self.in_order(self.choose(parts, chained))

    # -- parts

    def find_inside(self, outer: str, names: Iterable[str]) -> Parts:
        """Return the outermost parts below a path that may be blocks."""
        return collect(names, lambda name: self.find_part(name, outer))

    def find_part(self, name: str, outer: str) -> str | None:
        """Return the outermost part below a path that has a number or is whole: ``layers.3`` of ``layers.3.q.bias``."""
        words = name.split(".")
        begin = outer.count(".") + 1 if outer else 0
        for index in range(begin, len(words) - 1):
            path = ".".join(words[: index + 1])
            is_part = words[index].isdigit() or path in self.worded or path in self.whole
            if is_part and self.callable_at(path):
                return path
        return None

    def cut(self, path: str, names: list[str]) -> Parts | None:
        """Return the parts inside a block that is too large; None if it is not, is one piece, or has too few parts."""
        block_bytes = self.bytes_of(names)
        if block_bytes <= self.largest_bytes or (path in self.whole and not self.cuts_whole):
            return None
        inner = self.find_inside(path, names)
        if not self.cuts_layers:
            inner = self.without_chains(inner)
        inner_bytes = sum(map(self.bytes_of, inner.values()))
        return inner if len(inner) > 1 and inner_bytes >= SMALLEST_INNER_SHARE * block_bytes else None

    def without_chains(self, parts: Parts) -> Parts:
        """Return the parts without the layers of a ``Sequential``: ``to_out.0`` alone, or ``net.0.proj`` and ``net.2``.

        These are single layers; modules between them have no weights, so that numbers are missing.
        """
        siblings: defaultdict[str, list[str]] = defaultdict(list)
        for path in parts:
            siblings[path.rpartition(".")[0]].append(path)
        kept = set()
        for paths in siblings.values():
            numbers = sorted(number_of(path) for path in paths)
            has_gaps = numbers != list(range(numbers[0], numbers[0] + len(paths)))
            for path in paths:
                is_chained = has_gaps or (
                    len(paths) == 1 and any(name.rpartition(".")[0] == path for name in parts[path])
                )
                if not is_chained or path in self.whole or not self.is_layer(parts[path]):
                    kept.add(path)
        return {path: names for path, names in parts.items() if path in kept}

    def is_layer(self, names: Iterable[str]) -> bool:
        """Whether one layer of a part has most of its bytes."""
        layers: defaultdict[str, int] = defaultdict(int)
        for name in names:
            layers[name.rpartition(".")[0]] += self.weights[name]
        return max(layers.values()) > LAYER_SHARE * sum(layers.values())

    def bytes_of(self, names: Iterable[str]) -> int:
        return sum(self.weights[name] for name in names)

    # -- choosing ([Note: stacks])

    def choose(self, parts: Parts, chained: Collection[str]) -> Parts:
        """Return the parts that are blocks: large stacks, then as many others as leave few non-block weights."""
        stacks: defaultdict[str, list[str]] = defaultdict(list)
        for path in parts:
            if path not in chained:
                stacks[stack_of(path)].append(path)
        non_block_bytes = self.total_bytes
        chosen: set[str] = set()
        others: list[tuple[int, list[str]]] = []
        for paths in stacks.values():
            stack_bytes = sum(self.bytes_of(parts[path]) for path in paths)
            is_large = stack_bytes >= SMALLEST_STACK_SHARE * self.total_bytes
            if is_large and len(paths) > 1:
                chosen.update(paths)
                non_block_bytes -= stack_bytes
            elif len(paths) > 1 or self.is_worth_a_block(paths[0], parts[paths[0]]):
                others.append((stack_bytes, paths))
        found = dict(parts)
        if non_block_bytes > LARGEST_NON_BLOCK_SHARE * self.total_bytes:
            for alike in self.find_unnumbered(parts):
                found |= alike
                others.append((sum(map(self.bytes_of, alike.values())), list(alike)))
        for stack_bytes, paths in sorted(others, key=lambda other: other[0], reverse=True):
            if non_block_bytes <= LARGEST_NON_BLOCK_SHARE * self.total_bytes:
                break
            chosen.update(paths)
            non_block_bytes -= stack_bytes
        return {path: names for path, names in found.items() if path in chosen} if len(chosen) > 1 else {}

    def is_worth_a_block(self, path: str, names: list[str]) -> bool:
        """Whether a part that occurs once is large enough, and neither an embedder nor an output layer."""
        is_numbered = path.rpartition(".")[2].isdigit() or path in self.worded
        is_large = self.bytes_of(names) >= SMALLEST_PART_SHARE * self.total_bytes
        return is_large and (is_numbered or not self.is_layer(names))

    def find_unnumbered(self, parts: Parts) -> list[Parts]:
        """Return the outermost callable parts outside of all others that are not too large.

        Parts whose paths differ in numbers only are one group; each alone may be small. A single layer is left out
        unless each of several numbered parts has one.
        """
        taken = {name for names in parts.values() for name in names}
        above = {prefix for path in parts for prefix in prefixes(path)}
        inside: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.weights:
            if name not in taken:
                for path in prefixes(name.rpartition(".")[0]):
                    inside[path].append(name)
        alike: defaultdict[str, Parts] = defaultdict(dict)
        layers: defaultdict[str, Parts] = defaultdict(dict)
        for path, names in inside.items():
            if path in above or not self.callable_at(path):
                continue
            if not self.is_layer(names) and self.bytes_of(names) <= self.largest_bytes:
                alike[NUMBER.sub("*", path)][path] = names
            elif not self.cuts_layers and self.is_layer(names) and any(map(str.isdigit, path.split(".")[:-1])):
                layers[NUMBER.sub("*", path)][path] = names
        alike |= {pattern: group for pattern, group in layers.items() if len(group) > 1}
        smallest_bytes = SMALLEST_PART_SHARE * self.total_bytes
        large = [group for group in alike.values() if sum(map(self.bytes_of, group.values())) >= smallest_bytes]
        fitting = {path for group in large for path in group}
        outermost = [
            {path: names for path, names in group.items() if not fitting.intersection(prefixes(path)[:-1])}
            for group in large
        ]
        return [group for group in outermost if group]

    def in_order(self, blocks: Parts) -> Parts:
        order = {stack: place for place, stack in enumerate(dict.fromkeys(map(stack_of, blocks)))}

        def place_of(path: str) -> tuple[int, int, list[float]]:
            # A path with fewer numbers follows its neighbours with more: a level ends with its single layer.
            return stage_of(path), order[stack_of(path)], [*numbers_of(path), math.inf]

        return {path: blocks[path] for path in sorted(blocks, key=place_of)}


def collect(names: Iterable[str], path_of: Callable[[str], str | None]) -> Parts:
    parts: Parts = {}
    for name in names:
        path = path_of(name)
        if path is not None:
            parts.setdefault(path, []).append(name)
    return parts


def prefixes(path: str) -> list[str]:
    """Return a path and all paths that contain it, the outermost first, without the root."""
    words = path.split(".") if path else []
    return [".".join(words[: index + 1]) for index in range(len(words))]


def innermost(paths: Collection[str]) -> frozenset[str]:
    """Return the paths that have no other one inside."""
    outer = {prefix for path in paths for prefix in prefixes(path)[:-1]}
    return frozenset(path for path in paths if path and path not in outer)


def find_worded(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of parts that are a word with a number, of which there are at least three of two layers each."""
    layers: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        layer = name.rpartition(".")[0]
        for path in prefixes(layer):
            if not path[-1].isdigit() or path.rpartition(".")[2].isdigit():
                continue
            layers[path].add(layer)
    siblings: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path, inside in layers.items():
        outer, _, last = path.rpartition(".")
        match = WORD_WITH_NUMBER.fullmatch(last)
        if match is not None and len(inside) > 1:
            siblings[outer, match[1]].append(path)
    return frozenset(path for paths in siblings.values() if len(paths) >= FEWEST_WORDS_WITH_NUMBERS for path in paths)


def matching_path(name: str, pattern: str, callable_at: Callable_at) -> str | None:
    """Return the outermost part of a weight's name that the pattern matches; a star stands for one part."""
    parts, wanted = name.split("."), pattern.split(".")
    path = ".".join(parts[: len(wanted)])
    matches = len(parts) > len(wanted) and all(map(fnmatchcase, parts, wanted))
    return path if matches and callable_at(path) else None


def stack_of(path: str) -> str:
    """Return the part of a block's path before its first number: ``input_blocks`` of ``input_blocks.4.0``."""
    parts = path.split(".")
    return ".".join(parts[: next((index for index, part in enumerate(parts) if part[-1].isdigit()), len(parts))])


def numbers_of(path: str) -> list[int]:
    return [number_of(part) for part in path.split(".") if part[-1:].isdigit()]


def number_of(part: str) -> int:
    """Return the number that a part of a path ends with; -1 if it ends with none."""
    digits = re.search(r"\d+$", part)
    return int(digits[0]) if digits else -1


def stage_of(path: str) -> int:
    """Return 0, 1 or 2 for a stack that runs early, in the middle or late, by the words in its name."""
    for stage, words in enumerate(STAGES):
        if words.search(stack_of(path)):
            return stage
    return 1
