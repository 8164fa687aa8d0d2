"""What happens on the devices while the uses of a run are played: what enters, what leaves for it, and in which tiles.

The rules stand in [Note: repeated run] and [Note: room of a decode] in `run_plan.py`. Searches play thousands of runs,
so what only depends on the uses is found once, and tiles are asked for once for each size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .capacity import Machine
from .device_plan import DevicePlan
from .run import KINDS_OF_STEPS, Use
from .tiles import TileChoice, Tiles

__all__ = ["ColdSeconds", "Entered", "Holdings", "PassSeconds", "Played", "RunPlayer", "beside_tiles"]

PassSeconds = Callable[[int, Tiles | None], float | None]
"""Returns what one forward of a use takes, by its number in the run, in one piece or in tiles; None: not known."""
ColdSeconds = Callable[[int, Tiles | None], float]
"""Returns how much longer the first forward of a use takes before which nothing was staged of what streams."""


class Entered(NamedTuple):
    """A use that begins."""

    number: int
    loaded: dict[str, int]
    """The bytes that are copied to each device before it computes."""
    evicted: list[tuple[str, str, int]]
    """What has to leave for it: component, device, and how many bytes of it."""
    in_tiles: TileChoice | None
    is_cold: bool
    """Whether nothing is staged of what streams: it had to leave since the use before, or never was there."""
    beside_bytes: int
    """What its forwards take of each of its devices beside weights."""


class Played(NamedTuple):
    """A run in sum."""

    seconds: float | None
    """What a repeated run takes; None where a part of it is not known."""
    overfull_bytes: int
    """What is missing of the devices beside what the watermark keeps free of weights."""
    chosen_tiles: tuple[tuple[Use, TileChoice], ...]
    """The uses that are in tiles."""


class ShareNumbers(NamedTuple):
    """What playing asks of a share, and the share itself, so that it stays."""

    share: DevicePlan
    device: str
    device_bytes: int
    working_bytes: int
    """Staging memory and scratch."""
    piece_bytes: int
    """The bytes of a block: what leaves leaves in whole blocks."""
    streams: bool

    @classmethod
    def of(cls, share: DevicePlan) -> ShareNumbers:
        # Of an estimate is not known which blocks stay, but how large they are at most.
        piece = share.resident_bytes // len(share.resident) if share.resident else share.streamed_block_bytes
        working_bytes = share.staging_bytes + share.scratch_bytes
        streams = share.streamed_bytes > 0
        return cls(share, share.device, share.device_bytes, working_bytes, max(1, piece), streams)


@dataclass(slots=True)
class Holdings:
    """What the components hold of each device while the uses of a run are played."""

    room: Mapping[str, int]
    """What components may take of each device together."""
    held: dict[str, dict[str, int]] = field(default_factory=dict)
    """By device, the bytes of each component."""
    pieces: dict[tuple[str, str], int] = field(default_factory=dict)
    """The bytes of a block of each."""

    def on(self, device: str) -> dict[str, int]:
        """Return what each component has of a device."""
        return {name: num_bytes for name, num_bytes in self.held.get(device, {}).items() if num_bytes}

    def enter(
        self, share: ShareNumbers, component: str, beside_bytes: int, by_next_use: Sequence[str]
    ) -> tuple[int, list[tuple[str, str, int]]]:
        """Load a share; returns the bytes that are copied, and what was evicted for them.

        Args:
            beside_bytes: what its forwards take of the device, but for what they take of what the watermark keeps free.
            by_next_use: the other components, that which is used last first.
        """
        here = self.held.setdefault(share.device, {})
        own = here.get(component, 0)
        missing = sum(here.values()) - own + share.device_bytes + beside_bytes - self.room.get(share.device, 0)
        evicted = []
        for other in by_next_use if missing > 0 else ():
            held = here.get(other, 0)
            if not held:
                continue
            piece = self.pieces.get((other, share.device), 1)
            taken = min(held, -(-missing // piece) * piece)
            here[other] = held - taken
            evicted.append((other, share.device, taken))
            missing -= taken
            if missing <= 0:
                break
        here[component] = share.device_bytes
        self.pieces[component, share.device] = share.piece_bytes
        return max(0, share.device_bytes - share.working_bytes - max(0, own - share.working_bytes)), evicted


class RunPlayer:
    """Plays the uses of a run on a machine.

    Args:
        uses: in order; what they keep for tiles may be another each time.
    """

    def __init__(self, uses: Sequence[Use], machine: Machine) -> None:
        self.uses = uses
        self.room = {device.name: device.available_bytes for device in machine.accelerators}
        self.kept_free = {device.name: device.kept_free_bytes for device in machine.accelerators}
        self.rates = {device.name: device.link_bytes_per_s for device in machine.accelerators}
        self.kinds = {use.component: use.kind for use in uses}
        self.steps = [name for name, kind in self.kinds.items() if kind in KINDS_OF_STEPS]
        self.orders = [self.order_at(number) for number in range(len(uses))]
        self.numbers: dict[int, ShareNumbers] = {}
        self.tiles: dict[int, list[tuple[int, float, TileChoice | None]]] = {}
        """By use, the tiles that were chosen with some bytes left, at least and at most."""

    def order_at(self, number: int) -> list[str]:
        """Return the other components as they leave for a use: that which is used last first."""
        use = self.uses[number]
        order = [other.component for other in (*self.uses[number + 1 :], *self.uses[:number])]
        by_next_use = sorted({*order} - {use.component}, key=order.index, reverse=True)
        if use.kind == "vae":  # ([Note: room of a decode])
            by_next_use.sort(key=lambda other: self.kinds.get(other) in KINDS_OF_STEPS)
        return by_next_use

    def numbers_of(self, share: DevicePlan) -> ShareNumbers:
        found = self.numbers.get(id(share))
        if found is None:
            found = self.numbers[id(share)] = ShareNumbers.of(share)
        return found

    def play(
        self, shares: Mapping[str, Sequence[DevicePlan]], uses: Sequence[Use], holdings: Holdings, *, is_exact: bool
    ) -> Iterator[Entered]:
        """Yield the uses as they begin, each after its components entered.

        Args:
            is_exact: whether tiles tell what was left for them; in sums that does not matter.
        """
        for number, use in enumerate(uses):
            own = shares[use.component]
            loaded: dict[str, int] = {}
            evicted: list[tuple[str, str, int]] = []
            in_tiles: TileChoice | None = None
            is_cold, beside_bytes = False, 0
            for each in own:
                if each.device == "cpu":
                    continue
                share = self.numbers_of(each)
                here = holdings.held.get(share.device, {})
                beside_bytes = use.activation_bytes or 0
                dips_bytes = 0
                if len(own) > 1:
                    # Each device is taken to need all of it, and what blocks hand on: which part, no trace tells.
                    beside_bytes += 2 * use.carried_bytes
                elif use.tiling is not None:  # of a split VAE nothing chooses tiles
                    beside = sum(here.get(name, 0) for name in self.steps if name != use.component)
                    left = self.room.get(share.device, 0) - share.device_bytes - beside - use.held_bytes
                    left = max(left, 0 if use.tiling.beside_model else use.tile_bytes or 0)
                    in_tiles = use.tiling.choose(left) if is_exact else self.choose(number, use, left)
                    beside_bytes = beside_tiles(use, in_tiles) if in_tiles is not None else beside_bytes
                    if in_tiles is not None and use.tiling.beside_model:
                        dips_bytes = min(self.kept_free[share.device], max(0, in_tiles.tile_bytes - left))
                is_cold |= share.streams and here.get(use.component, 0) < share.device_bytes
                loaded[share.device], gone = holdings.enter(
                    share, use.component, beside_bytes - dips_bytes, self.orders[number]
                )
                evicted += gone
            # One forward alone stages nothing for the next one.
            is_alone = use.num_passes * use.num_calls == 1 and in_tiles is None
            is_cold |= is_alone and any(share.streamed_bytes for share in own)
            yield Entered(number, loaded, evicted, in_tiles, is_cold, beside_bytes)

    def choose(self, number: int, use: Use, left_bytes: int) -> TileChoice | None:
        """Return the tiles for what is left, but for what they tell of that."""
        known = self.tiles.setdefault(number, [])
        for least, most, choice in known:
            if least <= left_bytes <= most:
                return choice
        assert use.tiling is not None
        choice = use.tiling.choose(left_bytes)
        if choice is None:
            known.append((left_bytes, float("inf"), None))
        elif choice.fits:
            known.append((choice.tile_bytes, left_bytes, choice))
        else:
            known.append((-(1 << 62), left_bytes, choice))
        return choice

    def sum_up(
        self,
        shares: Mapping[str, Sequence[DevicePlan]],
        uses: Sequence[Use],
        *,
        pass_s: PassSeconds,
        cold_s: ColdSeconds,
        rates: Mapping[str, float | None] | None = None,
    ) -> Played:
        """Return what a repeated run takes, and whether it fits.

        Args:
            rates: how fast weights reach each device, in bytes per second; the machine's by default.
        """
        rates = self.rates if rates is None else rates
        holdings, peaks = Holdings(self.room), dict.fromkeys(self.room, 0)
        seconds: float | None = 0.0
        tiles: list[tuple[Use, TileChoice]] = []
        for is_repeated in (False, True):
            seconds = 0.0
            for number, loaded, _, in_tiles, is_cold, beside_bytes in self.play(shares, uses, holdings, is_exact=False):
                for device in loaded:
                    peaks[device] = max(peaks[device], sum(holdings.held[device].values()) + beside_bytes)
                if not is_repeated or seconds is None:
                    continue
                use, chosen = uses[number], in_tiles.tiles if in_tiles is not None else None
                if in_tiles is not None:
                    tiles.append((use, in_tiles))
                forward_s = pass_s(number, chosen)
                if forward_s is None or any(loaded[device] and not rates[device] for device in loaded):
                    seconds = None
                    continue
                seconds += use.num_passes * forward_s + (cold_s(number, chosen) if is_cold else 0.0)
                seconds += sum(num_bytes / (rates[device] or 1.0) for device, num_bytes in loaded.items() if num_bytes)
        over = sum(max(0, peaks[name] - self.room[name] - self.kept_free[name]) for name in self.room)
        return Played(seconds, over, tuple(tiles))


def beside_tiles(use: Use, choice: TileChoice) -> int:
    """Return what a use takes of a device beside weights in these tiles, with what is there as it begins."""
    return use.held_bytes + choice.tile_bytes
