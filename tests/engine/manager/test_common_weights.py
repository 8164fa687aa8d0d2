"""Components with weights of the same file: these are in RAM once, until one of the components writes to them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory.file_tensors import FileTensors
from highwater.memory.hosted_component import HostedComponent
from highwater.memory.manager.manager import MemoryManager
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import MIB

PROFILES = ["auto", "0.6MiB"]  # all blocks on the device, or streamed
KEYS = [f"blocks.{number}.weight" for number in range(4)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Loaded:
    """A model of a file, as a host loads it, under management."""

    def __init__(self, file: Path, name: str, manager: MemoryManager, profile: str = "auto") -> None:
        self.device = manager.devices["gpu:0"].torch_device
        self.net = Net().requires_grad_(False)
        self.hosted = HostedComponent(name, "diffusion", profile=parse_profile(profile, devices=["gpu:0"]))
        with FileTensors() as files:
            kept = files.read(file)
            tensors = load_file(file) if kept is None else kept[0]
            if kept is None:
                files.watch(file, tensors)
            self.net.load_state_dict(tensors)
            del tensors, kept
        self.hosted.came_from(files.origins(self.net))
        del files
        self.hosted.join(self.net, self.device)

    def values(self) -> dict[str, torch.Tensor]:
        """Return copies of the weights as they are now, wherever they rest."""
        weights = self.hosted.weights
        if not weights:
            return {key: self.net.get_parameter(key).detach().cpu().clone() for key in KEYS}
        return {key: weights[key].wide(torch.device("cpu")) for key in KEYS}

    @property
    def is_resident(self) -> bool:
        return self.net.get_parameter(KEYS[0]).device.type != "cpu"

    def compute(self) -> torch.Tensor:
        self.hosted.load()
        return self.net(torch.ones(1, 256, device=self.device)).cpu()


def compute(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what a model with these weights computes."""
    net = Net().requires_grad_(False)
    net.load_state_dict(weights)
    return net(torch.ones(1, 256))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    save_file({key: torch.randn(256, 256) / 16 for key in KEYS}, path)
    return path


