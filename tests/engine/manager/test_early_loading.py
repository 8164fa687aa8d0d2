"""Blocks of the component that is used next come to free device memory, and nothing depends on them until it runs."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from highwater.memory import MemoryManager, load_model, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.options.idle_limits import IdleLimits
from highwater.memory.planner import mixed_tiers, sizes
from highwater.memory.transfer.bounce_buffers import BounceBuffers
from highwater.memory.weights import file_reader
from highwater.memory.weights.file_reader import WeightsFile
from highwater.tests.engine.conftest import build_net
from highwater.tests.engine.interleaving import Interleaving

KIB = 1 << 10
X = torch.linspace(-1, 1, 192).view(3, 64)
PLACEMENTS = ["*=gpu:0:pinned", "*=gpu:0:host", "*=gpu:0:disk"]


@pytest.fixture(autouse=True)
def spares_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_tiers, "LEAST_SPARED_BYTES", 0)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / f"{name}.safetensors" for name in "abc"}
    for number, path in enumerate(paths.values()):
        save_file({name: weight.clone() for name, weight in build_net(seed=number).state_dict().items()}, path)
    return paths


def load(files: dict[str, Path]) -> dict[str, nn.Module]:
    return {name: load_model(path, build_net).eval() for name, path in files.items()}


def compute(module: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    with torch.no_grad():
        return module(x).cpu()


def expected_of(name: str) -> torch.Tensor:
    return compute(build_net(seed="abc".index(name)))


def early_bytes(manager: MemoryManager, name: str) -> int:
    return sum(share.early.num_bytes for share in manager.members[name].managed.shares)


def bytes_there(manager: MemoryManager, name: str) -> int:
    """Return the bytes whose copies have come."""
    copies = [copy for share in manager.members[name].managed.shares for copy in share.early.by_group.values()]
    return sum(copy.slab.numel() for copy in copies if copy.is_there)


def load_now(manager: MemoryManager, name: str) -> int:
    """Do what the thread does, here and now; returns the bytes that came."""
    early, before = manager.leases.look_ahead.early, early_bytes(manager, name)
    while True:
        with manager.exclusive():
            begun, _ = early.begin(name)
        if begun is None:
            return early_bytes(manager, name) - before
        begun[0].early.fill(begun[1])


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread does nothing by itself, and who does its work waits for nothing long."""
    monkeypatch.setattr("highwater.memory.manager.early_loading.WAITING_S", 0.001)
    monkeypatch.setattr("highwater.memory.manager.look_ahead.LookAhead.find_wanted", lambda self: iter(()))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_next_component_is_there_before_it_computes(sim, machine, files, wait_until, placement: str) -> None:
    with machine(8) as manager, manage(models := load(files), placement=placement, manager=manager) as handle:
        assert torch.equal(compute(models["a"]), expected_of("a"))
        manager.foresee([["a"], ["b"], ["c"]])
        plans = {member.name: member.managed.plan.shares[0] for member in handle.members}
        wait_until(lambda: all(bytes_there(manager, name) == plans[name].resident_bytes for name in "bc"))
        manager.ledger.check()
        sim.reset_stats()
        for name in "bc":
            manager.foresee([[name], ["c"]])
            assert torch.equal(compute(models[name]), expected_of(name))
            assert not early_bytes(manager, name)
        assert sim.stats(0).h2d_bytes < plans["b"].fixed_bytes + plans["c"].fixed_bytes + 4 * KIB
        loads = [event for event in manager.event_log.events if event.kind == "load" and event.component in "bc"]
        assert [event.bytes for event in loads] == [plans[name].device_bytes for name in "bc"]
        for event in loads:
            assert " of it were on the device ahead: " in event.reason and event.reason.endswith(" hidden")
        assert not [event for event in manager.event_log.events if event.kind == "evict"]


