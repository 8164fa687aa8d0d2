"""The handle that `manage` returns: overrides, another profile in place, keeping, watching and cancelling a loading."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

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
        manager.free_memory("gpu:0", 10 << 20, "all of it")
        assert not manager.ledger.used("gpu:0")


def test_a_loading_is_watched_block_by_block(toys, machine) -> None:
    seen = []
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, manager=manager):
            end = manager.watch_loading(lambda *step: seen.append(step))
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


class Cancelled(BaseException):
    pass


def cancel_after(steps: int, seen: list[tuple[str, int, int]]) -> Callable[..., None]:
    """Return a watcher that writes down each step and raises at the one of this number, and at every later one."""

    def watch(*step: Any) -> None:
        seen.append(step)
        if len(seen) >= steps:
            raise Cancelled

    return watch


def contents(net: torch.nn.Module) -> dict[str, tuple[int, torch.Tensor]]:
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return {name: (id(tensor), tensor.detach().clone()) for name, tensor in tensors}


def is_untouched(net: torch.nn.Module, before: dict[str, tuple[int, torch.Tensor]]) -> bool:
    """Whether a module has the objects that it had, with their bytes in memory of their own."""
    now = contents(net)
    storages = [tensor.untyped_storage() for tensor in net.parameters()]
    return (
        all(now[name][0] == id and torch.equal(now[name][1], tensor) for name, (id, tensor) in before.items())
        and len({storage.data_ptr() for storage in storages}) == len(storages)
        and not any(storage.is_pinned() for storage in storages)
    )


@pytest.mark.parametrize(
    ("placement", "other"),
    [("gpu:0", "gpu:0:host"), ("gpu:0:host", "gpu:0:pinned"), ("gpu:0&gpu:1", "gpu:0&gpu:1:host")],
)
def test_packing_is_watched_block_by_block(toys, machine, placement: str, other: str) -> None:
    """What `from_pretrained` has read lies in RAM: copying it into slabs takes long, too."""
    seen: list[tuple[str, int, int]] = []
    with machine(8, 8) as manager:
        net = toys.build_net()
        num_bytes = sum(tensor.nbytes for tensor in [*net.parameters(), *net.buffers()])
        end = manager.watch_loading(lambda *step: seen.append(step))
        with manage(net, placement=placement, manager=manager) as managed:
            groups = [group for group in managed.members[0].managed.groups if group.slots]
            assert len(seen) == len(groups) >= 9
            assert seen[-1] == ("model", num_bytes, num_bytes)
            assert [step[1] for step in seen] == sorted({step[1] for step in seen})
            seen.clear()
            managed.reprofile(TIGHT)
            assert not seen, "nothing is packed anew"
            managed.reprofile(TIGHT, placement=other)
            assert len(seen) >= 9 and seen[-1] == ("model", num_bytes, num_bytes)
            seen.clear()
        end()
        assert not seen


@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host", "gpu:0&gpu:1"])
@pytest.mark.parametrize("after", [1, 5, 9, 14])
def test_packing_is_cancelled_within_one_block(toys, machine, after: int, placement: str) -> None:
    """The part that was being packed, and those that were packed before it, are what they were."""
    seen: list[tuple[str, int, int]] = []
    nets = {"first": toys.build_net(), "second": toys.build_net(seed=1)}
    before = {name: contents(net) for name, net in nets.items()}
    with machine(8, 8) as manager, torch.no_grad():
        end = manager.watch_loading(cancel_after(after, seen))
        with pytest.raises(Cancelled):
            manage(nets, placement=placement, manager=manager)
        assert len(seen) == after
        assert not manager.members and not manager.ledger.entries
        for name, net in nets.items():
            assert is_untouched(net, before[name])
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
        end()
        x = torch.randn(2, 5, 64)
        with manage(nets, TIGHT, manager=manager):
            assert torch.equal(nets["second"](x).cpu(), toys.build_net(seed=1).to("sim:0")(x.to("sim:0")).cpu())


@pytest.mark.parametrize("after", [1, 5, 9, 14])
def test_another_profile_is_cancelled_within_one_block(toys, machine, after: int) -> None:
    """By somebody who goes on raising: nobody is asked while the old profile comes back."""
    seen: list[tuple[str, int, int]] = []
    nets = {"first": toys.build_net(), "second": toys.build_net(seed=1)}
    before = {name: contents(net) for name, net in nets.items()}
    x = torch.randn(2, 5, 64)
    with machine(8) as manager, torch.no_grad():
        want = toys.build_net(seed=1).to("sim:0")(x.to("sim:0")).cpu()
        with manage(nets, TIGHT, manager=manager) as managed:
            nets["second"](x)
            plans = [member.managed.plan for member in managed.members]
            end = manager.watch_loading(cancel_after(after, seen))
            with pytest.raises(Cancelled):
                managed.reprofile("auto", placement="gpu:0:host")
            end()
            assert len(seen) == after
            assert sorted(manager.members) == ["first", "second"]
            assert [member.managed.plan.tier for member in managed.members] == [plan.tier for plan in plans]
            assert streamed_blocks(managed, "first") and streamed_blocks(managed, "second")
            assert torch.equal(nets["second"](x).cpu(), want)
        assert all(is_untouched(net, before[name]) for name, net in nets.items())


def test_a_cancelled_packing_in_eight_bits_gives_weights_that_compute(toys, machine) -> None:
    """There is no copy of what they were: they are as after a release, and the next packing gives the same bits."""
    x = torch.randn(2, 5, 64)
    net = toys.build_net()
    with machine(8) as manager, torch.no_grad():
        with manage(toys.build_net(), precision="fp8 scaled", manager=manager) as managed:
            want = managed.members[0].managed.module(x).cpu()
        end = manager.watch_loading(cancel_after(7, []))
        with pytest.raises(Cancelled):
            manage(net, precision="fp8 scaled", manager=manager)
        end()
        assert not manager.ledger.entries
        assert torch.allclose(net(x), toys.build_net()(x), atol=0.3)
        with manage(net, precision="fp8 scaled", manager=manager):
            assert torch.equal(net(x).cpu(), want)


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

    monkeypatch.setattr("highwater.memory.runtime.managed_component.CompiledBlocks", fail)
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
            names = [block.name for block in managed.members[0].managed.component.blocks]
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
        go_on.wait(600)

    with machine(8) as manager, torch.no_grad():
        managed = manage(net, TIGHT, manager=manager)
        handle = net.singles[0].register_forward_hook(wait)
        thread = threading.Thread(target=lambda: net(torch.randn(2, 5, 64)))
        thread.start()
        inside.wait(600)
        with pytest.raises(UnsafeState, match="computes now"):
            managed.release()
        go_on.set()
        thread.join()
        handle.remove()
        managed.release()
        assert not manager.members


EXITING = """
import torch
from highwater.headless import simdevice