@pytest.fixture
def manager(machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    with machine(64) as manager:
        for module in ("hosted_component", "file_tensors"):
            monkeypatch.setattr(f"highwater.memory.{module}.default_manager", lambda: manager)
        manager.begin_run("1", "test")  # outside of runs nothing is kept: the host frees its memory
        yield manager
        manager.drop_kept("test")


def in_ram(manager: MemoryManager) -> int:
    assert dict(manager.ledger.entries) == dict(manager.count_bytes())
    return sum(n for (place, _, _), n in manager.ledger.entries.items() if place in ("pinned", "host"))


def test_what_two_have_is_in_the_books_once(file: Path, manager: MemoryManager) -> None:
    first = Loaded(file, "first", manager)
    before, expected = in_ram(manager), first.compute()
    second = Loaded(file, "second", manager)
    assert in_ram(manager) == before
    assert torch.equal(second.compute(), expected)
    (part,) = manager.kept.parts
    assert manager.kept.sharers(part) == ["first", "second"]
    third = Loaded(file, "third", manager)
    assert in_ram(manager) == before and manager.kept.sharers(part) == ["first", "second", "third"]
    for each in (first, second, third):
        each.hosted.leave()
    assert in_ram(manager) == before
    del first, second, third, each
    manager.drop_kept("test")
    assert in_ram(manager) == 0


def test_dropped_while_shared_leaves_with_the_last(file: Path, manager: MemoryManager) -> None:
    first, second = (Loaded(file, name, manager) for name in ("first", "second"))
    assert manager.drop_kept("test") == 0
    before = in_ram(manager)
    first.hosted.leave()
    assert in_ram(manager) == before and torch.equal(second.values()[KEYS[0]], load_file(file)[KEYS[0]])
    second.hosted.leave()
    assert in_ram(manager) == before  # a program may use the model on: it has its weights there
    assert [report.plan["reasons"] for report in manager.kept.reports()] == [
        ["a model that left still has it; leaves with that"]
    ]
    assert torch.equal(second.values()[KEYS[0]], load_file(file)[KEYS[0]])
    del first, second
    manager.capacity.trim_kept()
    assert in_ram(manager) == 0 and not manager.kept.parts


def test_what_a_model_that_left_still_has_stays_in_the_books(file: Path, manager: MemoryManager) -> None:
    """Also when the file is loaded again meanwhile, which takes memory of its own."""
    first, second = (Loaded(file, name, manager) for name in ("first", "second"))
    both = in_ram(manager)
    for each in (first, second):
        each.hosted.leave()
    third = Loaded(file, "third", manager)
    alone = in_ram(manager)
    assert both < alone <= 2 * both
    assert torch.equal(third.compute(), compute(load_file(file)))
    del first, second, each
    manager.capacity.trim_kept()
    assert in_ram(manager) <= both and not manager.kept.parts
    third.hosted.release()


def test_after_both_left_the_file_is_not_read_again(file: Path, manager: MemoryManager) -> None:
    """Nor is anything of the two left: they are gone without a search for cycles."""
    gc.disable()
    try:
        first, second = (Loaded(file, name, manager) for name in ("first", "second"))
        expected = first.compute()
        modules = [weakref.ref(each.net) for each in (first, second)]
        for each in (first, second):
            each.hosted.leave()
        del first, second, each
        assert not any(module() for module in modules)
        third = Loaded(file, "third", manager)
        assert torch.equal(third.compute(), expected)
        assert [event.kind for event in manager.event_log.events].count("reuse") == 1
    finally:
        gc.enable()


def test_kept_weights_hold_nothing_of_the_host(file: Path, manager: MemoryManager) -> None:
    gc.disable()
    try:
        loaded = Loaded(file, "net", manager)
        held = [weakref.ref(each) for each in (loaded.net, loaded.hosted, loaded.net.blocks[0].weight)]
        loaded.hosted.leave()
        del loaded
        assert manager.kept.parts and not any(each() for each in held)
    finally:
        gc.enable()


def test_threads_that_load_a_file_at_once_each_get_what_it_has(file: Path, manager: MemoryManager) -> None:
    """Of kept weights too: one of them may get those, all have the file's values, and the books are true."""
    for _ in range(3):
        with ThreadPoolExecutor(4) as threads:
            nets = list(threads.map(lambda number: Loaded(file, f"net {number}", manager), range(4)))
        for net in nets:
            assert all(torch.equal(value, load_file(file)[key]) for key, value in net.values().items())
            assert torch.equal(net.compute(), compute(load_file(file)))
        assert in_ram(manager) <= 4 * file.stat().st_size + 4 * MIB
        for net in nets:
            net.hosted.leave()
        del net, nets


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_cancelled_load_leaves_nothing_and_takes_nothing(file: Path, manager: MemoryManager, is_kept: bool) -> None:
    """While the library builds the model, or while its weights are packed."""
    if is_kept:
        Loaded(file, "earlier", manager).hosted.leave()
    before = in_ram(manager)
    with pytest.raises(Cancelled), FileTensors() as files:
        tensors = (files.read(file) or (load_file(file), {}))[0]
        Net().requires_grad_(False).load_state_dict(tensors)
        raise Cancelled
    del tensors, files
    assert in_ram(manager) == before

    def cancel(*_: object) -> None:
        raise Cancelled

    end = manager.watch_loading(cancel)
    with pytest.raises(Cancelled):
        Loaded(file, "cancelled", manager)
    end()
    assert in_ram(manager) == before and list(manager.members) == []
    gc.collect()  # the exception's frames hold the model that was cancelled
    net = Loaded(file, "later", manager)
    assert torch.equal(net.compute(), compute(load_file(file)))
    assert [event.kind for event in manager.event_log.events].count("reuse") == (3 if is_kept else 0)
    net.hosted.release()


def test_one_that_gets_another_profile_goes_on_with_what_it_shares(file: Path, manager: MemoryManager) -> None:
    first, second = (Loaded(file, name, manager) for name in ("first", "second"))
    before, expected = in_ram(manager), second.compute()
    member = first.hosted.joined()
    manager.replace(
        [member],
        placement=first.hosted.placement_on(first.device),
        profile=parse_profile(PROFILES[1], devices=["gpu:0"]),
        precision=Precision.AS_STORED,
    )
    assert in_ram(manager) == before
    first.net.get_parameter(KEYS[0]).add_(1)
    assert before < in_ram(manager) < 2 * before
    assert torch.equal(first.compute(), compute(load_file(file) | {KEYS[0]: load_file(file)[KEYS[0]] + 1}))
    assert torch.equal(second.compute(), expected)


WRITES: dict[str, Callable[[Loaded, str], None]] = {
    "patch": lambda net, key: net.hosted.weights[key].overwrite(net.values()[key] + 1),
    "in place": lambda net, key: net.net.get_parameter(key).add_(1),
    "data": lambda net, key: net.net.get_parameter(key).data.add_(1),
    "view": lambda net, key: net.net.get_parameter(key).view(-1).add_(1),
    "detached": lambda net, key: net.net.get_parameter(key).detach().add_(1),
    "numpy": lambda net, key: net.net.get_parameter(key).numpy().__iadd__(1),
}


# A module that its host dropped has them in memory of their own: its weights do not follow.
THROUGH_VIEWS = {"view", "detached"}
# Nobody sees these on a device.
UNSEEN = {"data", "numpy", "detached"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from([*WRITES, "load", "compute", "unload", "leave", "release", "join"]),
            st.sampled_from(KEYS),
        ),
        max_size=12,
    ),
    profiles=st.lists(st.sampled_from(PROFILES), min_size=3, max_size=3),
)
def test_each_has_its_own_values_whatever_is_written(
    file: Path, manager: MemoryManager, steps: list[tuple[int, str, str]], profiles: list[str]
) -> None:
    """Written to in any way, at rest or resident, under management or after it: the others stay as they are."""
    nets: list[Loaded] = []
    left: set[int] = set()
    try:
        nets += (Loaded(file, f"net {number}", manager, profile) for number, profile in enumerate(profiles))
        expected = [load_file(file) for _ in nets]
        for number, step, key in steps:
            net = nets[number]
            if step in WRITES:
                is_seen = not (number in left and step in THROUGH_VIEWS)
                if (net.hosted.is_managed or step != "patch") and is_seen and not (net.is_resident and step in UNSEEN):
                    WRITES[step](net, key)
                    expected[number][key] = expected[number][key] + 1
            elif step == "join" or net.hosted.is_managed:
                left -= {number}
                left |= {number} if step == "leave" else set()
                if step == "join":
                    net.hosted.join(net.net, net.device)
                elif step == "compute":
                    assert torch.equal(net.compute(), compute(expected[number]))
                else:
                    getattr(net.hosted, step)()
            in_ram(manager)
            for each, values in zip(nets, expected, strict=True):
                actual = each.values()
                assert all(torch.equal(actual[name], values[name]) for name in KEYS), (step, each.hosted.name)
    finally:
        for each in nets:
            each.hosted.release()
        nets.clear()
        net = each = None
        gc.collect()  # what hypothesis notes of a failure holds models
        manager.drop_kept("test")
    assert in_ram(manager) == 0


