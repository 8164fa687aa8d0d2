"""Weights that came in a mapping of their file stay in it while they need no copy in RAM; nothing else changes."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import manage
from highwater.memory.errors import InvalidInput
from highwater.memory.file_tensors import FileTensors
from highwater.memory.hosted_weight import HostedWeight
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.planner import mixed_tiers
from highwater.memory.runtime.blocks.weight_store import FileStore, HostStore
from highwater.memory.runtime.tensors.parameter_slots import ParameterSlot
from highwater.memory.transfer.devices import HostMemory
from highwater.memory.units import KIB, MIB
from highwater.memory.weights.file_reader import WeightsFile
from highwater.memory.weights.mapped_files import find_mapped
from highwater.memory.weights.source import WeightsSource

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is mapped")

KEPT_OUT = re.compile("resident while it computes, with no need for a copy in RAM")


@pytest.fixture(autouse=True)
def spares_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let networks of a few kilobytes stay in their files, too."""
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 0)


def mapped_net(toys, file: Path) -> nn.Module:
    """Return the toy network as a library loads it: each weight is a tensor in the mapping of the file."""
    net = toys.bare_net()
    net.load_state_dict(load_file(file), strict=False, assign=True)
    net.out.weight = net.embed.weight
    return net


def in_file(handle) -> set[str]:
    return {group.name for group in handle.members[0].managed.groups if isinstance(group.at_rest.store, FileStore)}


def mapped_names(net: nn.Module) -> set[str]:
    source = find_mapped(net)
    return source.mapped if source is not None else set()


@pytest.fixture
def net(toys, file: Path) -> Iterator[nn.Module]:
    net = mapped_net(toys, file)
    gc.collect()
    assert mapped_names(net) == {name for name, _ in net.named_parameters()}
    yield net


@torch.no_grad()
def test_what_stays_on_the_device_has_no_copy_in_ram_and_comes_back_as_it_came(toys, machine, net) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with manage({"net": net}, placement="gpu:0", manager=manager) as handle:
            plan = handle.plan["net"]
            assert plan.tier == "disk" and KEPT_OUT.search(plan.text()) and not plan.is_on_disk
            idle = Counter(manager.ledger.bytes_by_place("net"))
            assert idle["pinned"] + idle["host"] < 4 * KIB, "buffers only"
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
                held = Counter(manager.ledger.bytes_by_place("net"))
                assert held["pinned"] + held["host"] < 4 * KIB and held["gpu:0"] == plan.device_bytes["gpu:0"]
                manager.ledger.check()
            handle.unload()
            assert torch.equal(net(x).cpu(), want)
        assert mapped_names(net) == {name for name, _ in net.named_parameters()}
        assert torch.equal(net(x), toys.build_net()(x))


@torch.no_grad()
@pytest.mark.parametrize("how", ["pages", "data", "held", "viewed", "graph", "replaced"])
def test_what_is_not_surely_the_files_stays_in_ram(machine, net, how: str) -> None:
    """Written to in whatever way, or such that other code could still write to it where it was."""
    name, first = next(iter(net.named_parameters()))
    kept: object = None
    if how == "pages":
        first.add_(1)
    elif how == "data":
        first.data.mul_(2)
    elif how == "viewed":
        kept = first.detach()
    elif how == "graph":
        with torch.enable_grad():
            kept = (first.requires_grad_() * first).sum()
    elif how == "held":
        kept = first
    else:
        owner, _, attribute = name.rpartition(".")
        setattr(net.get_submodule(owner), attribute, nn.Parameter(first.detach().clone()))
    value = net.get_parameter(name).detach().clone()
    del first
    gc.collect()
    assert name not in mapped_names(net)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        (group,) = [g for g in handle.members[0].managed.groups if name in (slot.spec.name for slot in g.slots)]
        assert isinstance(group.at_rest.store, HostStore) or name not in group.at_rest.names_in_file
        net(torch.randn(2, 5, 64))
        assert torch.equal(net.get_parameter(name).cpu(), value)
        if how == "held":
            assert isinstance(kept, nn.Parameter) and torch.equal(kept, value)
    assert torch.equal(net.get_parameter(name), value)


