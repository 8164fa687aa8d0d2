"""A random run on a random machine, small enough that all placements can be tried: numbers to plan from, and modules.

Blocks of one component have equal bytes and different times. Memory and links are a thousandth of real ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory.planner.capacity import DeviceCapacity, Machine, PeerLink
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.planner.tiles import TileChoice, TiledSize, Tiles, choose_tiles
from highwater.memory.units import GIB, KIB, MIB

__all__ = ["HIDDEN_BYTES", "KEPT_BYTES", "Card", "Instance", "Layers", "Part", "random_instance"]

STEPS = 8
MOST_BLOCKS = 6
KINDS = ("text", "text", "vision", "control", "diffusion", "vae")
KINDS_OF_STEPS = ("control", "diffusion")
# Pictures are as small as tiles allow: few tiles are larger than the smallest one.
SIDES = (320, 384, 448)
HIDDEN_BYTES = 64 * KIB
KEPT_BYTES = MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A device: its bytes, and bytes per second from the host and from other devices."""

    total_bytes: int
    link: float
    peer: float

    @property
    def spec(self) -> simdevice.SimDeviceSpec:
        return simdevice.SimDeviceSpec(
            total_bytes=self.total_bytes, h2d_bytes_per_s=self.link, d2h_bytes_per_s=self.link,
            peer_bytes_per_s=self.peer, launch_s=0, latency_s=0, flops_per_s=1e30, memory_bytes_per_s=1e30,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A component of a run, and what it computes there."""

    name: str
    kind: str
    block_bytes: int
    times: Mapping[str, tuple[float, ...]]
    """By device, the seconds of each block in one forward."""
    num_passes: int
    activation_bytes: int
    side: int = 0
    """The pixels of each side of the picture that it decodes; 0: none, it has no tiles."""

    @property
    def num_blocks(self) -> int:
        return len(next(iter(self.times.values())))

    @property
    def size(self) -> TiledSize:
        return TiledSize(height=self.side, width=self.side)

    def part_of(self, tiles: Tiles | None) -> float:
        """Return how large a tile is beside the whole picture."""
        return 1.0 if tiles is None else tiles.volume(self.size) / self.side**2

    def tile_bytes(self, tiles: Tiles | None) -> int:
        """Return what a forward takes beside the weights: in proportion to what it decodes."""
        return int(self.activation_bytes * self.part_of(tiles))

    def num_tiles(self, tiles: Tiles | None) -> int:
        """Return how many tiles a picture has: all of one size, each overlaps the one before it."""
        if tiles is None:
            return 1
        step = tiles.pixels - tiles.overlap_pixels
        return (-(-max(0, self.side - tiles.overlap_pixels) // step)) ** 2

    def block_times(self, factor: float) -> dict[str, BlockTimes]:
        """Return what a forward takes by device, so many times as long as of the whole picture."""
        return {
            device: BlockTimes(blocks_s=tuple(factor * second for second in seconds))
            for device, seconds in self.times.items()
        }

    def use(self, tiles: Tiles | None = None, *, may_tile: bool = False) -> Use:
        """Return what it does in a run: in tiles one forward for each."""
        part = self.part_of(tiles)
        return Use(
            component=self.name,
            kind=self.kind,
            num_passes=self.num_passes * self.num_tiles(tiles),
            activation_bytes=self.tile_bytes(tiles) + 2 * HIDDEN_BYTES,
            held_bytes=HIDDEN_BYTES,
            carried_bytes=HIDDEN_BYTES,
            tiling=PartTiling(self) if may_tile and self.side else None,
            times=self.block_times(part),
        )


class PartTiling:
    """The tiles in which a part computes where it does not fit whole; `Tiling` of the planner."""

    beside_model = False

    def __init__(self, part: Part) -> None:
        self.part = part

    def choose(self, left_bytes: int) -> TileChoice | None:
        return choose_tiles(self.part.size, lambda tiles: self.part.tile_bytes(tiles) + HIDDEN_BYTES, left_bytes)

    def num_forwards(self, tiles: Tiles) -> int:
        return self.part.num_tiles(tiles)

    def work(self, tiles: Tiles) -> float:
        return self.part.num_tiles(tiles) * self.part.part_of(tiles)

    def times(self, tiles: Tiles) -> Mapping[str, BlockTimes]:
        return self.part.block_times(self.work(tiles))


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """Components in the order in which a run uses them, each once, and the devices."""

    parts: tuple[Part, ...]
    cards: tuple[Card, ...]

    @property
    def names(self) -> list[str]:
        return [f"gpu:{index}" for index in range(len(self.cards))]

    @property
    def uses(self) -> tuple[Use, ...]:
        """What a planner is told: pictures may be decoded in tiles."""
        return tuple(part.use(may_tile=True) for part in self.parts)

    @property
    def machine(self) -> Machine:
        devices = [DeviceCapacity(name="cpu", total_bytes=8 * GIB, available_bytes=8 * GIB)]
        for name, card in zip(self.names, self.cards, strict=True):
            others = [(other, each) for other, each in zip(self.names, self.cards, strict=True) if other != name]
            devices.append(
                DeviceCapacity(
                    name=name,
                    total_bytes=card.total_bytes,
                    available_bytes=card.total_bytes - KEPT_BYTES,
                    kept_free_bytes=KEPT_BYTES,
                    link_bytes_per_s=card.link,
                    peers=tuple(
                        PeerLink(device=other, is_direct=True, bytes_per_s=min(card.peer, each.peer))
                        for other, each in others
                    ),
                )
            )
        return Machine(devices=tuple(devices), pinned_bytes=4 * GIB)


class Layer(nn.Module):
    """Computes for a given time, by the device, and returns a copy of its input."""

    def __init__(self, weight_bytes: int, seconds: Mapping[str, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(max(1, weight_bytes // 2), dtype=torch.bfloat16), requires_grad=False)
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor, part: float) -> torch.Tensor:
        simdevice.advance(hidden.device, part * self.seconds[f"gpu:{hidden.device.index}"])
        return hidden.clone()  # so that nothing runs before this has


class Layers(nn.Module):
    """The module of a part; its forward takes memory beside the weights until it ends."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        by_block = [
            {device: seconds[number] for device, seconds in part.times.items()} for number in range(part.num_blocks)
        ]
        self.layers = nn.ModuleList(Layer(part.block_bytes, seconds) for seconds in by_block)

    def forward(self, hidden: torch.Tensor, part: float, activation_bytes: int) -> torch.Tensor:
        taken = torch.empty(activation_bytes, dtype=torch.uint8, device=hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, part)
        del taken
        return hidden


