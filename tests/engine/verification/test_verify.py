"""`verify`: equal where the engine is right, everything put back, and each seeded fault found with its block named."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from highwater.memory import InvalidInput, Managed, manage, verify
from highwater.memory.errors import UnsafeState
from highwater.memory.runtime.blocks.block_state import BlockState
from highwater.memory.runtime.blocks.staging import StagingSlot
from highwater.memory.runtime.tensors.deep_copies import OwnHook
from highwater.memory.verification import recording, reference, snapshot

VERIFYING = [module.__file__ for module in (recording, reference, snapshot, verify)]
MODES = {
    "resident": {},
    "streamed": {"profile": "gpu:0=0.35MiB"},
    "split": {"placement": "gpu:0&gpu:1"},
    "split and streamed": {"placement": "gpu:0&gpu:1", "profile": "gpu:0=0.3MiB,gpu:1=0.3MiB"},
    "eight bits": {"precision": "fp8 scaled"},
    "eight bits streamed": {"precision": "fp8 scaled", "profile": "gpu:0=0.3MiB"},
    "on the CPU": {"placement": "cpu"},
    "stored on another GPU": {"placement": "model=gpu:0:gpu:1", "profile": "gpu:0=0.35MiB"},
    "from disk": {"placement": "model=gpu:0:disk", "profile": "gpu:0=0.35MiB"},
}


@pytest.fixture
def file_of(tmp_path: Path):
    def save(net: nn.Module) -> Path:
        path = tmp_path / "net.safetensors"
        save_file({name: weight.contiguous().clone() for name, weight in net.named_parameters()}, path)
        return path

    return save


def managed_net(toys: SimpleNamespace, machine, mode: str, file_of=None) -> Managed:
    net = toys.build_net()
    files = {"model": file_of(net)} if file_of is not None else None
    return manage(net, manager=machine, files=files, **MODES[mode])


def states(managed: Managed) -> dict[str, torch.Tensor]:
    net = managed.members[0].managed.module
    return {name: tensor.detach().cpu().clone() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}


def assert_at_rest(managed: Managed) -> None:
    managed.manager.ledger.check()
    for member in managed.members:
        assert not member.leases
        assert member.managed.passes.open is None
        assert member.managed.is_hooked
        for group in member.managed.groups:
            assert group.state is not BlockState.COMPUTING


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_file", [False, True])
def test_what_the_engine_does_is_equal(mode: str, with_file: bool, toys, machine, file_of) -> None:
    if mode == "from disk" and not with_file:
        return
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, mode, file_of if with_file else None)
        expected = managed.members[0].managed.module(x).cpu()
        held = states(managed) if mode != "from disk" else {}
        plan, loaded = managed.members[0].managed.plan, dict(manager.ledger.bytes_by_place(managed.members[0].id))
        found = managed.verify(x)
        assert found.is_equal, found.text()
        assert found.num_calls == 8 + 2 + 1  # the blocks, embedder and output, the net itself
        assert "equal, bit for bit" in str(found)
        assert_at_rest(managed)
        assert managed.members[0].managed.plan == plan
        assert dict(manager.ledger.bytes_by_place(managed.members[0].id)) == loaded
        if managed.members[0].managed.plan.tier != "disk":
            assert all(torch.equal(tensor, held[name]) for name, tensor in states(managed).items())
        assert torch.equal(managed.members[0].managed.module(x).cpu(), expected)
        managed.release()


@pytest.mark.parametrize(
    "choices",
    [
        {"profile": "gpu:0=0.6MiB", "placement": "gpu:0"},
        {"profile": "gpu:0=0.6MiB", "placement": "gpu:0", "precision": "fp8 scaled"},
        {"profile": "gpu:0=0.9MiB,gpu:1=0.9MiB", "placement": "gpu:0&gpu:1"},
    ],
)
def test_a_reference_that_does_not_fit_runs_block_by_block(choices, toys, machine) -> None:
    x = torch.randn(1, 3, 64)
    with machine(1.1, 1.1) as manager:
        net = toys.build_net(doubles=4, singles=8)  # 1.6 MiB
        managed = manage(net, manager=manager, **choices)
        found = managed.verify(x)
        assert found.is_equal, found.text()
        assert "block by block, because not all weights fit at once" in found.reference
        assert_at_rest(managed)
        managed.release()


def test_a_reference_that_runs_out_of_memory_runs_block_by_block(toys, machine) -> None:
    x = torch.randn(1, 3, 64)
    with machine(8) as manager:
        managed = manage(toys.build_net(), manager=manager)
        managed_component = managed.members[0].managed
        num_failed = 0

        def fail_once(*_: object) -> None:
            nonlocal num_failed
            if not managed_component.is_hooked and not num_failed:
                num_failed += 1
                raise torch.OutOfMemoryError("on purpose")

        handle = managed_component.module.singles[1].register_forward_pre_hook(fail_once)
        found = managed.verify(x)
        handle.remove()
        assert num_failed == 1
        assert found.is_equal, found.text()
        assert "block by block" in found.reference
        assert_at_rest(managed)
        managed.release()


class Careful(nn.Module):
    """Changes all that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("table", torch.zeros(4))
        self.cache: dict[str, torch.Tensor] = {}
        self.seen: list[int] = []
        self.last = torch.zeros(3)
        self.state = SimpleNamespace(step=0)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        self.count += 1
        self.table = torch.arange(5.0, device=x.device)
        self.register_buffer("late", torch.ones(2, device=x.device))
        self.seen.append(len(self.seen))
        self.state.step += 1
        self.last.add_(1.0)
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + torch.randn(x.shape).to(x.device) + torch.randn(x.shape, device=x.device)
            self.cache[f"{number}"] = x
        if buffer is not None:
            buffer.copy_(x)
        return self.dropout(x) * self.count