PROFILES = {"streams": "0.3MiB", "a budget of the device": "gpu:0=2MiB", "bytes to leave free": "-6.9MiB"}


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("why", [*PROFILES, "not loaded", "another device", "unknown", "no room", "idle limits"])
def test_nothing_comes_early_where_it_might_disturb(machine, files, why: str) -> None:
    profile = PROFILES.get(why, "auto")
    models = load(files)
    with (
        machine(8, 8) as manager,
        manage({"a": models["a"]}, profile, placement="gpu:0", manager=manager),
        manage({"b": models["b"]}, placement="gpu:1" if why == "another device" else "gpu:0", manager=manager),
    ):
        if why != "not loaded":
            compute(models["a"])
        if why == "no room":
            free_bytes = manager.devices["gpu:0"].free_bytes()
            manager.set_watermark("gpu:0", 0, free_bytes - 1 * KIB)
        if why == "idle limits":
            manager.commands.set_idle_limits(IdleLimits(num_loaded=1))
        manager.foresee([["unknown" if why == "unknown" else "a"], ["b"]])
        assert load_now(manager, "b") == 0


@pytest.mark.usefixtures("still")
def test_only_what_the_watermark_leaves_is_taken(machine, files) -> None:
    models = load(files)
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        compute(models["a"])
        room_bytes = 300 * KIB
        high = manager.devices["gpu:0"].free_bytes() - room_bytes
        manager.set_watermark("gpu:0", 0, high)
        manager.foresee([["a"], ["b"]])
        assert 0 < load_now(manager, "b") <= room_bytes
        assert manager.devices["gpu:0"].free_bytes() >= high
        assert torch.equal(compute(models["b"]), expected_of("b"))


@pytest.mark.usefixtures("still")
def test_what_is_not_expected_any_more_is_dropped(machine, files) -> None:
    models = load(files)
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        compute(models["a"])
        manager.foresee([["a"], ["b"], ["c"]])
        assert load_now(manager, "b") and load_now(manager, "c")
        manager.foresee([["a"], ["c"]])
        assert not early_bytes(manager, "b") and early_bytes(manager, "c")
        manager.look_ahead(False)
        assert not early_bytes(manager, "c")
        manager.ledger.check()


