"""A managed module computes what the unmanaged one computes, in every placement, and leaves nothing behind."""

from __future__ import annotations

import copy

import pytest
import torch

from highwater.memory import InvalidInput, MemoryManager, manage

# Toy sizes in bytes of float32: embedder 16.6 KiB, double blocks 194 KiB, single blocks 97 KiB.
TIGHT, MIDDLE = "0.45MiB", "0.8MiB"
CASES = {
    "resident": ("auto", "gpu:0"),
    "streamed": (TIGHT, "gpu:0"),
    "half streamed": (MIDDLE, "gpu:0"),
    "one slot": ("0.25MiB", "gpu:0"),
    "pageable": (MIDDLE, "gpu:0:host"),
    "second device": (MIDDLE, "gpu:1"),
    "stored on another GPU": (TIGHT, "gpu:0:gpu:1"),
    "split": ("auto", "gpu:0&gpu:1"),
    "split and streamed": ("gpu:0=0.45MiB,gpu:1=0.3MiB", "gpu:0&gpu:1@0.4"),
    "cpu": ("auto", "cpu"),
}


def reference(toys, x, *, precision: str, dtype: torch.dtype, device: str, calls: int):
    """Return what the unmanaged module computes on a device, with weights as the precision leaves them."""
    net = toys.build_net(dtype=dtype)
    manage(net, placement="cpu", precision=precision, manager=MemoryManager()).release()
    net.to(device)
    return [net(x.to(device)).cpu() for _ in range(calls)]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("precision", "dtype"), [("as stored", torch.float32), ("fp8 scaled", torch.bfloat16)])
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_to_unmanaged(toys, machine, case: str, precision: str, dtype: torch.dtype, mode) -> None:
    profile, placement = CASES[case]
    x = torch.randn(2, 5, 64, dtype=dtype)
    net = toys.build_net(dtype=dtype)
    with machine(8, 8) as manager, mode():
        on = {"cpu": "cpu", "gpu:1": "sim:1"}.get(placement, "sim:0")
        wanted = reference(toys, x, precision=precision, dtype=dtype, device=on, calls=3)
        objects = [id(parameter) for parameter in net.parameters()]
        with manage(net, profile=profile, placement=placement, precision=precision, manager=manager):
            for want in wanted:
                got = net(x)
                assert str(got.device) == on
                assert torch.equal(got.cpu(), want)
                del got
                manager.ledger.check()
        assert [id(parameter) for parameter in net.parameters()] == objects
        assert torch.equal(net(x), reference(toys, x, precision=precision, dtype=dtype, device="cpu", calls=1)[0])


def test_a_module_made_in_inference_mode_is_managed_too(toys, machine) -> None:
    x = torch.randn(2, 5, 64)
    with machine(8) as manager:
        with torch.inference_mode():
            net = toys.build_net()
            managed = manage(net, profile=TIGHT, placement="gpu:0", manager=manager)
            inside = net(x).cpu()
        with torch.no_grad():
            assert torch.equal(net(x).cpu(), inside)
        managed.release()
        assert torch.allclose(net(x), inside, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "cpu"])
def test_ledger_is_what_the_device_counts(toys, machine, sim, case: str) -> None:
    profile, placement = CASES[case]
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile=profile, placement=placement, manager=manager) as managed:
            for passes in range(1, 4):
                net(x)
                for index in range(2):
                    assert manager.ledger.used(f"gpu:{index}") == sim.stats(index).used_bytes
                moved = sum(sim.stats(index).h2d_bytes for index in range(2))
                if placement == "gpu:0:gpu:1":
                    moved += sim.stats(0).peer_bytes
                inputs = passes * x.nbytes
                assert moved == manager.bytes_moved() + inputs
            planned = managed.plan["model"].device_bytes
            assert {place: manager.ledger.held("model", place) for place in planned} == planned
            assert all(component["in_effect"] for component in managed.report()["components"])
        assert [sim.stats(index).used_bytes for index in range(2)] == [0, 0]
        assert sim.pinned().used_bytes == 0
        assert not manager.ledger.bytes_by_place("model")


def test_streaming_moves_each_streamed_block_at_most_once_per_pass(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile=MIDDLE, placement="gpu:0", manager=manager) as managed:
            share = managed.members[0].managed.shares[0]
            x = torch.randn(1, 3, 64)
            net(x)
            streamed = sum(
                group.slab_bytes for number, group in share.blocks.items() if number in share.streamer.groups
            )
            before = manager.bytes_moved()
            for _ in range(4):
                net(x)
            # What no other block overwrites stays in the staging memory.
            moved = manager.bytes_moved() - before
            assert 4 * (streamed - share.streamer.area.num_bytes) < moved <= 4 * streamed