@pytest.mark.parametrize("profile", ["auto", "gpu:0=0.07MiB"])
def test_all_that_a_call_changes_is_put_back(profile: str, machine) -> None:
    net = Careful()
    net.cache["before"] = torch.ones(2)
    with machine(8) as manager:
        x, buffer = torch.randn(1, 64).to("sim:0"), torch.zeros(1, 64, device="sim:0")
        managed = manage(net, profile, manager=manager)
        torch.manual_seed(3)
        state, device_state = torch.get_rng_state(), torch.get_device_module().get_rng_state(0)
        given = x.clone()
        found = managed.verify(x, buffer=buffer)
        assert found.is_equal, found.text()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(torch.get_device_module().get_rng_state(0), device_state)
        assert torch.equal(x, given) and not buffer.any()
        assert set(net.cache) == {"before"} and net.seen == [] and net.state.step == 0
        assert torch.equal(net.last, torch.zeros(3)) and "late" not in net._buffers
        assert net.count.item() == 0 and net.table.shape == (4,) and not net.table.any()
        assert_at_rest(managed)
        found.assert_equal()
        managed.release()
        del x, buffer, given, found


class Capturing(nn.Module):
    """Hooks its layers in its first forward, as transformers does for hidden states, and refers to a type."""

    kind = list[int]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.is_hooked = False
        self.types = [list[int], dict[str, int], SimpleNamespace]
        self.captured: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if not self.is_hooked:
            self.is_hooked = True
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: self.captured.append(output))
        self.captured = []
        for layer in self.layers:
            x = layer(x)
        return x, list(self.captured)


@pytest.mark.parametrize("ran_before", [False, True])
@pytest.mark.parametrize("profile", ["auto", "gpu:0=0.003MiB"])
def test_hooks_that_a_forward_installs_are_put_back(ran_before: bool, profile: str, machine) -> None:
    x = torch.randn(2, 16)
    with machine(8) as manager:
        net = Capturing()
        managed = manage(net, profile, manager=manager)
        if ran_before:
            net(x)
        num_hooks = [count_hooks(layer) for layer in net.layers]
        for _ in range(3):
            found = managed.verify(x)
            assert found.is_equal, found.text()
            assert net.is_hooked == ran_before
            assert [count_hooks(layer) for layer in net.layers] == num_hooks
        assert len(net(x)[1]) == 4
        net.captured = []
        managed.release()
        del found


def count_hooks(layer: nn.Module) -> int:
    """Return how many hooks a layer has beside the engine's."""
    return sum(not isinstance(hook, OwnHook) for hook in layer._forward_hooks.values())


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, Interrupt, KeyboardInterrupt])
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_an_exception_in_any_of_the_runs_leaves_all_as_it_was(error, at: int, mode: str, toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, mode)
        net = managed.members[0].managed.module
        expected = net(x).cpu()
        num_calls = 0

        def fail(*_: object) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == at:
                raise error("on purpose")

        handle = net.singles[2].up.register_forward_hook(fail)
        if error is ValueError and at != 3:  # the reference does not fail: that is a difference
            found = managed.verify(x)
            assert not found.is_equal
            assert any("fails" in one.text for one in found.differences)
        else:
            with pytest.raises(error):
                managed.verify(x)
        handle.remove()
        manager.recover()
        assert_at_rest(managed)
        assert torch.equal(net(x).cpu(), expected)
        assert managed.verify(x).is_equal
        managed.release()