@torch.no_grad()
def test_blocks_that_stream_later_get_a_copy_in_ram(toys, machine, net, file: Path) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with manage({"net": net}, placement="gpu:0", manager=manager) as handle:
            assert torch.equal(net(x).cpu(), want)
            managed = handle.members[0].managed
            whole = in_file(handle)
            total = manager.devices["gpu:0"].total_bytes()
            least = managed.plan.device_bytes["gpu:0"] // 2
            manager.set_watermark("gpu:0", total - least, total - least)
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            streamed = {managed.component.blocks[n].name for n in managed.plan.shares[0].streamed}
            assert streamed and streamed == whole - in_file(handle) == whole - managed.plan.in_file
            held = Counter(manager.ledger.bytes_by_place("net"))
            slabs = [group.slab_bytes for group in managed.groups if group.name in streamed]
            assert sum(slabs) <= held["pinned"] <= sum(slabs) + 64 * KIB
            assert all(isinstance(group.at_rest.store, HostStore) for group in managed.groups if group.name in streamed)
            assert any("get a copy in RAM" in event.reason for event in manager.event_log.events)
            # With room again they are resident, and stay in RAM for the next time.
            manager.set_watermark("gpu:0", 0, 0)
            handle.unload()
            assert torch.equal(net(x).cpu(), want) and not managed.plan.streams
            assert in_file(handle) == whole - streamed
        manager.ledger.check()
    assert torch.equal(net(x), toys.build_net()(x))


@torch.no_grad()
def test_a_file_that_is_replaced_or_deleted_does_no_harm(toys, machine, net, file: Path) -> None:
    """As to a module without management, whose mapping is of the file that was there."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        other = {name: tensor + 1 for name, tensor in load_file(file).items()}
        file.rename(file.with_suffix(".before"))
        save_file(other, file)
        assert torch.equal(net(x).cpu(), want)
        handle.unload()
        file.unlink()
        assert torch.equal(net(x).cpu(), want)
        handle.unload()
        next(net.parameters()).data += 1  # reads a block into RAM
        manager.ledger.check()
        next(net.parameters()).data -= 1
    assert torch.allclose(net(x), toys.build_net()(x), atol=1e-5)


@torch.no_grad()
def test_a_file_that_is_overwritten_is_one_clear_error(machine, net, file: Path) -> None:
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager):
        with file.open("r+b") as opened:
            opened.seek(-8, 2)
            opened.write(b"12345678")
        os.utime(file, (1, 1))
        with pytest.raises(InvalidInput, match=r"net\.safetensors: was written to since it was planned"):
            net(torch.randn(2, 5, 64))
        manager.ledger.check()


@torch.no_grad()
def test_two_models_of_one_file_and_a_tied_weight(toys, machine, file: Path) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        nets = {f"net{number}": mapped_net(toys, file) for number in range(2)}
        gc.collect()
        with manage(nets, placement="*=gpu:0", manager=manager) as handle:
            outputs = [net(x).cpu() for net in nets.values()]
            assert torch.equal(*outputs)
            assert all(not in_part.managed.plan.pinned for in_part in handle.members)
            manager.ledger.check()


@torch.no_grad()
def test_another_profile_and_tier_take_it_into_ram_and_back(toys, machine, net) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        want = net(x).cpu()
        for choices in ({"placement": "gpu:0:pinned"}, {"profile": "2,quantize=none"}, {"profile": "auto"}):
            handle.reprofile(**{"placement": "gpu:0", **choices})
            assert torch.equal(net(x).cpu(), want), choices
            assert bool(in_file(handle)) is (choices == {"profile": "auto"}), choices
            manager.ledger.check()
    assert torch.equal(net(x), toys.build_net()(x))


@torch.no_grad()
@pytest.mark.parametrize("encoded", ["fp8 scaled"])
def test_a_precision_that_no_file_has_needs_a_copy(machine, net, encoded: str) -> None:
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", precision=encoded, manager=manager) as handle:
        net(torch.randn(2, 5, 64))
        assert not in_file(handle) and handle.plan["net"].pinned


@torch.no_grad()
def test_what_is_written_to_weights_later_counts(toys, machine, net, file: Path) -> None:
    """While it rests, and while it is resident: through the module, as LoRA libraries do it."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        plain = toys.build_net()
        for loaded in (False, True):
            if loaded:
                net(x)
            else:
                handle.unload()
            for each in (net, plain):
                weight = next(p for n, p in each.named_parameters() if n.endswith("weight") and p.dim() == 2)
                weight.data += 0.5 * torch.ones_like(weight.data)
            assert torch.allclose(net(x).cpu(), plain(x), atol=1e-5)
            manager.ledger.check()
    assert torch.allclose(net(x), plain(x), atol=1e-5)


