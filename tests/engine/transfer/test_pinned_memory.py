"""Page-locked memory: where slabs lie, what is locked and unlocked, how much may be, and what a refusal leaves."""

from __future__ import annotations

import gc
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.transfer import pinned_memory
from highwater.memory.transfer.devices import HostMemory
from highwater.memory.transfer.link_speed import link_bytes_per_s
from highwater.memory.transfer.pinned_memory import ARENA_BYTES, Slabs, lay_out, pin_limit_bytes, pinned_used_bytes
from highwater.memory.units import GIB, KIB, MIB, PAGE_BYTES, SLAB_ALIGNMENT, align_up

UNLIMITED = 1 << 50
PAGE = PAGE_BYTES

# Bytes of each block in bf16, as diffusers builds the published models; SDXL by the modules in its blocks.
MODELS = {
    "Flux": [679_662_592] * 19 + [283_183_616] * 38,
    "Wan 14B": [702_788_608] * 40,
    "SDXL": [
        *(4_510_080, 4_510_080, 1_843_840, 13_116_160, 16_392_960, 41_664_000, 41_664_000, 7_374_080),
        *(49_169_920, 62_277_120, 701_680_640, 701_680_640, 62_277_120, 62_277_120, 701_680_640),
        *(98_329_600, 98_329_600, 81_943_040, 701_680_640, 701_680_640, 701_680_640, 29_493_760),
        *(33_602_560, 25_408_000, 21_310_720, 41_664_000, 41_664_000, 41_664_000, 7_374_080),
        *(8_814_080, 6_764_800, 6_764_800),
    ],
}

slab_sizes = st.lists(st.one_of(st.integers(0, 4096), st.integers(0, 3 * GIB)), max_size=60)
roundings = st.sampled_from([pinned_memory.round_to_pages, pinned_memory.round_to_power_of_two])


# --- Layout


@given(sizes=slab_sizes, pinned_bytes=st.integers(0, 8 * GIB), rounding=roundings)
def test_slabs_are_whole_aligned_and_disjoint_in_arenas_below_two_gib(
    sizes: list[int], pinned_bytes: int, rounding: Callable[[int], int]
) -> None:
    arenas = lay_out(sizes, pinned_bytes=pinned_bytes, rounding=rounding)
    assert sum(arena.num_bytes for arena in arenas) <= pinned_bytes
    order = [number for arena in arenas for number in arena.slabs]
    assert order == sorted(set(order)), "in the order asked, each at most once"
    for arena in arenas:
        assert arena.num_bytes < 2 * GIB and arena.num_bytes == rounding(arena.num_bytes)
        assert arena.num_bytes <= ARENA_BYTES or len(arena.slabs) == 1
        end = 0
        for number, offset in zip(arena.slabs, arena.offsets, strict=True):
            assert offset % SLAB_ALIGNMENT == 0 and offset >= end and sizes[number] > 0
            end = offset + sizes[number]
        assert end <= arena.num_bytes


@given(sizes=slab_sizes, pinned_bytes=st.integers(0, 8 * GIB), rounding=roundings)
def test_earlier_slabs_come_first(sizes: list[int], pinned_bytes: int, rounding: Callable[[int], int]) -> None:
    """What lies in no arena would not have fit when its turn came, or fits in none."""
    arenas = lay_out(sizes, pinned_bytes=pinned_bytes, rounding=rounding)
    placed = {number for arena in arenas for number in arena.slabs}
    for number, size in enumerate(sizes):
        slab_bytes = rounding(align_up(size, SLAB_ALIGNMENT))
        if number not in placed and size and slab_bytes < 2 * GIB:
            before = lay_out(sizes[:number], pinned_bytes=pinned_bytes, rounding=rounding)
            assert sum(arena.num_bytes for arena in before) + slab_bytes > pinned_bytes - ARENA_BYTES
            alone = lay_out([*sizes[:number], size], pinned_bytes=pinned_bytes, rounding=rounding)
            assert number not in {found for arena in alone for found in arena.slabs}