def interrupted_at(number: int, work: Callable[[], object]) -> int:
    """Raise `KeyboardInterrupt` before the so manieth line that our files run in some work; returns how many ran."""
    num_lines = 0
    files = {path: Path(path).read_text().splitlines() for path in VERIFYING}

    def trace(frame, event, _):
        nonlocal num_lines
        lines = files.get(frame.f_code.co_filename)
        if lines is None:
            return None
        # Python looks for signals where it calls and loops, not where a block begins.
        if event == "line" and lines[frame.f_lineno - 1].strip() not in ("try:", "finally:"):
            num_lines += 1
            if num_lines == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return num_lines


def count_entry_hooks(net) -> int:
    """Return how many hooks are called before a forward. Those after one come and go with quiet passes."""
    assert all(len(part._forward_hooks) <= len(part._forward_pre_hooks) for part in net.modules())
    return sum(len(part._forward_pre_hooks) for part in net.modules())


def sweep_interrupts(mode: str, toys, machine, *, num_places: int) -> None:
    x = torch.randn(1, 3, 64)
    with machine(8, 8) as manager:
        managed = manage(toys.build_net(doubles=2, singles=2), manager=manager, **MODES[mode])
        net = managed.members[0].managed.module
        expected = net(x).cpu()
        hooks = managed.members[0].managed.hooks
        hooks.watch_inside()  # quiet passes in a row do without some
        num_hooks = count_entry_hooks(net)
        num_lines = interrupted_at(0, lambda: managed.verify(x))
        assert num_lines > 500
        step = max(1, num_lines // num_places)
        for number in range(random.randrange(1, step + 1), num_lines + 1, step):
            torch.manual_seed(number)
            state = torch.get_rng_state()
            interrupted_at(number, lambda: managed.verify(x))
            manager.recover()
            where = f"{mode}, line {number} of {num_lines}"
            assert_at_rest(managed)
            assert torch.equal(torch.get_rng_state(), state), where
            assert torch.equal(net(x).cpu(), expected), where
            hooks.watch_inside()
            assert num_hooks == count_entry_hooks(net), where
        assert managed.verify(x).is_equal
        managed.release()


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_an_interrupt_at_some_lines_leaves_all_as_it_was(mode: str, toys, machine) -> None:
    sweep_interrupts(mode, toys, machine, num_places=12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_an_interrupt_at_many_lines_leaves_all_as_it_was(mode: str, toys, machine) -> None:
    sweep_interrupts(mode, toys, machine, num_places=400)


# -- seeded faults


def first_place(found) -> str:
    assert not found.is_equal
    return found.first.place


def flip(tensor: torch.Tensor) -> None:
    """Change one bit without torch's knowledge."""
    tensor.data.reshape(-1).view(torch.uint8)[2] ^= 0x40


@pytest.mark.parametrize("mode", ["resident", "streamed", "eight bits", "eight bits streamed"])
def test_a_weight_that_is_flipped_in_host_memory_is_found_by_its_file(mode: str, toys, machine, file_of) -> None:
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, mode, file_of)
        group = next(group for group in managed.members[0].managed.groups if group.name == "singles.2")
        flip(group.host_slab.data[group.layout.at_rest.offsets[group.index_of("singles.2.up.weight")] :])
        found = managed.verify(torch.randn(2, 5, 64))
        assert first_place(found) == "singles.2"
        assert found.first.what == "weights" and "singles.2.up.weight" in found.first.text
        managed.release()


def test_a_weight_that_is_flipped_on_the_device_counts_as_written_and_is_named(toys, machine, file_of) -> None:
    """Who changed it without a trace cannot be told: a program may, through ``.data``, and means it."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "resident", file_of)
        managed.members[0].managed.module(x)
        group = next(group for group in managed.members[0].managed.groups if group.name == "doubles.1")
        flip(group.copy.slab.data)
        found = managed.verify(x)
        assert found.is_equal and "the managed run wrote weights" in found.notes[0] and "doubles.1" in found.notes[0]
        managed.release()


def test_a_weight_that_is_flipped_in_staging_memory_is_found(toys, machine, monkeypatch) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "streamed")
        managed_component = managed.members[0].managed
        managed_component.module(x)
        (share,) = managed_component.shares
        number, use = max(share.streamer.groups), StagingSlot.use

        def corrupt(staging_slot, copies):
            use(staging_slot, copies)
            if staging_slot.block == number:
                managed_component.finish_copies()
                flip(staging_slot.slab)
                staging_slot.forget()  # copied anew next time

        monkeypatch.setattr(StagingSlot, "use", corrupt)
        found = managed.verify(x)
        monkeypatch.undo()
        name = managed_component.component.blocks[number].name
        assert first_place(found) == name and "from equal inputs" in found.first.text
        managed.release()
        del share


def test_a_copy_that_comes_late_is_found(sim, toys) -> None:
    """The compute stream waits for no copy: it computes with what was there before."""
    from highwater.memory import MemoryManager

    x = torch.randn(2, 5, 64)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 20)], check_races=False):
        manager = MemoryManager()
        manager.set_watermark("*", 0, 0)
        managed = managed_net(toys, manager, "streamed")
        managed_component = managed.members[0].managed
        managed_component.module(x)
        (share,) = managed_component.shares
        streamed = {managed_component.component.blocks[number].name for number in share.streamer.groups}
        share.copies.await_on_compute = lambda ready: None
        found = managed.verify(x)
        del share.copies.await_on_compute
        assert first_place(found) in streamed | {"the output"}
        manager.release_all()


def test_a_write_through_data_that_is_lost_while_streaming_is_found(toys, machine) -> None:
    """The first block waits in staging memory for the next pass; here its copy counts whatever its weight store is."""
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "streamed")
        managed_component = managed.members[0].managed
        managed_component.module(x)
        (share,) = managed_component.shares
        number = min(share.streamer.groups)
        stays = share.streamer.area.staging_slots[number]
        for stay in stays:
            stay.holds = lambda version, stay=stay: not stay.missing_bytes
        block = managed_component.module.get_submodule(managed_component.component.blocks[number].name)
        managed_component.finish_copies()
        block.up.weight.data.add_(0.5)
        found = managed.verify(x)
        assert first_place(found) == managed_component.component.blocks[number].name
        assert "from equal inputs" in found.first.text
        for stay in stays:
            del stay.holds
        managed.release()
        del share, stays, stay


def test_a_write_through_data_that_is_lost_with_the_copy_on_the_device_is_found(toys, machine, monkeypatch) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "resident")
        managed_component = managed.members[0].managed
        managed_component.module(x)
        group = next(group for group in managed_component.groups if group.name == "singles.1")
        managed_component.module.singles[1].up.weight.data.add_(0.5)
        monkeypatch.setattr(group, "save_changes", lambda *_: None)
        found = managed.verify(x)
        assert first_place(found) == "singles.1"
        managed.release()


@pytest.mark.parametrize("stale", ["hidden states", "side input"])
def test_a_hop_that_is_dropped_is_found(stale: str, toys, machine) -> None:
    """A block of the second device gets what was hopped there for another one, or zeros."""
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, "split")
        managed_component = managed.members[0].managed
        number = min(managed_component.shares[1].blocks)
        name = managed_component.component.blocks[number].name
        hops = managed_component.forwards.hops
        visit = hops.visit

        def drop(value, device, **named):
            made = visit(value, device, **named)
            if managed_component.forwards.share_of[number].computing.keys() == {number} and made is not None:
                (hidden, shift), keywords = made.lent.value
                if stale == "hidden states":
                    made.lent.value = (torch.zeros_like(hidden), shift), keywords
                else:
                    made.lent.value = (hidden, torch.zeros_like(shift)), keywords
            return made

        hops.visit = drop
        found = managed.verify(x)
        del hops.visit
        assert first_place(found) == name and "its inputs differ already" in found.first.text
        managed.release()


def test_a_hop_that_is_not_made_at_all_is_found(toys, machine) -> None:
    """The block of the second device fails with torch's own error about devices; that is named, too."""
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, "split")
        managed_component = managed.members[0].managed
        number = min(managed_component.shares[1].blocks)
        hops, visit = managed_component.forwards.hops, managed_component.forwards.hops.visit

        def stay(value, device, **named):
            return None if device.index == 1 else visit(value, device, **named)

        hops.visit = stay
        found = managed.verify(x)
        del hops.visit
        assert managed_component.component.blocks[number].name in first_place(found) and "fails" in found.first.text
        assert_at_rest(managed)
        managed.release()