@torch.no_grad()
def test_the_modules_own_parameters_come_back(machine, net) -> None:
    """Not others with the same values: with their gradients wanted, and what other code has hung on them."""
    for parameter in net.parameters():
        parameter.requires_grad_()
        parameter.note = "of another library"
    before = {name: id(parameter) for name, parameter in net.named_parameters()}
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        assert all(parameter.requires_grad for parameter in net.parameters())
        net(torch.randn(2, 5, 64))
        handle.unload()
        next(net.parameters()).data += 1  # this block is in RAM from now on
    assert {name: id(parameter) for name, parameter in net.named_parameters()} == before
    assert all(parameter.requires_grad and parameter.note for parameter in net.parameters())


@torch.no_grad()
def test_other_weights_are_loaded_into_it_as_into_any_module(toys, machine, net) -> None:
    x, other = torch.randn(2, 5, 64), {name: tensor + 1 for name, tensor in toys.build_net().state_dict().items()}
    plain = toys.build_net()
    plain.load_state_dict(other)
    for loaded in (False, True):
        with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager):
            if loaded:
                net(x)
            net.load_state_dict(other)
            assert torch.allclose(net(x).cpu(), plain(x), atol=1e-4)
            manager.ledger.check()
        assert torch.equal(net(x), plain(x))


@torch.no_grad()
def test_a_source_used_again_is_not_trusted_with_what_was_written_meanwhile(machine, net, file: Path) -> None:
    x, source = torch.randn(2, 5, 64), WeightsSource([file])
    with machine(8) as manager:
        for _ in range(2):
            with manage({"net": net}, placement="gpu:0", files={"net": source}, manager=manager):
                found = net(x).cpu()
            want = net(x)
            assert torch.allclose(found, want, atol=1e-5)
            for parameter in net.parameters():
                parameter.mul_(0.5)


@torch.no_grad()
def test_another_profile_does_not_bring_back_what_was_written_before(machine, net, file: Path) -> None:
    x = torch.randn(2, 5, 64)
    net.get_submodule("doubles.1").up.weight.mul_(3)  # in RAM of its own, with another value than the file
    want = net(x)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", files={"net": file}, manager=manager) as handle:
        for profile in ("auto", "0.5MiB", "auto", "2,quantize=none", "auto"):
            handle.reprofile(profile=profile)
            assert torch.allclose(net(x).cpu(), want, atol=1e-4), profile
    assert torch.equal(net(x), want)


