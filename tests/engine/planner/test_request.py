"""One request plans everything: the devices with which a run takes least time, and what the run does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.options.budget import BudgetItem
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner.capacity import DeviceCapacity, Machine, PeerLink
from highwater.memory.planner.plan import Plan
from highwater.memory.planner.request import PlanRequest, plan_request, plan_together
from highwater.memory.planner.run import BlockTimes, Stretch, Use
from highwater.memory.planner.tiles import TileChoice, TiledSize, Tiles, choose_tiles
from highwater.memory.planner.workload import COPY_LATENCY_S
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.component import Block, Component, TensorSpec

LINK = 10e9


def part(name: str, kind: str, num_blocks: int, block_bytes: int) -> Component:
    def block(path: str, num_bytes: int) -> Block:
        return Block(name=path, tensors=(TensorSpec(name=f"{path}.weight", dtype="BF16", shape=(num_bytes // 2, 1)),))

    blocks = tuple(block(f"layers.{number}", block_bytes) for number in range(num_blocks))
    return Component(name=name, kind=kind, blocks=blocks, non_block=block("", MIB), has_file=True)


def machine(*available: int, link: float | None = LINK) -> Machine:
    devices = [DeviceCapacity(name="cpu", total_bytes=256 * GIB, available_bytes=256 * GIB)]
    devices += [
        DeviceCapacity(name=f"gpu:{index}", total_bytes=room, available_bytes=room, link_bytes_per_s=link)
        for index, room in enumerate(available)
    ]
    return Machine(devices=tuple(devices), pinned_bytes=128 * GIB)


def ask(*parts: Component, on: Machine, uses: Sequence[Use] = (), placement: str = "auto") -> Plan:
    names = [component.name for component in parts]
    return plan_request(
        PlanRequest(
            components=parts,
            machine=on,
            placement=parse_placement(placement, devices=[device.name for device in on.devices], components=names),
            uses=tuple(uses),
        )
    )


def devices_of(plan: Plan, name: str) -> list[str]:
    return [share.device for share in plan[name].shares]


TEXT = part("text_encoder", "text", 10, 100 * MIB)
MODEL = part("transformer", "diffusion", 20, 100 * MIB)
VAE = part("vae", "vae", 4, 20 * MIB)


def test_what_fits_together_is_on_the_device_with_most_memory():
    plan = ask(TEXT, MODEL, VAE, on=machine(8 * GIB, 6 * GIB))
    assert [devices_of(plan, name) for name in ("text_encoder", "transformer", "vae")] == [["gpu:0"]] * 3


def test_what_does_not_fit_beside_the_model_stays_loaded_on_the_other_device():
    plan = ask(TEXT, MODEL, on=machine(int(2.5 * GIB), int(1.5 * GIB)))
    assert devices_of(plan, "transformer") == ["gpu:0"]
    assert devices_of(plan, "text_encoder") == ["gpu:1"]
    assert any("stays loaded beside transformer on gpu:0" in line for line in plan["text_encoder"].reasons)
    assert not plan["transformer"].streams and not plan["text_encoder"].streams


def test_a_model_that_no_device_holds_is_split_over_both():
    run = [Use(component="transformer", num_passes=20)]
    plan = ask(MODEL, on=machine(int(1.5 * GIB), int(1.2 * GIB)), uses=run)
    assert sorted(devices_of(plan, "transformer")) == ["gpu:0", "gpu:1"]
    assert not plan["transformer"].streams
    assert any("would stream" in line for line in plan["transformer"].reasons)


def test_a_model_of_which_nothing_is_known_stays_on_one_device():
    """Its own code may not bear a split."""
    plan = ask(MODEL, on=machine(int(1.5 * GIB), int(1.2 * GIB)))
    assert devices_of(plan, "transformer") == ["gpu:0"] and plan["transformer"].streams


def test_blocks_that_share_a_weight_are_not_split():
    first, *others = MODEL.blocks
    (weight,) = first.tensors
    tied = replace(first, tensors=(replace(weight, other_names=("layers.5.weight",)),))
    run = [Use(component="transformer", num_passes=20)]
    plan = ask(replace(MODEL, blocks=(tied, *others)), on=machine(int(1.5 * GIB), int(1.2 * GIB)), uses=run)
    assert devices_of(plan, "transformer") == ["gpu:0"]


def test_nothing_is_placed_where_its_activations_do_not_fit_if_there_is_room_elsewhere():
    slow, fast = times(20, 0.002), times(20, 0.001)
    at = {"gpu:0": fast, "gpu:1": slow}
    used = Use(component="transformer", num_passes=20, activation_bytes=2 * GIB, times=at)
    plan = ask(MODEL, on=machine(int(1.9 * GIB), 8 * GIB), uses=[used])
    assert devices_of(plan, "transformer") == ["gpu:1"]


def test_a_forward_that_streams_takes_what_its_host_launches_while_weights_are_copied():
    """Kernels of a block that waits for its weights are launched meanwhile: not first copied, then launched."""
    block_s = 100 * MIB / LINK
    known = BlockTimes(blocks_s=(block_s,) * 20)
    launched = tuple(Stretch(block=n, launch_s=block_s, busy_s=0.0, end_s=block_s) for n in range(20))
    here, taken = machine(int(0.25 * GIB)), []
    for times_ in (known, replace(known, stretches=launched)):
        plan = ask(MODEL, on=here, uses=[Use(component="transformer", num_passes=20, times={"gpu:0": times_})])
        assert plan["transformer"].streams and plan.run is not None
        taken.append(plan.run.uses[0].pass_s)
    one_by_one, meanwhile = taken
    assert 20 * block_s <= meanwhile < one_by_one


def test_what_the_user_placed_stays_there():
    plan = ask(TEXT, MODEL, on=machine(8 * GIB, 6 * GIB), placement="text=gpu:1,transformer=gpu:1&gpu:0@30%")
    assert devices_of(plan, "text_encoder") == ["gpu:1"]
    assert devices_of(plan, "transformer") == ["gpu:1", "gpu:0"]


def test_the_text_of_the_plan_gives_the_same_plan_again():
    on = machine(int(1.5 * GIB), int(1.2 * GIB))
    plan = ask(TEXT, MODEL, VAE, on=on)
    again = ask(TEXT, MODEL, VAE, on=on, placement=plan.placement)
    assert [replace(one, choices=()) for one in again.components] == [
        replace(other, choices=()) for other in plan.components
    ]


def times(num_blocks: int, block_s: float) -> BlockTimes:
    return BlockTimes(blocks_s=(block_s,) * num_blocks, other_s=block_s)


def use(component: Component, passes: int = 1, activations: int = 0, block_s: float = 0.001) -> Use:
    at = {f"gpu:{index}": times(len(component.blocks), block_s) for index in range(3)}
    return Use(component=component.name, num_passes=passes, activation_bytes=activations, times=at)


def test_a_run_is_told_in_bytes_and_seconds():
    plan = ask(TEXT, MODEL, on=machine(8 * GIB), uses=[use(TEXT), use(MODEL, 20, 2 * GIB)])
    assert plan.run is not None
    text, model = plan.run.first_uses
    assert text.loaded == {"gpu:0": TEXT.weight_bytes}
    assert text.load_s == TEXT.weight_bytes / LINK
    assert abs(model.pass_s - 0.021) < 1e-9
    # The second run finds both loaded.
    assert [use.loaded for use in plan.run.uses] == [{"gpu:0": 0}, {"gpu:0": 0}]
    assert plan.run.peak_bytes("gpu:0") == TEXT.weight_bytes + MODEL.weight_bytes + 2 * GIB
    assert abs(plan.run.seconds - (0.011 + 20 * 0.021)) < 1e-9


def test_parts_that_do_not_fit_together_take_turns_and_the_plan_says_so():
    run = [use(TEXT), use(MODEL, 20)]
    plan = ask(TEXT, MODEL, on=machine(int(2.5 * GIB)), uses=run, placement="gpu:0:device")
    assert plan.run is not None
    text, model = plan.run.uses
    # Whole blocks leave.
    missing = -(-(TEXT.weight_bytes + MODEL.weight_bytes - int(2.5 * GIB)) // (100 * MIB)) * 100 * MIB
    assert model.evicted == (("text_encoder", "gpu:0", missing),)
    assert text.evicted == (("transformer", "gpu:0", missing),)
    assert "take turns on gpu:0" in plan.text()


class InPixels:
    """A VAE of images that takes 512 bytes for each pixel, and a microsecond for a thousand of them."""

    beside_model = False

    def __init__(self, size: TiledSize) -> None:
        self.size = size

    def cost(self, tiles: Tiles | None) -> int:
        return 512 * (tiles.volume(self.size) if tiles is not None else self.size.height * self.size.width)

    def choose(self, left_bytes: int) -> TileChoice | None:
        return choose_tiles(self.size, self.cost, left_bytes)

    def num_forwards(self, tiles: Tiles) -> int:
        return tiles.count(self.size)

    def work(self, tiles: Tiles) -> float:
        return tiles.work(self.size)

    def times(self, tiles: Tiles) -> dict[str, BlockTimes]:
        seconds = tiles.work(self.size) * self.size.height * self.size.width * 1e-9
        return {"gpu:0": BlockTimes(blocks_s=(seconds / 4,) * 4)}


def test_a_decode_that_does_not_fit_is_tiled_and_nothing_of_the_model_leaves():
    tiling = InPixels(TiledSize(height=2048, width=2048))
    decode = replace(use(VAE, 1, 2 * GIB), kind="vae", held_bytes=10 * MIB, tiling=tiling)
    sample = replace(use(MODEL, 20), kind="diffusion")
    plan = ask(MODEL, VAE, on=machine(3 * GIB), uses=[sample, decode])
    assert plan.run is not None
    last = plan.run.uses[-1]
    assert last.evicted == ()
    assert last.in_tiles == tiling.choose(3 * GIB - MODEL.weight_bytes - VAE.weight_bytes - 10 * MIB)
    assert last.in_tiles is not None and last.in_tiles.fits
    assert plan.run.remaining_bytes("gpu:0") >= 0
    # What tiles have in common is computed more than once.
    tiles = last.in_tiles.tiles
    assert last.pass_s == pytest.approx(tiles.work(tiling.size) * 2048 * 2048 * 1e-9)
    assert f"in tiles of {tiles.text()}" in last.text()
    whole = ask(MODEL, VAE, on=machine(3 * GIB), uses=[sample, replace(decode, tiling=None)])
    assert whole.run is not None and whole.run.uses[-1].evicted


def test_what_streams_is_copied_once_for_each_tile():
    tiling = InPixels(TiledSize(height=2048, width=2048))
    decode = replace(use(VAE, 1, 2 * GIB), kind="vae", tiling=tiling)
    request = PlanRequest(
        components=(VAE,),
        machine=machine(GIB),
        placement=parse_placement("gpu:0:pinned", devices=["cpu", "gpu:0"], components=["vae"]),
        profile=OffloadProfile(budgets=(BudgetItem(target="vae", limit_bytes=21 * MIB),)),
        uses=(decode,),
    )
    (share,), run = plan_request(request)["vae"].shares, plan_request(request).run
    assert run is not None and share.streamed
    last = run.uses[-1]
    assert last.in_tiles is not None
    tiles = last.in_tiles.tiles
    assert tiles.count(tiling.size) > 1
    # The staging memory holds less than two blocks, so computing waits for each copy.
    assert share.staging_bytes < 2 * share.streamed_block_bytes
    copying_s = tiles.count(tiling.size) * (share.streamed_bytes / LINK + len(share.streamed) * COPY_LATENCY_S)
    assert last.pass_s == pytest.approx(copying_s + tiling.times(tiles)["gpu:0"].pass_s)


def test_times_of_other_blocks_are_not_used():
    """As of a model that is cut into smaller blocks than those that were traced."""
    plan = ask(MODEL, on=machine(8 * GIB), uses=[replace(use(MODEL), times={"gpu:0": times(7, 0.001)})])
    assert plan.run is not None and plan.run.seconds is None


def test_no_seconds_are_made_up():
    plan = ask(MODEL, on=machine(8 * GIB, link=None), uses=[Use(component="transformer", num_passes=20)])
    assert plan.run is not None
    assert plan.run.seconds is None and plan.run.uses[0].pass_s is None
    assert "time unknown" in plan.text() and "activations unknown" in plan.text()


def test_a_part_that_the_faster_device_does_not_hold_is_split_though_the_slower_one_holds_it():
    slow, fast = times(20, 0.004), times(20, 0.001)
    used = Use(component="transformer", num_passes=20, activation_bytes=0, times={"gpu:0": slow, "gpu:1": fast})
    plan = ask(MODEL, on=machine(9 * GIB, int(1.5 * GIB)), uses=[used])
    blocks = {share.device: len(share.blocks) for share in plan["transformer"].shares}
    assert not plan["transformer"].streams and blocks["gpu:1"] > blocks["gpu:0"] > 0


def test_activations_are_kept_free_of_weights():
    plan = ask(MODEL, on=machine(int(2.5 * GIB)), uses=[use(MODEL, 20, GIB)])
    share = plan["transformer"].shares[0]
    assert share.streamed and share.device_bytes + GIB <= int(2.5 * GIB)
    assert any("predicted for this workflow" in line for line in plan["transformer"].reasons)


def test_the_faster_device_computes_what_fits_both():
    slow, fast = times(20, 0.002), times(20, 0.001)
    used = Use(component="transformer", num_passes=20, activation_bytes=0, times={"gpu:0": slow, "gpu:1": fast})
    plan = ask(MODEL, on=machine(9 * GIB, 8 * GIB), uses=[used])
    assert devices_of(plan, "transformer") == ["gpu:1"]
    assert "gpu:1, with which a run takes least time" in plan.text()


@settings(max_examples=25)
@given(
    rooms=st.lists(st.integers(300, 4000), min_size=2, max_size=3),
    blocks=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 150)), min_size=1, max_size=3),
)
def test_no_placement_of_single_devices_is_predicted_faster(rooms: list[int], blocks: list[tuple[int, int]]) -> None:
    kinds = ("text", "diffusion", "vae")
    parts = [
        part(f"{kind}_{number}", kind, count, size * MIB)
        for number, (kind, (count, size)) in enumerate(zip(kinds, blocks, strict=False))
    ]
    on = machine(*(room * MIB for room in rooms))
    uses = [use(component, 20 if component.kind == "diffusion" else 1) for component in parts]
    plan = ask(*parts, on=on, uses=uses)
    assert plan.run is not None and plan.run.seconds is not None
    names = [device.name for device in on.accelerators]
    for devices in product(names, repeat=len(parts)):
        text = ",".join(f"{component.name}={device}" for component, device in zip(parts, devices, strict=True))
        other = ask(*parts, on=on, uses=uses, placement=text)
        assert other.run is not None and other.run.seconds is not None
        assert plan.run.seconds <= other.run.seconds * 1.1, text


def with_peer(on: Machine, bytes_per_s: float | None) -> Machine:
    """Return the machine whose first GPU reaches the second one's memory at that speed."""
    cpu, first, *others = on.devices
    link = PeerLink(device="gpu:1", is_direct=True, bytes_per_s=bytes_per_s)
    return replace(on, devices=(cpu, replace(first, peers=(link,)), *others))


