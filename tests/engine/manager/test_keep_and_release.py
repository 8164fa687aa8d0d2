"""What is kept leaves last up to its limit; what is released leaves at once, and the driver says so."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import InvalidInput, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.manager.claims.kept import parse_limit
from highwater.memory.planner.capacity import DeviceCapacity

X = torch.ones(2, 5, 64)


def victims(manager) -> list[str]:
    return [event["component"] for event in manager.report()["events"] if event["kind"] == "evict"]


def loaded(manager, toys, count: int) -> list:
    nets = [toys.build_net(seed=seed) for seed in range(count)]
    handles = [manage(net, name=f"net{n}", manager=manager) for n, net in enumerate(nets)]
    for net in nets:
        net(X)
    return handles


def test_beyond_its_limit_a_kept_component_leaves_in_the_usual_order(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        first, _ = loaded(manager, toys, 2)
        held = manager.ledger.held("net0/model", "gpu:0")
        first.keep(at_most=f"{held // 2 / toys.MIB}MiB")
        manager.free_memory("gpu:0", 1, "a byte")
        assert victims(manager) == ["net0/model"]  # the oldest, and it holds more than its limit
        manager.free_memory("gpu:0", held // 2 - (held - manager.ledger.held("net0/model", "gpu:0")), "the rest")
        left = manager.ledger.held("net0/model", "gpu:0")
        assert 0 < left <= held // 2
        manager.free_memory("gpu:0", manager.ledger.held("net1/model", "gpu:0"), "all of the other")
        assert manager.ledger.held("net0/model", "gpu:0") == left
        assert not manager.ledger.held("net1/model", "gpu:0")
        manager.free_memory("gpu:0", 1, "nothing else is left")
        assert manager.ledger.held("net0/model", "gpu:0") < left


def test_a_share_of_the_device_is_a_limit_and_all_of_it_none(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        first, second = loaded(manager, toys, 2)
        held = manager.ledger.held("net0/model", "gpu:0")
        for text in ("100%", "unlimited"):
            second.members[0].managed.module(X)
            first.keep(at_most=text)
            manager.free_memory("gpu:0", held, "as much as one")
            assert manager.ledger.held("net0/model", "gpu:0") == held


def test_keep_off_undoes_it(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        first, _ = loaded(manager, toys, 2)
        first.keep().keep(False)
        manager.free_memory("gpu:0", 1, "a byte")
        assert victims(manager) == ["net0/model"]


@pytest.mark.parametrize("limit", ["9MiB", "1TiB", "200%", "0", "-1MiB", "much", "", "5", "6MiB 7MiB"])
def test_a_limit_that_no_device_has_is_refused_in_one_line(toys, machine, limit: str) -> None:
    with machine(8) as manager, torch.no_grad():
        (first,) = loaded(manager, toys, 1)
        with pytest.raises(InvalidInput, match="allowed: ") as refused:
            first.keep(at_most=limit)
        assert len(str(refused.value).splitlines()) == 1
        assert not manager.members["net0/model"].evict_last


def test_a_limit_is_said_as_it_was_given() -> None:
    assert [str(parse_limit(text)) for text in ("6 gib", "50%", "unlimited")] == ["6GiB", "50%", "all"]


def test_plans_count_the_bytes_of_a_kept_component_once(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        first, _ = loaded(manager, toys, 2)
        before = gpus_of(manager)
        first.keep(at_most="1MiB")
        assert gpus_of(manager) == before


def gpus_of(manager) -> list[DeviceCapacity]:
    return [device for device in manager.machine().devices if device.name != "cpu"]  # its free RAM is everybody's


# -- release


@pytest.mark.parametrize("device", [None, "gpu:0", "GPU"])
def test_what_is_released_is_free_for_every_program(toys, machine, device) -> None:
    with machine(8) as manager, torch.no_grad():
        first, second = loaded(manager, toys, 2)
        held = manager.ledger.held("net0/model", "gpu:0")
        other = manager.ledger.held("net1/model", "gpu:0")
        gpu = manager.devices["gpu:0"]
        gpu.empty_cache()
        before = gpu.driver_free_bytes()
        (left,) = first.unload(device)
        assert left.left_bytes == held and left.freed_bytes >= held and left.is_verified
        assert gpu.driver_free_bytes() - before == left.freed_bytes
        assert manager.ledger.held("net1/model", "gpu:0") == other
        assert manager.report()["events"][-1]["reason"] == "unloaded by its user; fully evicted"
        assert first.unload(device) == []
        expected = toys.build_net(seed=0)(X)
        assert torch.equal(first.members[0].managed.module(X).cpu(), expected)
        assert second.members[0].managed.is_loaded


def test_only_the_device_that_was_named_is_left(toys, machine) -> None:
    with machine(8, 8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager, placement="gpu:0&gpu:1") as managed:
            net(X)
            kept = manager.ledger.held("model", "gpu:0")
            assert [left.device for left in managed.unload("gpu:1")] == ["gpu:1"]
            assert manager.ledger.held("model", "gpu:0") == kept and not manager.ledger.held("model", "gpu:1")
            assert torch.equal(net(X).cpu(), toys.build_net()(X))


def test_what_computes_is_not_released(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager) as managed:
            net.doubles[1].register_forward_hook(lambda *_: managed.unload())
            with pytest.raises(UnsafeState, match=r"^model: computes now; release it after that$"):
                net(X)
            net.doubles[1]._forward_hooks.popitem()
            assert torch.equal(net(X).cpu(), toys.build_net()(X))
            with manager.lease(managed.members[0]), pytest.raises(UnsafeState, match="computes now"):
                managed.unload()


@pytest.mark.parametrize("device", ["cpu", "gpu:7", "", "sim:9"])
def test_a_device_without_memory_of_its_own_is_refused(toys, machine, device: str) -> None:
    with machine(8) as manager, torch.no_grad():
        (first,) = loaded(manager, toys, 1)
        with pytest.raises(InvalidInput, match="allowed: gpu:0"):
            first.unload(device)


def test_a_component_is_found_by_its_id_only(toys, machine) -> None:
    with machine(8) as manager:
        loaded(manager, toys, 1)
        assert manager.commands.find("net0/model").id == "net0/model"
        with pytest.raises(InvalidInput, match="did you mean 'net0/model'"):
            manager.commands.find("net0/mode")
