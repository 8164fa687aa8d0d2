"""Weights that rest in their file: no RAM while they are idle, the same results, and nobody fooled by another file."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.runtime.devices.ledger import Kind
from highwater.memory.runtime.managed_component import ManagedComponent
from highwater.memory.transfer.bounce_buffers import BounceBuffers
from highwater.memory.weights import file_reader
from highwater.memory.weights.file_reader import WeightsFile
from highwater.memory.weights.module_component import component_from_module
from highwater.memory.weights.page_cache import PageCache
from highwater.memory.weights.source import WeightsSource

TIGHT = "0.45MiB"


def bare_net(toys):
    return toys.bare_net()


@pytest.fixture
def files(toys, tmp_path):
    """The toy network in two shards, in an order of its own."""
    state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if "gain" not in name}
    del state["out.weight"]  # tied
    names = sorted(state, key=lambda name: name[::-1])
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, part in zip(paths, (names[:20], names[20:]), strict=True):
        save_file({name: state[name].contiguous() for name in part}, path)
    return paths


@pytest.fixture
def fail_third(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager in which the third reading from files fails."""

    @contextmanager
    def failing() -> Iterator[None]:
        calls = itertools.count(1)

        def failing_third(read: Callable[..., object]) -> Callable[..., object]:
            def fail(self, *args, **options) -> object:
                if next(calls) == 3:
                    raise InvalidInput("the disk is gone")
                return read(self, *args, **options)

            return fail

        with monkeypatch.context() as patch, pytest.raises(InvalidInput, match="the disk is gone"):
            for name in ("read_into", "warm"):  # into memory, or into the system's cache
                patch.setattr(WeightsSource, name, failing_third(getattr(WeightsSource, name)))
            yield

    return failing


def on_disk(net, files, manager, profile: str = "auto"):
    return manage({"net": net}, placement="gpu:0:disk", profile=profile, files={"net": files}, manager=manager)


