"""The handle that `manage` returns: overrides, another profile in place, keeping, watching and cancelling a loading."""

from __future__ import annotations

import threading

import pytest
import torch
from highwater.memory import InvalidInput, manage
from highwater.memory.errors import UnsafeState

TIGHT = "0.45MiB"


class Pipeline:
    """Any object whose parts are modules."""

    def __init__(self, toys) -> None:
        self.transformer = toys.build_net()
        self.vae = toys.build_net(seed=1)
        self.scheduler = object()


def streamed_blocks(managed, name: str = "model") -> int:
    (entry,) = (part for part in managed.report()["components"] if part["id"] == name)
    return sum(share["streamed_blocks"] for share in entry["plan"]["shares"])


def test_an_objects_modules_are_its_components(toys, machine) -> None:
    with machine(8) as manager:
        target = Pipeline(toys)
        with manage(target, 4, manager=manager) as managed:
            assert managed.components == ("transformer", "vae")


def test_the_number_of_a_profile_and_overrides(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        x = torch.randn(2, 5, 64)
        target = Pipeline(toys)
        with manage(target, 1, budgets={"transformer": 0.45, "*": 100}, pinned="vae", quantize=False, manager=manager):
            parts = {part["id"]: part for part in manager.report()["components"]}
            assert parts["transformer"]["plan"]["shares"][0]["streamed_blocks"]
            assert not parts["vae"]["plan"]["shares"][0]["streamed_blocks"]
            assert parts["transformer"]["plan"]["tier"] == "host"
            assert parts["vae"]["plan"]["tier"] == "pinned"
            want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
            assert torch.equal(target.transformer(x).cpu(), want)


def test_an_unknown_override_is_refused(toys, machine) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match=r"'budgtes' is unknown.*budgets"):
        manage(toys.build_net(), budgtes="1GiB", manager=manager)