def test_blocks_stream_from_another_gpu_where_that_is_faster_than_from_ram():
    """Its own memory is too slow to compute with: the second card is only a store."""
    slow = {"gpu:0": times(20, 0.001), "gpu:1": times(20, 0.1)}
    used = Use(component="transformer", num_passes=20, activation_bytes=0, times=slow)
    on = machine(int(1.2 * GIB), 4 * GIB)
    stored = ask(MODEL, on=with_peer(on, 5 * LINK), uses=[used])
    assert stored["transformer"].store == "gpu:1" and devices_of(stored, "transformer") == ["gpu:0"]
    assert "faster than from RAM" in stored.text()
    # Of ways that are as fast, that which leaves RAM free.
    stored = ask(MODEL, on=with_peer(on, LINK), uses=[used])
    assert stored["transformer"].store == "gpu:1" and "as fast as from RAM" in stored.text()
    for speed in (None, LINK / 2):
        assert ask(MODEL, on=with_peer(on, speed), uses=[used])["transformer"].store == ""


def test_nothing_is_stored_where_another_part_computes():
    slow = {"gpu:0": times(20, 0.001), "gpu:1": times(20, 0.1)}
    used = Use(component="transformer", num_passes=20, activation_bytes=0, times=slow)
    on = with_peer(machine(int(1.2 * GIB), 4 * GIB), 5 * LINK)
    plan = ask(TEXT, MODEL, on=on, uses=[use(TEXT), used], placement="text_encoder=gpu:1")
    assert plan["transformer"].store == ""