def test_a_pass_uses_no_device_wide_synchronize(toys, machine, sim) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile=TIGHT, placement="gpu:0", manager=manager):
            x = torch.randn(1, 3, 64)
            net(x)
            before = sim.stats(0).num_syncs
            for _ in range(3):
                net(x)
            assert sim.stats(0).num_syncs == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", range(9))
@pytest.mark.parametrize("case", ["resident", "streamed", "split and streamed"])
def test_state_is_restored_when_a_block_fails(toys, machine, case: str, where: int, error: type[BaseException]) -> None:
    profile, placement = CASES[case]
    precision = "fp8 scaled"
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16)
    with machine(8, 8) as manager, torch.no_grad():
        want = reference(toys, x, precision=precision, dtype=torch.bfloat16, device="sim:0", calls=1)[0]
        net = toys.build_net(dtype=torch.bfloat16)
        blocks = [*net.doubles, *net.singles, net.out]
        with manage(net, profile=profile, placement=placement, precision=precision, manager=manager) as managed:
            net(x)
            at_rest = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}

            def fail(*_: object) -> None:
                raise error("planted")

            # The pre-hook fails after ours ran; the hook fails after the block computed.
            for register in (blocks[where].register_forward_pre_hook, blocks[where].register_forward_hook):
                handle = register(fail)
                with pytest.raises(error, match="planted"):
                    net(x)
                handle.remove()
                assert torch.equal(net(x).cpu(), want)
                assert {name: parameter.data_ptr() for name, parameter in net.named_parameters()} == at_rest
                assert not managed.members[0].leases
            handle = blocks[where].register_forward_pre_hook(fail)
            with pytest.raises(error):
                net(x)
            handle.remove()
            manager.begin_run("next", "next")  # a run boundary recovers what no re-entry did
            assert {name: parameter.data_ptr() for name, parameter in net.named_parameters()} == at_rest
            assert not managed.members[0].leases


@pytest.mark.parametrize("case", ["resident", "half streamed", "split and streamed"])
def test_out_of_memory_at_any_allocation_leaves_nothing_and_the_next_try_works(toys, machine, sim, case: str) -> None:
    profile, placement = CASES[case]
    x = torch.randn(2, 5, 64)
    with machine(8, 8) as manager, torch.no_grad():
        want = reference(toys, x, precision="as stored", dtype=torch.float32, device="sim:0", calls=1)[0]
        net = toys.build_net()
        with manage(net, profile=profile, placement=placement, manager=manager):
            num_failures = 0
            for nth in range(1, 60):
                manager.members["model"].managed.unload()
                sim.fail_alloc(0, nth)
                try:
                    assert torch.equal(net(x).cpu(), want)  # some are done without
                except torch.OutOfMemoryError:
                    num_failures += 1
                # Only here: a handled error's frames hold tensors.
                manager.ledger.check()
                for index in range(2):
                    assert sim.stats(index).used_bytes == manager.ledger.used(f"gpu:{index}")
            assert 8 < num_failures < 59  # the failures really were inside loading and computing
            sim.fail_alloc(0, 0)
            assert torch.equal(net(x).cpu(), want)


@pytest.mark.parametrize("case", ["streamed", "half streamed", "one slot", "split and streamed"])
def test_skipped_and_repeated_blocks_are_normal(toys, machine, case: str) -> None:
    profile, placement = CASES[case]
    x = torch.randn(1, 3, 64)
    patterns = [((), ()), ((1, 2, 5), ()), ((), (0, 4)), ((0, 7), (3,)), (tuple(range(1, 8)), ()), ((), ())]
    with machine(8, 8) as manager, torch.no_grad():
        plain, net = toys.build_net(), toys.build_net()
        plain.to("sim:0")
        with manage(net, profile=profile, placement=placement, manager=manager) as managed:
            held = None
            for skip, repeat in patterns * 2:
                for module in (plain, net):
                    module.skip, module.repeat = frozenset(skip), frozenset(repeat)
                assert torch.equal(net(x), plain(x.to("sim:0")))
                now = manager.ledger.bytes_by_place("model")
                assert held in (None, now)
                held = now
            assert not any(share.computing for share in managed.members[0].managed.shares)
        plain.to("cpu")


def test_a_changed_order_is_learned(toys, machine) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        with manage(net, profile=TIGHT, placement="gpu:0", manager=manager) as managed:
            streamer = lambda: managed.members[0].managed.shares[0].streamer  # noqa: E731
            net.skip = frozenset({1, 5})
            x = torch.randn(1, 3, 64)
            net(x)
            assert {1, 5} <= set(streamer().order)  # it may have been a single one
            net(x)
            order = streamer().order
            assert not {1, 5} & set(order)
            net(x)
            before = manager.bytes_moved()
            net(x)
            assert manager.bytes_moved() - before <= sum(streamer().groups[number].slab_bytes for number in order)


