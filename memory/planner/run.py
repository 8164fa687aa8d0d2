"""A run in numbers: which components compute, in order, how often, for how long, beside how much memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..weights.component import Component
from .tiles import TileChoice, Tiles

__all__ = [
    "KINDS_OF_STEPS",
    "BlockTimes",
    "Stretch",
    "Tiling",
    "Use",
    "largest_activations",
    "longest_use",
    "usual_uses",
    "with_slack",
]

# The order in which the parts of a pipeline compute, and how often each does where nothing tells: a sampler's steps.
USUAL_ORDER = ("text", "vision", "control", "diffusion", "vae")
USUAL_STEPS = 20
KINDS_OF_STEPS = ("control", "diffusion")
SLACK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Kernels of one forward that run one after the other, in a block or between two; times in seconds.

    What waits for a copy of weights finds its kernels launched meanwhile: then it takes ``busy_s``, else what the host
    takes to launch them where that is longer.
    """

    block: int | None
    """The number of the block; None: between blocks."""
    launch_s: float
    """What the host takes to launch them."""
    busy_s: float
    end_s: float
    """How long after the first launch they end at the soonest."""
    copy_s: float = 0.0
    """What a copy behind them takes, for which the host waits; 0 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTimes:
    """What one forward computes on one device, in seconds: each block, by its number, and what lies between them."""

    blocks_s: tuple[float, ...]
    other_s: float = 0.0
    launch_s: float = 0.0
    """What of the forward is the host's time to launch it: calls that compute at the same time share the host."""
    source: str = ""
    """Where these are from, in a word or two, such as ``measured``; it changes nothing."""
    stretches: tuple[Stretch, ...] = ()
    """All that it computes, in order; empty where that is not known."""
    copy_launch_s: float = 0.0
    """What the host takes to launch a copy of weights."""
    following: tuple[Stretch, ...] = ()
    """What its caller computes between it and the next one."""

    @property
    def order(self) -> list[int]:
        """The numbers of the blocks as they run first, then those of which that is not known."""
        ran = [stretch.block for stretch in self.stretches if stretch.block is not None]
        return list(dict.fromkeys([*ran, *range(len(self.blocks_s))]))

    @property
    def pass_s(self) -> float:
        return sum(self.blocks_s) + self.other_s

    def by_block(self) -> dict[int, float]:
        """Return the seconds of the blocks in their order; the last one has what lies between them, too."""
        found = dict(enumerate(self.blocks_s))
        if found:
            found[len(found) - 1] += self.other_s
        return found


class Tiling(Protocol):
    """How a use is computed in tiles where it does not fit in one piece; made where models are known."""

    @property
    def beside_model(self) -> bool:
        """Whether the tiles are always chosen beside the model that sampled, whatever is kept for them.

        Their host makes the memory that it says they may take in any case, first of what the watermark keeps free.
        """

    def choose(self, left_bytes: int) -> TileChoice | None:
        """Return the tiles that will be chosen where so much is left of a device; None: in one piece."""

    def num_forwards(self, tiles: Tiles) -> int:
        """Return how often the blocks run for these tiles."""

    def work(self, tiles: Tiles) -> float:
        """Return how many times the work of one piece these tiles are, about."""

    def times(self, tiles: Tiles) -> Mapping[str, BlockTimes]:
        """Return what all of these tiles compute, by device, as far as that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One stretch of a run in which a component computes: so many forwards, one right after the other."""

    component: str
    kind: str = ""
    num_passes: int = 1
    num_calls: int = 1
    """Of how many independent calls each forward consists, such as the conditional and the unconditional half of a
    step: micro-batches, where devices can compute them at the same time."""
    one_by_one: str = ""
    """Why its calls are no micro-batches whatever computes them; empty where that is not known, or they are."""
    may_clone: bool = False
    """Whether its calls may also be computed by clones of all of it, one per device, as ComfyUI can."""
    activation_bytes: int | None = None
    """What its forwards take beside the weights, on the device of its non-block weights; None: not known."""
    held_bytes: int = 0
    """What of these is there as a forward begins: inputs, and results of earlier parts that are needed later."""
    carried_bytes: int = 0
    """What the blocks hand on to each other: it crosses each cut of a split."""
    tiling: Tiling | None = field(default=None, compare=False)
    """How it is computed in tiles where it does not fit beside the model that sampled; None: never."""
    tile_bytes: int | None = None
    """What is kept free for its tiles, whatever else has to leave; where those are chosen beside the model: whatever of
    its own weights. None: for one piece, of which tiles take what fits beside the model that sampled."""
    times: Mapping[str, BlockTimes] = field(default_factory=dict)
    """By device, as far as they are known: of one call."""
    what: str = ""
    """What it computes, in words, such as ``20 steps at 1024x1024``."""

    @property
    def kept_bytes(self) -> int | None:
        """What is kept free for its forwards beside what is held as they begin; None: not known."""
        if self.tile_bytes is not None or self.activation_bytes is None:
            return self.tile_bytes
        return self.activation_bytes - self.held_bytes


def usual_uses(components: Iterable[Component]) -> tuple[Use, ...]:
    """Return a run of which only the components are known: text encoders, a sampler's steps, the VAE."""
    ordered = sorted(components, key=lambda part: USUAL_ORDER.index(part.kind) if part.kind in USUAL_ORDER else -1)
    return tuple(
        Use(component=part.name, kind=part.kind, num_passes=USUAL_STEPS if part.kind in KINDS_OF_STEPS else 1)
        for part in ordered
    )


def with_slack(num_bytes: int) -> int:
    """Return what is kept free for a predicted need: a 16th more, as no two forwards allocate quite alike."""
    return num_bytes + num_bytes // SLACK


def largest_activations(uses: Sequence[Use], component: str) -> int | None:
    """Return the most that is kept free for a component's forwards, beside its weights and what is held as they begin.

    None where nothing is known of any.
    """
    known = [use.kept_bytes for use in uses if use.component == component]
    return max((num_bytes for num_bytes in known if num_bytes is not None), default=None)


def longest_use(uses: Sequence[Use], component: str) -> Use | None:
    """Return the use of a component that makes most calls; None where there is none."""
    return max(
        (use for use in uses if use.component == component),
        key=lambda use: use.num_passes * use.num_calls,
        default=None,
    )