@pytest.mark.parametrize("in_ram", [True, False])
def test_what_has_been_read_is_copied_while_the_rest_is_read(toys, machine, files, monkeypatch, in_ram: bool) -> None:
    x, sizes = torch.randn(2, 5, 64), []
    look, queue_copies = PageCache.look, BounceBuffers.queue_copies
    monkeypatch.setattr(file_reader, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(PageCache, "look", lambda *args: (look(*args), in_ram)[1])

    def record(self, parts) -> None:
        sizes.append(sum(source.numel() for source, _ in parts))
        queue_copies(self, parts)

    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        net = toys.build_net()
        with on_disk(net, files, manager), monkeypatch.context() as patch:
            patch.setattr(BounceBuffers, "queue_copies", record)
            assert torch.equal(net(x).cpu(), want)
    assert len(sizes) > 20 and max(sizes) <= 4096


@pytest.mark.parametrize("profile", ["auto", TIGHT, "0.8MiB"])
def test_computes_alike_and_costs_no_ram_while_idle(toys, machine, files, profile: str) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        net = toys.build_net()
        buffer_bytes = sum(buffer.nbytes for buffer in net.buffers())
        with on_disk(net, files, manager, profile) as managed:
            (member,) = managed.members
            idle = manager.ledger.bytes_by_place("net")
            assert idle == {"host": buffer_bytes}
            assert all(parameter.is_meta for parameter in net.parameters())
            for _ in range(3):
                assert torch.equal(net(x).cpu(), want)
                manager.ledger.check()
            held = manager.ledger.bytes_by_place("net")
            assert held["gpu:0"]
            assert ("pinned" in held) == (profile != "auto")  # buffers to read through, while anything streams
            member.managed.unload()
            assert manager.ledger.bytes_by_place("net") == idle
            assert torch.equal(net(x).cpu(), want)
        assert torch.allclose(net(x), toys.build_net()(x))
        assert not any(parameter.is_meta for parameter in net.parameters())


@torch.no_grad()
def test_the_rams_watermark_decides_what_is_read_into_ram_and_what_is_page_locked(toys, machine, files) -> None:
    """Marks of 0 and of all the RAM mean the same on every machine, however busy."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        for mark, from_file, in_ram in (("0%", "pinned", "pinned"), ("100%", "disk", "host")):
            manager.set_watermark("host", mark, mark)
            net = bare_net(toys)
            with manage({"net": net}, placement="gpu:0", files={"net": files}, manager=manager) as managed:
                plan = managed.members[0].managed.plan
                assert plan.tier == from_file
                told = [reason for reason in plan.reasons if "kept in its file: it needs" in reason]
                assert bool(told) == (from_file == "disk") == any(reason.endswith(" reserved") for reason in told)
                assert torch.equal(net(x).cpu(), want)
                assert ("pinned" in manager.ledger.bytes_by_place("net")) == (from_file == "pinned")
            with manage({"net": toys.build_net()}, placement="gpu:0", manager=manager) as managed:
                plan = managed.members[0].managed.plan
                assert plan.tier == in_ram
                assert ("pinned" in manager.ledger.bytes_by_place("net")) == (in_ram == "pinned")
                assert any("of RAM reserved" in reason for reason in plan.reasons) == (in_ram == "host")
                assert torch.equal(managed.members[0].managed.module(x).cpu(), want)


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned", "gpu:0:host", "gpu:0&gpu:1", "cpu"])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_a_module_without_memory_is_filled_by_managing_it(toys, machine, files, placement: str, precision: str) -> None:
    if placement.endswith("disk") and precision != "as stored":
        pytest.skip("what the user wants in eight bits does not rest in its file")
    x = torch.randn(2, 5, 64)
    net = bare_net(toys)
    with machine(8, 8) as manager, torch.no_grad():
        elsewhere = placement.removesuffix(":disk")
        from_memory = manage(toys.build_net(), placement=elsewhere, precision=precision, manager=MemoryManager())
        want = from_memory.members[0].managed.module(x).cpu()
        from_memory.release()
        with manage({"net": net}, placement=placement, precision=precision, files={"net": files}, manager=manager):
            assert torch.equal(net(x).cpu(), want)


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned", "gpu:0:host", "gpu:0&gpu:1", "cpu"])
def test_buffers_without_memory_come_from_the_file_too(toys, machine, tmp_path, placement: str) -> None:
    path = tmp_path / "net.safetensors"
    saved = toys.build_net()
    saved.singles[2].gain.fill_(0.25)
    save_model(saved, path)
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager, torch.no_grad():
        want = saved(x) if placement == "cpu" else toys.build_net().to("sim:0")
        if placement != "cpu":
            want.singles[2].gain.fill_(0.25)
            want = want(x.to("sim:0")).cpu()
        net = toys.build_net().to("meta")
        net.out.weight = net.embed.weight
        with manage({"net": net}, TIGHT, placement=placement, files={"net": [path]}, manager=manager):
            assert torch.equal(net(x).cpu(), want)


def other_buffers(state):
    return {name: tensor.int() if "singles.2.gain" in name else tensor for name, tensor in state.items()}


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned", "cpu"])
@pytest.mark.parametrize("change", [other_buffers, lambda state: {n: t for n, t in state.items() if "gain" not in n}])
def test_a_buffer_without_memory_that_no_file_has_is_refused(toys, machine, tmp_path, placement: str, change) -> None:
    path = tmp_path / "net.safetensors"
    state = toys.build_net().state_dict()
    del state["out.weight"]  # tied
    save_file(change(state), path)
    net = toys.build_net().to("meta")
    net.out.weight = net.embed.weight
    with machine(8) as manager:
        with pytest.raises(InvalidInput, match=r"net: buffer '\w+.\d.gain' is on meta.*; load the buffer on the CPU"):
            manage({"net": net}, placement=placement, files={"net": [path]}, manager=manager)
        assert all(tensor.is_meta for tensor in net.state_dict().values())
        assert not manager.members and not manager.ledger.used("host") and not manager.ledger.used("pinned")


def test_reading_for_the_cpu_that_fails_is_taken_back(toys, machine, files, fail_third) -> None:
    net = bare_net(toys)
    with machine(8) as manager, fail_third():
        manage({"net": net}, placement="cpu", files={"net": files}, manager=manager)
    assert all(parameter.is_meta for parameter in net.parameters())
    assert net.out.weight is net.embed.weight


def test_buffers_keep_what_a_forward_wrote(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager, TIGHT) as managed:
        net(torch.randn(2, 5, 64))
        net.doubles[0].gain.mul_(2.0)
        managed.members[0].managed.unload()
        assert torch.equal(net.doubles[0].gain, torch.ones(64))


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:host"])
@pytest.mark.parametrize("managed_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("leaves_in", [torch.no_grad, torch.inference_mode])
def test_buffers_made_in_inference_mode_keep_what_was_written_too(
    toys, machine, files, placement: str, managed_in, leaves_in
) -> None:
    with torch.inference_mode():
        net = toys.build_net()
    replaced = torch.full((64,), 4.0)
    with machine(8) as manager:
        with managed_in():
            managed = manage({"net": net}, TIGHT, placement=placement, files={"net": files}, manager=manager)
        with torch.inference_mode():
            net(torch.randn(2, 5, 64))
            net.doubles[0].gain.mul_(2.0)
            net.doubles[1].gain = torch.full_like(net.doubles[1].gain, 3.0)
        with leaves_in():
            managed.members[0].managed.unload()
            assert torch.equal(net.doubles[0].gain, torch.ones(64))
            assert torch.equal(net.doubles[1].gain, torch.full((64,), 3.0))
            net.doubles[2].gain = replaced
            net(torch.randn(2, 5, 64))
            managed.release()
        assert torch.equal(net.doubles[0].gain, torch.ones(64))
        assert torch.equal(net.doubles[2].gain, replaced)


@pytest.fixture
def reads(monkeypatch):
    """The names that were read, call by call."""
    calls = []
    read_into = WeightsSource.read_into

    def record(self, targets, **options) -> None:
        targets = list(targets)
        calls.append([name for name, *_ in targets])
        read_into(self, targets, **options)

    monkeypatch.setattr(WeightsSource, "read_into", record)
    return calls


def assert_equal_states(state, want) -> None:
    assert list(state) == list(want)
    for name, tensor in want.items():
        assert torch.equal(state[name].cpu(), tensor), name


@pytest.mark.parametrize("profile", ["auto", TIGHT])
def test_state_dict_has_the_weights_and_leaves_them_on_disk(toys, machine, files, reads, profile: str) -> None:
    net, want = toys.build_net(), toys.build_net().state_dict()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager, profile):
        idle = manager.ledger.bytes_by_place("net")
        state = net.state_dict()
        assert len(reads) == 1  # in one go
        assert_equal_states(state, want)
        assert state["out.weight"].data_ptr() == state["embed.weight"].data_ptr()
        assert all(parameter.is_meta for parameter in net.parameters())
        assert manager.ledger.bytes_by_place("net") == idle
        assert_equal_states(net.doubles[1].state_dict(), toys.build_net().doubles[1].state_dict())
        assert_equal_states(torch.nn.ModuleDict({"unet": net}).state_dict(prefix="a."), {
            f"a.unet.{name}": tensor for name, tensor in want.items()
        })  # fmt: skip
        net(torch.randn(2, 5, 64))
        assert_equal_states(net.state_dict(), want)


def parameter_ids(net) -> dict[str, int]:
    return {name: id(parameter) for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("profile", ["auto", TIGHT])
def test_what_came_without_memory_goes_without(toys, machine, files, reads, profile: str) -> None:
    x = torch.randn(2, 5, 64)
    net = bare_net(toys)
    before = parameter_ids(net)
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager, profile)
        net(x)
        managed.members[0].managed.unload()
        reads.clear()
        managed.release()
        assert not reads
        assert all(parameter.is_meta for parameter in net.parameters())
        assert parameter_ids(net) == before
        with on_disk(net, files, manager, profile):
            assert torch.isfinite(net(x)).all()


def test_what_was_written_on_the_device_keeps_its_memory_after_release_and_all_else_with_it(
    toys, machine, files
) -> None:
    net = bare_net(toys)
    with machine(8) as manager, torch.no_grad():
        with on_disk(net, files, manager):
            net(torch.randn(2, 5, 64))
            net.doubles[1].up.weight.mul_(2.0)
        want = toys.build_net()
        want.doubles[1].up.weight.mul_(2.0)
        assert_equal_states(net.state_dict(), want.state_dict())


@pytest.mark.parametrize("build", [bare_net, lambda toys: toys.build_net()])
def test_from_disk_to_disk_nothing_is_read(toys, machine, files, reads, build) -> None:
    net = build(toys)
    came_on_meta = net.embed.weight.is_meta
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager)
        managed.reprofile(TIGHT, placement="gpu:0:disk")
        managed.reprofile("auto", placement="gpu:0:disk")
        assert not reads
        assert net(torch.randn(2, 5, 64)).isfinite().all()
        managed.release()
        assert all(parameter.is_meta == came_on_meta for parameter in net.parameters())
        if not came_on_meta:
            assert_equal_states(net.state_dict(), toys.build_net().state_dict())


@pytest.mark.parametrize("build", [bare_net, lambda toys: toys.build_net()])
def test_from_disk_to_ram_weights_are_read_straight_into_their_slabs(toys, machine, files, monkeypatch, build) -> None:
    net, x = build(toys), torch.randn(2, 5, 64)
    targets = []
    read_into = WeightsSource.read_into

    def record(self, pairs, **options) -> None:
        pairs = list(pairs)
        targets.extend(tensor for _, tensor, *_ in pairs)
        read_into(self, pairs, **options)

    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        managed = on_disk(net, files, manager)
        with monkeypatch.context() as patch:
            patch.setattr(WeightsSource, "read_into", record)
            managed.reprofile(placement="gpu:0:pinned")
        groups = managed.members[0].managed.groups
        ends = [(group.host_slab.data_ptr(), group.host_slab.data_ptr() + group.slab_bytes) for group in groups]
        assert len(targets) == len(list(net.parameters()))
        assert all(any(begin <= target.data_ptr() < end for begin, end in ends) for target in targets)
        targets.clear()
        assert torch.equal(net(x).cpu(), want)
        managed.release()
        assert_equal_states(net.state_dict(), toys.build_net().state_dict())


@pytest.mark.parametrize("build", [bare_net, lambda toys: toys.build_net()])
def test_a_profile_that_fails_leaves_the_weights_in_their_file(toys, machine, files, fail_third, build) -> None:
    net, x = build(toys), torch.randn(2, 5, 64)
    came_on_meta = net.embed.weight.is_meta
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager)
        want = net(x).cpu()
        with fail_third():
            managed.reprofile(placement="gpu:0:pinned")
        assert all(parameter.is_meta for parameter in net.parameters())
        assert not manager.ledger.used("pinned")
        assert torch.equal(net(x).cpu(), want)
        managed.release()
        assert all(parameter.is_meta == came_on_meta for parameter in net.parameters())


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0:pinned"])
def test_what_was_written_survives_another_profile(
    toys, machine, files, monkeypatch, placement: str, fails: bool
) -> None:
    net, want = bare_net(toys), toys.build_net()
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager)
        net(torch.randn(2, 5, 64))
        for module in (net, want):
            module.doubles[1].up.weight.mul_(2.0)
        if fails:
            hook, calls = ManagedComponent.hook, itertools.count(1)

            def fail_first(self) -> None:
                if next(calls) == 1:
                    raise RuntimeError("no hooks today")
                hook(self)

            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no hooks"):
                patch.setattr(ManagedComponent, "hook", fail_first)
                managed.reprofile(TIGHT, placement=placement)
        else:
            managed.reprofile(TIGHT, placement=placement)
        assert_equal_states(net.state_dict(), want.state_dict())
        managed.release()
        assert_equal_states(net.state_dict(), want.state_dict())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("precision", ["disk", "fp8 scaled"])
def test_loading_other_weights_is_refused(toys, machine, files, precision: str, assign: bool) -> None:
    x = torch.randn(2, 5, 64)
    net, other = toys.build_net(), toys.build_net(1)
    with machine(8) as manager, torch.no_grad():
        form = {"placement": "gpu:0:disk"} if precision == "disk" else {"precision": precision}
        with manage({"net": net}, files={"net": files}, manager=manager, **form):
            want = net(x).cpu()
            for module, given in ((net, other), (net.doubles[1], other.doubles[1]), (net.doubles, other.doubles)):
                rests = "in its file" if precision == "disk" else "in eight bits"
                with pytest.raises(UnsafeState, match=rf"^net rests {rests}: release it before [^\n]*$"):
                    module.load_state_dict(given.state_dict(), assign=assign)
            assert torch.equal(net(x).cpu(), want)
        net.load_state_dict(other.state_dict())


def test_what_is_written_on_the_device_stays_when_it_leaves(toys, machine, files) -> None:
    x = torch.randn(2, 5, 64)
    net, unmanaged = toys.build_net(), toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager) as managed:
        net(x)
        managed_component = managed.members[0].managed
        for module in (net, unmanaged):
            module.doubles[1].up.weight.mul_(2.0)
            module.out.weight.add_(0.5)
        idle = manager.ledger.held("net", "host")
        managed_component.unload()
        changed = [group for group in managed_component.shares[0].groups if group.name in ("", "doubles.1")]
        kept_bytes = sum(buffer.nbytes for buffer in net.buffers())  # moved into the slab of the rest
        assert manager.ledger.held("net", "host") == idle + sum(group.slab_bytes for group in changed) - kept_bytes
        manager.ledger.check()
        assert net.doubles[0].up.weight.is_meta and not net.doubles[1].up.weight.is_meta
        assert_equal_states(net.state_dict(), unmanaged.state_dict())
        y = net(x).cpu()
        managed.release()
        assert_equal_states(net.state_dict(), unmanaged.state_dict())
        assert torch.equal(y, unmanaged.to("sim:0")(x.to("sim:0")).cpu())
        del unmanaged, module


def test_a_write_that_changes_nothing_leaves_the_weights_in_their_file(toys, machine, files, reads) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager) as managed:
        idle = manager.ledger.bytes_by_place("net")
        net(torch.randn(2, 5, 64))
        net.doubles[1].up.weight.mul_(1.0)
        managed.members[0].managed.unload()
        assert manager.ledger.bytes_by_place("net") == idle
        assert net.doubles[1].up.weight.is_meta
        net(torch.randn(2, 5, 64))
        net.doubles[1].gain.mul_(2.0)
        reads.clear()
        managed.members[0].managed.unload()
        assert not reads  # a buffer says nothing about the weights
        assert manager.ledger.bytes_by_place("net") == idle


def test_written_weights_stay_when_their_file_has_changed_meanwhile(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager) as managed:
        net(torch.randn(2, 5, 64))
        net.doubles[1].up.weight.mul_(2.0)
        for file in files:
            file.write_bytes(file.read_bytes()[:-4] + b"abcd")
        managed.members[0].managed.unload()
        assert torch.equal(net.doubles[1].up.weight, toys.build_net().doubles[1].up.weight * 2.0)
        manager.ledger.check()
        with pytest.raises(InvalidInput, match=r"[ab]\.safetensors"):
            managed.release()


def test_a_file_that_changed_is_refused_by_name(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager) as managed:
        saved = files[0].read_bytes()
        files[0].write_bytes(saved[:-4] + b"abcd")
        with pytest.raises(InvalidInput, match=r"a\.safetensors"):
            net(torch.randn(2, 5, 64))
        assert not manager.ledger.used("gpu:0")
        assert not managed.members[0].leases
        with pytest.raises(InvalidInput, match=r"a\.safetensors"):
            managed.release()
        assert not manager.members
        manager.ledger.check()


def test_a_file_that_goes_when_all_is_read_costs_nobody_the_finished_pass(toys, machine, files) -> None:
    """Copying ahead what the next pass begins with is a hint; whoever needs that block hears of the file."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        managed = on_disk(net, files, manager, "0.42MiB")
        want = net(x).cpu()
        streamer = managed.members[0].managed.shares[0].streamer
        assert streamer.is_there(streamer.find(0, 1)), "it was copied ahead"
        del streamer
        handle = net.singles[-1].register_forward_hook(lambda *args: files[0].unlink(missing_ok=True))
        assert torch.equal(net(x).cpu(), want)
        with pytest.raises(InvalidInput, match=r"a\.safetensors"):
            net(x)
        handle.remove()
        with pytest.raises(InvalidInput, match=r"a\.safetensors"):
            managed.release()


def test_files_of_another_model_do_not_count(toys, machine, files) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match="tier 'disk' is not available"):
        on_disk(toys.build_net(dim=32), files, manager)