def test_what_a_forward_writes_into_buffers_survives_eviction(machine) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer in self.layers:
                x = layer(x)
            return x

    for mode in (torch.no_grad, torch.inference_mode):
        with machine(1) as manager, mode():
            net = Counting()
            with manage(net, placement="gpu:0", manager=manager):
                for expected in range(1, 4):
                    net(torch.ones(1, 8))
                    manager.members["model"].managed.unload()
                    assert int(net.calls) == expected
            assert int(net.calls) == 3


def test_parts_called_directly_are_entries(toys, machine) -> None:
    class Coder(torch.nn.Module):
        def __init__(self, net) -> None:
            super().__init__()
            self.decoder = net
            self.scale = torch.nn.Linear(64, 64)

        def decode(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(self.scale(x))

    x = torch.randn(1, 3, 64)
    with machine(8) as manager, torch.no_grad():
        coder = Coder(toys.build_net())
        plain = copy.deepcopy(coder).to("sim:0")
        with manage({"vae": coder}, profile="0.5MiB", placement="gpu:0", manager=manager):
            assert torch.equal(coder.decode(x), plain.decode(x.to("sim:0")))
            assert not manager.members["vae"].leases
        plain.to("cpu")


def test_bad_values_leave_the_module_as_it_was(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        before = {name: parameter.data_ptr() for name, parameter in net.named_parameters()}
        hooks = [len(module._forward_pre_hooks) for module in net.modules()]
        for values in (
            {"profile": "fast"},
            {"placement": "gpu:7"},
            {"precision": "int3"},
            {"profile": "0.1MiB", "placement": "gpu:0"},
        ):
            with pytest.raises(InvalidInput):
                manage(net, manager=manager, **values)
        net.singles[3].up.weight[0, 0] = float("nan")
        with pytest.raises(InvalidInput, match="holds NaN"):
            manage(net, manager=manager, precision="fp8 scaled")
        assert [len(module._forward_pre_hooks) for module in net.modules()] == hooks
        assert manager.members == {} and manager.ledger.used("pinned") == 0
        net.singles[3].up.weight[0, 0] = 0.0
        assert set(before) == {name for name, _ in net.named_parameters()}
        assert all(parameter.dtype == torch.float32 for parameter in net.parameters())


def test_a_module_is_managed_once_and_release_is_idempotent(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        managed = manage(net, manager=manager)
        with pytest.raises(InvalidInput, match="managed already, with other choices"):
            manage(net, profile="1GiB", manager=manager)
        with pytest.raises(InvalidInput, match="managed already, inside 'model'"):
            manage(net.singles[0], manager=manager)
        managed.release()
        managed.release()
        manage(net, manager=manager).release()


@pytest.mark.parametrize("target", [3, {}, {"scheduler": object()}])
def test_what_cannot_be_managed_is_named(target) -> None:
    with pytest.raises(InvalidInput, match=r"cannot manage a int|nothing to manage"):
        manage(target)


def test_a_model_of_nothing_but_blocks_is_pinned_and_overlaps(machine, sim) -> None:
    with machine(8) as manager, torch.no_grad():
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        with manage(net, profile="0.06MiB", placement="gpu:0", manager=manager):
            assert manager.ledger.used("pinned")
            assert sim.pinned().used_bytes >= manager.ledger.used("pinned") > 0


def test_when_pinning_fails_the_rest_is_pageable_and_said_once(toys, sim, monkeypatch) -> None:
    monkeypatch.setattr("highwater.memory.transfer.pinned_memory.ARENA_BYTES", 256 << 10)
    x = torch.randn(1, 3, 64)
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 20)], pinned_bytes=512 * 1024), torch.no_grad():
        manager = MemoryManager()
        net = toys.build_net()
        want = net(x)
        with manage(net, profile=MIDDLE, placement="gpu:0", manager=manager):
            assert sim.pinned().used_bytes > 0
            said = [event for event in manager.report()["events"] if "page-lock" in event["reason"]]
            assert len(said) == 1
            assert torch.allclose(net(x).cpu(), want, atol=1e-5)


def test_the_host_runs_at_most_a_few_blocks_ahead(machine, sim) -> None:
    """Else an interrupt would be heard only when everything that was queued is done."""
    with machine(64, flops_per_s=1e9, launch_s=1e-7) as manager, torch.no_grad():
        net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(12)))
        x = torch.randn(64, 512)
        with manage(net, profile="5MiB", manager=manager) as managed:
            share = managed.members[0].managed.shares[0]
            leads = []
            for block in net:
                block.register_forward_hook(
                    lambda *_: leads.append(sim.stream_time_s(torch.accelerator.current_stream()) - sim.clock_s())
                )
            for _ in range(4):
                net(x)
            streamed = len(share.streamer.groups)
            assert streamed > 6
            block_s = 2 * 64 * 512 * 512 / 1e9
            # Beside the staged ones, the residents that stand between two streamed blocks.
            staged = share.streamer.area.num_bytes / share.blocks[0].slab_bytes
            assert max(leads[12:]) < (staged + 3) * block_s
