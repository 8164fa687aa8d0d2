"""How much of a device to keep for a decode: for one piece, or for tiles of several sizes, and what those take.

[Note: room for tiles] What is kept for a decode others cannot have: where it is much, the VAE itself streams, goes to a
slower device, or everything else comes back in each run. Tiles take less, and compute what overlaps more than once. So
the plan reckons the whole run with room for one piece and for tiles of several sizes, and keeps what makes it shortest.
Of the tiles that cut a picture into equally many only the smallest are looked at: larger ones overlap more and need
more. Tiles so small that colors may differ are for where no others fit, or a good part of the run is saved. Tiles
of ComfyUI's VAEs are chosen beside the model (`Tiling.beside_model`): what is kept for them only limits the VAE itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ..weights.component import Component
from .capacity import KeptFree, Machine
from .device_plan import DevicePlan
from .prefetch_schedule import spread_residents
from .run import BlockTimes, Tiling, Use, largest_activations, with_slack
from .sizes import Sizes
from .staging_layout import window_seconds
from .tiles import TileChoice, Tiles
from .workload import Workload

__all__ = [
    "each_tile",
    "keep_for_uses",
    "room_levels",
    "seconds_with_colors",
    "tiled_times",
    "tiles_seconds",
    "whole_room",
    "with_room",
]

# The next smaller tiles that are looked at have at most this part of the bytes, and so many sizes are.
NEXT_LEVEL = 7 / 8
MOST_LEVELS = 16
# Of the sizes with which colors may differ so many; they have to make a run by this part shorter.
MOST_SMALL = 2
SMALL_TILES_PART = 0.04


def keep_for_uses(machine: Machine, uses: Sequence[Use]) -> Machine:
    """Return the machine that keeps free what the uses say, where the needs of a component were not learned."""
    learned = machine.needs

    def needs(component: Component, device: str) -> KeptFree | None:
        kept = learned(component, device) if learned is not None else None
        if kept is not None and kept.is_known:
            return kept
        num_bytes = largest_activations(uses, component.name)
        if num_bytes is None:
            return kept
        return KeptFree(num_bytes=with_slack(num_bytes), why="predicted for this workflow")

    def held(component: Component, device: str) -> int:
        found = [use.held_bytes for use in uses if use.component == component.name]
        return max(found, default=0)

    return replace(machine, needs=needs, held=held) if uses else machine


def with_room(uses: Sequence[Use], rooms: Mapping[str, int]) -> list[Use]:
    """Return the uses with so many bytes kept for the tiles of these components."""
    return [
        replace(use, tile_bytes=rooms[use.component]) if use.tiling is not None and use.component in rooms else use
        for use in uses
    ]


def room_levels(use: Use) -> Iterator[int]:
    """Yield what may be kept for a decode, the most first ([Note: room for tiles]); nothing where it never tiles."""
    if use.tiling is None or use.kept_bytes is None or use.tile_bytes is not None:
        return
    left, forwards = use.kept_bytes, 0
    found: list[int] = []
    num_small = 0
    for _ in range(MOST_LEVELS):
        choice = use.tiling.choose(left - 1)
        if choice is None:
            return
        if not found:
            found = [whole_room(use)]
        num_small += choice.is_small
        if num_small > MOST_SMALL or not choice.fits:
            break
        number = use.tiling.num_forwards(choice.tiles)
        if number == forwards:
            found.pop()
        found.append(choice.tile_bytes)
        left, forwards = min(choice.tile_bytes, int(left * NEXT_LEVEL)), number
    yield from found


def each_tile(times: BlockTimes, count: float) -> BlockTimes:
    """Return what one of so many equal tiles computes, of the times of all."""
    return replace(
        times,
        blocks_s=tuple(second / count for second in times.blocks_s),
        other_s=times.other_s / count,
        launch_s=times.launch_s / count,
        stretches=(),  # those of all tiles, one after the other
        following=(),
    )


def whole_room(use: Use) -> int:
    """Return what is kept for a decode in one piece: what its tiles are chosen by, where that is more."""
    kept = use.kept_bytes or 0
    choice = use.tiling.choose(kept - 1) if use.tiling is not None else None
    return kept if choice is None else max(kept, choice.whole_bytes)


def seconds_with_colors(seconds: float, choices: Iterable[TileChoice | None]) -> float:
    """Return what a run counts as where tiles are so small that colors may differ between them."""
    is_small = any(choice is not None and choice.is_small for choice in choices)
    return seconds * (1 + SMALL_TILES_PART) if is_small else seconds


def tiled_times(times: BlockTimes, tiling: Tiling, tiles: Tiles) -> BlockTimes:
    """Return what one tile computes, about: in proportion to what it decodes of one piece."""
    return each_tile(times, tiling.num_forwards(tiles) / tiling.work(tiles))


def tiles_seconds(sizes: Sizes, share: DevicePlan, use: Use, tiles: Tiles, rate: float | None) -> float | None:
    """Return what all tiles of a use take on one device, by estimate; None where its times or copies are not known.

    Args:
        rate: how fast what streams reaches the device, in bytes per second.
    """
    times = use.times.get(share.device)
    if times is None or use.tiling is None:
        return None
    count, each = use.tiling.num_forwards(tiles), tiled_times(times, use.tiling, tiles)
    if not share.streamed_bytes:
        return count * each.pass_s
    if rate is None:
        return None
    # Of an estimate is not known which blocks stay.
    resident = share.resident or spread_residents(sizes.blocks, share.resident_bytes)
    work = Workload(sizes.blocks, each.blocks_s, tuple(size / rate for size in sizes.blocks), each.other_s)
    return count * window_seconds(work, resident, share.staging_bytes)