class Pair(Net):
    """A model of two files, with weights of both outside of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256, bias=False), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(super().forward(self.first(x)))


def load_pair(files: list[Path], name: str, manager: MemoryManager) -> tuple[Pair, HostedComponent]:
    pair = Pair().requires_grad_(False)
    hosted = HostedComponent(name, "text", profile=parse_profile("auto", devices=["gpu:0"]))
    with FileTensors() as reading:
        for path in files:
            kept = reading.read(path)
            tensors = load_file(path) if kept is None else kept[0]
            if kept is None:
                reading.watch(path, tensors)
            pair.load_state_dict(tensors, strict=False)
            del tensors, kept
    hosted.came_from(reading.origins(pair))
    del reading
    hosted.join(pair, manager.devices["gpu:0"].torch_device)
    return pair, hosted


@pytest.fixture
def files(file: Path) -> list[Path]:
    """Two files; both have weights outside of blocks."""
    tensors = load_file(file)
    other = file.with_name("other.safetensors")
    save_file({key: tensors.pop(key) for key in KEYS[2:]} | Pair().second.state_dict(prefix="second."), other)
    save_file(tensors | Pair().first.state_dict(prefix="first."), file)
    return [file, other]


@pytest.mark.parametrize("order", [1, -1])
def test_a_model_of_several_files_reads_each_of_them_once(
    files: list[Path], manager: MemoryManager, order: int
) -> None:
    """Also weights of two files that lie in one slab."""
    expected = {key: tensor for path in files for key, tensor in load_file(path).items()}
    for _ in range(2):
        pair, hosted = load_pair(files[::order], "pair", manager)
        hosted.load()
        assert all(torch.equal(weight.cpu(), expected[key]) for key, weight in pair.named_parameters())
        before = in_ram(manager)
        hosted.leave()
        del pair, hosted
        assert in_ram(manager) == before  # kept in its place
    reused = {event.component: event.bytes for event in manager.event_log.events if event.kind == "reuse"}
    for path in files:
        assert reused[path.name] == sum(tensor.nbytes for tensor in load_file(path).values())


def test_of_several_files_one_is_replaced(files: list[Path], manager: MemoryManager) -> None:
    load_pair(files, "pair", manager)[1].leave()
    tensors = {key: tensor + 1 for key, tensor in load_file(files[1]).items()}
    save_file(tensors, files[1].with_name("new"))
    files[1].with_name("new").replace(files[1])
    expected = {key: tensor for path in files for key, tensor in load_file(path).items()}
    pair, hosted = load_pair(files, "pair", manager)
    hosted.load()
    assert all(torch.equal(weight.cpu(), expected[key]) for key, weight in pair.named_parameters())
    hosted.leave()


def test_a_file_that_one_loading_reads_twice_is_in_memory_twice(file: Path, manager: MemoryManager) -> None:
    """A write to the one model is none to the other."""
    Loaded(file, "earlier", manager).hosted.leave()
    nets = [Net().requires_grad_(False) for _ in range(2)]
    with FileTensors() as reading:
        for net in nets:
            kept = reading.read(file)
            net.load_state_dict(load_file(file) if kept is None else kept[0])
            del kept
    nets[0].get_parameter(KEYS[0]).add_(1)
    assert torch.equal(nets[1].get_parameter(KEYS[0]), load_file(file)[KEYS[0]])
    del reading, nets, net
    gc.collect()
