"""What a decode may take: what fits beside the model, or what its plan keeps for it, as far as that can be there."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.manager.vae_room import Room, VaePlace
from highwater.memory.planner.run import Use
from highwater.memory.units import MIB

ROOM = Room(free_bytes=10 * MIB, kept_bytes=MIB, idle_bytes=5 * MIB, model_bytes=20 * MIB)


def place(tile_bytes: int) -> VaePlace:
    return VaePlace(name="vae", device="sim:0", missing_bytes=0, tile_bytes=tile_bytes)


def test_nothing_of_the_model_counts_without_a_plan() -> None:
    assert ROOM.tile_bytes(place(0), 3 * MIB) == 12 * MIB
    assert ROOM.tile_bytes(place(8 * MIB), 3 * MIB) == 12 * MIB


def test_what_a_plan_keeps_counts_as_far_as_it_can_be_there() -> None:
    assert ROOM.tile_bytes(place(25 * MIB), 3 * MIB) == 25 * MIB
    assert ROOM.tile_bytes(place(80 * MIB), 3 * MIB) == 33 * MIB


@pytest.mark.parametrize(("tile_mib", "kept_mib"), [(2, 2), (10, 10), (20, 9)])
def test_a_vae_keeps_what_its_tiles_were_planned_with(sim: Any, tile_mib: int, kept_mib: int) -> None:
    """Or one piece, with the margin by which tiles are chosen; of a smaller picture that is no room."""
    manager = MemoryManager()
    vae = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    uses = [Use(component="vae", kind="vae", activation_bytes=9 * MIB, tile_bytes=tile_mib * MIB)]
    managed = manage({"vae": vae}, placement="gpu:0", manager=manager, uses=uses)
    try:
        (member,) = managed.members
        room = manager.vae_room.place_of(vae)
        assert room is not None and room.tile_bytes == tile_mib * MIB
        managed.expect({"vae": 9 * MIB})  # a node predicts one piece
        kept = manager.capacity.needed(member, room.device)
        assert kept is not None and kept_mib * MIB <= kept.num_bytes < (kept_mib + 1) * MIB
    finally:
        managed.release()