@torch.no_grad()
@pytest.mark.parametrize("at", [1, 5, 12])
def test_an_interrupt_while_weights_are_left_in_their_file_loses_none(machine, net, monkeypatch, at: int) -> None:
    x, calls = torch.randn(2, 5, 64), []
    want = net(x)
    hold = ParameterSlot.hold

    def interrupted(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            calls.append(self)
            if len(calls) == at:
                raise KeyboardInterrupt
        hold(self, tensor)

    with machine(8) as manager:
        monkeypatch.setattr(ParameterSlot, "hold", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manage({"net": net}, placement="gpu:0", manager=manager)
        monkeypatch.undo()
        assert torch.equal(net(x), want)
        manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("squeezed", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("placement", ["gpu:0:host", "gpu:0:pinned", "cpu", "gpu:0"])
def test_exchanged_weights_stay_exchanged(toys, machine, net, placement: str, loaded: bool, squeezed: bool) -> None:
    x, plain = torch.randn(2, 5, 64), toys.build_net()
    with machine(8) as manager:
        with manage({"net": net}, placement="gpu:0", manager=manager) as handle:
            if loaded:
                net(x)
            for each in (net, plain):
                one, other = each.singles[0].up, each.singles[1].up
                one.weight, other.weight = other.weight, one.weight
            want = plain(x)
            assert torch.allclose(net(x).cpu(), want, atol=1e-5)
            handle.unload()
            if squeezed:
                total, least = manager.devices["gpu:0"].total_bytes(), handle.plan["net"].device_bytes["gpu:0"] // 2
                manager.set_watermark("gpu:0", total - least, total - least)
                assert torch.allclose(net(x).cpu(), want, atol=1e-5)
                manager.set_watermark("gpu:0", 0, 0)
            handle.reprofile(placement=placement)
            assert torch.allclose(net(x).cpu(), want, atol=1e-5)
            manager.ledger.check()
        assert torch.allclose(net(x), want, atol=1e-5)


@torch.no_grad()
def test_a_refusal_to_page_lock_is_in_the_plan(sim, machine, net) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        want = net(x).cpu()
        managed = handle.members[0].managed
        total, least = manager.devices["gpu:0"].total_bytes(), managed.plan.device_bytes["gpu:0"] // 2
        manager.set_watermark("gpu:0", total - least, total - least)
        sim.fail_registration(1)
        assert torch.equal(net(x).cpu(), want)
        assert managed.plan.streams and not managed.plan.pinned and not managed.plan.pinned_bytes
        assert managed.plan.tier == "host" and torch.equal(net(x).cpu(), want)
        manager.ledger.check()


def test_small_components_are_packed(machine, net, monkeypatch) -> None:
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 64 * MIB)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0", manager=manager) as handle:
        assert not in_file(handle)


@torch.no_grad()
def test_weights_written_in_ram_are_not_read_from_the_file_again(machine, net) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, manage({"net": net}, placement="gpu:0:pinned", manager=manager) as handle:
        plain = net(x).cpu()
        handle.unload()
        for parameter in net.parameters():
            parameter.data.mul_(0.5)
        want = net(x).cpu()
        assert not torch.equal(want, plain)
        for choices in ({"placement": "gpu:0"}, {"placement": "gpu:0:pinned"}, {"placement": "gpu:0:host"}):
            handle.reprofile(profile="auto", **choices)
            assert torch.equal(net(x).cpu(), want), choices
            manager.ledger.check()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Note for each reading whether it drops and whether it keeps pages."""
    found: list[tuple[bool, bool]] = []
    read_into = WeightsFile.read_into

    def note(self, targets, *, drop_pages: bool = False, keep_pages: bool = False, **options) -> bool:
        found.append((drop_pages, keep_pages))
        return read_into(self, targets, drop_pages=drop_pages, keep_pages=keep_pages, **options)

    monkeypatch.setattr(WeightsFile, "read_into", note)
    return found


@torch.no_grad()
def test_pages_stay_in_the_systems_cache_while_ram_has_room_and_go_at_release(machine, net, reads, monkeypatch) -> None:
    x, dropped = torch.randn(2, 5, 64), []
    monkeypatch.setattr(WeightsFile, "drop_kept", lambda self: dropped.append(self.path.name))
    with machine(8) as manager:
        with manage({"net": net}, placement="gpu:0", manager=manager) as handle:
            net(x)
            assert reads and set(reads) == {(False, True)}
            reads.clear()
            handle.unload()
            total = HostMemory.now().total_bytes
            manager.set_watermark("host", total, total)
            net(x)
            assert set(reads) == {(True, False)} and not dropped
        assert dropped == ["net.safetensors"]


@torch.no_grad()
def test_a_library_that_copies_a_mapped_file_gets_weights_that_are_apart(file: Path) -> None:
    """One tensor for two weights, and a write to the library's own tensors after it has copied them."""
    first, second = nn.Linear(64, 192, bias=False), nn.Linear(64, 192, bias=False)
    with FileTensors() as files:
        tensors, _ = files.map_file(file)
        stored = tensors["singles.0.up.weight"]
        first.weight.copy_(stored)
        second.weight.copy_(stored)
        want = stored.clone()
        stored.mul_(2)
    del files, tensors, stored
    gc.collect()
    assert mapped_names(nn.ModuleList([first, second])) == {"0.weight"}
    first.weight.add_(1)
    assert torch.equal(first.weight, want + 1) and torch.equal(second.weight, want)


@torch.no_grad()
@pytest.mark.parametrize("written", [False, True])
def test_a_host_gets_the_newest_of_a_weight_whose_file_has_it(sim, machine, net, file: Path, written: bool) -> None:
    with machine(8) as manager:
        (member,), _ = manager.add(
            {"net": net}, placement=parse_placement("gpu:0", devices=["cpu", "gpu:0"], components=["net"]),
            profile=OffloadProfile(), precision=None, name=None, node_id=None,
        )  # fmt: skip
        net(torch.randn(2, 5, 64))
        (group, slot) = next((g, s) for g in member.managed.groups for s in g.slots if "singles.0.up.w" in s.spec.name)
        weight, want = HostedWeight(group, slot), load_file(file)["singles.0.up.weight"]
        assert isinstance(group.at_rest.store, FileStore) and group.copy is not None
        if written:
            net.singles[0].up.weight.data.mul_(2)
            want = want * 2
        member.managed.settle()
        for found in (weight.original(), weight.reader()[0], weight.wide(torch.device("cpu"))):
            assert torch.equal(found.cpu(), want)
        manager.release_all()


# -- weights that the library which mapped the file widened (diffusers' `_keep_in_fp32_modules`)


def is_widened(name: str) -> bool:
    return ".norm." in name


@pytest.fixture
def widened(toys, tmp_path: Path) -> tuple[nn.Module, nn.Module]:
    """Return the toy network as such a library loads it from a file with its norms in bf16, and a twin in RAM."""
    twin, path = toys.build_net(), tmp_path / "norms.safetensors"
    generator = torch.Generator().manual_seed(3)
    for name, weight in twin.named_parameters():
        if is_widened(name):
            weight.copy_(torch.randn(weight.shape, generator=generator).to(torch.bfloat16))
    stored = {
        name: weight.to(torch.bfloat16) if is_widened(name) else weight for name, weight in twin.state_dict().items()
    }
    del stored["out.weight"]
    save_file(stored, path)
    net = toys.bare_net()
    mapped = load_file(path)
    net.load_state_dict({name: weight.float() for name, weight in mapped.items()}, strict=False, assign=True)
    net.out.weight = net.embed.weight
    del mapped
    gc.collect()
    assert mapped_names(net) == {name for name, _ in net.named_parameters() if not is_widened(name)}
    return net, twin


def host_bytes(manager) -> int:
    held = Counter(manager.ledger.bytes_by_place("net"))
    return held["pinned"] + held["host"]


def norm_bytes(net: nn.Module) -> int:
    return sum(weight.nbytes for name, weight in net.named_parameters() if is_widened(name))


def buffer_bytes(net: nn.Module) -> int:
    return sum(buffer.nbytes for buffer in net.buffers())


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "0.4MiB", "auto,disk=all", "0.4MiB,disk=all"])
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:disk", "gpu:0&gpu:1"])
def test_single_widened_weights_rest_in_ram_and_the_rest_of_their_blocks_in_the_file(
    machine, widened, placement: str, profile: str
) -> None:
    net, twin = widened
    x = torch.randn(2, 5, 64)
    want = twin(x)
    rests = "disk" in placement + profile
    with machine(8, 8) as manager:
        with manage({"net": net}, profile, placement=placement, manager=manager) as handle:
            (member,) = handle.members
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
                streamed = [
                    member.managed.component.blocks[number].name
                    for share in member.managed.plan.shares
                    for number in share.streamed
                ]
                assert in_file(handle) >= {group.name for group in member.managed.groups} - set(streamed)
                if rests:
                    assert in_file(handle) == {group.name for group in member.managed.groups}
                    assert host_bytes(manager) <= norm_bytes(net) + buffer_bytes(net) + member.managed.plan.host_bytes
            handle.unload()
            assert torch.equal(net(x).cpu(), want)
        for (name, got), weight in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(got, weight), name
        del got, weight
        assert torch.equal(net(x), want)
        if rests:
            assert mapped_names(net) == {name for name, _ in net.named_parameters() if not is_widened(name)}


