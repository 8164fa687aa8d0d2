"""Kept weights by the content of their files, and the watermark of the RAM below which they leave."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import MemoryManager
from highwater.memory.errors import InvalidInput
from highwater.memory.file_tensors import FileTensors
from highwater.memory.manager.default import default_manager
from highwater.memory.manager.event_log import EventLog
from highwater.memory.manager.forecast import Forecast
from highwater.memory.manager.kept_weights import KeptPart, KeptWeights
from highwater.memory.manager.member import Member
from highwater.memory.manager.members import Members
from highwater.memory.manager.policies.candidate import EvictionPolicy
from highwater.memory.manager.policies.largest_first import LargestFirst
from highwater.memory.manager.policies.least_recently_used import LeastRecentlyUsed
from highwater.memory.manager.policies.next_use import NextUse
from highwater.memory.manager.watermark import Watermark, Watermarks, default_host_watermark
from highwater.memory.options.placement import AUTO_PLACEMENT
from highwater.memory.options.precision import DEFAULT_PRECISION
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.runtime.blocks.pristine_slab import PristineSlab
from highwater.memory.runtime.devices.ledger import Ledger
from highwater.memory.transfer.devices import HostMemory
from highwater.memory.transfer.pinned_memory import allocate_slab
from highwater.memory.transfer.slabs import Form, SlabLayout
from highwater.memory.weights.file_origin import FileIdentity, Origin, differs

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.arange(64 * 1024, dtype=torch.float32).view(256, 256)}, path)
    return path


@pytest.fixture
def bank() -> KeptWeights:
    return new_bank()


def new_bank(policy: EvictionPolicy | None = None) -> KeptWeights:
    return KeptWeights(Members(), Ledger(), EventLog(), Forecast(), policy or NextUse())


def keep_parts(bank: KeptWeights, sizes: Iterable[int]) -> list[KeptPart]:
    """Keep parts of so many bytes in a bank, the oldest first: p0, p1, ...; books and slabs are left out."""
    for number, size in enumerate(sizes):
        part = KeptPart(f"p{number}", "vae", [], 0.0)
        part.take_id(f"p{number}")
        part.count_bytes = lambda size=size: {"host": size}  # type: ignore[method-assign]
        bank.parts.append(part)
    bank.give_up = lambda part, slabs: bank.parts.remove(part)  # type: ignore[method-assign]
    return list(bank.parts)


def slab_of(path: Path) -> PristineSlab:
    """Return a slab with the file's only weight."""
    identity, header = FileIdentity.of(path)
    return slab_with(load_file(path)["w"], Origin(identity, header.tensors[0]))


def slab_with(weight: torch.Tensor, origin: Origin | None) -> PristineSlab:
    layout = SlabLayout.of([Form.of(weight)])
    slab = allocate_slab(layout.slab_bytes)
    layout.views(slab.data)[0].copy_(weight)
    return PristineSlab(slab, layout, (origin,))


def keep(bank: KeptWeights, path: Path, name: str = "net") -> KeptPart:
    return keep_slab(bank, slab_of(path), name)


def keep_slab(bank: KeptWeights, slab: PristineSlab, name: str = "net") -> KeptPart:
    part = KeptPart(name, "diffusion", [slab], 0.0)
    part.take_id(bank.members.name_other(f"kept/{name}", part))
    bank.parts.append(part)
    bank.enter(part)
    return part


def test_what_is_kept_is_found_and_entered_in_the_books(bank: KeptWeights, file: Path) -> None:
    part = keep(bank, file)
    (found,) = bank.find(FileIdentity.of(file)[0]).values()
    assert torch.equal(found, torch.arange(64 * 1024, dtype=torch.float32).view(256, 256))
    assert bank.ledger.entries == dict(bank.count_bytes()) and bank.held()["host"] == part.slabs[0].num_bytes
    num_bytes = part.slabs[0].num_bytes
    assert bank.drop_all("test") == 0 and bank.ledger.entries == dict(bank.count_bytes())  # it would stay in memory
    assert not bank.find(FileIdentity.of(file)[0])
    del found
    assert bank.drop_all("test") == num_bytes
    assert not bank.ledger.entries and not bank.parts


