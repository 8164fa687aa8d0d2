"""Thrashing and growth are told with numbers, and runs begin and end with the watermark free."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import MemoryManager, manage
from highwater.memory.file_tensors import FileTensors
from highwater.memory.manager.member import Member
from highwater.memory.manager.returns import MAX_CONTENTS, KnownReturns, Returns
from highwater.memory.manager.thrashing import remedy
from highwater.memory.options.idle_limits import IdleLimits
from highwater.memory.options.placement import AUTO_PLACEMENT
from highwater.memory.options.precision import DEFAULT_PRECISION
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.units import MIB
from highwater.memory.weights.source import WeightsSource

from .test_steered import PAGE, Host, Paged

X = torch.ones(1, 3, 64)


def events(manager, kind: str) -> list[dict]:
    return [event for event in manager.report()["events"] if event["kind"] == kind]


def run_all(manager, nets, runs: int, name: str = "both") -> None:
    for number in range(runs):
        manager.begin_run(str(number), name)
        for node, net in nets.items():
            manager.begin_node(node, node)
            net(X)
            manager.end_node()
        manager.end_run()
        manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize(
    ("sizes", "mark", "told"),
    [
        ((2.6,), 0.9, "a watermark of gpu:0 of low "),
        ((2,), 0.0, "a profile with budget "),
        ((2, 8), 0.0, "placement gpu:1 would stop that: 8.00MiB are free there, it has 1.06MiB"),
    ],
)
def test_three_reloads_within_five_runs_are_thrashing(toys, machine, sizes, mark, told: str) -> None:
    with machine(*sizes, low=int(mark * MIB), high=int(mark * MIB)) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 3)
        assert not events(manager, "thrashing")
        run_all(manager, nets, 2)
        found = events(manager, "thrashing")
        assert {event["component"] for event in found} == {"a", "b"}
        for event in found:
            assert told in event["reason"] and event["node_id"] == event["component"]
            assert event["reason"].startswith("evicted and loaded again 3 times within 5 runs, ")


@torch.no_grad()
def test_a_precision_is_a_remedy_only_where_it_saves_what_is_missing(toys, machine) -> None:
    with machine(8) as manager:
        saved = 0
        for seed, (name, precision) in enumerate({"a": "as stored", "b": "as stored", "c": "fp8 scaled"}.items()):
            manage({name: toys.build_net(seed)}, placement="gpu:0", precision=precision, manager=manager)
            managed = manager.members[name].managed
            if precision == "as stored":
                saved += managed.plan.total_bytes - managed.encoded_bytes
        told = [remedy(manager.members["a"], manager.capacity, "gpu:0", lost) for lost in (saved, saved + 1)]
        assert ["precision 'fp8 scaled' takes half" in line for line in told] == [True, False]


@torch.no_grad()
def test_what_fits_does_not_thrash_and_moves_nothing_again(toys, machine) -> None:
    with machine(8) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 6)
        assert not events(manager, "thrashing") and not events(manager, "growth")
        assert [run["bytes_moved"] > 0 for run in manager.report()["runs"]] == [True, *[False] * 5]


@torch.no_grad()
def test_a_workflow_that_needs_more_says_what_and_since_which_change(toys, machine) -> None:
    with machine(8) as manager:
        nets = {"a": toys.build_net()}
        managed = manage(nets, placement="gpu:0", precision="fp8 scaled", manager=manager)
        run_all(manager, nets, 2)
        assert not events(manager, "growth")
        managed.reprofile(precision="as stored")
        managed.release()
        manage(nets, placement="gpu:0", manager=manager)
        nets["b"] = toys.build_net(1)
        manage({"b": nets["b"]}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 2)
        (event,) = events(manager, "growth")
        assert event["reason"].startswith("both needs ") and "b is new, 1.06MiB" in event["reason"]
        assert "(since precision as stored, was fp8 scaled)" in event["reason"]
        run_all(manager, {"a": nets["a"]}, 1)
        assert len(events(manager, "growth")) == 1, "less is no news"


@torch.no_grad()
def test_a_run_begins_and_ends_with_the_watermark_free(toys, machine) -> None:
    with machine(4, low=MIB, high=MIB) as manager:
        net = toys.build_net()
        manage({"a": net}, placement="gpu:0", manager=manager)
        net(X)
        other = torch.empty(int(2.4 * MIB), dtype=torch.uint8, device="sim:0")
        assert manager.devices["gpu:0"].free_bytes() < MIB
        manager.begin_run("1", "first")
        assert manager.devices["gpu:0"].free_bytes() >= MIB
        (event,) = events(manager, "evict")
        assert event["run_id"] == "1" and event["reason"].startswith("less than the watermark is free; ")
        more = torch.empty(MIB // 2, dtype=torch.uint8, device="sim:0")
        manager.end_run()
        assert manager.devices["gpu:0"].free_bytes() >= MIB
        del other, more


def load_file_anew(manager: MemoryManager, path: Path) -> Member:
    """Return a hosted component with a new model of a file, as a host makes it that dropped the last one."""
    model = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
    with FileTensors() as files:
        tensors = load_file(path)
        files.watch(path, tensors)
        model.load_state_dict(tensors, assign=True)
    choices = {"placement": AUTO_PLACEMENT, "profile": OffloadProfile(), "precision": DEFAULT_PRECISION}
    name = path.stem
    origins = {name: files.origins(model)}
    (member,), _ = manager.add(
        {name: model}, kinds={name: "diffusion"}, name=None, node_id=None, is_hosted=True, origins=origins, **choices
    )
    return member


@torch.no_grad()
@pytest.mark.parametrize("replaced", [False, True])
def test_another_model_of_the_same_file_counts_on(machine, tmp_path: Path, replaced: bool) -> None:
    """Each prompt evicts the model at its end, and the host drops it before the next one loads the file again."""
    path = tmp_path / "flux.safetensors"
    with machine(4) as manager:
        for number in range(5):
            if replaced or not number:
                save_file({"0.weight": torch.rand(256, 256)}, path)
            manager.begin_run(str(number), "run")
            member = load_file_anew(manager, path)
            manager.hosting.load(member)
            manager.free_memory("gpu:0", member.managed.plan.weight_bytes, "wan needs it")
            manager.end_run()
            manager.discard(member)
        assert bool(events(manager, "thrashing")) != replaced
        assert manager.capacity.event_log.num_runs == 5
        manager.drop_kept("test")


@torch.no_grad()
def test_another_model_that_was_loaded_from_the_same_file_counts_on(machine, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    save_file({"0.weight": torch.rand(256, 256)}, path)
    choices = {"placement": AUTO_PLACEMENT, "profile": OffloadProfile(), "precision": None, "name": None}
    with machine(4) as manager:
        for number in range(5):
            manager.begin_run(str(number), "run")
            net = nn.Sequential(nn.Linear(256, 256, bias=False)).requires_grad_(False)
            net.load_state_dict(load_file(path))
            sources = {"net": WeightsSource([path])}
            (member,), _ = manager.add({"net": net}, sources=sources, node_id=None, **choices)
            net(torch.ones(1, 256))
            manager.free_memory("gpu:0", member.managed.plan.weight_bytes, "another needs it")
            manager.end_run()
            manager.discard(member)
        assert [event["component"] for event in events(manager, "thrashing")] == ["net"]


# -- components that their host moves


class Known(Paged):
    """One whose host says what it was read from, how large it is and which profile was chosen."""

    def __init__(self, name: str, num_pages: int = 0, *, profile: str = "auto", file: str = "") -> None:
        super().__init__(name, num_pages)
        self.whole_pages, self.profile, self.file = num_pages, profile, file

    def describe(self) -> Mapping[str, Any]:
        return {"weight_bytes": self.whole_pages * PAGE}

    def wanted_bytes(self) -> Mapping[str, int]:
        return {"gpu:0": self.whole_pages * PAGE}

    def host_bytes(self) -> Mapping[str, int]:
        return {"pinned": self.whole_pages * PAGE}

    def choices(self) -> dict[str, str]:
        return {"profile": self.profile}

    def content(self) -> str | None:
        return self.file or None

    def fill(self) -> None:
        """Bring the pages that are missing, as its host does while it computes."""
        missing = self.whole_pages - len(self.pages)
        self.pages += [torch.empty(PAGE, dtype=torch.uint8, device="sim:0") for _ in range(missing)]


def run_steered(manager: MemoryManager, *components: Known, number: int = 0, taken: tuple[Known, ...] = ()) -> None:
    """Run a prompt that uses these after one another; while it does, the host empties ``taken`` and tells nobody."""
    manager.begin_run(str(number), "steered")
    for component in components:
        manager.begin_node(component.name, component.name)
        manager.hosting.note_use(component)
        for other in taken:
            if other is not component:
                other.pages.clear()
        missing = (component.whole_pages - len(component.pages)) * PAGE - manager.devices["gpu:0"].free_bytes()
        manager.free_memory("gpu:0", max(0, missing), "ComfyUI asked for memory", exclude=[component.id])
        component.fill()
        manager.end_node()
    manager.end_run()
    manager.ledger.check()


@torch.no_grad()
@pytest.mark.parametrize("tells", [True, False], ids=["evicted by us", "taken by the host"])
def test_what_the_host_moves_thrashes_too(toys, machine, tells: bool) -> None:
    with machine(2.4) as manager:
        other, third = Known("flux", 6), Known("wan", 3)
        manager.hosting.steer(Host(other, third))
        nets = {"ours": toys.build_net()}
        managed = manage(nets, placement="gpu:0", manager=manager)
        for number in range(5):
            if tells:
                run_steered(manager, other, number=number)
                run_all(manager, nets, 1, "ours")
            else:
                run_steered(manager, other, third, number=number, taken=(other, third))
            if number == 2:
                assert not events(manager, "thrashing")
        found = [event for event in events(manager, "thrashing") if event["component"] == "flux"]
        assert len(found) == 1
        (event,) = found
        assert event["node_id"] == "flux" and event["device"] == "gpu:0" and event["component_kind"] == "diffusion"
        lost = event["bytes"]
        assert 0 < lost <= 6 * PAGE and (tells or lost == 6 * PAGE)
        assert event["reason"].startswith("evicted and loaded again 3 times within 5 runs, ")
        for component in (other, third):
            component.pages.clear()
        managed.release()


@torch.no_grad()
@pytest.mark.parametrize("why", ["it fits", "released", "a limit", "between runs"])
def test_what_left_for_nobody_does_not_thrash(machine, why: str) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Known("flux", 6), third := Known("wan", 3)))
        if why == "a limit":
            manager.commands.set_idle_limits(IdleLimits(num_loaded=1))
        for number in range(8):
            run_steered(manager, other, third, number=number)
            if why == "released":
                manager.begin_run("release", "release")
                manager.commands.release_from(other, reason="asked for")
                manager.end_run()
            elif why == "between runs":
                other.pages.clear()
        assert not events(manager, "thrashing")
        assert {len(other.pages), len(third.pages)} <= {0, 3, 6}
        for component in (other, third):
            component.pages.clear()


@torch.no_grad()
@pytest.mark.parametrize("how", ["released", "a limit"])
def test_ours_that_left_because_its_user_asked_does_not_thrash(toys, machine, how: str) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        managed = manage({"a": net}, placement="gpu:0", manager=manager)
        if how == "a limit":
            manager.commands.set_idle_limits(IdleLimits(idle_s=1e-9))
        for number in range(8):
            run_all(manager, {"a": net}, 1)
            if how == "a limit":
                manager.look()
            else:
                manager.begin_run(str(number), "release")
                manager.commands.release_from(manager.members["a"], reason="asked for")
                manager.end_run()
        assert len([event for event in events(manager, "evict") if event["component"] == "a"]) >= 5
        assert not events(manager, "thrashing")
        managed.release()


@torch.no_grad()
@torch.no_grad()
@pytest.mark.parametrize("frees", [False, True])
def test_what_was_evicted_before_all_was_freed_is_not_loaded_again(toys, machine, frees: bool) -> None:
    with machine(2) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
        run_all(manager, nets, 1)
        assert events(manager, "evict")
        if frees:
            manager.follow_free("asked for")
        run_all(manager, {"a": nets["a"]}, 1)
        assert (manager.report()["runs"][-1]["reloaded_bytes"] == {}) == frees


def test_the_remedy_is_no_budget_for_what_takes_none(machine) -> None:
    class Unmanaged(Known):
        takes_budgets = False

    with machine(4) as manager:
        manager.hosting.steer(Host(other := Known("flux", 6), third := Unmanaged("wan", 7)))
        for number in range(5):
            run_steered(manager, other, third, number=number, taken=(other, third))
        reasons = {event["component"]: event["reason"] for event in events(manager, "thrashing")}
        assert reasons.keys() == {"flux", "wan"}
        assert "for wan would stop that" not in reasons["flux"] and "precision 'fp8 scaled'" in reasons["flux"]
        other.pages.clear()
        third.pages.clear()


@torch.no_grad()
def test_another_object_of_the_same_files_counts_on(machine) -> None:
    """The host drops each model when the next prompt begins, and loads its file into a new one."""
    with machine(4) as manager:
        manager.hosting.steer(host := Host())
        for number in range(4):
            first, second = (Known(name, 6, file=f"{name}.safetensors") for name in ("flux", "wan"))
            host.held[:] = [first, second]
            run_steered(manager, first, second, number=number, taken=(first, second))
            run_steered(manager, second, first, number=number, taken=(first, second))
            for component in (first, second):
                component.pages.clear()
            host.held.clear()
            del first, second, component
            gc.collect()
        assert {event["component"] for event in events(manager, "thrashing")} == {"flux", "wan"}


def test_objects_of_the_same_files_at_the_same_time_count_apart() -> None:
    known, there = KnownReturns(), {"first": True}
    first = known.take("file", lambda: there["first"])
    second = known.take("file", lambda: True)
    assert first is not second
    there["first"] = False
    assert known.take("file", lambda: True) is first
    assert known.take(None, lambda: True) is not known.take(None, lambda: True)
    for number in range(MAX_CONTENTS):
        known.take(number, lambda: True)
    assert len(known.known) == MAX_CONTENTS and "file" not in known.known


def test_what_comes_back_is_what_had_left_since_the_last_use() -> None:
    returns = Returns()
    assert returns.end_use({"gpu:0": 10}) == {}
    returns.look("gpu:0", 4)
    returns.look("gpu:0", 7)
    assert returns.end_use({"gpu:0": 12, "gpu:1": 3}) == {"gpu:0": 6}
    returns.look("gpu:0", 2)
    assert returns.end_use({"gpu:0": 2}) == {}, "it left and did not come back"
    assert returns.end_use({"gpu:0": 12}) == {}, "and was there for the first time since"
    returns.excuse("gpu:0", 5)
    assert returns.end_use({"gpu:0": 12}) == {}
    returns.look("gpu:0", 9)
    returns.excuse("gpu:0", 5)
    assert returns.end_use({"gpu:0": 12}) == {"gpu:0": 3}
    returns.look("gpu:0", 0)
    returns.excuse("gpu:0", 0, before=10)
    assert returns.end_use({"gpu:0": 12}) == {"gpu:0": 2}


@torch.no_grad()
def test_growth_of_what_the_host_moves_says_since_which_change(machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(host := Host(small := Known("flux", 3)))
        for number in range(2):
            run_steered(manager, small, number=number)
        assert not events(manager, "growth")
        small.pages.clear()
        host.held[:] = [large := Known("flux", 9, profile="1GiB")]
        del small
        gc.collect()
        run_steered(manager, large)
        (event,) = events(manager, "growth")
        assert event["bytes"] == 6 * PAGE
        assert "steered needs 1.50MiB more than at its last run: weights of flux take 2.25MiB" in event["reason"]
        assert event["reason"].endswith("instead of 0.75MiB (since profile 1GiB, was auto)")
        large.pages.clear()


@torch.no_grad()
def test_growth_of_activations_of_what_the_host_moves(machine) -> None:
    """A run in which weights come to the device tells nothing, as patches are applied to them then."""
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Known("flux", 6)))

        def run(activation_bytes: int, *, loses: int = 0) -> list[str]:
            before = len(events(manager, "growth"))
            del other.pages[len(other.pages) - loses :]
            manager.begin_run("run", "steered")
            manager.begin_node("7", "KSampler")
            manager.hosting.note_use(other)
            other.fill()
            torch.empty(activation_bytes, dtype=torch.uint8, device="sim:0")
            manager.end_node()
            manager.end_run()
            return [event["reason"] for event in events(manager, "growth")[before:]]

        assert run(2 * MIB) == []
        assert run(MIB) == []
        assert run(3 * MIB, loses=2) == []
        assert run(MIB) == []
        (reason,) = run(4 * MIB)
        assert "needs 3.00MiB more than at its last run: activations of flux take 4.00MiB instead of 1.00MiB" in reason
        assert run(MIB // 2) == [] and not manager.measures.intervals
        other.pages.clear()


@torch.no_grad()
def test_an_eviction_of_what_the_host_moves_says_how_long_a_reload_takes(machine) -> None:
    with machine(8) as manager:
        manager.hosting.steer(Host(other := Known("flux", 6)))
        (candidate,) = manager.capacity.candidates(manager.devices["gpu:0"], None)
        assert candidate.reload_s_per_byte is None
        manager.capacity.links["gpu:0"] = 1e6
        (candidate,) = manager.capacity.candidates(manager.devices["gpu:0"], None)
        assert candidate.reload_s_per_byte == pytest.approx(1e-6)
        manager.free_memory("gpu:0", 4 * PAGE, "asked for")
        (event,) = events(manager, "evict")
        assert "reload 1 s" in event["reason"] or "reload 1.0 s" in event["reason"]
        other.pages.clear()