@torch.no_grad()
def test_a_widened_weight_takes_its_own_bytes_of_ram_and_no_more(machine, widened) -> None:
    net, _ = widened
    with machine(8) as manager, manage({"net": net}, "auto", placement="gpu:0", manager=manager) as handle:
        plan = handle.plan["net"]
        assert plan.tier == "disk" and any("rest in RAM: no file has these" in reason for reason in plan.reasons)
        assert plan.weight_bytes - plan.file_bytes == norm_bytes(net)
        net(torch.randn(2, 5, 64))
        assert host_bytes(manager) == norm_bytes(net) + buffer_bytes(net)


@torch.no_grad()
@pytest.mark.parametrize("how", ["held", "held data", "module", "module data", "assigned", "replaced"])
@pytest.mark.parametrize("when", ["before", "idle", "resident", "evicted"])
@pytest.mark.parametrize("profile", ["auto", "0.4MiB,disk=all"])
def test_what_is_written_to_a_widened_weight_counts_whoever_holds_it(
    machine, widened, how: str, when: str, profile: str
) -> None:
    net, twin = widened
    name = "singles.2.norm.weight"
    held, x = net.get_parameter(name), torch.randn(2, 5, 64)

    def write(model: nn.Module, kept: nn.Parameter) -> None:
        weight = kept if how.startswith("held") else model.get_parameter(name)
        if how in ("held", "module"):
            weight.mul_(2)
        elif how.endswith("data"):
            weight.data.mul_(2)
        elif how == "assigned":
            weight.data = weight.data * 2
        else:
            model.singles[2].norm.weight = nn.Parameter(weight.detach() * 2, requires_grad=False)

    twin_held = twin.get_parameter(name)
    with machine(8) as manager:
        if when == "before":
            write(net, held), write(twin, twin_held)
        with manage({"net": net}, profile, placement="gpu:0", manager=manager) as handle:
            if when in ("resident", "evicted"):
                assert torch.equal(net(x).cpu(), twin(x))
            if when == "evicted":
                handle.unload()
            if when != "before":
                write(net, held), write(twin, twin_held)
            for _ in range(2):
                assert torch.equal(net(x).cpu(), twin(x))
                manager.ledger.check()
        for (_, got), weight in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(got, weight)


