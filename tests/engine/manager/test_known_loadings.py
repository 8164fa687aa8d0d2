"""Modules that another library loaded: which of their weights are the files', what is kept of them, what two share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.manager import default, known_loadings
from highwater.memory.manager.manager import MemoryManager
from highwater.memory.stand_in import copy_with_holes, open_stand_in
from highwater.memory.weights.file_origin import FileIdentity
from highwater.memory.weights.loading import Loading
from highwater.memory.weights.safetensors_header import read_header
from highwater.memory.weights.source import WeightsSource
from highwater.tests.engine.manager.test_common_weights import KEYS, PROFILES, Net, compute, in_ram

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


class Loaded:
    """A model that a library loads from a file, in its own way, under management."""

    def __init__(
        self,
        file: Path,
        manager: MemoryManager,
        *,
        profile: str = "auto",
        change: Change = dict,
        made: str = "as it is",
        placement: str = "gpu:0",
    ) -> None:
        self.device = manager.devices["gpu:0"].torch_device
        loading = Loading(made=made, files=(FileIdentity.of(file)[0],))
        with torch.device("meta"):
            self.net = Net().requires_grad_(False)
        with open_stand_in(loading, [file]) as other:
            self.is_stand_in = other is not None
            path = file if other is None else other.folder / file.name
            self.net.load_state_dict(change(load_file(path)), assign=True)
            assert other is None or other.fill(self.net)
        source = WeightsSource([file])
        source.was_loaded(loading)
        self.managed = manage({"net": self.net}, profile, placement=placement, files={"net": source}, manager=manager)

    def values(self) -> dict[str, torch.Tensor]:
        return {key: self.net.get_parameter(key).detach().cpu().clone() for key in KEYS}

    @property
    def is_resident(self) -> bool:
        return self.net.get_parameter(KEYS[0]).device.type != "cpu"

    def compute(self) -> torch.Tensor:
        return self.net(torch.ones(1, 256, device=self.device)).cpu()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    save_file({key: torch.randn(256, 256) / 16 for key in KEYS}, path)
    return path


@pytest.fixture
def manager(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    with machine(64) as manager:
        monkeypatch.setattr(default, "made", [manager])
        manager.begin_run("1", "test")  # outside of runs nothing is kept: the host frees its memory
        yield manager
        manager.drop_kept("test")


def origins(manager: MemoryManager) -> dict[str, str]:
    """Return the tensors of the file that weights are known to be, by their names."""
    (seen,) = manager.attacher.loadings.seen.values()
    return {name: origin.tensor.name for name, origin in seen.origins.items()}


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {KEYS[1]: tensors[KEYS[1]].T.contiguous()}


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tensors | {KEYS[1]: tensors[KEYS[2]], KEYS[2]: tensors[KEYS[1]]}


def one_bit(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    changed = tensors[KEYS[1]].clone()
    changed.view(torch.int32)[255, 255] ^= 1
    return tensors | {KEYS[1]: changed}


@pytest.mark.parametrize("change", [transposed, exchanged, one_bit])
@pytest.mark.parametrize("profile", PROFILES)
def test_what_a_library_changes_is_no_weight_of_the_file(
    file: Path, manager: MemoryManager, profile: str, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same name and form; it is right, also after the others were kept."""
    monkeypatch.setattr(known_loadings, "LARGEST_COPIED_SHARE", 0.3)
    expected = compute(change(load_file(file)))
    for number in range(3):
        loaded = Loaded(file, manager, change=change, profile=profile)
        assert torch.equal(loaded.compute(), expected)
        changed = {key for key in KEYS if not torch.equal(change(load_file(file))[key], load_file(file)[key])}
        assert origins(manager) == {key: key for key in KEYS if key not in changed}
        assert loaded.is_stand_in == (number > 0 and len(changed) == 1)
        loaded.managed.discard()
        del loaded


def test_the_same_file_loaded_otherwise_is_compared_anew(file: Path, manager: MemoryManager) -> None:
    Loaded(file, manager).managed.discard()
    loaded = Loaded(file, manager, change=transposed, made="transposed")
    assert not loaded.is_stand_in
    assert torch.equal(loaded.compute(), compute(transposed(load_file(file))))