def test_ram_that_is_short_puts_weights_on_disk(toys, machine, files, monkeypatch) -> None:
    from highwater.memory.transfer.devices import HostMemory

    tiny = HostMemory(total_bytes=64 << 20, free_bytes=1 << 16)
    monkeypatch.setattr(HostMemory, "now", classmethod(lambda cls, *args: tiny))
    in_ram, on_meta = toys.build_net(), bare_net(toys)
    with machine(8) as manager:
        for net, tier in ((on_meta, "disk"), (in_ram, "pinned")):  # what is in RAM may differ from the file by now
            with manage({"net": net}, profile=TIGHT, files={"net": files}, manager=manager) as managed:
                assert managed.report()["components"][0]["plan"]["tier"] == tier


def test_a_failed_reading_leaves_no_memory_that_looks_like_weights(toys, machine, files, fail_third) -> None:
    net = bare_net(toys)
    with machine(8) as manager, torch.no_grad():
        with fail_third():
            manage({"net": net}, placement="gpu:0:host", files={"net": files}, manager=manager)
        assert not manager.ledger.used("host")
        x = torch.randn(2, 5, 64)
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with manage({"net": net}, placement="gpu:0:host", files={"net": files}, manager=manager):
            assert torch.equal(net(x).cpu(), want)