@given(sizes=slab_sizes)
def test_in_pages_an_arena_wastes_less_than_a_page_and_the_alignment(sizes: list[int]) -> None:
    arenas = lay_out(sizes, pinned_bytes=UNLIMITED)
    for arena in arenas:
        used = sum(sizes[number] for number in arena.slabs)
        assert arena.num_bytes - used < PAGE + SLAB_ALIGNMENT * len(arena.slabs)
    for arena, following in itertools.pairwise(arenas):
        joined = arena.num_bytes + sizes[following.slabs[0]]
        assert joined + 2 * PAGE > ARENA_BYTES, "neighbours that fit one arena share it"


@given(sizes=slab_sizes)
def test_in_powers_of_two_nothing_is_wasted_that_torch_would_not_waste(sizes: list[int]) -> None:
    arenas = lay_out(sizes, pinned_bytes=UNLIMITED, rounding=pinned_memory.round_to_power_of_two)
    aligned = [align_up(sizes[number], SLAB_ALIGNMENT) for arena in arenas for number in arena.slabs]
    assert sum(arena.num_bytes for arena in arenas) <= sum(map(pinned_memory.round_to_power_of_two, aligned))


@pytest.mark.parametrize("name", MODELS)
def test_real_models_waste_at_most_two_percent_in_few_arenas(name: str) -> None:
    sizes = MODELS[name]
    arenas = lay_out(sizes, pinned_bytes=UNLIMITED)
    assert sum(len(arena.slabs) for arena in arenas) == len(sizes), "all of it can be locked"
    locked = sum(arena.num_bytes for arena in arenas)
    assert sum(sizes) <= locked <= 1.02 * sum(sizes)
    assert sum(map(pinned_memory.round_to_power_of_two, sizes)) > 1.5 * sum(sizes), "as torch's allocator does it"
    assert len(arenas) <= 2 * locked / ARENA_BYTES + 1


def test_a_budget_in_the_middle_of_a_model_locks_its_first_blocks() -> None:
    sizes = MODELS["Flux"]
    arenas = lay_out(sizes, pinned_bytes=sum(sizes[:30]) + 40 * PAGE)
    assert [number for arena in arenas for number in arena.slabs][:30] == list(range(30))


# --- Allocation


