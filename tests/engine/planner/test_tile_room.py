"""How much of a device a plan keeps for a decode: what makes the whole run shortest, and nothing that the user set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.request import PlanRequest, plan_request
from highwater.memory.planner.run import BlockTimes, Use
from highwater.memory.planner.run_plan import UsePlan
from highwater.memory.planner.tile_room import room_levels, whole_room, with_room
from highwater.memory.planner.tiles import TileChoice, TiledSize, Tiles, choose_tiles
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

LINK = 10e9


def part(name: str, kind: str, num_blocks: int, block_bytes: int) -> Component:
    def block(path: str) -> Block:
        spec = TensorSpec(name=f"{path}.weight", dtype="BF16", shape=(block_bytes // 2, 1))
        return Block(name=path, tensors=(spec,))

    blocks = tuple(block(f"layers.{number}") for number in range(num_blocks))
    return Component(name=name, kind=kind, blocks=blocks, non_block=Block(name="", tensors=()), has_file=True)


@dataclass(frozen=True)
class InPixels:
    """The tiles of a square picture, in proportion to its bytes and its seconds."""

    side: int
    whole_bytes: int
    whole: Mapping[str, BlockTimes]
    beside_model: bool = False
    least_bytes: int = 0
    """What it may take in any case."""

    @property
    def size(self) -> TiledSize:
        return TiledSize(height=self.side, width=self.side)

    def cost(self, tiles: Tiles | None) -> int:
        return self.whole_bytes if tiles is None else self.whole_bytes * tiles.volume(self.size) // self.side**2

    def choose(self, left_bytes: int) -> TileChoice | None:
        return choose_tiles(self.size, self.cost, max(left_bytes, self.least_bytes))

    def num_forwards(self, tiles: Tiles) -> int:
        return tiles.count(self.size)

    def work(self, tiles: Tiles) -> float:
        return tiles.work(self.size)

    def times(self, tiles: Tiles) -> dict[str, BlockTimes]:
        return {
            device: BlockTimes(blocks_s=tuple(self.work(tiles) * second for second in times.blocks_s))
            for device, times in self.whole.items()
        }


def use(component: Component, passes: int, block_s: Sequence[float], decode_bytes: int = 0, side: int = 1024) -> Use:
    """Return a use of so many seconds a block, by device; with bytes to decode it may be in tiles."""
    times = {
        f"gpu:{index}": BlockTimes(blocks_s=(second,) * len(component.blocks)) for index, second in enumerate(block_s)
    }
    return Use(
        component=component.name, kind=component.kind, num_passes=passes, activation_bytes=decode_bytes,
        tiling=InPixels(side, decode_bytes, times) if decode_bytes else None, times=times,
    )  # fmt: skip


def request(parts: Sequence[Component], uses: Sequence[Use], *rooms: int) -> PlanRequest:
    devices = [DeviceCapacity(name="cpu", total_bytes=256 * GIB, available_bytes=256 * GIB)]
    devices += [
        DeviceCapacity(name=f"gpu:{index}", total_bytes=room, available_bytes=room, link_bytes_per_s=LINK)
        for index, room in enumerate(rooms)
    ]
    machine = Machine(devices=tuple(devices), pinned_bytes=128 * GIB)
    return PlanRequest(components=tuple(parts), machine=machine, uses=tuple(uses))


def in_one_piece(asked: PlanRequest) -> PlanRequest:
    """Return what keeps room for the whole picture, as plans did before."""
    rooms = {use.component: whole_room(use) for use in asked.uses if use.tiling is not None}
    return replace(asked, uses=tuple(with_room(asked.uses, rooms)))


def seconds(plan: Plan) -> float:
    assert plan.run is not None and plan.run.seconds is not None
    return plan.run.seconds


def decode_of(plan: Plan) -> UsePlan:
    assert plan.run is not None
    return plan.run.uses[-1]


MODEL, VAE = part("transformer", "diffusion", 10, 100 * MIB), part("vae", "vae", 4, 50 * MIB)


def test_a_decode_is_in_tiles_where_one_piece_would_send_the_vae_to_a_slower_device() -> None:
    uses = [use(MODEL, 20, (0.001, 0.01)), use(VAE, 1, (0.02, 0.2), decode_bytes=1500 * MIB)]
    asked = request([MODEL, VAE], uses, 1900 * MIB, 1900 * MIB)
    plan, whole = plan_request(asked), plan_request(in_one_piece(asked))
    assert decode_of(whole).in_tiles is None
    assert decode_of(plan).in_tiles is not None and seconds(plan) < seconds(whole) * 0.99
    assert plan["vae"].shares[0].device == "gpu:0"
    # What is kept for them stands in the uses, which whoever carries out the plan is given.
    assert decode_of(plan).use.tile_bytes == decode_of(plan).in_tiles.tile_bytes
    assert plan["vae"].shares[0].keeps_bytes < 1500 * MIB


def test_a_decode_is_in_one_piece_where_that_costs_nothing() -> None:
    asked = request([MODEL, VAE], [use(MODEL, 20, (0.001,)), use(VAE, 1, (0.02,), decode_bytes=1500 * MIB)], 4 * GIB)
    last = decode_of(plan_request(asked))
    assert last.in_tiles is None and last.use.tile_bytes == 1500 * MIB


def test_what_was_set_stays_and_only_tiles_are_chosen() -> None:
    uses = [use(MODEL, 20, (0.001, 0.01)), use(VAE, 1, (0.02, 0.2), decode_bytes=1500 * MIB)]
    asked = request([MODEL, VAE], uses, 1600 * MIB, 1900 * MIB)
    names = [MODEL.name, VAE.name]
    devices = ["cpu", "gpu:0", "gpu:1"]
    profile = OffloadProfile(budgets=(BudgetItem(target="vae", limit_bytes=120 * MIB),))
    asked = replace(
        asked, profile=profile, placement=parse_placement("*=gpu:0:pinned", devices=devices, components=names)
    )
    plan, whole = plan_request(asked), plan_request(in_one_piece(asked))
    assert plan.profile == profile
    assert [share.device for each in plan.components for share in each.shares] == ["gpu:0", "gpu:0"]
    assert plan["vae"].shares[0].device_bytes <= 120 * MIB
    assert seconds(plan) <= seconds(whole)


def beside_the_model(decode: Use, least_bytes: int = 0) -> Use:
    assert isinstance(decode.tiling, InPixels)
    return replace(decode, tiling=replace(decode.tiling, beside_model=True, least_bytes=least_bytes))


def evicted_for_the_decode(plan: Plan) -> list[str]:
    assert plan.run is not None
    return [name for uses in (plan.run.first_uses, plan.run.uses) for name, _, _ in uses[-1].evicted]


def test_of_the_model_nothing_leaves_for_a_decode_beside_it() -> None:
    """With a little of it gone the picture would be decoded in one piece, and the run shorter."""
    sampling, decoding = use(MODEL, 20, (0.001,)), use(VAE, 1, (0.2,), decode_bytes=1500 * MIB)
    asked = request([MODEL, VAE], [sampling, decoding], 2650 * MIB)
    asked = replace(asked, profile=OffloadProfile(budgets=(BudgetItem(target="gpu:0", limit_bytes=4 * GIB),)))
    plan = plan_request(asked)
    assert decode_of(plan).in_tiles is None and evicted_for_the_decode(plan) == [MODEL.name] * 2
    beside = plan_request(replace(asked, uses=(sampling, beside_the_model(decoding))))
    left = 2650 * MIB - 1000 * MIB - beside["vae"].shares[0].device_bytes
    assert decode_of(beside).in_tiles == decode_of(beside).use.tiling.choose(left)
    assert evicted_for_the_decode(beside) == []


def test_room_that_a_decode_has_in_any_case_is_not_made_before_it_is_missing() -> None:
    """It takes what the watermark keeps free, then of the model."""
    sampling, decoding = use(MODEL, 20, (0.001,)), use(VAE, 1, (0.2,), decode_bytes=1500 * MIB)
    asked = request([MODEL, VAE], [sampling, beside_the_model(decoding, 700 * MIB)], 1400 * MIB)
    cpu, gpu = asked.machine.devices
    for kept_free, gone in ((600 * MIB, []), (0, [MODEL.name] * 2)):
        devices = cpu, replace(gpu, kept_free_bytes=kept_free)
        plan = plan_request(replace(asked, machine=replace(asked.machine, devices=devices)))
        choice = decode_of(plan).in_tiles
        assert choice is not None and 200 * MIB < choice.tile_bytes <= 700 * MIB
        assert evicted_for_the_decode(plan) == gone


def test_room_that_was_given_is_kept() -> None:
    asked = request([VAE], [replace(use(VAE, 1, (0.02,), decode_bytes=1500 * MIB), tile_bytes=400 * MIB)], 1000 * MIB)
    assert list(room_levels(asked.uses[0])) == []
    last = decode_of(plan_request(asked))
    assert last.use.tile_bytes == 400 * MIB and last.in_tiles is not None


def test_the_least_tiles_of_each_number_are_looked_at() -> None:
    decode = use(VAE, 1, (0.02,), decode_bytes=1500 * MIB)
    tiling = decode.tiling
    assert tiling is not None
    whole, *levels = room_levels(decode)
    assert whole == 1500 * MIB and levels == sorted(levels, reverse=True)
    choices = [tiling.choose(level) for level in levels]
    counts = [tiling.num_forwards(choice.tiles) for choice in choices if choice is not None]
    assert counts == sorted(set(counts)) and len(counts) == len(levels)


def test_small_tiles_have_to_save_a_part_of_the_run() -> None:
    """Colors may differ between tiles below 256 pixels."""
    small = [use(VAE, 1, (0.02,), decode_bytes=600 * MIB, side=320)]
    last = decode_of(plan_request(request([VAE], small, 600 * MIB)))
    assert last.in_tiles is not None and not last.in_tiles.is_small
    # With room for none other there is no choice.
    last = decode_of(plan_request(request([VAE], small, 300 * MIB)))
    assert last.in_tiles is not None and last.in_tiles.is_small


@settings(max_examples=10)
@given(
    rooms=st.lists(st.integers(600, 3000), min_size=1, max_size=2),
    blocks=st.lists(st.tuples(st.integers(1, 5), st.integers(20, 200), st.integers(1, 30)), min_size=2, max_size=3),
    decode_mib=st.integers(200, 2000),
)
def test_tiles_never_make_a_run_longer_nor_take_more_than_there_is(
    rooms: list[int], blocks: list[tuple[int, int, int]], decode_mib: int
) -> None:
    kinds = ("diffusion", "vae") if len(blocks) == 2 else ("text", "diffusion", "vae")
    parts = [part(f"{kinds[n]}_{n}", kinds[n], count, size * MIB) for n, (count, size, _) in enumerate(blocks)]
    uses = [
        use(
            each, 8 if each.kind == "diffusion" else 1, (blocks[n][2] / 1000, blocks[n][2] / 500)[: len(rooms)],
            decode_mib * MIB if each.kind == "vae" else 0,
        )
        for n, each in enumerate(parts)
    ]  # fmt: skip
    asked = request(parts, uses, *(room * MIB for room in rooms))
    plan, whole = plan_request(asked), plan_request(in_one_piece(asked))
    assert plan.run is not None and whole.run is not None
    if all(whole.run.remaining_bytes(device) >= 0 for device in whole.run.devices):
        assert seconds(plan) <= seconds(whole) * 1.01
    for planned in plan.components:
        for share in planned.shares:
            room = next(each.available_bytes for each in asked.machine.devices if each.name == share.device)
            assert share.device_bytes <= room
    again = plan_request(asked)
    assert again.placement == plan.placement and seconds(again) == pytest.approx(seconds(plan))
