"""What computes on the CPU, or streams without page-locked memory, is used from the file's own pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import load_model, load_weights, manage
from highwater.memory.errors import InvalidInput, UnsafeState
from highwater.memory.planner import mixed_tiers

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a mapped file could not be replaced there")

X = torch.ones(2, 64)
PLACES = {"on the CPU": ("cpu", "auto"), "streamed": ("gpu:0", "0.08MiB,pinned=none")}


@pytest.fixture(autouse=True)
def small_models_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 0)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> dict[str, str]:
    placement, profile = PLACES[request.param]
    return {"placement": placement, "profile": profile}


def make() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(3)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "net.safetensors"
    save_file(make().state_dict(), path)
    return path


@torch.no_grad()
def expected(path: Path) -> torch.Tensor:
    module = make()
    module.load_state_dict(load_file(path))
    return module(X)


def mapped_paths() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else []
    return {line.split(None, 5)[5] for line in lines if len(line.split(None, 5)) == 6}


def overwrite(path: Path) -> None:
    """Overwrite the file where it is, as a copy program does: the same inode, other bytes."""
    content = bytearray(path.read_bytes())
    content[-64:] = bytes(64)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(1, 1))


@torch.no_grad()
def test_it_computes_from_a_mapping_and_gives_the_same(machine, path: Path, place: dict[str, str]) -> None:
    want = expected(path)
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager):
            assert torch.equal(module(X).cpu(), want)
            assert sys.platform != "linux" or str(path) in mapped_paths()
        if place["placement"] != "cpu":
            load_weights(module)  # released, it is as `load_model` gave it
        assert torch.equal(module(X), want)


@torch.no_grad()
def test_a_write_is_the_modules_own_and_never_reaches_the_file(machine, path: Path, place: dict[str, str]) -> None:
    content = path.read_bytes()
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager):
            before = module(X).cpu()
            module[0][0].weight.mul_(2.0)
            module[1][2].bias.data += 1.0
            after = module(X).cpu()
            assert not torch.equal(before, after)
        assert torch.equal(module(X).cpu(), after)
        save_file(module.state_dict(), path)  # which puts another file in its place
        assert torch.equal(module(X).cpu(), after) and torch.equal(expected(path), after)
    assert path.read_bytes() != content


def cut_short(path: Path) -> None:
    os.truncate(path, 4096)


CHANGED = r"net\.safetensors: .*; load it again"


@pytest.mark.parametrize("change", [overwrite, cut_short])
@torch.no_grad()
def test_a_file_that_was_changed_where_it_is_is_refused_in_one_line(
    machine, path: Path, place: dict[str, str], change: Callable[[Path], None]
) -> None:
    """By the next call, by what would take weights out of the mapping, and where release would."""
    with machine(16) as manager:
        module = load_model(path, make)
        managed = manage({"net": module}, **place, manager=manager)
        module(X)
        change(path)
        for placement, profile in [*PLACES.values(), ("gpu:0:host", "0.08MiB")]:
            with pytest.raises(InvalidInput, match=CHANGED):
                module(X)
            with pytest.raises(InvalidInput, match=CHANGED):
                managed.reprofile(profile, placement=placement)
        with pytest.raises(InvalidInput, match=CHANGED):
            module.state_dict()
        if place["placement"] == "cpu":
            with pytest.raises(InvalidInput, match=CHANGED):
                managed.release()
        managed.release()
        with pytest.raises(UnsafeState, match=r"net\.safetensors: manage its model, or call load_weights"):
            module(X)
        with pytest.raises(InvalidInput, match=CHANGED):
            load_weights(module)


@torch.no_grad()
def test_a_file_that_is_changed_during_a_call_is_refused_at_its_end(machine, path: Path, place: dict[str, str]) -> None:
    with machine(16) as manager:
        module = load_model(path, make)
        managed = manage({"net": module}, **place, manager=manager)
        module(X)
        handle = module[1].register_forward_hook(lambda *_: overwrite(path))
        with pytest.raises(InvalidInput, match=CHANGED):
            module(X)
        handle.remove()
        with suppress(InvalidInput):
            managed.release()


@torch.no_grad()
def test_after_release_the_file_may_change(machine, path: Path) -> None:
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, placement="cpu", manager=manager):
            want = module(X)
        cut_short(path)
        assert torch.equal(module(X), want)


@torch.no_grad()
def test_what_is_not_used_from_the_file_any_more_does_not_mind_its_changes(
    machine, path: Path, place: dict[str, str]
) -> None:
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager) as managed:
            want = module(X).cpu()
            managed.reprofile("0.08MiB", placement="gpu:0:host")
            cut_short(path)
            assert torch.equal(module(X).cpu(), want)


@torch.no_grad()
def test_after_a_write_it_is_planned_anew(machine, path: Path, place: dict[str, str]) -> None:
    """A block of which one weight is its module's own, and one with nothing but such weights."""
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager) as managed:
            module(X)
            for layer in (module[0][0], module[1][0], module[1][2]):
                layer.weight.data.mul_(2)
            module[1][0].bias.data.add_(1)
            want = module(X).cpu()
            for placement, profile in [*PLACES.values(), ("gpu:0", "0.09MiB,pinned=none"), *PLACES.values()]:
                managed.reprofile(profile, placement=placement)
                assert torch.equal(module(X).cpu(), want)


