"""A component of which RAM holds a part: the rest of it stays in its file, and nothing else changes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from highwater.memory import MemoryManager, manage
from highwater.memory.api import Managed
from highwater.memory.errors import UnsafeState
from highwater.memory.manager import live_capacity, registry
from highwater.memory.manager.module_plans import plan_modules
from highwater.memory.planner import sizes
from highwater.memory.planner.capacity import Machine
from highwater.memory.planner.plan import ComponentPlan
from highwater.memory.runtime.blocks.weight_store import FileStore
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.units import KIB, PAGE_BYTES
from highwater.memory.weights.source import WeightsSource

TIGHT = "0.45MiB"


@pytest.fixture
def with_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[MemoryManager, int], None]:
    """Return a function after which a manager's plans have so many bytes of RAM for weights."""

    def set_room(manager: MemoryManager, num_bytes: int) -> None:
        read = type(manager.capacity).machine

        def machine(capacity, *arguments, given=None, **options) -> Machine:
            found = read(capacity, *arguments, given=given, **options)
            taken = Counter(manager.ledger.bytes_by_place("net"))
            room = num_bytes - taken["pinned"] - taken["host"] + (given or {}).get("cpu", 0)
            cpu, *others = found.devices
            return replace(found, devices=(replace(cpu, available_bytes=room), *others), host_kept_bytes=0)

        monkeypatch.setattr(type(manager.capacity), "machine", machine)

    return set_room


@contextmanager
def mixed(toys, file: Path, manager: MemoryManager, **choices: str) -> Iterator[tuple[torch.nn.Module, Managed]]:
    """Manage the toy network where RAM holds a part of it; the caller has set how much."""
    net = toys.bare_net()
    choices = {"placement": "gpu:0", "profile": TIGHT, **choices}
    with manage({"net": net}, files={"net": file}, manager=manager, **choices) as managed:
        assert is_mixed(managed.members[0].managed.plan)
        yield net, managed


def is_mixed(plan: ComponentPlan) -> bool:
    return bool(plan.in_file) and plan.tier != "disk"


def in_file(managed: ManagedComponent) -> set[str]:
    return {group.name for group in managed.groups if isinstance(group.at_rest.store, FileStore)}


@torch.no_grad()
@pytest.mark.parametrize("profile", [TIGHT, "auto", "0.8MiB"])
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0&gpu:1"])
def test_it_computes_alike_from_both(toys, machine, file: Path, with_room, profile: str, placement: str) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with_room(manager, 600 * KIB if placement == "gpu:0" else 900 * KIB)
        with mixed(toys, file, manager, profile=profile, placement=placement) as (net, handle):
            managed = handle.members[0].managed
            assert in_file(managed) == managed.plan.in_file
            idle = manager.ledger.bytes_by_place("net")
            resting = sum(group.slab_bytes for group in managed.groups if group.name not in managed.plan.in_file)
            assert resting <= idle["pinned"] <= resting + 64 * KIB
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            managed.unload()
            assert manager.ledger.bytes_by_place("net") == idle
            assert torch.equal(net(x).cpu(), want)
        assert all(parameter.is_meta for parameter in net.parameters()), "as it came: its file has it"
        manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("profile", ["0.3MiB", "auto"])
def test_eight_bits_that_ram_does_not_hold_rest_in_part_in_the_file(
    toys, machine, file: Path, with_room, monkeypatch, profile: str
) -> None:
    monkeypatch.setattr(sizes, "BOUNCE_BUFFER_BYTES", 16 * KIB)
    x, choices = torch.randn(2, 5, 64), {"profile": profile, "precision": "fp8 scaled"}
    with machine(8) as manager:
        with manage({"net": toys.build_net()}, placement="gpu:0:host", manager=manager, **choices) as handle:
            want = handle.members[0].managed.module(x).cpu()
        with_room(manager, 230 * KIB)
        with mixed(toys, file, manager, **choices) as (net, handle):
            managed = handle.members[0].managed
            assert in_file(managed) == managed.plan.in_file
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
        assert all(parameter.is_meta for parameter in net.parameters()), "as it came: its file has it"


@torch.no_grad()
def test_a_pass_reads_only_what_rests_in_the_file(toys, machine, file: Path, with_room, monkeypatch) -> None:
    x = torch.randn(2, 5, 64)
    read: list[int] = []
    read_into = WeightsSource.read_into

    def count(self, targets, **options) -> None:
        targets = list(targets)
        read.append(sum(target[1].nbytes for target in targets))
        read_into(self, targets, **options)

    monkeypatch.setattr(WeightsSource, "read_into", count)
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, handle):
            net(x)
            for _ in range(2):
                read.clear()
                net(x)
                (share,) = handle.members[0].managed.plan.shares
                assert share.read_bytes <= sum(read) < share.streamed_bytes


@torch.no_grad()
def test_another_profile_moves_blocks_between_ram_and_file(toys, machine, file: Path, with_room) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, handle):
            mixed_before = handle.members[0].managed.plan.in_file
            choices = [
                ("gpu:0", TIGHT),
                ("gpu:0:disk", TIGHT),
                ("gpu:0", "0.8MiB"),
                ("gpu:0", TIGHT),
                ("gpu:0:host", TIGHT),
            ]
            in_files = []
            for placement, profile in [*choices, ("gpu:0", TIGHT)]:
                handle.reprofile(profile, placement=placement)
                in_files.append(handle.members[0].managed.plan.in_file)
                assert in_file(handle.members[0].managed) == in_files[-1]
                assert torch.equal(net(x).cpu(), want), placement
                manager.ledger.check()
            assert in_files[0] == in_files[3] == mixed_before < in_files[1]
            assert not in_files[4] and not in_files[5], "what is in RAM as a whole stays there"
        assert torch.equal(net(x), toys.build_net()(x))