simdevice.install("sim", num_devices=1)
from highwater.memory import manage


class Owner:
    def __init__(self):
        self.net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
        self.managed = manage(self.net, {profile!r}, placement="gpu:0")
        self.net(torch.ones(1, 64))
        self.me = self

    def __del__(self):
        self.managed.{method}()
        print("gone")


owner = Owner()
"""


@pytest.mark.parametrize("method", ["release", "discard"])
@pytest.mark.parametrize("profile", ["auto", "0.06MiB"])
def test_an_owner_that_releases_as_the_interpreter_ends_does_not_raise_or_hang(sim, method: str, profile: str) -> None:
    program = EXITING.format(method=method, profile=profile)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr


def test_a_reprofile_that_fails_keeps_what_was_chosen(toys, machine) -> None:
    """So the same choices find the component again, and those of the failed call do not."""

    def cancel(*progress: object) -> None:
        raise KeyboardInterrupt

    with machine(4) as manager:
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            end = manager.watch_loading(cancel)
            with pytest.raises(KeyboardInterrupt):
                managed.reprofile(precision="fp8 scaled")
            end()
            with pytest.raises(InvalidInput, match="managed already, with other choices"):
                manage(net, placement="gpu:0", precision="fp8 scaled", manager=manager)
            again = manage(net, placement="gpu:0", manager=manager)
            assert again.members == managed.members
            again.release()


def test_what_a_reprofile_does_not_name_stays(toys, machine) -> None:
    """Without arguments it takes in what came and leaves out what went, and changes nothing of what was chosen."""
    chosen = {"profile": "0.6MiB,prefetch=1", "placement": "gpu:1:host", "precision": "fp8 scaled"}
    with machine(8, 8) as manager, manage(toys.build_net(), manager=manager, **chosen) as managed:

        def now() -> tuple[str, str, str]:
            (part,) = managed.plan.to_json()["components"]
            return str(managed.members[0].profile), part["placement"], part["precision"]

        before = now()
        managed.reprofile()
        assert now() == before
        managed.reprofile("0.7MiB")
        assert now() == ("0.7MiB", *before[1:])
        managed.reprofile(placement="gpu:0")
        assert now()[0] == "0.7MiB" and now()[1].startswith("model=gpu:0") and now()[2] == before[2]
        managed.reprofile(precision="as stored", pinned="none")
        assert now()[2] == "as stored" and now()[0] == "0.7MiB,pinned=none"
        with pytest.raises(InvalidInput):
            managed.reprofile("12")
        managed.reprofile()
        assert now()[0] == "0.7MiB,pinned=none"
        managed.reprofile("auto", precision="by profile", placement="auto")
        assert now()[0] == "auto" and now()[2] == "as stored"


@pytest.mark.parametrize("uses", [3, [3], "model", {"model": 1}, None])
def test_uses_that_are_none_are_refused_in_one_line(toys, machine, uses: Any) -> None:
    with machine(8) as manager, pytest.raises(InvalidInput, match=r"uses .*; allowed: a (list of )?Use$"):
        manage(toys.build_net(), manager=manager, uses=uses)