def test_a_weight_that_is_made_of_others_keeps_the_loading_from_holes(file: Path, manager: MemoryManager) -> None:
    """What it is made of is not known, so none of the file's tensors may be a hole."""

    def join(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {KEYS[3]: tensors[KEYS[0]] + tensors[KEYS[1]]}

    tensors = load_file(file)
    save_file({key: tensors[key] for key in KEYS[:3]}, file)
    for _ in range(2):
        loaded = Loaded(file, manager, change=join)
        assert not loaded.is_stand_in and origins(manager).keys() == set(KEYS[:3])
        assert torch.equal(loaded.compute(), compute(join(load_file(file))))
        loaded.managed.discard()
        del loaded


def test_a_module_with_other_weights_than_before_is_not_filled(file: Path, manager: MemoryManager) -> None:
    first = Loaded(file, manager)
    loading = next(iter(manager.attacher.loadings.seen))
    first.managed.discard()
    with open_stand_in(loading, [file]) as other:
        assert other is not None
        assert not other.fill(nn.Linear(2, 2)) and not other.fill(Net().half())


def test_a_file_that_was_replaced_before_it_is_packed_is_not_taken_for_it(file: Path, manager: MemoryManager) -> None:
    """The library has the former one open: its values count, and they come from no file any more."""
    expected = compute(load_file(file))
    loading = Loading(made="as it is", files=(FileIdentity.of(file)[0],))
    source = WeightsSource([file])
    net = Net().requires_grad_(False)
    net.load_state_dict(load_file(file), assign=True)
    source.was_loaded(loading)
    save_file({key: tensor + 1 for key, tensor in load_file(file).items()}, file.with_name("new"))
    file.with_name("new").replace(file)
    managed = manage({"net": net}, placement="gpu:0", files={"net": source}, manager=manager)
    assert torch.equal(net(torch.ones(1, 256, device=manager.devices["gpu:0"].torch_device)).cpu(), expected)
    assert origins(manager) == {}
    managed.discard()
    assert not manager.kept.parts


def test_loadings_are_forgotten(file: Path, manager: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_loadings, "MAX_LOADINGS", 2)
    for made in ("one", "two", "one", "three"):
        Loaded(file, manager, made=made).managed.discard()
    assert [loading.made for loading in manager.attacher.loadings.seen] == ["one", "three"]


@given(data=st.data())
def test_a_copy_has_all_bytes_but_those_of_the_holes(tmp_path: Path, data: st.DataObject) -> None:
    path, copy = tmp_path / "model.safetensors", tmp_path / "copy"
    sizes = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=8))
    save_file({str(n): torch.full((size,), n + 1, dtype=torch.uint8) for n, size in enumerate(sizes)}, path)
    tensors = read_header(path).tensors
    holes = data.draw(st.lists(st.sampled_from(tensors), unique=True))
    copy_with_holes(path, copy, holes)
    expected = bytearray(path.read_bytes())
    for hole in holes:
        expected[hole.begin : hole.end] = bytes(hole.weight_bytes)
    assert copy.read_bytes() == expected


def test_what_two_have_is_in_the_books_once(file: Path, manager: MemoryManager) -> None:
    first = Loaded(file, manager)
    before, expected = in_ram(manager), first.compute()
    second = Loaded(file, manager)
    assert in_ram(manager) == before and torch.equal(second.compute(), expected)
    first.managed.release()
    assert torch.equal(first.net(torch.ones(1, 256)), expected) and torch.equal(second.compute(), expected)
    first.net.get_parameter(KEYS[0]).add_(1)
    assert torch.equal(second.compute(), expected)
    second.managed.discard()


def test_a_released_one_and_its_file_stay_apart(file: Path, manager: MemoryManager) -> None:
    """A program that was given the weights back may write to them."""
    first = Loaded(file, manager)
    first.managed.release()
    first.net.get_parameter(KEYS[0]).add_(1)
    assert not manager.kept.parts
    assert torch.equal(Loaded(file, manager).compute(), compute(load_file(file)))


WRITES: dict[str, Callable[[Loaded, str], None]] = {
    "in place": lambda net, key: net.net.get_parameter(key).add_(1),
    "data": lambda net, key: net.net.get_parameter(key).data.add_(1),
    "assigned data": lambda net, key: setattr(net.net.get_parameter(key), "data", net.net.get_parameter(key) + 1),
    "assigned": lambda net, key: assign(net.net, key),
    "loaded": lambda net, key: load_one(net.net, key),
}
# Nobody sees these on a device.
UNSEEN = {"data"}


def assign(net: Net, key: str) -> None:
    path, _, name = key.rpartition(".")
    weight = net.get_parameter(key)
    setattr(net.get_submodule(path), name, nn.Parameter(weight.detach() + 1, requires_grad=False))


def load_one(net: Net, key: str) -> None:
    net.load_state_dict({key: net.get_parameter(key).detach().cpu() + 1}, strict=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([*WRITES, "compute", "unload", "reprofile", "release", "discard"]),
            st.sampled_from(KEYS),
        ),
        max_size=12,
    ),
    profiles=st.lists(st.sampled_from(PROFILES), min_size=3, max_size=3),
)
def test_each_has_its_own_values_whatever_is_written(
    file: Path, manager: MemoryManager, steps: list[tuple[int, str, str]], profiles: list[str]
) -> None:
    """Written to in any way, at rest or resident: the others stay as they are, and what is kept is the file's."""
    stored = load_file(file)
    nets = [Loaded(file, manager, profile=profile) for profile in profiles]
    expected: list[dict[str, torch.Tensor]] = [dict(stored) for _ in nets]
    released: set[int] = set()
    try:
        for number, step, key in steps:
            net = nets[number]
            if step == "discard" and number not in released:  # as a host that drops it, and loads the file again
                net.managed.discard()
                nets[number] = net = Loaded(file, manager, profile=profiles[number])
                expected[number] = dict(stored)
            elif step in WRITES:
                if not (net.is_resident and step in UNSEEN):
                    WRITES[step](net, key)
                    expected[number][key] = expected[number][key] + 1
            elif step == "release":
                net.managed.release()
                released.add(number)
            elif number not in released:
                if step == "compute":
                    assert torch.equal(net.compute(), compute(expected[number]))
                elif step == "unload":
                    net.managed.unload()
                else:
                    net.managed.reprofile(PROFILES[key == KEYS[0]])
            in_ram(manager)
            for each, values in zip(nets, expected, strict=True):
                actual = each.values()
                assert all(torch.equal(actual[name], values[name]) for name in KEYS), (number, step, key)
            for part in manager.kept.parts:
                for slab in part.slabs:
                    assert all(torch.equal(view, stored[origin.tensor.name]) for origin, view in slab.weights())
    finally:
        for each in nets:
            each.managed.release()
        nets.clear()
        net = each = None
        gc.collect()  # what hypothesis notes of a failure holds models
        manager.drop_kept("test")
    assert in_ram(manager) == 0