@pytest.fixture
def narrow(monkeypatch) -> int:
    """Bounce buffers narrower than most weights."""
    monkeypatch.setattr("highwater.memory.planner.sizes.BOUNCE_BUFFER_BYTES", 4096)
    return 4096


def staging_bytes(manager) -> dict[str, int]:
    found = {place: num_bytes for (place, _, kind), num_bytes in manager.ledger.entries.items() if kind is Kind.STAGING}
    return {place: num_bytes for place, num_bytes in found.items() if place in ("host", "pinned")}


@pytest.mark.parametrize("profile", ["auto", TIGHT, TIGHT + ",pinned=none"])
def test_weights_pass_through_nothing_but_the_planned_buffers(
    toys, machine, files, monkeypatch, narrow, profile: str
) -> None:
    x = torch.randn(2, 5, 64)
    net, elsewhere, booked = toys.build_net(), [], []
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        with on_disk(net, files, manager, profile) as managed:
            (member,) = managed.members
            read_into = WeightsSource.read_into

            def record(self, targets, **options) -> None:
                targets = list(targets)
                buffers = member.managed.shares[0].bounce.buffers
                ends = [(buffer.data_ptr(), buffer.data_ptr() + narrow) for buffer in buffers]
                for name, target, *_ in targets:
                    if not any(begin <= target.data_ptr() <= target.data_ptr() + target.nbytes <= end
                               for begin, end in ends):  # fmt: skip
                        elsewhere.append(name)
                booked.append(staging_bytes(manager))
                assert all(buffer.is_pinned() == ("none" not in profile) for buffer in buffers)
                read_into(self, targets, **options)

            with monkeypatch.context() as patch:
                patch.setattr(WeightsSource, "read_into", record)
                assert torch.equal(net(x).cpu(), want)
                assert torch.equal(net(x).cpu(), want)
            plan = member.managed.plan
            tier = "host" if "none" in profile else "pinned"
            assert plan.host_bytes == 2 * narrow
            assert plan.pinned_bytes == (2 * narrow if tier == "pinned" else 0)
            assert booked and all(found == {tier: plan.host_bytes} for found in booked)
            assert not elsewhere