def test_what_a_tensor_uses_is_not_given_again(bank: KeptWeights, file: Path) -> None:
    keep(bank, file)
    identity = FileIdentity.of(file)[0]
    used = bank.find(identity)
    assert used and not bank.find(identity)
    used.clear()
    gc.collect()
    assert bank.find(identity)


def overwrite(path: Path) -> None:
    """Other bytes of the same size in place, the time restored."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    with path.open("r+b") as stream:
        stream.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace(path: Path) -> None:
    before = path.stat()
    other = path.with_name("other")
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


def link(path: Path) -> None:
    """A second name of the same file: a false miss, which costs one read."""
    os.link(path, path.with_name("second"))


@pytest.mark.parametrize("change", [overwrite, replace, link])
def test_a_changed_file_is_another_one(bank: KeptWeights, file: Path, change) -> None:
    keep(bank, file)
    change(file)
    assert not bank.find(FileIdentity.of(file)[0])
    assert not bank.parts


def test_a_moved_symbolic_link_leads_to_another_file(bank: KeptWeights, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.safetensors"
    other.write_bytes(file.read_bytes())
    pointer = tmp_path / "pointer.safetensors"
    pointer.symlink_to(file)
    keep(bank, pointer)
    assert bank.find(FileIdentity.of(pointer)[0])
    pointer.unlink()
    pointer.symlink_to(other)
    assert not bank.find(FileIdentity.of(pointer)[0])


def test_weights_that_differ_from_their_file_are_seen_by_samples(file: Path) -> None:
    slab = slab_of(file)
    assert not differs(file, list(slab.weights()))
    slab.slab.data.zero_()
    assert differs(file, list(slab.weights()))


def test_a_library_s_copies_are_traced(file: Path) -> None:
    """What was copied or converted has an origin; what was written to has none."""
    weight = load_file(file)["w"]
    model = nn.ModuleDict(
        {
            name: nn.Linear(256, 256, bias=False, dtype=dtype)
            for name, dtype in (("same", None), ("converted", torch.half))
        }
    ).requires_grad_(False)
    model["written"] = nn.Linear(256, 256, bias=False).requires_grad_(False)
    with FileTensors() as files:
        files.watch(file, {"w": weight})
        for layer in model.values():
            layer.load_state_dict({"weight": weight})
        model["written"].weight.mul_(2)
    found = files.origins(model)
    assert list(found) == ["same.weight", "converted.weight"]
    assert [origin.dtype for ((_, origin),) in found.values()] == [None, torch.half]  # type: ignore[misc]


# What a library does with a tensor of a file as it builds a model; each returns what the model has of it.


def fill(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return nn.Parameter(torch.empty(tensor.shape, dtype=dtype), requires_grad=False).copy_(tensor)


def fill_through_data(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The object that is filled is not the one that the model has."""
    weight = nn.Parameter(torch.empty(tensor.shape, dtype=dtype), requires_grad=False)
    weight.data.copy_(tensor)
    return weight


def fill_converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fill(tensor.to(dtype), dtype)


