"""Traces: which components prompts use, one after another, and how many passes each use makes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["SIZES", "TRACES", "Trace", "Use"]

Use = tuple[str, int]
"""A component, and the passes of its use; ``name@version`` is another set of weights of the same size."""

# In blocks. The device holds 24: one workflow, and a part of another.
SIZES: Mapping[str, int] = {
    "text a": 8, "model a": 14, "vae a": 1,
    "text b": 6, "model b": 15, "vae b": 1,
    "model c": 13, "model d": 16, "big": 20, "huge": 48,
    **{f"small {number}": 2 for number in range(6)},
    **{f"zipf {number}": size for number, size in enumerate((12, 6, 10, 4, 14, 3, 8, 5))},
}  # fmt: skip
STEPS = 6
NUM_PROMPTS = 24


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts, each the uses of its nodes in their order."""

    prompts: Sequence[Sequence[Use]]

    def uses(self) -> Iterator[Use]:
        for prompt in self.prompts:
            yield from prompt


def workflow(name: str, version: int | None = None) -> list[Use]:
    model = f"model {name}" if version is None else f"model {name}@{version}"
    return [(f"text {name}", 1), (model, STEPS), (f"vae {name}", 1)]


def zipf() -> list[list[Use]]:
    dice = random.Random(7)
    names = [name for name in SIZES if name.startswith("zipf")]
    weights = [1 / (rank + 1) for rank in range(len(names))]
    return [[(dice.choices(names, weights)[0], dice.choice((1, STEPS)))] for _ in range(3 * NUM_PROMPTS)]


TRACES: Mapping[str, Trace] = {
    "alternating workflows": Trace([workflow("ab"[turn % 2]) for turn in range(NUM_PROMPTS)]),
    "three models in turn": Trace([[(f"model {'acd'[turn % 3]}", STEPS)] for turn in range(NUM_PROMPTS)]),
    "one big, many small": Trace(
        [[("big", STEPS), (f"small {turn % 6}", 1), (f"small {turn * 5 % 6}", 1)] for turn in range(NUM_PROMPTS)]
    ),
    "batch with LoRA changes": Trace([workflow("a", turn // 4) for turn in range(NUM_PROMPTS)]),
    "shared text encoder": Trace(
        [[("text a", 1), (f"model {'ac'[turn % 2]}", STEPS), ("vae a", 1)] for turn in range(NUM_PROMPTS)]
    ),
    "random, Zipf": Trace(zipf()),
    "larger than the device": Trace([[("text a", 1), ("huge", STEPS), ("vae a", 1)] for _ in range(NUM_PROMPTS // 4)]),
}