def test_one_part_of_a_weight_is_copied_while_the_next_is_read(toys, machine, files, monkeypatch, narrow) -> None:
    # A launch takes longer than a copy of so little, and a tag is some launches.
    with machine(8, launch_s=0.0) as manager, torch.no_grad(), on_disk(toys.build_net(), files, manager) as managed:
        net = managed.members[0].managed.module
        bounce = managed.members[0].managed.shares[0].bounce
        read_into, pending = WeightsSource.read_into, []

        def record(self, targets, **options) -> None:
            pending.append(not bounce.done[1 - bounce.turn].query())
            read_into(self, targets, **options)

        monkeypatch.setattr(WeightsSource, "read_into", record)
        net(torch.randn(2, 5, 64))
        assert not pending[0] and all(pending[1:]) and len(pending) > 20


def test_a_lock_that_the_driver_refuses_is_told_once(toys, machine, files, sim) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad(), on_disk(toys.build_net(), files, manager, TIGHT) as managed:
        net, managed_component = managed.members[0].managed.module, managed.members[0].managed
        for _ in range(2):
            sim.fail_registration(1)
            net(x)
            assert staging_bytes(manager) == {"host": managed_component.plan.host_bytes}
            managed_component.unload()
        told = [event for event in manager.report()["events"] if "refused" in event["reason"]]
        assert [event["component"] for event in told] == ["net"]


def test_nothing_is_locked_where_nothing_is_read(toys, machine, files, monkeypatch) -> None:
    with machine(8) as manager, torch.no_grad(), on_disk(toys.build_net(), files, manager) as managed:
        net = managed.members[0].managed.module
        net(torch.randn(2, 5, 64))
        opened = []
        monkeypatch.setattr(BounceBuffers, "open", lambda *_, **__: opened.append(1))
        manager.begin_run("again", "again")
        net(torch.randn(2, 5, 64))
        assert not opened


class Stop(BaseException):
    pass


READ_AT_ONCE = ["gpu:0:pinned", "gpu:0:host", "gpu:0&gpu:1", "cpu"]


@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("placement", READ_AT_ONCE)
def test_reading_is_watched(toys, machine, files, placement: str, precision: str) -> None:
    net, seen = bare_net(toys), []
    with machine(8, 8) as manager:
        manager.watch_loading(lambda *step: seen.append(step))
        manage({"net": net}, placement=placement, precision=precision, files={"net": files}, manager=manager)
        came = toys.build_net()
        weight_bytes = sum(parameter.nbytes for parameter in came.parameters())
        if placement != "cpu":  # there buffers compute in the memory that they came in
            weight_bytes += sum(buffer.nbytes for buffer in came.buffers())
        assert seen[-1] == ("net", weight_bytes, weight_bytes)
        done = [step[1] for step in seen]
        assert done == sorted(set(done)) and len(done) > 8
        assert {(step[0], step[2]) for step in seen} == {("net", weight_bytes)}