def test_another_profile_in_place(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        net = toys.build_net()
        with manage(net, manager=manager) as managed:
            for profile in ("auto", TIGHT, "auto", "0.8MiB,pinned=none"):
                managed.reprofile(profile)
                assert torch.equal(net(x).cpu(), want)
                assert (streamed_blocks(managed) > 0) == (profile != "auto")
                manager.ledger.check()
            before = manager.report()["components"]
            with pytest.raises(InvalidInput, match="too small"):
                managed.reprofile("0.0001MiB")
            assert manager.report()["components"] == before
        with pytest.raises(UnsafeState, match="was released"):
            managed.reprofile("auto")


def test_another_profile_for_a_pipeline(toys, machine) -> None:
    """Its modules say where they compute in accelerate's way, which the manager refuses in what others bring."""
    with machine(8, 8) as manager, torch.no_grad():
        target = Pipeline(toys)
        managed = manage(target, manager=manager)
        managed.reprofile(TIGHT, placement="gpu:1")
        assert str(target.vae._hf_hook.execution_device) == "sim:1"
        target.transformer(torch.randn(2, 5, 64))
        with pytest.raises(InvalidInput, match="too small"):
            managed.reprofile("0.0001MiB")
        assert str(target.vae._hf_hook.execution_device) == "sim:1"
        managed.release()
        with pytest.raises(UnsafeState, match="was released"):
            managed.reprofile("auto")
        assert not hasattr(target.vae, "_hf_hook")


def test_a_profile_does_not_change_under_a_forward(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager) as managed:
            net.doubles[1].register_forward_hook(lambda *_: managed.reprofile(TIGHT))
            with pytest.raises(UnsafeState, match="computes"):
                net(torch.randn(2, 5, 64))
            net.doubles[1]._forward_hooks.popitem()
            assert not streamed_blocks(managed)


def test_what_is_kept_leaves_last(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(2.6) as manager, torch.no_grad():
        nets = [toys.build_net(seed=seed) for seed in range(3)]
        handles = [manage(net, name=f"net{n}", manager=manager) for n, net in enumerate(nets)]
        handles[0].keep()
        for net in nets:
            net(x)
        victims = [event["component"] for event in manager.report()["events"] if event["kind"] == "evict"]
        assert victims and set(victims) == {"net1/model"}
        manager.give_up("gpu:0", 10 << 20, "all of it")
        assert not manager.ledger.used("gpu:0")


def test_a_loading_is_watched_block_by_block(toys, machine) -> None:
    seen = []
    with machine(8) as manager, torch.no_grad():
        end = manager.watch_loading(lambda *step: seen.append(step))
        net = toys.build_net()
        with manage(net, manager=manager):
            net(torch.randn(2, 5, 64))
            net(torch.randn(2, 5, 64))
            held = manager.ledger.held("model", "gpu:0")
        end()
        assert [step[1] for step in seen] == sorted({step[1] for step in seen})
        assert seen[-1] == ("model", held, held)
        assert len(seen) == 9  # the rest and eight blocks; the second forward loads nothing


@pytest.mark.parametrize("after", [1, 4, 9])
def test_a_loading_is_cancelled_within_one_block(toys, machine, after: int) -> None:
    class Stop(BaseException):
        pass

    calls = 0

    def stop(component: str, done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise Stop

    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        x = torch.randn(2, 5, 64)
        with manage(net, manager=manager) as managed:
            end = manager.watch_loading(stop)
            with pytest.raises(Stop):
                net(x)
            assert calls == after
            assert not manager.ledger.used("gpu:0")
            assert not managed.members[0].leases
            end()
            assert torch.equal(net(x).cpu(), toys.build_net().to("sim:0")(x.to("sim:0")).cpu())


@pytest.mark.parametrize("profile", ["auto", TIGHT, "auto,quantize=all"])
def test_discarded_modules_keep_no_weights(toys, machine, profile: str) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        managed = manage(net, profile=profile, manager=manager)
        net(torch.randn(2, 5, 64))
        managed.discard()
        assert not manager.members and not manager.ledger.used("gpu:0") and not manager.ledger.used("pinned")
        assert all(tensor.is_meta for tensor in (*net.parameters(), *net.buffers()))
        managed.discard()
        managed.release()


def with_a_nan(net):
    net.singles[4].down.weight.data[0, 0] = float("nan")
    return net


def test_a_part_that_is_refused_leaves_the_others_as_they_were(toys, machine) -> None:
    good, bad = toys.build_net(), with_a_nan(toys.build_net(seed=1))
    before = {name: tensor.clone() for name, tensor in good.state_dict().items()}
    with machine(8) as manager, pytest.raises(InvalidInput, match="NaN"):
        manage({"good": good, "bad": bad}, precision="fp8 scaled", manager=manager)
    assert all(torch.equal(tensor, before[name]) for name, tensor in good.state_dict().items())


def test_a_profile_that_fails_half_way_is_taken_back(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    good, bad = toys.build_net(), with_a_nan(toys.build_net(seed=1))
    parts = {"good": good, "bad": bad}
    with machine(8) as manager, torch.no_grad(), manage(parts, TIGHT, manager=manager) as managed:
        with pytest.raises(InvalidInput, match="NaN"):
            managed.reprofile("auto", precision="fp8 scaled")
        assert sorted(manager.members) == ["bad", "good"]
        assert streamed_blocks(managed, "good") and streamed_blocks(managed, "bad")
        assert {entry["precision"] for entry in managed.report()["components"]} == {"as stored"}
        good(x)
        manager.ledger.check()


def test_a_compiler_that_does_not_start_leaves_nothing(toys, machine, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("highwater.memory.attachment.CompiledBlocks", fail)
    net = toys.build_net()
    with machine(8) as manager:
        with pytest.raises(RuntimeError, match="no compiler"):
            manage(net, "auto,compile=on", manager=manager)
        assert not manager.ledger.used("pinned") and not manager.members
        assert not any(module._forward_pre_hooks for module in net.modules())


def test_the_user_says_what_a_block_is(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net().to("sim:0")(x.to("sim:0")).cpu()
        net = toys.build_net()
        with manage(net, "0.8MiB", blocks={"model": "*.*.up"}, manager=manager) as managed:
            names = [block.name for block in managed.members[0].attachment.component.blocks]
            assert names == [f"doubles.{n}.up" for n in range(3)] + [f"singles.{n}.up" for n in range(5)]
            assert streamed_blocks(managed)
            assert torch.equal(net(x).cpu(), want)
        with pytest.raises(InvalidInput, match=r"blocks 'layers\.\*': model has no such parts"):
            manage(net, blocks={"model": "layers.*"}, manager=manager)
        with pytest.raises(InvalidInput, match="blocks of 'unet': no such component"):
            manage(net, blocks={"unet": "*.*"}, manager=manager)


def test_what_another_thread_computes_with_is_not_released(toys, machine) -> None:
    net = toys.build_net()
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(10)

    with machine(8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, manager=manager)
        handle = net.singles[0].register_forward_hook(wait)
        thread = threading.Thread(target=lambda: net(torch.randn(2, 5, 64)))
        thread.start()
        inside.wait(10)
        with pytest.raises(UnsafeState, match="computes now"):
            managed.release()
        go_on.set()
        thread.join()
        handle.remove()
        managed.release()
        assert not manager.members
