"""What a run does to the devices: what is loaded and evicted before each use, the peaks, and how long it all takes.

[Note: repeated run] Components compute in turns. One that finds too little room has idle ones evicted: the one that is
used last first, in whole blocks, no more than are missing. The first run loads everything; in each further one the same
things leave and come back, and those are what a run costs beside its forwards.

[Note: room of a decode] For a VAE text encoders leave before anything of the model that sampled. Where that does not
suffice, and the picture is larger than the smallest tile, it is decoded in tiles that fit, and nothing of the model
leaves, unless not even the smallest tile fits. Tiles overlap by a quarter, so together they compute more than the
picture, and what streams is copied for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..units import format_bytes, format_seconds
from .capacity import DeviceCapacity, Machine
from .device_plan import DevicePlan
from .run import KINDS_OF_STEPS, BlockTimes, Tiling, Use
from .tiles import TileChoice, Tiles

__all__ = [
    "PassSeconds",
    "RunPlan",
    "UsePlan",
    "copy_rate",
    "first_and_further",
    "hop_seconds",
    "num_hops",
    "run_seconds",
    "tiled_seconds",
]

# What a link is assumed to move where it was not measured: only to compare choices, no seconds are shown for it.
ASSUMED_BYTES_PER_S = 25e9

PassSeconds = Callable[[int, Tiles | None], float | None]
"""Returns what one forward of a use takes, by its number in the run, in one piece or in tiles; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePlan:
    """One use of a component in a run, as the plan expects it."""

    use: Use
    pass_s: float | None
    """What one of its forwards takes; None where that is not known."""
    loaded: Mapping[str, int]
    """The bytes that are copied to each device before it computes."""
    load_s: float | None
    evicted: tuple[tuple[str, str, int], ...] = ()
    """What has to leave for it: component, device, and how many bytes of it."""
    in_tiles: TileChoice | None = None
    """The tiles in which it is computed; None: in one piece."""
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By device, what each component has there while it computes; its own devices alone, its home first."""

    @property
    def seconds(self) -> float | None:
        """What the use takes, with what is loaded for it; None where either is not known."""
        if self.pass_s is None or self.load_s is None:
            return None
        return self.load_s + self.use.num_passes * self.pass_s

    def peak_bytes(self, device: str) -> int:
        """Return what weights and activations take of a device; activations that are not known count nothing."""
        return sum(self.held.get(device, {}).values()) + self.activation_bytes(device)

    def activation_bytes(self, device: str) -> int:
        """Return what its forwards take of a device beside weights, as far as that is known."""
        if device not in self.held:
            return 0
        if self.in_tiles is None:
            return self.use.activation_bytes or 0
        expected = self.in_tiles.expected_bytes
        return beside_tiles(self.use, self.in_tiles) if expected is None else self.use.held_bytes + expected

    def text(self) -> str:
        """Return the use in one line for people."""
        one = f"{format_seconds(self.pass_s)} each" if self.pass_s is not None else "time unknown"
        times = f"{self.use.num_passes} forwards, {one}" if self.use.num_passes != 1 else one.removesuffix(" each")
        what = f" ({self.use.what})" if self.use.what else ""
        parts = [f"{self.use.component}{what}: {times}"]
        if any(self.loaded.values()):
            took = f" in {format_seconds(self.load_s)}" if self.load_s is not None else ""
            parts.append(f"loads {format_bytes(sum(self.loaded.values()))}{took}")
        parts += [f"evicts {format_bytes(num_bytes)} of {name} on {device}" for name, device, num_bytes in self.evicted]
        if self.in_tiles is not None:
            parts.append(f"in tiles of {self.in_tiles.tiles.text()}")
        if self.use.activation_bytes is None:
            parts.append("activations unknown")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            "component": self.use.component,
            "what": self.use.what,
            "num_passes": self.use.num_passes,
            "activation_bytes": self.use.activation_bytes,
            "in_tiles_bytes": beside_tiles(self.use, self.in_tiles) if self.in_tiles is not None else None,
            "tiles": self.in_tiles.tiles.text() if self.in_tiles is not None else None,
            "pass_s": self.pass_s,
            "load_s": self.load_s,
            "loaded_bytes": dict(self.loaded),
            "evicted": [
                {"component": name, "device": device, "bytes": num_bytes} for name, device, num_bytes in self.evicted
            ],
            "peak_bytes": {device: self.peak_bytes(device) for device in self.held},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The uses of a run that was run before ([Note: repeated run]), and those of the first one."""

    uses: tuple[UsePlan, ...]
    first_uses: tuple[UsePlan, ...]
    room: Mapping[str, int]
    """What weights and activations may take of each device."""

    @property
    def devices(self) -> list[str]:
        """The accelerators of the machine on which something computes."""
        return [device for device in self.room if any(device in use.held for use in self.uses)]

    @property
    def seconds(self) -> float | None:
        """What a repeated run takes; None where a part of it is not known."""
        return total_seconds(self.uses)

    @property
    def first_seconds(self) -> float | None:
        """What the first run takes; None where a part of it is not known."""
        return total_seconds(self.first_uses)

    def peak_bytes(self, device: str) -> int:
        """Return the most that weights and activations take of a device at once."""
        return max((use.peak_bytes(device) for use in (*self.first_uses, *self.uses)), default=0)

    def remaining_bytes(self, device: str) -> int:
        """Return what is left of a device at the peak; negative if activations take more than what is kept for them."""
        return self.room[device] - self.peak_bytes(device)

    @property
    def turns(self) -> list[str]:
        """Which components take turns on a device because they do not fit together, a line each."""
        lines = []
        for device in self.devices:
            pairs = [(use.use.component, name) for use in self.uses for name, at, _ in use.evicted if at == device]
            parts = sorted({part for pair in pairs for part in pair})
            if parts:
                room = format_bytes(self.room[device])
                lines.append(f"{' and '.join(parts)} take turns on {device}: {room} do not hold all parts together")
        return lines

    def text(self) -> str:
        """Return the run as lines for people."""
        first_s = self.first_seconds
        took = "time unknown" if self.seconds is None else f"{format_seconds(self.seconds)}"
        first = "" if first_s is None or self.seconds is None else f", the first time {format_seconds(first_s)}"
        lines = [f"run: {took}{first}", *(f"  {use.text()}" for use in self.uses)]
        for device in self.devices:
            peak, left = self.peak_bytes(device), self.remaining_bytes(device)
            left_text = f"{format_bytes(left)} remain" if left >= 0 else f"{format_bytes(-left)} too much"
            lines.append(f"  {device}: at most {format_bytes(peak)} of {format_bytes(self.room[device])}, {left_text}")
        lines += [f"  {device}: nothing computes there" for device in self.room if device not in self.devices]
        return "\n".join([*lines, *(f"  - {line}" for line in self.turns)])

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "first_seconds": self.first_seconds,
            "devices": {
                device: {
                    "room_bytes": self.room[device],
                    "peak_bytes": self.peak_bytes(device),
                    "remaining_bytes": self.remaining_bytes(device),
                }
                for device in self.devices
            },
            "turns": self.turns,
            "uses": [use.to_json() for use in self.uses],
            "first_uses": [use.to_json() for use in self.first_uses],
        }