@pytest.mark.parametrize("after", [1, 5, 9])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
@pytest.mark.parametrize("placement", READ_AT_ONCE)
def test_reading_is_cancelled_and_leaves_nothing(
    toys, machine, files, placement: str, precision: str, after: int
) -> None:
    nets = {"first": bare_net(toys), "net": bare_net(toys)}
    before = {name: parameter_ids(net) for name, net in nets.items()}
    choices = {"placement": placement, "precision": precision, "files": dict.fromkeys(nets, files)}
    calls = 0

    def stop(component: str, done: int, total: int) -> None:
        nonlocal calls
        calls += component == "net"
        if calls == after:
            raise Stop

    with machine(8, 8) as manager, torch.no_grad():
        end = manager.watch_loading(stop)
        with pytest.raises(Stop):
            manage(nets, manager=manager, **choices)
        assert calls == after
        assert not manager.members and not manager.ledger.entries
        manager.ledger.check()
        for name, net in nets.items():
            assert all(parameter.is_meta for parameter in net.parameters())
            assert parameter_ids(net) == before[name]
            assert not net._forward_hooks
        end()
        x = torch.randn(2, 5, 64)
        with manage(nets, manager=manager, **choices):
            assert torch.equal(nets["first"](x).cpu(), nets["net"](x).cpu())


def test_another_profile_that_is_cancelled_while_it_reads_leaves_the_weights_in_their_file(
    toys, machine, files
) -> None:
    net, x = toys.build_net(), torch.randn(2, 5, 64)

    def stop(component: str, done: int, total: int) -> None:
        if done > total / 2:
            raise Stop

    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager) as managed:
        want = net(x).cpu()
        idle = manager.ledger.bytes_by_place("net")
        end = manager.watch_loading(stop)
        with pytest.raises(Stop):
            managed.reprofile(placement="gpu:0:pinned")
        end()
        managed.members[0].managed.unload()
        assert {place: held for place, held in idle.items() if place == "host"} == manager.ledger.bytes_by_place("net")
        assert torch.equal(net(x).cpu(), want)


def test_bytes_that_are_read_of_several_files_are_counted_on(toys, files) -> None:
    source, done = WeightsSource(files), []
    targets = {name: torch.empty(header.shape) for name, (_, header) in source.files.items()}
    source.read_into(targets.items(), progress=done.append)
    assert done == sorted(set(done))
    assert done[-1] == sum(target.nbytes for target in targets.values())


def test_what_is_released_while_a_file_is_read_waits_for_nobody(toys, machine, files, monkeypatch) -> None:
    """A garbage collection may release a component in the reading thread, for which the loading one waits."""
    read_into = WeightsSource.read_into
    with machine(8) as manager, torch.no_grad():
        other = manage({"other": toys.build_net()}, manager=manager)

        def release_meanwhile(self, *args, **options) -> None:
            thread = threading.Thread(target=other.discard, daemon=True)  # as its finalizer does
            thread.start()
            thread.join(600)
            assert not thread.is_alive()
            read_into(self, *args, **options)

        monkeypatch.setattr(WeightsSource, "read_into", release_meanwhile)
        net = toys.build_net()
        with on_disk(net, files, manager):
            net(torch.randn(2, 5, 64))
            assert "other" not in manager.members


def test_a_tied_weight_is_found_under_its_other_name(toys, machine, tmp_path) -> None:
    state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if "gain" not in name}
    del state["embed.weight"]
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "net.safetensors")
    with machine(8) as manager, on_disk(toys.build_net(), [tmp_path / "net.safetensors"], manager) as managed:
        assert managed.report()["components"][0]["plan"]["tier"] == "disk"


def test_asking_for_a_tied_weight_changes_nothing_and_an_alias_lets_it_be_read(toys, tmp_path) -> None:
    net = toys.build_net()
    state = {name: tensor for name, tensor in net.state_dict().items() if name != "embed.weight"}
    save_file(state, tmp_path / "net.safetensors")
    source, component = WeightsSource([tmp_path / "net.safetensors"]), component_from_module(net, name="net")
    assert source.covers(component) and "embed.weight" not in source.files
    source.alias_tied(component)
    weight = torch.empty(64, 64)
    source.read_into([("embed.weight", weight)])
    assert torch.equal(weight, net.embed.weight)


def test_nothing_is_read_after_an_exception(toys, machine, files, monkeypatch) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager, TIGHT):
        net(torch.randn(2, 5, 64))
        reads = []
        read_into = WeightsSource.read_into
        monkeypatch.setattr(WeightsSource, "read_into", lambda *args, **o: reads.append(1) or read_into(*args, **o))

        def fail(*_: object) -> None:
            reads.clear()
            raise RuntimeError("trouble")

        handle = net.doubles[1].norm.register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="trouble"):
            net(torch.randn(2, 5, 64))
        assert not reads
        handle.remove()
        assert torch.isfinite(net(torch.randn(2, 5, 64))).all()


def test_files_of_no_component_are_refused(toys, machine, files) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match=r"files of 'unet'.*allowed: net"):
        manage({"net": toys.build_net()}, files={"unet": files}, manager=manager)


@pytest.mark.parametrize("form", [str, lambda path: path, lambda path: (str(path),)])
def test_one_file_is_a_path_a_string_or_a_list_of_one(toys, machine, tmp_path, form) -> None:
    state = {name: tensor for name, tensor in toys.build_net().state_dict().items() if name != "out.weight"}
    path = tmp_path / "net.safetensors"
    save_file(state, path)
    with machine(8) as manager, on_disk(toys.build_net(), form(path), manager) as managed:
        assert managed.plan["net"].tier == "disk"


