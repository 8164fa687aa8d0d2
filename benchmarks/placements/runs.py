"""What a run takes as it was placed, in the virtual time of simulated devices.

A small host stands around it as the nodes do: it tells what is used next, the same run again behind the one that runs,
and a VAE whose tiles are left open is decoded in those that fit beside what stays (`nodes/pipelines/tiled_decode.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import nn

from highwater.headless import simdevice
from highwater.memory import MemoryManager, manage
from highwater.memory.api import Managed
from highwater.memory.options.marks import parse_watermarks
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner import device_plan
from highwater.memory.planner.run import Use
from highwater.memory.planner.tiles import Tiles, choose_tiles, halve_tiles
from highwater.memory.units import GIB

from .instance import HIDDEN_BYTES, Instance, Part
from .schedule import fastest_schedule

__all__ = ["Placed", "run_seconds", "with_all_residents"]

NUM_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A placement of all components: its text, their budgets, and the tiles of pictures."""

    placement: str
    profile: OffloadProfile
    tiles: Mapping[str, Tiles | None] | None = None
    """By component; None: chosen as they are decoded."""
    uses: tuple[Use, ...] = ()
    """The uses as they were planned, with what is kept for tiles that are chosen as they are decoded."""
    tries_residents: bool = False
    """Whether all residents are tried within each budget, in place of the planner's search."""

    @property
    def text(self) -> str:
        parts = [self.placement, *(str(budget) for budget in self.profile.budgets)]
        tiles = (self.tiles or {}).items()
        return ", ".join([*parts, *(f"{name} in {each.pixels} px" for name, each in tiles if each is not None)])


@contextlib.contextmanager
def with_all_residents() -> Iterator[None]:
    """In the body every plan tries all choices of residents."""
    with patch.object(device_plan, "choose_schedule", fastest_schedule):
        yield


def run_seconds(instance: Instance, modules: Mapping[str, nn.Module], placed: Placed) -> float | None:
    """Return the virtual seconds of the third run; None where it runs out of memory."""
    residents = with_all_residents() if placed.tries_residents else contextlib.nullcontext()
    with residents, simdevice.cluster([card.spec for card in instance.cards], pinned_bytes=4 * GIB), torch.no_grad():
        manager = MemoryManager()
        manager.commands.set_default_watermarks(parse_watermarks("1MiB:1MiB"))
        tiles = placed.tiles or {}
        uses = placed.uses or [part.use(tiles.get(part.name)) for part in instance.parts]
        managed = manage(
            dict(modules), placed.profile, placement=placed.placement, manager=manager, name="run", uses=uses
        )
        ids = {member.name: member.id for member in managed.members}
        seconds: list[float] = []
        try:
            for turn in range(NUM_RUNS):
                begin_s = now_s(instance)
                manager.begin_run(str(turn), "run")
                for number, part in enumerate(instance.parts):
                    manager.begin_node(part.name, part.name)
                    coming = [*instance.parts[number:], *instance.parts]
                    manager.foresee([ids[each.name]] for each in coming)
                    compute(managed, modules[part.name], part, placed)
                    now_s(instance)  # the next one needs its result
                    manager.end_node()
                manager.end_run()
                seconds.append(now_s(instance) - begin_s)
        except torch.OutOfMemoryError:
            return None
        finally:
            managed.release()
        return seconds[-1]


def compute(managed: Managed, module: nn.Module, part: Part, placed: Placed) -> None:
    """Compute a part as its node does; open tiles are halved after an out-of-memory error."""
    is_open = placed.tiles is None and part.side > 0
    tiles = fitting_tiles(managed, module, part) if is_open else (placed.tiles or {}).get(part.name)
    member = next(member for member in managed.members if member.name == part.name)
    while True:
        hidden = torch.zeros(HIDDEN_BYTES, dtype=torch.uint8, device=member.managed.primary.torch_device)
        try:
            for _ in range(part.num_passes * part.num_tiles(tiles)):
                hidden = module(hidden, part.part_of(tiles), part.tile_bytes(tiles))
            return
        except torch.OutOfMemoryError:
            smaller = halve_tiles(part.size, tiles) if is_open else None
            if smaller is None:
                raise
            tiles = smaller


def fitting_tiles(managed: Managed, module: nn.Module, part: Part) -> Tiles | None:
    """Return the tiles that fit beside what stays, and make room for them; None: in one piece."""
    vae_room = managed.manager.vae_room
    place = vae_room.place_of(module)
    if place is None:
        return None
    room = vae_room.beside(place.device, place.name)
    taken = place.missing_bytes + room.kept_bytes + HIDDEN_BYTES
    # What a plan keeps for tiles is with what a forward makes beside its input.
    choice = choose_tiles(part.size, lambda tiles: part.tile_bytes(tiles) + HIDDEN_BYTES, room.tile_bytes(place, taken))
    tiles = choice.tiles if choice is not None else None
    lacking = part.tile_bytes(tiles) + taken - room.free_bytes
    if lacking > 0 and room.idle_bytes:
        vae_room.clear(place.device, place.name, min(lacking, room.idle_bytes), "the VAE decodes")
    return tiles


def now_s(instance: Instance) -> float:
    for index in range(len(instance.cards)):
        torch.accelerator.synchronize(index)
    return simdevice.clock_s()