def random_instance(random: Random) -> Instance:
    count = random.choice([2, 2, 3])
    cards = tuple(
        Card(
            total_bytes=int(random.uniform(12, 56) * MIB),
            link=random.uniform(2, 20) * 1e9,
            peer=random.choice([2, 10, 50]) * 1e9,
        )
        for _ in range(count)
    )
    speeds = [random.uniform(0.3, 1.0) for _ in range(count)]
    kinds = sorted(random.sample(range(len(KINDS)), random.randint(1, len(KINDS))))
    parts = []
    for number, kind in enumerate(KINDS[index] for index in kinds):
        block_bytes = int(random.uniform(1.1, 6) * MIB)
        block_s = random.uniform(0.2, 3.0) * block_bytes / 10e9
        seconds = [block_s * random.uniform(0.5, 1.5) for _ in range(random.randint(2, MOST_BLOCKS))]
        side = random.choice(SIDES) if kind == "vae" else 0
        parts.append(
            Part(
                name=f"{kind}_{number}",
                kind=kind,
                block_bytes=block_bytes,
                times=times_of(seconds, speeds),
                num_passes=STEPS if kind in KINDS_OF_STEPS else 1,
                activation_bytes=int(random.uniform(4, 24) * MIB if side else random.uniform(0.1, 4) * MIB),
                side=side,
            )
        )
    return Instance(parts=tuple(parts), cards=cards)


def times_of(seconds: Sequence[float], speeds: Sequence[float]) -> dict[str, tuple[float, ...]]:
    return {f"gpu:{index}": tuple(second / speed for second in seconds) for index, speed in enumerate(speeds)}