@pytest.mark.parametrize("wrong", [None, {"a.safetensors": 1}, [], [None], 3])
def test_what_is_no_path_is_refused_in_one_line(toys, machine, wrong) -> None:
    allowed = "allowed: the path of a .safetensors file"
    with machine(8) as manager:
        with pytest.raises(InvalidInput) as error:
            manage({"net": toys.build_net()}, files={"net": wrong}, manager=manager)
        assert str(error.value).startswith(f"files of 'net': {wrong!r}; {allowed}")
        with pytest.raises(InvalidInput, match="allowed: a dict of paths by component"):
            manage({"net": toys.build_net()}, files="a.safetensors", manager=manager)


def test_one_release_that_fails_does_not_hold_the_others_back(toys, machine, files) -> None:
    parts = {"net": toys.build_net(), "other": toys.build_net()}
    with machine(8) as manager, torch.no_grad():
        managed = manage(parts, placement="net=gpu:0:disk,other=gpu:0", files={"net": files}, manager=manager)
        files[0].write_bytes(files[0].read_bytes()[:-4] + b"abcd")
        with pytest.raises(InvalidInput, match=r"a\.safetensors"):
            managed.release()
        assert not manager.members
        assert torch.isfinite(parts["other"](torch.randn(2, 5, 64))).all()


WRITES = {
    "in place": lambda weight: weight.mul_(2.0),
    "data": lambda weight: weight.data.mul_(2.0),
    "data assigned": lambda weight: setattr(weight, "data", weight.data * 2.0),
    "alias": lambda weight: weight.data.detach().add_(weight),
    "out": lambda weight: torch.mul(weight, 2.0, out=weight.data),
    "copy": lambda weight: weight.copy_(weight.clone() * 2.0),
    "view": lambda weight: weight.view(-1)[:100].mul_(2.0),
    "numpy": lambda weight: weight.numpy().__imul__(2.0),
    "init": lambda weight: torch.nn.init.constant_(weight, 0.25),
    "list": lambda weight: torch._foreach_mul_([weight], 2.0),
    "index": lambda weight: weight.__setitem__((0, 0), 5.0),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("name", ["doubles.1.up.weight", "embed.weight"])
@pytest.mark.parametrize(("profile", "is_loaded"), [("auto", True), (TIGHT, False)])
def test_what_is_written_to_a_weight_in_its_file_counts(
    toys, machine, files, how: str, name: str, profile: str, is_loaded: bool
) -> None:
    """Its block is read into RAM, and rests there from now on; the report says so."""
    x = torch.randn(2, 5, 64)
    net, unmanaged = toys.build_net(), toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager, profile) as managed:
        if is_loaded:
            net(x)
            managed.members[0].managed.unload()
        idle = manager.ledger.held("net", "host")
        for module in (net, unmanaged):
            WRITES[how](module.get_parameter(name))
        assert_equal_states(net.state_dict(), unmanaged.state_dict())
        want = unmanaged.to("sim:0")(x.to("sim:0")).cpu()
        unmanaged.to("cpu")
        for _ in range(2):
            assert torch.equal(net(x).cpu(), want)
        managed.members[0].managed.unload()
        (group,) = [group for group in managed.members[0].managed.groups if group.host_slab is not None]
        buffers = sum(buffer.nbytes for buffer in net.buffers()) if not group.name else 0
        assert manager.ledger.held("net", "host") == idle + group.slab_bytes - buffers
        manager.ledger.check()
        said = [event for event in manager.report()["events"] if "was read into RAM" in event["reason"]]
        assert [event["bytes"] for event in said] == [group.slab_bytes]
        managed.reprofile(placement="gpu:0:disk")
        assert torch.equal(net(x).cpu(), want)
        managed.release()
        assert_equal_states(net.state_dict(), unmanaged.state_dict())
        assert all(type(parameter) is torch.nn.Parameter for parameter in net.parameters())


def test_asking_for_the_form_of_a_weight_in_its_file_reads_nothing(toys, machine, files, reads) -> None:
    net = toys.build_net()
    with machine(8) as manager, on_disk(net, files, manager):
        reads.clear()
        for weight in net.parameters():
            for form in (weight, weight.data, weight.data.data, weight.detach(), weight.data.detach()):
                assert form.shape == form.size() and form.dtype is torch.float32 and form.numel() == form.shape.numel()
                assert form.dim() == form.ndim and form.stride() and form.device.type == "cpu" and form.is_meta
                assert form.nbytes == form.numel() * form.element_size() and form.is_floating_point()
                assert not form.requires_grad and form.is_contiguous() and repr(form) and len(form) == form.shape[0]
                assert torch.empty_like(form, device="cpu").shape == form.shape == form.new_empty(form.shape).shape
                assert isinstance(hash(form), int) and not form.is_cuda and form.is_leaf and form.grad is None
        assert not reads


def test_a_weight_in_a_file_that_is_gone_cannot_be_written_to(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager)
        stored = [file.read_bytes() for file in files]
        for file in files:
            file.unlink()
        places = manager.ledger.bytes_by_place("net")
        with pytest.raises(InvalidInput, match=r"[ab]\.safetensors"):
            net.doubles[1].up.weight.data.mul_(2.0)
        assert net.doubles[1].up.weight.is_meta and manager.ledger.bytes_by_place("net") == places
        del stored
        managed.discard()