class Waits:
    """Counts the waits before unlocking, and does them as the engine would."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        torch.accelerator.synchronize(0)


@pytest.fixture
def hardware(sim: ModuleType) -> Iterator[ModuleType]:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)], pinned_bytes=64 * MIB):
        assert pinned_used_bytes() == 0
        yield sim
        gc.collect()
        assert pinned_used_bytes() == 0


@pytest.fixture
def small_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "ARENA_BYTES", 64 * KIB)
    monkeypatch.setattr(pinned_memory, "LOCK_LIMIT_BYTES", 128 * KIB)


def allocate(sizes: list[int], pinned_bytes: int = UNLIMITED) -> tuple[list[torch.Tensor], Slabs]:
    slabs = Slabs(sizes, pinned_bytes=pinned_bytes, before_unlock=Waits())
    return [slab.data for slab in slabs], slabs


@pytest.mark.usefixtures("small_arenas")
def test_slabs_are_locked_exactly_and_unlocked_in_any_order(hardware: ModuleType) -> None:
    sizes = [3 * KIB, 30 * KIB, 0, 500, 40 * KIB, 70 * KIB, 20 * KIB, 200 * KIB]
    tensors, slabs = allocate(sizes)
    assert [tensor.numel() for tensor in tensors] == sizes
    assert [tensor.is_pinned() for tensor in tensors] == [True, True, False, True, True, True, True, False]
    arenas = lay_out(sizes, pinned_bytes=UNLIMITED)
    locked = sum(arena.num_bytes for arena in arenas)
    books = hardware.pinned()
    assert slabs.locked_bytes == pinned_used_bytes() == books.used_bytes == books.registered_bytes == locked
    assert books.num_registered == len(arenas) == 4 and not slabs.was_refused
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors)), "disjoint"
    assert all(tensor.data_ptr() % SLAB_ALIGNMENT == 0 for tensor in tensors if tensor.is_pinned())
    assert all(tensors[arena.slabs[0]].data_ptr() % PAGE == arena.num_bytes % PAGE == 0 for arena in arenas)

    order = list(range(len(tensors)))
    random.Random(5).shuffle(order)
    for position, number in enumerate(order):
        tensors[number] = torch.empty(0)
        left = set(order[position + 1 :])
        expected = sum(arena.num_bytes for arena in arenas if left & set(arena.slabs))
        assert pinned_used_bytes() == hardware.pinned().used_bytes == expected
    assert slabs.before_unlock.count == len(arenas)


@given(data=st.data())
def test_whatever_is_dropped_first_nothing_stays_locked(sim: ModuleType, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 40 * KIB), max_size=8))
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)]):
        tensors, slabs = allocate(sizes, data.draw(st.integers(0, 200 * KIB)))
        assert slabs.locked_bytes == pinned_used_bytes() == sim.pinned().used_bytes <= 200 * KIB
        for number in data.draw(st.permutations(range(len(sizes)))):
            tensors[number] = torch.empty(0)
        assert pinned_used_bytes() == sim.pinned().used_bytes == 0


def test_a_view_keeps_its_arena_locked(hardware: ModuleType) -> None:
    tensors, _ = allocate([4 * KIB, 4 * KIB])
    view = tensors[1][100:200].view(torch.float32).detach()
    storage = tensors[0].untyped_storage()
    tensors.clear()
    gc.collect()
    assert pinned_used_bytes() == 8 * KIB and view.is_pinned()
    del view
    assert pinned_used_bytes() == 8 * KIB
    del storage
    assert pinned_used_bytes() == 0


def test_slabs_of_one_arena_have_versions_of_their_own(hardware: ModuleType) -> None:
    """The engine takes a changed version for a changed block."""
    (first, second), _ = allocate([256, 256])
    before = second._version
    first.fill_(1)
    assert second._version == before and not first.is_inference()
    with torch.inference_mode():
        (made, _), _ = allocate([256, 256])
    made.fill_(1)
    assert not made.is_inference()


@pytest.mark.usefixtures("small_arenas")
def test_an_arena_is_locked_when_its_first_slab_is_asked_for(hardware: ModuleType) -> None:
    """So packing takes one arena beside the weights."""
    slabs = iter(Slabs([40 * KIB] * 4, pinned_bytes=UNLIMITED, before_unlock=Waits()))
    assert pinned_used_bytes() == 0
    for number in range(1, 5):
        kept = next(slabs).data
        assert kept.is_pinned() and pinned_used_bytes() == 40 * KIB, f"slab {number} alone: those before are gone"


@pytest.mark.usefixtures("small_arenas")
def test_copies_from_slabs_run_beside_the_host_and_are_waited_for(hardware: ModuleType) -> None:
    (slab,), slabs = allocate([60 * KIB])
    slab.fill_(5)
    target = torch.empty(60 * KIB, dtype=torch.uint8, device="sim:0")
    target.copy_(slab, non_blocking=True)
    assert hardware.clock_s() < hardware.stream_time_s(torch.accelerator.current_stream(0))
    del slab
    assert slabs.before_unlock.count == 1, "the cluster reports a race if memory is unlocked under a copy"
    assert (target == 5).all().item()


@pytest.mark.usefixtures("small_arenas")
def test_unlocking_during_a_garbage_collection_and_from_another_thread(hardware: ModuleType) -> None:
    tensors, _ = allocate([8 * KIB] * 20)
    cycle: list[object] = [tensors[:10]]
    cycle.append(cycle)
    rest = [tensors[10:]]
    tensors = []
    del cycle
    gc.collect()
    thread = threading.Thread(target=rest.clear)
    thread.start()
    thread.join()
    assert pinned_used_bytes() == hardware.pinned().used_bytes == 0


# --- Refusals


@pytest.mark.usefixtures("small_arenas")
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_after_the_first_refusal_the_rest_is_pageable_and_no_error_is_left(hardware: ModuleType, nth: int) -> None:
    hardware.fail_registration(nth)
    tensors, slabs = allocate([40 * KIB] * 4)
    assert slabs.was_refused
    assert [tensor.is_pinned() for tensor in tensors] == [number < nth - 1 for number in range(4)]
    assert slabs.locked_bytes == pinned_used_bytes() == hardware.pinned().used_bytes == (nth - 1) * 40 * KIB
    assert torch.ones(3, device="sim:0").sum().item() == 3, "the next kernel is not blamed"


@pytest.mark.usefixtures("small_arenas")
def test_a_refusal_is_discarded_even_if_the_device_is_full(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)], pinned_bytes=64 * KIB):
        full = torch.empty(MIB - 1, dtype=torch.uint8, device="sim:0")
        tensors, slabs = allocate([40 * KIB] * 3)
        assert slabs.was_refused and [tensor.is_pinned() for tensor in tensors] == [True, False, False]
        del full, tensors
        torch.ones(1, device="sim:0")


def test_what_the_driver_does_not_unlock_is_kept_and_counted(
    hardware: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_memory, "stuck", [])
    cudart = torch.get_device_module("sim").cudart()
    tensors, _ = allocate([4 * KIB])
    address = tensors[0].data_ptr()
    refuse = torch.ops.highwater_simdevice.host_unregister
    monkeypatch.setattr(cudart, "cudaHostUnregister", lambda address: 1 if refuse(1) else 0)
    tensors.clear()
    assert pinned_used_bytes() == 4 * KIB and len(pinned_memory.stuck) == 1
    torch.ones(1, device="sim:0")
    monkeypatch.undo()
    assert cudart.cudaHostUnregister(address) == 0
    pinned_memory.locked_arenas.clear()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_around_the_locking_leaves_nothing_locked(
    hardware: ModuleType, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    cudart = torch.get_device_module("sim").cudart()
    register = cudart.cudaHostRegister

    def interrupted(*args: int) -> int:
        if moment == "after":
            register(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(cudart, "cudaHostRegister", interrupted)
    with pytest.raises(KeyboardInterrupt) as stopped:
        allocate([4 * KIB])
    stopped.value.__traceback__ = None
    del stopped
    gc.collect()
    assert pinned_used_bytes() == 0 and not pinned_memory.stuck
    assert hardware.pinned().num_registered == 0
    monkeypatch.undo()
    tensors, _ = allocate([4 * KIB])
    assert tensors[0].is_pinned()


def test_without_an_accelerator_slabs_are_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    tensors, slabs = allocate([4 * KIB, 0, 10])
    assert [tensor.numel() for tensor in tensors] == [4 * KIB, 0, 10]
    assert slabs.arenas == () and slabs.locked_bytes == 0 and not slabs.was_refused


@pytest.mark.usefixtures("small_arenas")
def test_without_a_register_call_arenas_come_from_torch(hardware: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.get_device_module("sim"), "cudart")
    tensors, slabs = allocate([20 * KIB, 10 * KIB, 20 * KIB, 5 * KIB, 40 * KIB, 200 * KIB])
    assert [tensor.is_pinned() for tensor in tensors] == [True] * 5 + [False]
    assert [arena.num_bytes for arena in slabs.arenas] == [64 * KIB, 64 * KIB]
    assert slabs.locked_bytes == pinned_used_bytes() == hardware.pinned().used_bytes == 128 * KIB
    tensors[0].fill_(1)
    assert hardware.pinned().num_registered == 0
    tensors.clear()
    assert pinned_used_bytes() == hardware.pinned().used_bytes == 0


@pytest.mark.usefixtures("small_arenas")
def test_torchs_refusal_makes_the_rest_pageable(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=MIB)], pinned_bytes=64 * KIB):
        monkeypatch.delattr(torch.get_device_module("sim"), "cudart")
        tensors, slabs = allocate([40 * KIB] * 3)
        assert slabs.was_refused and [tensor.is_pinned() for tensor in tensors] == [True, False, False]
        del tensors


# --- How much may be locked


def host(total: int, free: int) -> HostMemory:
    return HostMemory(total_bytes=total, free_bytes=free)


def test_the_limit_is_what_the_machine_may_lock_or_what_is_free() -> None:
    def limit(total: int, free: int, **more: int) -> float:
        return pin_limit_bytes(host(total * GIB, free * GIB), used_bytes=0, platform="linux", **more) / GIB

    assert limit(64, 60) == pytest.approx(54), "free, less a tenth"
    assert limit(64, 10) == 8, "free, less 2 GiB"
    assert limit(64, 3) == 1.5, "half of what is almost nothing"
    assert limit(64, 3, freed_bytes=20 * GIB) == 21.5, "what packing gives back counts"
    assert limit(32, 30, freed_bytes=20 * GIB) == pytest.approx(28.8), "but never more than nine tenths of the RAM"
    assert limit(64, 0) == 0


def test_windows_shares_half_of_the_ram_with_all_its_programs() -> None:
    memory = host(64 * GIB, 60 * GIB)
    free = pin_limit_bytes(memory, used_bytes=0, platform="win32")
    assert free == int(64 * GIB * 0.45) < 32 * GIB
    assert pin_limit_bytes(memory, used_bytes=20 * GIB, platform="win32") == free - 20 * GIB
    assert pin_limit_bytes(memory, used_bytes=40 * GIB, platform="win32") == 0


def test_what_is_locked_already_counts(hardware: ModuleType) -> None:
    memory = host(MIB, MIB * 100)
    before = pin_limit_bytes(memory, platform="linux")
    tensors, _ = allocate([100 * KIB])
    assert before - pin_limit_bytes(memory, platform="linux") == 100 * KIB
    del tensors
    assert pin_limit_bytes(memory, platform="linux") == before


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], HostMemory]:
    """Return what `HostMemory.now` reads on a machine of 64 GiB, 50 free, with these files."""
    machine = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)

    def read(files: dict[str, str]) -> HostMemory:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return HostMemory.now(tmp_path)

    return read


Tree = Callable[[dict[str, str]], HostMemory]


def test_without_cgroups_the_machine_counts(tree: Tree) -> None:
    assert tree({}) == host(64 * GIB, 50 * GIB)


def test_a_container_of_cgroup_v2(tree: Tree) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory.high": "max\n",
        "sys/fs/cgroup/memory.current": f"{10 * GIB}\n",
    }
    assert tree(files) == host(16 * GIB, 6 * GIB)
    cached = {"sys/fs/cgroup/memory.stat": f"anon 5\nactive_file {GIB}\ninactive_file {3 * GIB}\nshmem {GIB}\n"}
    assert tree(cached) == host(16 * GIB, 10 * GIB), "files that are only cached can be dropped"
    assert tree({"sys/fs/cgroup/memory.high": f"{12 * GIB}"}) == host(12 * GIB, 6 * GIB)
    assert tree({"sys/fs/cgroup/memory.current": f"{60 * GIB}"}) == host(12 * GIB, 0)


def test_the_tightest_group_around_the_process_counts(tree: Tree) -> None:
    slice_, service = "sys/fs/cgroup/user.slice", "sys/fs/cgroup/user.slice/comfy.service"
    files = {
        "proc/self/cgroup": "0::/user.slice/comfy.service\n",
        f"{service}/memory.max": f"{32 * GIB}",
        f"{service}/memory.current": f"{4 * GIB}",
        f"{slice_}/memory.max": f"{24 * GIB}",
        f"{slice_}/memory.current": f"{20 * GIB}",
        "sys/fs/cgroup/memory.stat": "active_file 5",  # the root group has no limit
    }
    assert tree(files) == host(24 * GIB, 4 * GIB)


def test_cgroup_v1_with_the_path_of_the_host(tree: Tree) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n0::/docker/1\n",
        f"{folder}/memory.limit_in_bytes": f"{8 * GIB}",
        f"{folder}/memory.usage_in_bytes": f"{5 * GIB}",
        f"{folder}/memory.stat": f"active_file 1\ntotal_active_file {GIB}\ntotal_inactive_file {GIB}\n",
    }
    assert tree(files) == host(8 * GIB, 5 * GIB)
    assert tree({f"{folder}/memory.limit_in_bytes": "9223372036854771712"}) == host(64 * GIB, 50 * GIB), "no limit"


# --- The link


def device_named(name: str, **properties: object) -> SimpleNamespace:
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(name=name, **properties))
    return SimpleNamespace(name="gpu:0", torch_device=None, module=module)


class Measure:
    def __init__(self, speed: float) -> None:
        self.speed = speed
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return self.speed


def test_a_link_is_measured_once_per_card_slot_and_driver(tmp_path: Path) -> None:
    cards = [
        device_named("RTX", uuid="a", pci_bus_id=1),
        device_named("RTX", uuid="a", pci_bus_id=2),
        device_named("RTX", uuid="b", pci_bus_id=1),
        device_named("RTX", uuid="a", pci_bus_id=1, driver_version="2"),
    ]
    for number, card in enumerate(cards):
        measure = Measure(1e9 + number)
        for _ in range(3):
            assert link_bytes_per_s(card, measure, directory=tmp_path / "new") == 1e9 + number
        assert measure.count == 1
    assert len(list((tmp_path / "new").iterdir())) == len(cards), "and nothing else is left there"


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "null", '{"bytes_per_s": 5}', "half", "other", "zero", "NaN", "text", "bytes"],
)
def test_a_damaged_cache_is_measured_again(tmp_path: Path, damage: str) -> None:
    card = device_named("RTX")
    link_bytes_per_s(card, Measure(1e9), directory=tmp_path)
    (path,) = tmp_path.iterdir()
    stored = json.loads(path.read_text())
    damaged = {
        "half": path.read_text()[:-5],
        "other": json.dumps({**stored, "link": {**stored["link"], "torch": "0"}}),
        "zero": json.dumps({**stored, "bytes_per_s": 0}),
        "NaN": json.dumps({**stored, "bytes_per_s": float("nan")}),
        "text": json.dumps({**stored, "bytes_per_s": "1e9"}),
    }.get(damage, damage)
    path.write_bytes(b"\xff\xfe" if damage == "bytes" else damaged.encode())
    again = Measure(2e9)
    assert link_bytes_per_s(card, again, directory=tmp_path) == 2e9
    assert link_bytes_per_s(card, again, directory=tmp_path) == 2e9 and again.count == 1


def test_a_cache_that_cannot_be_written_only_costs_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert link_bytes_per_s(device_named("RTX"), Measure(1e9), directory=tmp_path / "file" / "links") == 1e9


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wrong_measurement_is_an_error_and_is_not_kept(tmp_path: Path, speed: float) -> None:
    with pytest.raises(ValueError, match="wrong measurement"):
        link_bytes_per_s(device_named("RTX"), Measure(speed), directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_users_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hardware: ModuleType) -> None:
    from highwater.memory.transfer.devices import find_device

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert link_bytes_per_s(find_device("gpu:0"), Measure(3e9)) == 3e9
    assert not list(tmp_path.iterdir())  # its devices are simulated
    monkeypatch.setattr("highwater.memory.transfer.link_speed.links_folder", [])
    assert link_bytes_per_s(find_device("gpu:0"), Measure(3e9)) == 3e9
    assert len(list((tmp_path / "highwater" / "links").iterdir())) == 1
