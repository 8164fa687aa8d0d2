"""One manager across runs: watermarks, least-recently-used eviction, leases, and the report that says so."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory import DoesNotFit, InvalidInput, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import Precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.units import MIB, format_bytes

X = torch.ones(1, 3, 64)


def used(manager, name: str) -> int:
    return manager.ledger.held(name, "gpu:0")


def add(toys, manager, *names: str, **options):
    nets = {name: toys.build_net(seed) for seed, name in enumerate(names)}
    managed = [manage({name: net}, placement="gpu:0", manager=manager, **options) for name, net in nets.items()]
    return nets, managed


@torch.no_grad()
def test_nothing_moves_before_a_component_computes(toys, machine, sim) -> None:
    with machine(8) as manager:
        add(toys, manager, "a")
        assert sim.stats(0).h2d_bytes == 0


@torch.no_grad()
def test_both_stay_when_both_fit(toys, machine) -> None:
    with machine(8) as manager:
        nets, _ = add(toys, manager, "a", "b")
        nets["a"](X), nets["b"](X)
        moved = manager.bytes_moved()
        nets["a"](X), nets["b"](X)
        assert manager.bytes_moved() == moved
        assert not [event for event in manager.report()["events"] if event["kind"] == "evict"]


@torch.no_grad()
def test_the_watermark_evicts_the_least_recently_used_across_runs(toys, machine, sim) -> None:
    # A net is 1.09 MiB: two fit beside the mark, the third does not.
    with machine(4, low=int(1.2 * MIB), high=int(1.2 * MIB)) as manager:
        nets, _ = add(toys, manager, "a", "b", "c")
        for run, name in enumerate(["a", "b", "a", "c"]):
            manager.begin_run(str(run), name)
            nets[name](X)
            manager.end_run()
            assert manager.devices["gpu:0"].free_bytes() >= int(1.2 * MIB)
        evictions = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        assert [event["component"] for event in evictions] == ["b"]
        assert (
            "c needs 1.06MiB" in evictions[0]["reason"]
            and "1.20MiB reserved; least recently used" in evictions[0]["reason"]
        )
        assert used(manager, "a") and used(manager, "c")
        runs = manager.report()["runs"]
        assert [run["num_evictions"] for run in runs] == [0, 0, 0, 1]
        assert [bool(run["bytes_moved"]) for run in runs] == [True, True, False, True]


@torch.no_grad()
def test_eviction_is_partial_and_stops_at_the_high_mark(toys, machine) -> None:
    with machine(4, low=int(2.0 * MIB), high=int(2.1 * MIB)) as manager:
        nets, _ = add(toys, manager, "a", "b")
        nets["a"](X)
        whole = used(manager, "a")
        nets["b"](X)
        assert 0 < used(manager, "a") < whole
        largest = 6 * 64 * 64 * 2 * 4 + 8 * 1024
        assert int(2.1 * MIB) <= manager.devices["gpu:0"].free_bytes() < int(2.1 * MIB) + largest
        assert torch.equal(nets["a"](X).cpu(), toys.build_net(0).to("sim:0")(X.to("sim:0")).cpu())


@torch.no_grad()
def test_a_leased_component_is_never_evicted(toys, machine) -> None:
    with machine(1.9) as manager:
        nets, managed = add(toys, manager, "a", "b")
        (member,) = managed[0].members
        with manager.lease(member):
            before = used(manager, "a")
            with pytest.raises(UnsafeState):
                manager.admission.evict(member, manager.devices["gpu:0"], 1, "by force")
            nets["b"](X)  # streams in what is left
            assert used(manager, "a") == before
            assert managed[1].members[0].managed.plan.shares[0].streamed
        manager.begin_run("next", "next")
        nets["b"](X)  # and takes it all once the lease is over
        assert not managed[1].members[0].managed.plan.shares[0].streamed


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "0.45MiB"])
def test_what_a_host_puts_in_place_of_a_blocks_weights_is_not_computed_with(toys, machine, profile: str) -> None:
    """ComfyUI's quantized layers make other objects of their weights whenever they are moved."""
    net, x = toys.build_net(), X.to("sim:0")
    with machine(8) as manager:
        (member,), _ = manager.add(
            {"a": net},
            placement=parse_placement("gpu:0", devices=["gpu:0"]),
            profile=parse_profile(profile, devices=["gpu:0"]),
            precision=Precision.AS_STORED,
            name=None,
            node_id=None,
            is_hosted=True,
        )
        manager.hosting.load(member)
        want = net(x).cpu()
        block = net.get_submodule(member.managed.component.blocks[2].name)
        for _ in range(3):
            block.up.weight = torch.nn.Parameter(torch.zeros(block.up.weight.shape), requires_grad=False)
            assert torch.equal(net(x).cpu(), want)
        manager.release_all()