def test_a_weight_in_its_file_cannot_be_written_to_while_its_component_computes(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager, TIGHT):
        handle = net.singles[0].register_forward_hook(lambda *_: net.doubles[1].up.weight.data.mul_(2.0))
        with pytest.raises(UnsafeState, match=r"^net computes now, and doubles\.1 rests in its file"):
            net(torch.randn(2, 5, 64))
        handle.remove()
        net(torch.randn(2, 5, 64))


def test_what_is_kept_of_a_released_weight_has_no_memory(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad(), on_disk(net, files, manager):
        alias = net.doubles[1].up.weight.data
        own = net.doubles[1].up.weight
    alias.mul_(2.0)  # as one of an unmanaged module: it is the module's weight
    assert torch.equal(net.doubles[1].up.weight, toys.build_net().doubles[1].up.weight * 2.0)
    assert own is not None


@pytest.mark.parametrize("then", ["release", "manage", "assign", "discard"])
def test_a_second_release_reads_what_the_first_could_not(toys, machine, files, then: str) -> None:
    net, other = toys.build_net(), toys.build_net(1)
    with machine(8) as manager, torch.no_grad():
        managed = on_disk(net, files, manager, TIGHT)
        away = files[0].rename(files[0].with_suffix(".away"))
        for _ in range(2):
            with pytest.raises(InvalidInput, match=r"a\.safetensors"):
                managed.release()
        assert any(parameter.is_meta for parameter in net.parameters())
        away.rename(files[0])
        if then == "manage":
            with on_disk(net, files, manager):
                managed.release()
                assert net.doubles[1].up.weight.is_meta
        elif then == "assign":
            net.load_state_dict(other.state_dict(), assign=True)
        elif then == "discard":
            managed.discard()
        managed.release()
        want = other if then == "assign" else toys.build_net()
        if then != "discard":
            assert_equal_states(net.state_dict(), want.state_dict())
            assert all(type(parameter) is torch.nn.Parameter for parameter in net.parameters())
        managed.release()
        manager.ledger.check()


def test_a_tier_that_cannot_be_says_why(toys, machine, files) -> None:
    net = toys.build_net()
    with machine(8) as manager:
        for choices, why in (
            ({"placement": "gpu:0:disk"}, "no file is known"),
            ({"placement": "cpu:pinned"}, "computes on the CPU"),
        ):
            with pytest.raises(InvalidInput, match=f"is not available for net: [^\n]*{why}"):
                manage({"net": net}, manager=manager, **choices)


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:disk"])
@pytest.mark.parametrize("has_run", [False, True])
def test_the_state_of_a_managed_module_is_saved(toys, machine, files, tmp_path, placement: str, has_run: bool) -> None:
    """Not by `save_model`, which sees weights that share memory."""
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    want = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    save_file(want, tmp_path / "net.safetensors")
    choices = {"placement": placement, "files": {"net": [tmp_path / "net.safetensors"]}}
    with machine(8) as manager, manage({"net": net}, manager=manager, **choices):
        if has_run:
            net(torch.ones(1, 64))
        save_file(net.state_dict(), tmp_path / "saved.safetensors")
    saved = load_file(tmp_path / "saved.safetensors")
    assert_equal_states({name: saved.pop(name) for name in want}, want)
    assert not saved


@pytest.mark.parametrize("num_passes", [0, 2])
@pytest.mark.parametrize("profile", ["auto", "0.6MiB"])
def test_layers_of_peft_keep_their_values_beside_weights_that_rest_in_their_file(
    toys, machine, files, num_passes: int, profile: str
) -> None:
    """Peft puts them on the device of the weight that they stand beside."""
    net, other, x = toys.build_net(), toys.build_net(), torch.randn(2, 5, 64)
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False)
    choices = {"placement": "gpu:0:disk", "files": {"net": files}}
    with machine(8) as manager, torch.no_grad(), manage({"net": net}, profile, **choices, manager=manager):
        for _ in range(num_passes):
            net(x)
        for which in (net, other):
            torch.manual_seed(3)
            peft.inject_adapter_in_model(config, which)
        assert torch.equal(net(x).cpu(), other.to("sim:0")(x.to("sim:0")).cpu())
        other.to("cpu")


@pytest.mark.parametrize("placement", ["gpu:0:disk", "gpu:0&gpu:1:disk"])
def test_each_file_is_opened_once_and_threads_begin_once_while_a_component_is_loaded(
    toys, machine, files, monkeypatch, placement: str
) -> None:
    """In windows of 8 KiB, with cores for all threads."""
    from highwater.memory.weights import file_reader

    monkeypatch.setattr("os.cpu_count", lambda: 8)

    opened, begun = [], []
    open_file, pool = WeightsFile.open, file_reader.ThreadPoolExecutor
    monkeypatch.setattr("highwater.memory.planner.sizes.BOUNCE_BUFFER_BYTES", 8 << 10)
    monkeypatch.setattr(file_reader, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(WeightsFile, "open", lambda self: opened.append(self) or open_file(self))
    monkeypatch.setattr(file_reader, "ThreadPoolExecutor", lambda *args: begun.append(args) or pool(*args))

    def reading_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("highwater-read")]

    net, x = bare_net(toys), torch.randn(2, 5, 64)
    with machine(8, 8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, placement=placement, files={"model": files}, manager=manager)
        opened.clear()
        begun.clear()
        for _ in range(3):
            net(x)
        assert sorted(map(id, opened)) == sorted({id(file) for file in opened}) and len(opened) == len(files)
        assert len(begun) == 1
        managed.release()
        assert not reading_threads()