@torch.no_grad()
@pytest.mark.parametrize("when", ["idle", "resident", "evicted", "written"])
@pytest.mark.parametrize("profile", ["auto", "auto,disk=all", "0.4MiB,disk=all"])
def test_a_host_reads_and_writes_a_widened_weight(machine, widened, profile: str, when: str) -> None:
    net, twin = widened
    name, x = "singles.2.norm.weight", torch.randn(2, 5, 64)
    want = twin.get_parameter(name)
    with machine(8) as manager:
        with manage({"net": net}, profile, placement="gpu:0", manager=manager) as handle:
            groups = handle.members[0].managed.groups
            group, slot = next((g, s) for g in groups for s in g.slots if s.spec.name == name)
            weight = HostedWeight(group, slot)
            if when != "idle":
                assert torch.equal(net(x).cpu(), twin(x))
            if when == "evicted":
                handle.unload()
            if when == "written":
                net.get_parameter(name).data.mul_(2), want.mul_(2)
                assert torch.equal(net(x).cpu(), twin(x))
            handle.members[0].managed.settle()
            assert not weight.rests_in_file
            found = weight.original(), weight.reader()[0], weight.wide(torch.device("cpu"))
            assert all(torch.equal(each.cpu(), want) for each in found)
            is_at_rest = when != "written" or ("disk" in profile and "MiB" in profile)  # what streams is at rest again
            assert torch.equal(weight.read_stored(), want) == weight.is_same(want) == is_at_rest
            if is_at_rest:  # what other code writes to the weight at rest is the newest at once
                group.at_rest.tensors[group.index_of(name)].mul_(1.5), want.mul_(1.5)
                assert torch.equal(weight.wide(torch.device("cpu")), want)
                assert torch.equal(net(x).cpu(), twin(x))
                handle.members[0].managed.settle()
            weight.overwrite(want * 3), want.mul_(3)
            for _ in range(2):
                assert torch.equal(net(x).cpu(), twin(x))
            with weight.held_on(torch.device("sim:0")):
                slot.held.add_(1)
            want.add_(1)
            assert torch.equal(net(x).cpu(), twin(x))
            manager.ledger.check()
        for (_, got), weight in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(got, weight)


class Plain(nn.Module):
    """Layers between an embedder and an output, without any buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0&gpu:1"])
def test_a_device_of_a_split_may_have_nothing_but_streamed_blocks(machine, tmp_path: Path, placement: str) -> None:
    twin, path = Plain().requires_grad_(False), tmp_path / "plain.safetensors"
    save_file(twin.state_dict(), path)
    with torch.device("meta"):
        net = Plain()
    net.load_state_dict(load_file(path), assign=True)
    gc.collect()
    x = torch.randn(3, 64)
    with machine(8, 8) as manager:
        with manage(
            {"net": net}, f"{34 * KIB / MIB:.5f}MiB,prefetch=1", placement=placement, manager=manager
        ) as handle:
            for _ in range(2):
                assert torch.equal(net(x).cpu(), twin(x))
            shares = handle.members[0].managed.plan.shares
            assert all(share.streamed and not share.resident for share in shares) and "" in in_file(handle)
            manager.ledger.check()
        for got, want in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(got, want)