def convert(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


def assign(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor


def detach(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach()


def fill_part(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fill(tensor[: len(tensor) // 2], dtype)


def look_and_fill(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fill(tensor, dtype) if tensor.float().std().item() > 0 else torch.zeros(1)


def transpose(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fill(tensor.T, dtype)


def clone(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.clone()


def clone_and_fill(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return fill(tensor.clone(), dtype)


def clone_and_write(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The clone has what was there before the write, and the other way round."""
    first = tensor.clone()
    second = first.clone()
    first[3].add_(1)
    return torch.stack([first, second.clone()]).to(dtype)


def convert_a_view(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.detach().view(-1)[100:].to(dtype)


USES = [fill, fill_through_data, fill_converted, convert, assign, detach, fill_part, look_and_fill, transpose]
USES += [clone, clone_and_fill, clone_and_write, convert_a_view]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture
def keeping() -> Iterator[KeptWeights]:
    """What the process's manager keeps; dropped after the test."""
    default_manager().drop_kept("test")
    yield default_manager().kept
    default_manager().drop_kept("test")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(data=st.data(), stored=st.sampled_from(DTYPES), in_inference=st.booleans())
def test_from_kept_weights_a_library_builds_what_it_builds_from_the_file(
    tmp_path: Path, keeping: KeptWeights, data: st.DataObject, stored: torch.dtype, in_inference: bool
) -> None:
    """Whatever it does with the file's tensors, in whatever dtype they were kept."""
    names, path = [f"w{number}" for number in range(3)], tmp_path / "model.safetensors"
    weights = {name: torch.randn(256, 130).to(stored) for name in names}
    save_file(weights, path)
    identity, header = FileIdentity.of(path)
    for tensor in header.tensors:
        dtype = data.draw(st.sampled_from([*DTYPES, None]))
        if dtype is not None:
            origin = Origin(identity, tensor).in_dtype(dtype)
            keep_slab(keeping, slab_with(weights[tensor.name].to(dtype), origin), tensor.name)
    uses = {name: (data.draw(st.sampled_from(USES)), data.draw(st.sampled_from(DTYPES))) for name in names}
    expected = {name: use(weights[name], dtype) for name, (use, dtype) in uses.items()}
    with torch.inference_mode(in_inference), FileTensors() as files:
        tensors, _ = files.read(path) or (load_file(path), {})
        built = {name: use(tensors.pop(name), dtype) for name, (use, dtype) in uses.items()}
    for name in names:
        assert torch.equal(built[name], expected[name]), uses[name]
    assert not files.were_written()
    keeping.drop_all("test")


def test_what_is_converted_as_it_was_kept_is_not_read(file: Path, keeping: KeptWeights) -> None:
    """The memory of the file's tensor stays as it came, and the weight lies in the slab."""
    identity, header = FileIdentity.of(file)
    origin = Origin(identity, header.tensors[0]).in_dtype(torch.half)
    part = keep_slab(keeping, slab_with(load_file(file)["w"].half(), origin))
    layer = nn.Linear(256, 256, bias=False, dtype=torch.half).requires_grad_(False)
    with FileTensors() as files:
        tensors, _ = files.read(file) or ({}, {})
        tensors["w"].numpy()[:] = 7  # behind the library's back: nothing is read for it
        layer.load_state_dict({"weight": tensors.pop("w")})
    assert layer.weight.data_ptr() == part.slabs[0].slab.data.data_ptr()
    assert torch.equal(layer.weight, load_file(file)["w"].half())


@pytest.mark.parametrize("use", [assign, clone])
@pytest.mark.parametrize("in_inference", [False, True])
def test_what_is_converted_after_it_was_assigned_is_not_read(
    file: Path, keeping: KeptWeights, use: Callable[..., torch.Tensor], in_inference: bool
) -> None:
    """As our own conversion of what a library took from the file as it is, or cloned."""
    identity, header = FileIdentity.of(file)
    origin = Origin(identity, header.tensors[0]).in_dtype(torch.half)
    part = keep_slab(keeping, slab_with(load_file(file)["w"].half(), origin))
    with torch.inference_mode(in_inference):
        layer = nn.Linear(256, 256, bias=False, device="meta").requires_grad_(False)
        with FileTensors() as files:
            tensors, _ = files.read(file) or ({}, {})
            tensors["w"].numpy()[:] = 7  # behind the library's back: nothing is read for it
            layer.load_state_dict({"weight": use(tensors.pop("w"), torch.half)}, assign=True)
            before = files.origins(layer)
            assert files.converted(layer.weight, torch.bfloat16) is None
            layer.weight.data = files.converted(layer.weight, torch.half)
    assert layer.weight.data_ptr() == part.slabs[0].slab.data.data_ptr()
    assert torch.equal(layer.weight, load_file(file)["w"].half()) and not files.were_written()
    assert files.origins_after(layer, before) == {"weight": ((layer.weight.data_ptr(), origin),)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_converted_weights_are_compared_with_what_the_file_has_by_now(file: Path, dtype: torch.dtype) -> None:
    identity, header = FileIdentity.of(file)
    slab = slab_with(load_file(file)["w"].to(dtype), Origin(identity, header.tensors[0]).in_dtype(dtype))
    assert not differs(file, list(slab.weights()))
    slab.slab.data.zero_()
    assert differs(file, list(slab.weights()))


def join(manager: MemoryManager, folder: Path, name: str) -> Member:
    """Return a member whose only weight was read from a file."""
    path = folder / f"{name}.safetensors"
    save_file({"0.weight": torch.rand(256, 256)}, path)
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
    with FileTensors() as files:
        tensors = load_file(path)
        files.watch(path, tensors)
        model.load_state_dict(tensors, assign=True)
    (member,), _ = manager.add(
        {name: model},
        kinds={name: "diffusion"},
        placement=AUTO_PLACEMENT,
        profile=OffloadProfile(),
        precision=DEFAULT_PRECISION,
        name=None,
        node_id=None,
        is_hosted=True,
        origins={name: files.origins(model)},
    )
    return member


@torch.no_grad()
def test_what_is_dropped_is_freed_though_another_component_came_after(machine, tmp_path: Path) -> None:
    """Whatever of the kept weights could have been the newcomer's, it holds none of it once it is packed."""
    with machine(32) as manager:
        manager.begin_run("1", "run")
        first = join(manager, tmp_path, "first")
        first.leave_weights()
        manager.remove(first)
        del first
        (part,) = manager.kept.parts
        slab = weakref.ref(part.slabs[0].slab.data)
        del part
        second = join(manager, tmp_path, "second")
        manager.end_run()
        assert manager.drop_kept("test") >= 256 * 256 * 4
        assert slab() is None
        manager.remove(second)


@torch.no_grad()
def test_kept_weights_leave_beside_runs_when_other_programs_take_the_ram(machine, tmp_path: Path, monkeypatch) -> None:
    with machine(32) as manager:
        manager.begin_run("1", "run")
        member = join(manager, tmp_path, "first")
        member.leave_weights()
        manager.remove(member)
        del member
        manager.end_run()
        assert manager.look() is not None and manager.kept.parts
        manager.set_watermark("host", 2 * MIB, 3 * MIB)
        memory = HostMemory(total_bytes=16 * GIB, free_bytes=MIB)
        monkeypatch.setattr(HostMemory, "now", staticmethod(lambda: memory))
        manager.look()
        assert not manager.kept.parts
        assert manager.look() is None


# -- the watermark of the RAM


@given(total=st.integers(0, 1 << 50))
def test_the_default_leaves_most_of_the_ram(total: int) -> None:
    mark = default_host_watermark(total)
    assert 0 <= mark.low_bytes <= mark.high_bytes <= total
    assert mark.low_bytes <= 12 * GIB


@given(
    low=st.integers(0, 100),
    rise=st.integers(0, 100),
    sizes=st.lists(st.integers(1, 50), max_size=8),
    start=st.integers(0, 300),
)
def test_between_the_marks_nothing_leaves_and_never_more_than_needed(
    low: int, rise: int, sizes: list[int], start: int
) -> None:
    bank = new_bank()
    keep_parts(bank, sizes)
    mark = Watermark(low_bytes=low, high_bytes=low + rise)
    bank.trim(start, mark)
    left = len(bank.parts)
    freed = sum(sizes[: len(sizes) - left])
    if start >= low:
        assert not freed
    else:
        assert start + freed >= mark.high_bytes or not bank.parts
        assert not freed or start + freed - sizes[len(sizes) - left - 1] < mark.high_bytes
    bank.trim(start + freed, mark)
    assert start + freed < low or len(bank.parts) == left


@given(uses=st.lists(st.none() | st.integers(0, 5), max_size=8), num_bytes=st.integers(0, 30), data=st.data())
def test_they_leave_by_their_next_use_and_the_oldest_first_where_it_is_unknown(
    uses: list[int | None], num_bytes: int, data: st.DataObject
) -> None:
    bank = new_bank()
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(uses), max_size=len(uses)))
    parts = keep_parts(bank, sizes)
    bank.forecast.foresee([[f"p{number}" for number, use in enumerate(uses) if use == step] for step in range(6)])
    wanted = sorted(range(len(uses)), key=lambda number: (uses[number] is not None, -(uses[number] or 0)))
    freed = bank.drop_until(num_bytes, "RAM is short")
    gone = [number for number, part in enumerate(parts) if part not in bank.parts]
    assert sorted(wanted[: len(gone)]) == gone and freed == sum(sizes[number] for number in gone)
    assert freed >= num_bytes or not bank.parts
    events = list(bank.event_log.events)
    assert [event.component for event in events] == [f"p{number}" for number in wanted[: len(gone)]]
    assert all(event.reason.startswith("RAM is short; ") for event in events)
    assert all("next use" in event.reason or "used in this step" in event.reason for event in events)


def test_another_policy_counts_for_kept_weights_too() -> None:
    for policy, order in ((LeastRecentlyUsed(), ["p0", "p1", "p2"]), (LargestFirst(), ["p1", "p2", "p0"])):
        bank = new_bank(policy)
        keep_parts(bank, [1, 9, 5])
        bank.forecast.foresee([["p0"], ["p1"]])
        assert [part.id for part, _ in bank.in_order()] == order


@torch.no_grad()
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_waiting_prompt_names_stays_longer_than_what_was_kept_later(
    machine, tmp_path: Path, waits: bool
) -> None:
    from highwater.nodes.forecast.queue_forecast import QueueForecast

    with machine(32) as manager:
        manager.begin_run("1", "run")
        for name in ("first", "second"):
            member = join(manager, tmp_path, name)
            member.leave_weights()
            manager.remove(member)
        queue = QueueForecast()
        load = {"class_type": "HighwaterLoadDiffusionModel", "inputs": {"unet_name": "folder/first.safetensors"}}
        queue.read("next", {"1": load, "2": {"class_type": "KSampler", "inputs": {"model": ["1", 0]}}})
        told = queue.foresee(None, None, (), ["next"] if waits else [], manager.known_components())
        manager.foresee(told.steps, told.num_running)
        first, second = (f"kept/{name}.safetensors" for name in ("first", "second"))
        assert [part.id for part in manager.kept.parts] == [first, second]
        manager.kept.drop_until(1, "RAM is short")
        assert [part.id for part in manager.kept.parts] == [first if waits else second]
        manager.ledger.check()
        manager.end_run()
        manager.drop_kept("test")


def test_marks_of_the_ram_are_set_by_its_name_and_checked() -> None:
    marks, total = Watermarks({}), HostMemory.now().total_bytes
    assert marks.set(" Host", MIB, 2 * MIB) == ["host"] and marks.set("host", MIB, 2 * MIB) == []
    assert marks.of_host(total) == Watermark(low_bytes=MIB, high_bytes=2 * MIB)
    with pytest.raises(InvalidInput, match=r"watermark high=.* exceeds host; allowed: up to"):
        marks.set("host", MIB, total + 1)