class Filling(nn.Module):
    """Fills a buffer that its caller gives, as LTX's decoder does, and returns something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, output_buffer: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        output_buffer.copy_(x)
        return x.sum()


def test_an_argument_that_is_not_filled_is_found(machine) -> None:
    with machine(8) as manager:
        managed = manage(Filling(), manager=manager)
        visit = managed.members[0].managed.forwards.hops.visit

        def lose(value, device, **named):
            made = visit(value, device, **named)
            if made is not None and "output_buffer" in made.lent.value[1]:
                made.lent.value[1]["output_buffer"] = made.lent.value[1]["output_buffer"].clone()
            return made

        managed.members[0].managed.forwards.hops.visit = lose
        found = managed.verify(torch.randn(2, 16), output_buffer=torch.zeros(2, 16))
        assert "what the call wrote into its arguments" in first_place(found)
        del managed.members[0].managed.forwards.hops.visit
        managed.release()


# -- what is called


def test_several_modules_are_called_by_a_function(toys, machine) -> None:
    x = torch.randn(1, 3, 64)
    one, two = toys.build_net(1), toys.build_net(2)
    with machine(8, 8) as manager:
        managed = manage({"one": one, "two": two}, placement="one=gpu:1,two=gpu:0", manager=manager)
        found = managed.verify(lambda x: two(one(x)), x)
        assert found.is_equal, found.text()
        assert found.num_calls == 2 * 11
        with pytest.raises(InvalidInput, match="give the function that calls them first"):
            managed.verify(x)
        managed.release()
    with pytest.raises(InvalidInput, match="released"):
        managed.verify(two, x)


def test_it_is_refused_in_the_middle_of_a_forward(toys, machine) -> None:
    x = torch.randn(1, 3, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "streamed")
        net = managed.members[0].managed.module
        caught = []

        def ask(*_: object) -> None:
            try:
                managed.verify(x)
            except UnsafeState as error:
                caught.append(error)

        handle = net.doubles[1].register_forward_hook(ask)
        expected = net(x).cpu()
        handle.remove()
        assert len(caught) == 1
        caught.clear()
        assert torch.equal(net(x).cpu(), expected)
        managed.release()


def test_other_threads_wait_and_compute_right(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "streamed")
        net = managed.members[0].managed.module
        expected = net(x).cpu()
        results: list[bool] = []
        stop = threading.Event()

        def compute() -> None:
            while not stop.is_set():
                results.append(torch.equal(net(x).cpu(), expected))

        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(compute) for _ in range(2)]
            try:
                found = [managed.verify(x) for _ in range(4)]
            finally:
                stop.set()
            for future in futures:
                future.result()
        assert all(one.is_equal for one in found)
        assert results and all(results)
        assert_at_rest(managed)
        managed.release()


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_in_inference_mode(mode: str, toys, machine) -> None:
    with machine(8, 8) as manager, torch.inference_mode():
        managed = managed_net(toys, manager, mode)
        assert managed.verify(torch.randn(2, 5, 64)).is_equal
        managed.release()


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
def test_what_a_program_wrote_on_purpose_is_no_fault(mode: str, toys, machine, file_of) -> None:
    """Such as a merged LoRA: the weights are not those of the file any more."""
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager:
        managed = managed_net(toys, manager, mode, file_of)
        net = managed.members[0].managed.module
        net(x)
        net.singles[1].up.weight.data.add_(0.25)
        changed = net.singles[1].up.weight.detach().cpu().clone()
        for _ in range(2):
            found = managed.verify(x)
            assert found.is_equal, found.text()
        assert torch.equal(net.singles[1].up.weight.detach().cpu(), changed)
        managed.release()


def test_quantized_weights_are_equal(toys, machine) -> None:
    from optimum.quanto import freeze, qint8, quantize

    net = toys.build_net()
    quantize(net, weights=qint8)
    freeze(net)
    with machine(8) as manager, torch.inference_mode():
        managed = manage(net, "gpu:0=0.15MiB", manager=manager)
        found = managed.verify(torch.randn(2, 5, 64))
        assert found.is_equal, found.text()
        managed.release()
        del managed


def test_outputs_that_are_not_kept_are_compared_by_digest(toys, machine, monkeypatch) -> None:
    monkeypatch.setattr("highwater.memory.verification.findings.MAX_KEPT_BYTES", 3000)
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        managed = managed_net(toys, manager, "resident")
        assert "compared by digest only" in managed.verify(x).text()
        managed_component = managed.members[0].managed
        group = next(group for group in managed_component.groups if group.name == "doubles.1")
        flip(group.copy.slab.data)
        found = managed.verify(x)
        if not found.is_equal:  # else it counts as a write
            assert found.first.place == "doubles.1"
        managed.release()