@torch.no_grad()
def test_a_block_in_two_files_outlives_one_of_them(machine, tmp_path: Path, place: dict[str, str]) -> None:
    torch.manual_seed(0)
    state = make().state_dict()
    paths = [tmp_path / "weights.safetensors", tmp_path / "biases.safetensors"]
    for at, path in enumerate(paths):
        save_file({name: weight for name, weight in state.items() if name.endswith("bias") == bool(at)}, path)
    same = make()
    same.load_state_dict(state)
    with machine(16) as manager:
        module = load_model(paths, make)
        with manage({"net": module}, **place, manager=manager) as managed:
            paths[1].unlink()
            assert torch.equal(module(X).cpu(), same(X))
            managed.reprofile("0.09MiB,pinned=none", placement="gpu:0")
            assert torch.equal(module(X).cpu(), same(X))


@pytest.mark.parametrize("deed", ["replaced", "deleted"])
@torch.no_grad()
def test_a_file_that_was_replaced_or_deleted_does_no_harm(
    machine, path: Path, place: dict[str, str], deed: str
) -> None:
    want = expected(path)
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager) as managed:
            if deed == "deleted":
                path.unlink()
            else:
                other = path.with_suffix(".new")
                save_file({name: weight + 1 for name, weight in load_file(path).items()}, other)
                other.replace(path)
            for placement, profile in [*PLACES.values(), ("gpu:0", "0.09MiB,pinned=none")]:
                assert torch.equal(module(X).cpu(), want)
                own = module.state_dict()
                again = make()
                again.load_state_dict(own)
                assert torch.equal(again(X), want)
                managed.reprofile(profile, placement=placement)
                assert torch.equal(module(X).cpu(), want)


@torch.no_grad()
def test_it_moves_to_a_device_and_back(machine, path: Path, place: dict[str, str]) -> None:
    want = expected(path)
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager) as managed:
            for placement, profile in [
                *PLACES.values(),
                ("gpu:0", "auto"),
                ("gpu:0:host", "0.08MiB"),
                *PLACES.values(),
            ]:
                managed.reprofile(profile, placement=placement)
                assert torch.equal(module(X).cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_what_the_file_has_in_another_dtype_is_read(
    machine, place: dict[str, str], tmp_path: Path, dtype: torch.dtype
) -> None:
    path = tmp_path / "net.safetensors"
    torch.manual_seed(0)
    state: dict[str, Any] = {name: weight.to(dtype) for name, weight in make().state_dict().items()}
    save_file(state, path)
    with torch.device("meta"):
        module = make()
    with machine(16) as manager:
        with manage({"net": module}, **place, manager=manager, files={"net": path}):
            got = module(X).cpu()
        same = make()
        same.load_state_dict({name: weight.float() for name, weight in state.items()})
        assert torch.equal(got, same(X))


@torch.no_grad()
def test_weights_that_lie_where_their_dtype_may_not_are_read(machine, place: dict[str, str], tmp_path: Path) -> None:
    """A header of any length is allowed: then tensors begin at any byte."""
    path = tmp_path / "net.safetensors"
    torch.manual_seed(0)
    save_file(make().state_dict(), path)
    want, content = expected(path), path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    header += b" " * next(n for n in range(4) if (8 + len(header) + n) % 4 == 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])
    with machine(16) as manager:
        module = load_model(path, make)
        with manage({"net": module}, **place, manager=manager):
            assert torch.equal(module(X).cpu(), want)
