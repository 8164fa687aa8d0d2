"""What a run does to the devices: what is loaded and evicted before each use, the peaks, and how long it all takes.

[Note: repeated run] Components compute in turns. One that finds too little room has idle ones evicted: the one that is
used last first, in whole blocks, no more than are missing. The first run loads everything; in each further one the same
things leave and come back, and those are what a run costs beside its forwards.

[Note: room of a decode] For a VAE text encoders leave before anything of the model that sampled. Where that does not
suffice, and the picture is larger than the smallest tile, it is decoded in tiles that fit, and nothing of the model
leaves, unless not even the smallest tile fits, or the plan keeps more room for it ([Note: room for tiles] in
`tile_room.py`). Tiles overlap by a quarter, so together they compute more than the picture, and what streams is copied
for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..units import format_bytes, format_seconds
from .calls_at_once import devices_by_block
from .capacity import DeviceCapacity, Machine
from .device_plan import DevicePlan
from .pipeline import hop_seconds_between, hops_of_call
from .run import BlockTimes, Use
from .run_play import ColdSeconds, Entered, Holdings, PassSeconds, RunPlayer, beside_tiles
from .tiles import TileChoice

__all__ = [
    "ASSUMED_BYTES_PER_S",
    "PassSeconds",
    "RunPlan",
    "UsePlan",
    "copy_rate",
    "first_and_further",
    "hop_seconds",
    "run_seconds",
]

# What a link is assumed to move where it was not measured: only to compare choices, no seconds are shown for it.
ASSUMED_BYTES_PER_S = 25e9


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
    cold_s: float = 0.0
    """How much longer its first forward takes, because what was staged had to leave since the use before."""
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By device, what each component has there while it computes; its own devices alone, its home first."""

    @property
    def source(self) -> str:
        """Where the seconds of its forwards are from; empty where that is not said, or they are not known."""
        times = self.use.times
        if self.in_tiles is not None and self.use.tiling is not None:
            times = self.use.tiling.times(self.in_tiles.tiles)
        found = times.get(next(iter(self.loaded), "cpu"))
        return found.source if found is not None and self.pass_s is not None else ""

    @property
    def seconds(self) -> float | None:
        """What the use takes, with what is loaded for it; None where either is not known."""
        if self.pass_s is None or self.load_s is None:
            return None
        return self.load_s + self.cold_s + self.use.num_passes * self.pass_s

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
            "pass_s_from": self.source,
            "load_s": self.load_s,
            "cold_s": self.cold_s,
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


def total_seconds(uses: Sequence[UsePlan]) -> float | None:
    seconds = [use.seconds for use in uses]
    return None if None in seconds else sum(second for second in seconds if second is not None)


def first_and_further(
    shares: Mapping[str, Sequence[DevicePlan]],
    uses: Sequence[Use],
    machine: Machine,
    *,
    pass_s: PassSeconds,
    cold_s: ColdSeconds = lambda number, tiles: 0.0,
) -> RunPlan:
    """Play a run twice: the first time nothing is on the devices, then what the first one left.

    Args:
        shares: by component, those of its plan.
    """
    player = RunPlayer(uses, machine)
    holdings = Holdings(player.room)
    first, further = (
        tuple(
            planned_use(uses[entered.number], entered, holdings, machine, pass_s, cold_s)
            for entered in player.play(shares, uses, holdings, is_exact=True)
        )
        for _ in range(2)
    )
    return RunPlan(first_uses=first, uses=further, room=holdings.room)


def planned_use(
    use: Use, entered: Entered, holdings: Holdings, machine: Machine, pass_s: PassSeconds, cold_s: ColdSeconds
) -> UsePlan:
    """Return a use that begins as the plan tells it."""
    in_tiles, loaded = entered.in_tiles, entered.loaded
    tiles = in_tiles.tiles if in_tiles is not None else None
    rates = {device: machine.device(device).link_bytes_per_s for device in loaded}
    parts = [(num_bytes, rates[device]) for device, num_bytes in loaded.items() if num_bytes]
    seconds = [num_bytes / rate for num_bytes, rate in parts if rate is not None]
    return UsePlan(
        use=use,
        pass_s=pass_s(entered.number, tiles),
        loaded=loaded,
        load_s=sum(seconds) if len(seconds) == len(parts) else None,
        evicted=tuple(entered.evicted),
        in_tiles=in_tiles,
        cold_s=cold_s(entered.number, tiles) if entered.is_cold else 0.0,
        held={device: holdings.on(device) for device in loaded},
    )


def copy_rate(device: DeviceCapacity) -> float:
    """Return how fast weights reach a device, in bytes per second: as measured, else an assumed rate."""
    return device.link_bytes_per_s or ASSUMED_BYTES_PER_S


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


def hop_seconds(
    shares: Sequence[DevicePlan], carried_bytes: int, machine: Machine, *, assumed: float | None = None
) -> float | None:
    """Return what the hops of a call take, and back at its end; None where a link is not known, or taken as assumed."""
    hops = hop_seconds_between([share.device for share in shares], carried_bytes, machine, assumed=assumed)
    return None if hops is None else hops_of_call(hops, devices_by_block(shares))