@torch.no_grad()
def test_room_for_a_component_that_its_host_loads_again_is_not_taken_from_it(toys, machine) -> None:
    """The host asks for memory before it loads: the component that is to have it may be the one idle longest."""
    with machine(8) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        members, _ = manager.add(
            nets,
            placement=parse_placement("gpu:0", devices=["gpu:0"]),
            profile=parse_profile("auto", devices=["gpu:0"]),
            precision=Precision.AS_STORED,
            name=None,
            node_id=None,
            is_hosted=True,
        )
        coming, idle = members
        for member in members:
            manager.hosting.load(member)
        whole = used(manager, "a")
        freed = manager.free_memory("gpu:0", whole // 2, "the host asks", exclude=[coming.id])
        assert used(manager, "a") == whole
        assert used(manager, "b") == whole - freed <= whole // 2
        manager.hosting.unload(idle)
        assert manager.free_memory("gpu:0", 1, "the host asks", exclude=[coming.id]) == 0
        assert used(manager, "a") == whole
        manager.hosting.load(idle)
        assert manager.free_memory("gpu:0", 1, "the host asks") == whole - used(manager, "a") > 0  # idle longest


@torch.no_grad()
def test_what_does_not_fit_says_so_and_the_manager_goes_on(toys, machine) -> None:
    with machine(4, low=int(3.9 * MIB), high=int(3.9 * MIB)) as manager:
        net = toys.build_net()
        with pytest.raises(DoesNotFit, match=r"3\.90MiB reserved"):
            manage(net, placement="gpu:0", manager=manager)
        manager.set_watermark("*", 0, 0)
        with manage(net, placement="gpu:0", manager=manager):
            manager.set_watermark("*", int(3.9 * MIB), int(3.9 * MIB))
            with pytest.raises(DoesNotFit):
                net(X)
            assert not used(manager, "model") and not manager.members["model"].leases
            manager.set_watermark("*", 0, 0)
            net(X)


@pytest.mark.parametrize("low", [0, MIB // 4])
@torch.no_grad()
def test_what_does_not_fit_beside_others_that_compute_names_them_and_a_remedy_that_applies(
    toys, machine, low: int
) -> None:
    with machine(4, low=0, high=0) as manager:
        nets, _ = add(toys, manager, "a", "b")
        told = []

        def enter_other(*_: object) -> None:
            manager.set_watermark("*", low, low)
            left = manager.devices["gpu:0"].free_bytes() - low - MIB // 16
            others = torch.empty(left, dtype=torch.uint8, device="sim:0")
            with pytest.raises(DoesNotFit) as raised:
                nets["b"](X)
            told.append(str(raised.value))
            del others, raised

        nets["a"].singles[0].register_forward_pre_hook(enter_other)
        nets["a"](X)
        held = f"{format_bytes(low)} reserved, a computes and holds {format_bytes(used(manager, 'a'))}; "
        lower = ", lower the watermark" if low else ""
        # Encoded, it would need scratch to be widened in: more than it saves. There is no other GPU.
        remedies = f"wait until it has computed{lower}, or place it on the CPU"
        assert told[0].endswith(held + remedies)


@torch.no_grad()
def test_what_is_on_a_device_stays_there_when_no_plan_fits_any_more(toys, machine) -> None:
    with machine(4) as manager:
        nets, (managed,) = add(toys, manager, "a")
        net = nets["a"]
        want, held = net(X).cpu(), used(manager, "a")
        with manager.lease(managed.members[0]):
            manager.set_watermark("*", 4 * MIB, 4 * MIB)
            with pytest.raises(DoesNotFit):
                net(X)
            assert used(manager, "a") == held
            assert len(managed.members[0].leases) == 1
            manager.set_watermark("*", 0, 0)
            assert torch.equal(net(X).cpu(), want)


@torch.no_grad()
def test_a_raised_watermark_clears_room_at_once(toys, machine) -> None:
    with machine(4) as manager:
        nets, _ = add(toys, manager, "a")
        nets["a"](X)
        manager.set_watermark("gpu:0", 4 * MIB, 4 * MIB)
        assert used(manager, "a") == 0


@torch.no_grad()
def test_the_second_run_keeps_free_what_the_first_one_needed_beside_the_weights(toys, machine) -> None:
    x = torch.ones(1, 700, 64)
    with machine(6) as manager:
        nets, managed = add(toys, manager, "a", "b")
        nets["a"](X)
        nets["b"](x)
        needed = managed[1].members[0].activation_bytes["gpu:0"]
        assert needed > MIB
        assert manager.capacity.needed(managed[1].members[0], "gpu:0").num_bytes == needed


@pytest.mark.parametrize(
    ("device", "low", "high", "words"),
    [("gpu:3", 0, 0, "no device 'gpu:3'; did you mean"), ("cpu", 0, 0, "allowed: \\*, gpu:0"),
     ("*", 2, 1, "allowed: low <= high"), ("gpu:0", 0, 1 << 40, "exceeds gpu:0; allowed: up to")],
)  # fmt: skip
def test_a_bad_watermark_changes_nothing(machine, device: str, low: int, high: int, words: str) -> None:
    with machine(4, 4) as manager:
        before = dict(manager.capacity.watermarks.marks)
        with pytest.raises(InvalidInput, match=words):
            manager.set_watermark(device, low, high)
        assert manager.capacity.watermarks.marks == before


@torch.no_grad()
def test_node_reports_measure_weights_and_activations(toys, machine) -> None:
    with machine(8) as manager:
        told = []
        end = manager.subscribe(told.append)
        manager.begin_run("r1", "toy")
        manager.begin_node("1", "Load")
        net = toys.build_net()
        manage({"net": net}, placement="gpu:0", manager=manager, node_id="1")
        load = manager.end_node()
        manager.begin_node("2", "Sample", workflow_id="w")
        net(torch.ones(1, 100, 64))
        sample = manager.end_node()
        manager.end_run()
        end()
        assert load["tiers"] == {"pinned": manager.ledger.used("pinned")}
        assert sample["weights_bytes"] == {"gpu:0": used(manager, "net")}
        assert sample["peak_bytes"]["gpu:0"] == sample["weights_bytes"]["gpu:0"] + sample["activation_bytes"]["gpu:0"]
        assert sample["activation_bytes"]["gpu:0"] >= 100 * 6 * 64 * 4  # the widest hidden state
        assert sample["bytes_moved"] == manager.bytes_moved()
        assert (sample["run_id"], sample["workflow_id"]) == ("r1", "w")
        assert [message["node_id"] for message in told if message["type"] == "node"] == ["1", "2"]
        report = json.loads(json.dumps(manager.report()))
        assert report["version"] == 2 and len(report["nodes"]) == 2


@torch.no_grad()
def test_equal_node_ids_of_two_workflows_are_two_nodes(toys, machine) -> None:
    with machine(8) as manager:
        tiers = []
        for seed, workflow in enumerate("vw"):
            manager.begin_node("1", "Load", workflow_id=workflow)
            manage({"net": toys.build_net(seed)}, placement="gpu:0", manager=manager, node_id="1")
            tiers.append(manager.end_node()["tiers"]["pinned"])
        assert tiers[0] == tiers[1] == manager.ledger.used("pinned") // 2
        assert [part["workflow_id"] for part in manager.report()["components"]] == ["v", "w"]


@settings(max_examples=15)
@given(
    sequence=st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    capacity=st.floats(1.6, 4.0),
    low=st.floats(0.1, 0.8),
    precision=st.sampled_from(["as stored", "fp8 scaled"]),
)
def test_any_sequence_of_models_computes_right_within_any_capacity(
    toys, machine, sim, sequence: list[str], capacity: float, low: float, precision: str
) -> None:
    with torch.no_grad(), machine(capacity, 8, low=int(low * MIB), high=int(low * MIB)) as manager:
        nets, _ = add(toys, manager, "a", "b", "c", precision=precision)
        wanted = {}
        for seed, name in enumerate("abc"):
            plain = toys.build_net(seed)
            manage(plain, placement="cpu", precision=precision, manager=MemoryManager()).release()
            plain.to("sim:1")
            wanted[name] = plain(X.to("sim:1")).cpu()
        del plain
        for name in sequence:
            manager.begin_run(name, name)
            assert torch.equal(nets[name](X).cpu(), wanted[name])
            manager.end_run()
            assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0")
            assert sim.stats(0).total_bytes - sim.stats(0).used_bytes >= int(low * MIB)


def test_what_was_released_meanwhile_is_gone_before_anyone_else_comes_in(toys, machine) -> None:
    """Another thread holds the lock: a finalizer does not wait for it, `release` does; the next caller finds none."""
    with machine(8) as manager:
        finalized, released = (manage(toys.build_net(seed=seed), name=f"net{seed}", manager=manager) for seed in (1, 2))
        holding, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with manager.lock.rlock:
                holding.set()
                let_go.wait(600)

        holder = threading.Thread(target=hold)
        holder.start()
        holding.wait(600)
        finalized.discard()
        assert "net1/model" in manager.members
        waiting = threading.Thread(target=released.release)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        let_go.set()
        waiting.join(600)
        holder.join(600)
        assert not manager.members


@pytest.mark.parametrize(("nth", "tier"), [(1, "host"), (2, "pinned")])
def test_the_report_says_where_weights_rest_that_the_driver_would_not_lock(
    toys, machine, sim, monkeypatch, nth: int, tier: str
) -> None:
    monkeypatch.setattr("highwater.memory.transfer.pinned_memory.ARENA_BYTES", 256 << 10)
    with machine(8) as manager:
        sim.fail_registration(nth)
        manage(toys.build_net(), "0.45MiB", placement="gpu:0", manager=manager)
        (component,) = manager.report()["components"]
        assert component["plan"]["tier"] == tier
        assert component["plan"]["pinned_bytes"] <= component["tiers"].get("pinned", 0)