def beside_tiles(use: Use, choice: TileChoice) -> int:
    """Return what a use takes of a device beside weights in these tiles, with what is there as it begins."""
    return use.held_bytes + choice.tile_bytes


def total_seconds(uses: Sequence[UsePlan]) -> float | None:
    seconds = [use.seconds for use in uses]
    return None if None in seconds else sum(second for second in seconds if second is not None)


@dataclass(slots=True)
class Holdings:
    """What the components hold of each device while the uses of a run are played."""

    room: Mapping[str, int]
    """What components may take of each device together."""
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    """By device, the bytes of each component."""
    pieces: dict[tuple[str, str], int] = field(default_factory=dict)
    """The bytes of a block of each: what leaves leaves in whole blocks."""

    def on(self, device: str) -> dict[str, int]:
        """Return what each component has of a device."""
        return {name: num_bytes for name, num_bytes in self.held.get(device, {}).items() if num_bytes}

    def left_beside(self, share: DevicePlan, component: str, others: Sequence[str]) -> int:
        """Return what activations may take of a device beside a share and what some components have there."""
        held = sum(num_bytes for name, num_bytes in self.on(share.device).items() if name in others)
        return self.room.get(share.device, 0) - share.device_bytes - held

    def enter(
        self, share: DevicePlan, component: str, beside_bytes: int, by_next_use: Sequence[str]
    ) -> tuple[int, list[tuple[str, str, int]]]:
        """Load a share; returns the bytes that are copied, and what was evicted for them.

        Args:
            beside_bytes: what its forwards take of the device.
            by_next_use: the other components, that which is used last first.
        """
        here = self.held.setdefault(share.device, {})
        own = here.get(component, 0)
        missing = sum(here.values()) - own + share.device_bytes + beside_bytes - self.room.get(share.device, 0)
        evicted = []
        for other in by_next_use if missing > 0 else ():
            held = here.get(other, 0)
            piece = self.pieces.get((other, share.device), 1)
            taken = min(held, -(-missing // piece) * piece)
            if taken > 0:
                here[other] = held - taken
                evicted.append((other, share.device, taken))
                missing -= taken
        working_bytes = share.staging_bytes + share.scratch_bytes
        here[component] = share.device_bytes
        # Of an estimate is not known which blocks stay, but how large they are at most.
        piece = share.resident_bytes // len(share.resident) if share.resident else share.streamed_block_bytes
        self.pieces[component, share.device] = max(1, piece)
        return max(0, share.device_bytes - working_bytes - max(0, own - working_bytes)), evicted


def first_and_further(
    shares: Mapping[str, Sequence[DevicePlan]],
    uses: Sequence[Use],
    machine: Machine,
    *,
    pass_s: PassSeconds,
) -> RunPlan:
    """Play a run twice: the first time nothing is on the devices, then what the first one left.

    Args:
        shares: by component, those of its plan.
    """
    holdings = Holdings({device.name: device.available_bytes for device in machine.accelerators})
    first = tuple(play(shares, uses, machine, holdings, pass_s))
    further = tuple(play(shares, uses, machine, holdings, pass_s))
    return RunPlan(first_uses=first, uses=further, room=holdings.room)


def play(
    shares: Mapping[str, Sequence[DevicePlan]],
    uses: Sequence[Use],
    machine: Machine,
    holdings: Holdings,
    pass_s: PassSeconds,
) -> Iterator[UsePlan]:
    kinds = {use.component: use.kind for use in uses}
    for number, use in enumerate(uses):
        order = [other.component for other in (*uses[number + 1 :], *uses[:number])]
        by_next_use = sorted({*order} - {use.component}, key=order.index, reverse=True)
        if use.kind == "vae":  # ([Note: room of a decode])
            by_next_use.sort(key=lambda other: kinds.get(other) in KINDS_OF_STEPS)
        loaded: dict[str, int] = {}
        evicted: list[tuple[str, str, int]] = []
        load_s: float | None = 0.0
        in_tiles: TileChoice | None = None
        for share in shares[use.component]:
            if share.device == "cpu":
                continue
            # Of a split each device is taken to need all of it: which part, no trace tells.
            beside_bytes = use.activation_bytes or 0
            # Of a split VAE nothing chooses tiles.
            if use.tiling is not None and len(shares[use.component]) == 1:
                steps = [name for name, kind in kinds.items() if kind in KINDS_OF_STEPS]
                left = holdings.left_beside(share, use.component, steps)
                in_tiles = use.tiling.choose(left - use.held_bytes)
                beside_bytes = beside_tiles(use, in_tiles) if in_tiles is not None else beside_bytes
            loaded[share.device], gone = holdings.enter(share, use.component, beside_bytes, by_next_use)
            evicted += gone
            if loaded[share.device]:
                rate = machine.device(share.device).link_bytes_per_s
                load_s = None if rate is None or load_s is None else load_s + loaded[share.device] / rate
        yield UsePlan(
            use=use,
            pass_s=pass_s(number, in_tiles.tiles if in_tiles is not None else None),
            loaded=loaded,
            load_s=load_s,
            evicted=tuple(evicted),
            in_tiles=in_tiles,
            held={device: holdings.on(device) for device in loaded},
        )


def copy_rate(device: DeviceCapacity) -> float:
    """Return how fast weights reach a device, in bytes per second: as measured, else an assumed rate."""
    return device.link_bytes_per_s or ASSUMED_BYTES_PER_S


def tiled_seconds(share: DevicePlan, tiling: Tiling, tiles: Tiles, rate: float | None) -> float | None:
    """Return what all tiles of a use take on one device, which copies what streams once for each tile.

    That hides behind computing, or takes longer, but where the staging memory holds no two blocks: then it is added.
    None where the times of the device, or of copies to it, are not known.

    Args:
        rate: how fast what streams reaches the device, in bytes per second.
    """
    times = tiling.times(tiles).get(share.device)
    if times is None:
        return None
    if not share.streamed:
        return times.pass_s
    if rate is None:
        return None
    copying_s = tiling.num_forwards(tiles) * share.streamed_bytes / rate
    overlaps = share.staging_bytes >= 2 * share.streamed_block_bytes
    return max(times.pass_s, copying_s) if overlaps else times.pass_s + copying_s


def run_seconds(shares: Sequence[DevicePlan], times: Mapping[str, BlockTimes], hop_s: float) -> float | None:
    """Return what one forward takes: computing, what of copies no compute hides, and the hops of a split.

    None where the times of a device, or of copies to it, are not known.

    Args:
        hop_s: what all hops of a forward take.
    """
    seconds = hop_s
    for index, share in enumerate(shares):
        known = times.get(share.device)
        if known is None or (share.streamed and share.pass_s is None):
            return None
        computing_s = sum(known.blocks_s[number] for number in share.blocks) + (known.other_s if index == 0 else 0.0)
        waiting_s = 0.0
        if share.pass_s is not None:
            # A pass of a share is as long as the whole forward: what it has more than the computes is waiting.
            everywhere_s = sum(
                times[each.device].blocks_s[number] for each in shares if each.device in times for number in each.blocks
            ) + (times[shares[0].device].other_s if shares[0].device in times else 0.0)
            waiting_s = max(0.0, share.pass_s - everywhere_s)
        seconds += computing_s + waiting_s
    return seconds


def hop_seconds(shares: Sequence[DevicePlan], carried_bytes: int, machine: Machine) -> float | None:
    """Return what the hops of a forward take over the slowest of the links; None where one is not known."""
    hops = num_hops(shares) if len(shares) > 1 else 0
    if not hops or not carried_bytes:
        return 0.0
    rates = [machine.device(share.device).link_bytes_per_s for share in shares]
    known = [rate for rate in rates if rate is not None]
    return hops * carried_bytes / min(known) if len(known) == len(rates) else None


def num_hops(shares: Sequence[DevicePlan]) -> int:
    """Return how often a forward crosses from device to device, and back at its end."""
    where = {number: share.device for share in shares for number in share.blocks}
    home = shares[0].device
    path = [home, *(where[number] for number in sorted(where)), home]
    return sum(1 for one, other in pairwise(path) if one != other)