@pytest.mark.usefixtures("still")
def test_what_came_early_leaves_for_what_computes_now(machine, files) -> None:
    models = load(files)
    with machine(2) as manager, manage(models, placement="*=gpu:0", manager=manager):
        compute(models["a"])
        manager.foresee([["a"], ["b"]])
        came = load_now(manager, "b")
        assert came
        free_bytes = manager.devices["gpu:0"].free_bytes()
        manager.free_memory("gpu:0", came // 2, "a forward needs it", exclude=["a"])
        assert early_bytes(manager, "b") <= came // 2 and manager.devices["gpu:0"].free_bytes() > free_bytes
        manager.ledger.check()
        for name in "bca":
            assert torch.equal(compute(models[name]), expected_of(name))


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_copy_that_fails_is_forgotten(sim, machine, files, placement: str) -> None:
    models = load(files)
    with machine(8) as manager, manage(models, placement=placement, manager=manager):
        compute(models["a"])
        manager.foresee([["a"], ["b"]])
        sim.fail_copy(0, nth=3)
        manager.leases.look_ahead.early.load("b", lambda: True)  # tells nothing
        manager.ledger.check()
        assert torch.equal(compute(models["b"]), expected_of("b"))


class NotedLock:
    """A lock of `EarlyCopies` that notes when another thread than the one that fills asks for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.filler: threading.Thread | None = None
        self.is_asked_for = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread() is not self.filler:
            self.is_asked_for.set()
        self.lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self.lock.release()


DROPS: dict[str, Callable[..., object]] = {
    "another forecast": lambda manager, handle, models: manager.foresee([["a"]]),
    "look-ahead off": lambda manager, handle, models: manager.look_ahead(False),
    "a forward of another size": lambda manager, handle, models: compute(models["a"], X[:2]),
    "room for others": lambda manager, handle, models: manager.free_memory("gpu:0", 8 << 20, "a test", exclude=["a"]),
    "another profile": lambda manager, handle, models: handle.reprofile("0.3MiB"),
    "release": lambda manager, handle, models: handle.release(),
}


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("drop", "piece", "precision"),
    [
        *((drop, "a buffer", "as stored") for drop in DROPS),
        ("another forecast", "a part of a buffer", "as stored"),
        ("another forecast", "a buffer", "fp8 scaled"),  # which reads a weight to measure it first
    ],
)
def test_what_drops_a_block_waits_for_one_piece_of_its_file(
    machine, files, wait_until, monkeypatch, drop: str, piece: str, precision: str
) -> None:
    """The thread stops before its second piece until the drop waits for it, then reads that one and no more."""
    monkeypatch.setattr(
        *((sizes, "BOUNCE_BUFFER_BYTES") if piece == "a buffer" else (file_reader, "CHUNK_BYTES")), 8 * KIB
    )
    monkeypatch.setattr(file_reader, "NUM_THREADS", 1)
    monkeypatch.setattr(file_reader, "count_cached_threads", lambda: 1)
    read_chunk, pieces, goes_on = WeightsFile.read_chunk, [], threading.Event()

    def read_piece(self: WeightsFile, *args: object) -> object:
        if threading.current_thread() is lock.filler:
            pieces.append(args)
            assert len(pieces) < 2 or goes_on.wait(60)
        return read_chunk(self, *args)

    lock = NotedLock()
    monkeypatch.setattr(WeightsFile, "read_chunk", read_piece)
    models = load(files)
    choices = {"placement": "*=gpu:0:disk", "precision": precision}
    with machine(8) as manager, manage(models, manager=manager, **choices) as handle:
        want = {name: compute(module) for name, module in models.items()}
        manager.free_memory("gpu:0", 8 << 20, "a test", exclude=["a"])
        compute(models["a"])
        manager.foresee([["a"], ["b"]])
        free_bytes = manager.devices["gpu:0"].free_bytes()
        (share,) = manager.members["b"].managed.shares
        share.early.filling = lock
        outcomes: list[object] = []
        lock.filler = threading.Thread(
            target=lambda: outcomes.append(manager.leases.look_ahead.early.load_block("b", lambda: True)), daemon=True
        )
        lock.filler.start()
        wait_until(lambda: len(pieces) == 2)
        assert early_bytes(manager, "b")
        dropping = threading.Thread(target=lambda: outcomes.append(DROPS[drop](manager, handle, models)), daemon=True)
        dropping.start()
        assert lock.is_asked_for.wait(60)
        goes_on.set()
        for thread in (dropping, lock.filler):
            thread.join(60)
            assert not thread.is_alive()
        assert len(pieces) == 2 and len(outcomes) == 2, "it read on, or failed"
        assert not share.early.by_group
        manager.ledger.check()
        if drop in ("another forecast", "look-ahead off"):
            assert manager.devices["gpu:0"].free_bytes() == free_bytes
        again = manage(models, manager=manager, **choices) if drop == "release" else nullcontext()
        with again:
            for name, module in models.items():
                assert torch.equal(compute(module), want[name])
                assert precision != "as stored" or torch.equal(want[name], expected_of(name))
            manager.ledger.check()


@pytest.mark.usefixtures("still")
def test_a_copy_that_was_stopped_is_never_taken(machine, files, monkeypatch) -> None:
    """Its memory has a part of the block, and something else behind it."""
    monkeypatch.setattr(sizes, "BOUNCE_BUFFER_BYTES", 8 * KIB)
    models = load(files)
    with machine(8) as manager, manage(models, placement="*=gpu:0:disk", manager=manager):
        compute(models["a"])
        manager.foresee([["a"], ["b"]])
        with manager.exclusive():
            manager.leases.look_ahead.early.begin("b")
        (share,) = manager.members["b"].managed.shares
        copy_windows = BounceBuffers.queue_copies

        def copy_once(self: BounceBuffers, *args: object, **options: object) -> None:
            copy_windows(self, *args, **options)
            for early in share.early.by_group.values():
                early.is_dropped = True

        with monkeypatch.context() as patch:
            patch.setattr(BounceBuffers, "queue_copies", copy_once)
            assert [share.early.fill(early) for early in share.early.by_group.values()] == [False]
        assert not any(early.is_filled or early.is_of_now for early in share.early.by_group.values())
        assert early_bytes(manager, "b"), "whoever drops it frees it"
        manager.ledger.check()
        assert torch.equal(compute(models["b"]), expected_of("b"))
        assert not early_bytes(manager, "b")
        manager.ledger.check()


def test_copies_of_what_computes_are_not_delayed(sim, machine, files) -> None:
    """In virtual seconds, in which what goes over the link counts: while it streams nothing goes beside it."""
    told = {}
    for is_on in (False, True):
        models = load(files)
        with machine(8) as manager, manage(models, "0.3MiB", placement="*=gpu:0:pinned", manager=manager):
            manager.look_ahead(is_on)
            compute(models["a"])
            begin_s = sim.clock_s()
            manager.foresee([["a"], ["b"]])
            for _ in range(3):
                compute(models["a"])
            told[is_on] = sim.clock_s() - begin_s, sim.stats(0).h2d_bytes
    assert told[True] == told[False]


class Needy(nn.Module):
    """Allocates 3 MiB in the middle of its forward, and does something before and behind that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.before = self.behind = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        self.before()
        torch.empty(3 << 20, dtype=torch.uint8, device=x.device).fill_(1)
        self.behind()
        return self.blocks[2](self.blocks[1](x))


@pytest.mark.usefixtures("still")
def test_what_computes_is_known_to_need_what_it_needs(machine) -> None:
    """Also where blocks come behind its peak, or before it and are dropped behind it."""
    needy, other = Needy().requires_grad_(False), build_net(seed=1)
    with machine(16) as manager, manage({"a": needy, "b": other}, placement="*=gpu:0", manager=manager):
        member = manager.members["a"]

        def come() -> None:
            assert load_now(manager, "b")

        def needed() -> int:
            member.activation_bytes.clear()
            manager.foresee([["a"], ["b"]])
            compute(needy)
            manager.foresee([["a"]])
            return member.activation_bytes["gpu:0"]

        alone = needed()
        needy.behind = come
        behind = needed()
        needy.before, needy.behind = come, lambda: manager.foresee([["a"]])
        assert alone == behind == needed() >= 3 << 20


@pytest.mark.usefixtures("still")
def test_a_forward_of_another_size_begins_without_it(machine, files) -> None:
    models = load(files)
    with machine(8) as manager, manage(models, placement="*=gpu:0", manager=manager):
        compute(models["a"])
        manager.foresee([["a"], ["b"]])
        assert load_now(manager, "b")
        compute(models["a"])
        assert early_bytes(manager, "b")
        compute(models["a"], X[:2])
        assert not early_bytes(manager, "b")
        assert load_now(manager, "b")


def write_in_place(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        module.doubles[0].up.weight.mul_(value)


def write_data(module: nn.Module, value: float) -> None:
    module.doubles[1].up.weight.data.mul_(value)


def swap_data(module: nn.Module, value: float) -> None:
    weight = module.doubles[0].down.weight
    weight.data = weight.data * value


def replace_parameter(module: nn.Module, value: float) -> None:
    layer = module.doubles[1].down
    layer.weight = nn.Parameter(layer.weight.detach().clone() * value, requires_grad=False)


def load_state(module: nn.Module, value: float) -> None:
    state = {name: weight.clone() for name, weight in module.state_dict().items()}
    state["doubles.0.up.weight"] = state["doubles.0.up.weight"] * value
    module.load_state_dict(state)


WRITES: list[Callable[[nn.Module, float], None]] = [
    write_in_place,
    write_data,
    swap_data,
    replace_parameter,
    load_state,
]
DEEDS = st.one_of(
    st.tuples(st.just("early"), st.sampled_from("ab")),
    st.tuples(st.just("compute"), st.sampled_from("ab")),
    st.tuples(st.sampled_from(WRITES), st.sampled_from("ab")),
    st.tuples(st.just("evict"), st.sampled_from("ab")),
    st.tuples(st.just("reprofile"), st.sampled_from(["0.3MiB", "0.8MiB", "auto"])),
)


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize("placement", PLACEMENTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(deeds=st.lists(DEEDS, min_size=3, max_size=14))
def test_any_order_of_deeds_computes_the_same(machine, files, placement: str, deeds: list) -> None:
    models = load({name: files[name] for name in "ab"})
    twins = {name: build_net(seed=number) for number, name in enumerate("ab")}
    twins = {name: copy.deepcopy(twin) for name, twin in twins.items()}
    with machine(8) as manager, manage(models, placement=placement, manager=manager) as handle:
        for number, (deed, what) in enumerate(deeds):
            if deed == "early":
                manager.foresee([["b" if what == "a" else "a"], [what]])
                load_now(manager, what)
            elif deed == "compute":
                assert torch.equal(compute(models[what]), compute(twins[what]))
            elif deed == "evict":
                manager.free_memory("gpu:0", 1 << 20, "a test", exclude=[what])
            elif deed == "reprofile":
                handle.reprofile(what)
            else:
                try:
                    deed(models[what], 1.0 + number / 8)
                except UnsafeState:  # other weights, while its own rest in their file
                    assert deed is load_state and placement.endswith("disk")
                    continue
                deed(twins[what], 1.0 + number / 8)
            manager.ledger.check()
        for name, module in models.items():
            assert torch.equal(compute(module), compute(twins[name]))
    for name, module in models.items():
        if not any(weight.is_meta for weight in module.parameters()):  # else some were never read
            assert torch.equal(compute(module), compute(twins[name]))


ACTS: dict[str, Callable[..., object]] = {
    "computes with it": lambda manager, handle, nets: compute(nets["b"], X[:, :16]),
    "computes": lambda manager, handle, nets: compute(nets["a"], X[:, :16]),
    "expects something else": lambda manager, handle, nets: manager.foresee([["a"]]),
    "needs its room": lambda manager, handle, nets: manager.free_memory("gpu:0", 8 << 20, "a test", exclude=["a"]),
    "gives another profile": lambda manager, handle, nets: handle.reprofile("0.05MiB"),
    "releases": lambda manager, handle, nets: handle.release(),
    "writes to it": lambda manager, handle, nets: write_in_place(nets["b"], 1.5),
}
ROOMS = ("runtime/devices/early", "manager/early")
SWEPT_EACH_TIME = [("computes with it", ROOMS[0]), ("releases", ROOMS[0])]
SHAPE = {"dim": 16, "doubles": 1, "singles": 1}


@pytest.mark.usefixtures("still")
@pytest.mark.parametrize(
    ("act", "room"),
    [
        pytest.param(act, room, marks=() if (act, room) in SWEPT_EACH_TIME else pytest.mark.slow(one_in=12))
        for act in ACTS
        for room in ROOMS
    ],
)
def test_another_thread_acts_at_each_line_of_it(machine, act: str, room: str) -> None:
    x = X[:, :16]
    nets = {name: build_net(seed=number, **SHAPE) for number, name in enumerate("ab")}
    expected = {}
    with torch.no_grad():
        for factor in (1.0, 1.5) if act == "writes to it" else (1.0,):
            write_in_place(nets["b"], factor)
            expected[factor] = nets["b"](x)
    for number in itertools.count():
        nets = {name: build_net(seed=place, **SHAPE) for place, name in enumerate("ab")}
        with machine(8) as manager, manage(nets, placement="*=gpu:0", manager=manager) as handle, torch.no_grad():
            nets["a"](x)
            manager.foresee([["a"], ["b"]])
            forecast, looks = manager.capacity.forecast, iter(range(20))
            first = partial(
                manager.leases.look_ahead.early.load,
                "b",
                lambda: "b" in forecast.later_uses and next(looks, None) is not None,  # noqa: B023
            )
            both = Interleaving(first, partial(ACTS[act], manager, handle, nets), room=room)
            for outcome in both.run(number):
                if isinstance(outcome, BaseException):
                    raise outcome
            manager.ledger.check()
            if "b" in manager.members:
                assert any(torch.equal(nets["b"](x).cpu(), output) for output in expected.values())
        assert any(torch.equal(nets["b"](x), output) for output in expected.values())
        if number >= len(both.lines):
            assert number > 10
            return