def test_several_loaders_name_one_limit_of_page_locked_memory() -> None:
    """What the first one takes leaves less to the second, and is no other limit."""
    on = replace(machine(GIB), pinned_bytes=int(1.2 * GIB))
    texts = replace(TEXT, has_file=False), replace(MODEL, has_file=False), replace(VAE, has_file=False)
    plans, _ = plan_together([PlanRequest(components=(each,), machine=on) for each in texts], ())
    told = [
        line[0]
        for plan in plans
        for reason in plan.components[0].reasons
        if (line := re.findall(r"the limit of page-locked memory for all components is ([\d.]+\w+)", reason))
    ]
    assert told == ["1.20GiB"] * len(told) and len(told) > 1


@pytest.mark.parametrize("ceiling_mib", [0, 3, 6])
def test_a_hosts_ceiling_holds_on_the_first_device_and_leaves_the_least_form(ceiling_mib: int) -> None:
    tensors = (TensorSpec(name="weight", dtype="BF16", shape=(MIB // 2,), encodable=False),)
    blocks = tuple(Block(name=f"blocks.{number}", tensors=tensors) for number in range(8))
    component = Component(name="net", kind="diffusion", blocks=blocks, non_block=Block(name="", tensors=()))
    gpus = (
        DeviceCapacity(name=f"gpu:{n}", total_bytes=GIB, available_bytes=100 * MIB, ceiling_bytes=ceiling_mib * MIB)
        for n in range(2)
    )
    cpu = DeviceCapacity(name="cpu", total_bytes=GIB, available_bytes=GIB)
    machine = Machine(devices=(cpu, *gpus), pinned_bytes=GIB)
    for text in ("gpu:0", "gpu:0&gpu:1"):
        placement = parse_placement(text, devices=["cpu", "gpu:0", "gpu:1"], components=["net"])
        plan = plan_request(PlanRequest(components=(component,), machine=machine, placement=placement))
        first, *others = plan["net"].shares
        assert first.device_bytes <= max(ceiling_mib, 1) * MIB
        assert all(not share.streamed for share in others)