@torch.no_grad()
def test_a_write_stays_wherever_the_weight_rests(toys, machine, file: Path, with_room) -> None:
    x = torch.randn(2, 5, 64)
    other = toys.build_net()
    for parameter in other.parameters():
        parameter += 0.01
    with machine(8) as manager:
        want = other.to("sim:0")(x.to("sim:0")).cpu()
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, handle):
            net(x)
            for parameter in net.parameters():
                parameter += 0.01
            assert torch.equal(net(x).cpu(), want)
            handle.reprofile("0.8MiB")
            assert torch.equal(net(x).cpu(), want)
            manager.ledger.check()
        assert torch.equal(net(x), other.cpu()(x))
    stored = load_file(file)
    assert torch.equal(stored["embed.weight"], toys.build_net().embed.weight)


@torch.no_grad()
def test_a_file_that_cannot_be_read_leaves_the_part_in_ram_alone(toys, machine, file: Path, with_room) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, _):
            content = file.read_bytes()
            net(x)
            stat = file.stat()
            file.write_bytes(content[:-8] + bytes(8))
            with pytest.raises(Exception, match=r"net\.safetensors"):
                for _ in range(2):
                    net(x)
            manager.ledger.check()
            file.write_bytes(content)
            os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
def test_a_write_in_ram_survives_packing_anew_and_release(toys, machine, file: Path, with_room) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, handle):
            net(x)
            managed = handle.members[0].managed
            group = next(group for group in managed.groups if group.name and group.name not in managed.plan.in_file)
            name = next(slot.spec.name for slot in group.slots if not slot.is_buffer)
            net.get_parameter(name).add_(0.01)
            want = net(x).cpu()
            handle.reprofile(f"{TIGHT},pinned=none")
            plan = handle.members[0].managed.plan
            assert is_mixed(plan) and group.name not in plan.in_file
            assert torch.equal(net(x).cpu(), want)
        assert not net.get_parameter(name).is_meta


class Lora(torch.nn.Module):
    """A layer beside another one, with a weight that is called like the one inside."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.weight = torch.nn.Parameter(torch.randn_like(base.weight, device="cpu") * 0.1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.weight.T


@torch.no_grad()
@pytest.mark.parametrize("rests", ["in RAM", "in its file"])
@pytest.mark.parametrize("deed", ["added", "replaced"])
def test_a_layer_that_came_later_stays(toys, machine, file: Path, with_room, rests: str, deed: str) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (net, handle):
            net(x)
            managed = handle.members[0].managed
            names = [block.name for block in managed.component.blocks]
            name = next(name for name in names if (name in managed.plan.in_file) == (rests == "in its file"))
            block = net.get_submodule(name)
            new = torch.nn.Linear(64, block.up.out_features).requires_grad_(False)
            block.up = Lora(block.up) if deed == "added" else new
            kept = block.up.weight.clone()
            net(x)
        assert not block.up.weight.is_meta and torch.equal(block.up.weight, kept)
        if deed == "added":
            assert net.embed.weight.is_meta, "what nobody wrote to goes as it came"


class Counting(torch.nn.Module):
    """A block that counts its forwards in a buffer."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(x, shift)  # type: ignore[no-any-return]


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:disk"])
def test_buffers_without_memory_keep_what_forwards_wrote(toys, machine, tmp_path, with_room, placement: str) -> None:
    def build() -> torch.nn.Module:
        net = toys.build_net()
        for stack in (net.doubles, net.singles):
            for number, block in enumerate(stack):
                stack[number] = Counting(block)
        return net

    state = dict(build().state_dict())
    del state["out.weight"]
    save_file(state, tmp_path / "net.safetensors")
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        net = build().to("meta")
        net.out.weight = net.embed.weight
        files = {"net": tmp_path / "net.safetensors"}
        with manage({"net": net}, files=files, manager=manager, placement=placement, profile=TIGHT):
            for _ in range(3):
                net(x)
        counts = [buffer for name, buffer in net.named_buffers() if name.endswith("count")]
        assert all(not count.is_meta and count.tolist() == [3.0] * 4 for count in counts)


@torch.no_grad()
def test_no_more_is_page_locked_than_may_be(toys, machine, file: Path, with_room, monkeypatch) -> None:
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        monkeypatch.setattr(live_capacity, "pin_limit_bytes", lambda *_, **options: 250 * KIB)
        with mixed(toys, file, manager) as (net, _):
            net(torch.randn(2, 5, 64))
            assert manager.ledger.bytes_by_place("net")["pinned"] <= 250 * KIB + PAGE_BYTES


@torch.no_grad()
def test_what_is_page_locked_counts_once_as_room(toys, machine, file: Path, with_room, monkeypatch) -> None:
    seen = []

    def look(modules, machine, **options):
        seen.append(machine)
        return plan_modules(modules, machine, **options)

    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        with mixed(toys, file, manager) as (_, handle):
            monkeypatch.setattr(registry, "plan_modules", look)
            handle.reprofile(TIGHT)
            (found,) = seen
            assert found.device("cpu").available_bytes + found.freed_bytes <= 600 * KIB


@torch.no_grad()
def test_loading_other_weights_is_refused(toys, machine, file: Path, with_room) -> None:
    with machine(8) as manager:
        with_room(manager, 600 * KIB)
        with (
            mixed(toys, file, manager) as (net, _),
            pytest.raises(UnsafeState, match=r"^net rests in part in its file: release it before"),
        ):
            net.load_state_dict(toys.build_net().state_dict())
