"""What users do to managed modules that no model does by itself: threads, streams, writes, copies, interrupts."""

from __future__ import annotations

import copy
import gc
import threading

import accelerate
import pytest
import torch
from diffusers.hooks import apply_group_offloading, apply_layerwise_casting

from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.errors import UnsafeState
from highwater.memory.units import MIB

X = torch.ones(1, 3, 64)


@torch.no_grad()
def test_foreign_bytes_are_not_taken_for_activations(toys, machine) -> None:
    with machine(8) as manager:
        foreign = torch.empty(4 * MIB, dtype=torch.uint8, device="sim:0")
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            for run in range(4):
                manager.begin_run(str(run), "toy")
                net(X)
                manager.end_run()
                assert not managed.members[0].managed.plan.shares[0].streamed
        del foreign


@torch.no_grad()
def test_a_large_run_is_forgotten_after_two_small_ones(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, placement="gpu:0", manager=manager) as managed:
            needs = []
            for length in (500, 3, 3):
                manager.begin_run(str(length), "toy")
                net(torch.ones(1, length, 64))
                manager.end_run()
                needs.append(manager.capacity.needed(managed.members[0], "gpu:0").num_bytes)
            assert needs[0] == needs[1] > 50 * needs[2] > 0


@torch.no_grad()
@pytest.mark.parametrize("budget", ["auto", "0.45MiB"])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_passes_on_several_streams_are_ordered(toys, machine, budget: str, precision: str) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, profile=budget, placement="gpu:0", precision=precision, manager=manager):
            want = net(X).cpu()
            streams = [torch.Stream(device="sim:0") for _ in range(2)]
            for stream in [*streams, *streams]:
                with stream:
                    assert torch.equal(net(X).cpu(), want)
            manager.members["model"].managed.unload()
            with streams[0]:
                net(X)
            with streams[1]:
                assert torch.equal(net(X).cpu(), want)
                manager.members["model"].managed.unload()


@torch.no_grad()
def test_what_an_interrupted_pass_reads_on_another_stream_is_not_overwritten(toys, machine, sim) -> None:
    with machine(8, h2d_bytes_per_s=2e9) as manager:
        net, side = toys.build_net(), torch.Stream(device="sim:0")
        with manage(net, profile="0.45MiB", placement="gpu:0", manager=manager):
            want = net(X).cpu()

            def read_slowly(*_: object) -> None:
                sim.advance(side, 0.05)
                net.singles[2].up(torch.zeros(1, 64, device="sim:0"))
                raise KeyboardInterrupt

            handle = net.singles[2].down.register_forward_hook(read_slowly)
            with side, pytest.raises(KeyboardInterrupt):
                net(X)
            handle.remove()
            assert torch.equal(net(X).cpu(), want)  # leaving the machine fails on a race


@torch.no_grad()
def test_what_was_written_on_one_stream_is_saved_from_another(toys, machine, sim) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(256, 256)
            self.register_buffer("count", torch.zeros(256))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sim.advance(torch.accelerator.current_stream(0), 0.05)
            self.count.add_(1)
            return self.inner(x)

    with machine(0.3) as manager:
        first, second = (Counting().requires_grad_(False) for _ in range(2))
        for name, net in (("first", first), ("second", second)):
            manage({name: net}, placement="gpu:0", manager=manager)
        for net in (first, second):
            with torch.Stream(device="sim:0"):
                net(torch.ones(1, 256))
        assert not manager.ledger.held("first", "gpu:0")
        assert (first.count == 1).all()


@torch.no_grad()
@pytest.mark.parametrize("budget", ["auto", "0.45MiB"])
def test_threads_take_turns(toys, machine, budget: str) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, profile=budget, placement="gpu:0", manager=manager):
            want = net(X).cpu()
            wrong: list[object] = []

            def work() -> None:
                with torch.no_grad():
                    for _ in range(6):
                        try:
                            if not torch.equal(net(X).cpu(), want):
                                wrong.append("values")
                        except RuntimeError as error:
                            wrong.append(error)

            threads = [threading.Thread(target=work) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert wrong == []
            assert not manager.members["model"].leases


@torch.no_grad()
def test_an_interrupt_in_one_component_does_not_keep_its_memory_from_another(toys, machine) -> None:
    with machine(1.9) as manager:
        nets = {name: toys.build_net(seed) for seed, name in enumerate("ab")}
        managed = [manage({name: net}, placement="gpu:0", manager=manager) for name, net in nets.items()]

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        handle = nets["a"].singles[2].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            nets["a"](X)
        handle.remove()
        nets["b"](X)
        assert not managed[0].members[0].leases
        assert not managed[1].members[0].managed.plan.shares[0].streamed


@torch.no_grad()
def test_release_after_an_interrupt_leaves_nothing(toys, machine, sim) -> None:
    with machine(8, 8) as manager:
        net = toys.build_net()
        managed = manage(net, placement="gpu:0&gpu:1", manager=manager)
        handle = net.singles[4].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            net(X)
        handle.remove()
        managed.release()
        assert [sim.stats(index).used_bytes for index in range(2)] == [0, 0]


@torch.no_grad()
@pytest.mark.parametrize("budget", ["auto", "0.45MiB"])
def test_weights_loaded_into_a_managed_module_stay(toys, machine, budget: str) -> None:
    with machine(8) as manager:
        net, other = toys.build_net(0), toys.build_net(1)
        want = other.to("sim:0")(X.to("sim:0")).cpu()
        state = other.to("cpu").state_dict()
        with manage(net, profile=budget, placement="gpu:0", manager=manager):
            net(X)
            net.load_state_dict(state)
            assert torch.equal(net(X).cpu(), want)
            manager.members["model"].managed.unload()
            assert torch.equal(net(X).cpu(), want)
        assert all(torch.equal(tensor, state[name]) for name, tensor in net.state_dict().items())


@torch.no_grad()
def test_an_eight_bit_module_saves_wide_weights_and_refuses_to_load(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, placement="gpu:0", precision="fp8 scaled", manager=manager) as managed:
            net(X)
            saved = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}
            with pytest.raises(UnsafeState, match="release it before loading"):
                net.load_state_dict(saved)
            managed.release()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in net.state_dict().items())


@torch.no_grad()
def test_buffers_that_a_forward_replaces_are_kept(machine) -> None:
    class Replacing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("table", torch.zeros(0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            if self.table.shape != x.shape:
                self.table = torch.full_like(x, 2.0)
            return self.layer(x) * self.table

    with machine(1) as manager:
        net, plain = Replacing(), Replacing()
        plain.load_state_dict(net.state_dict())
        plain.to("sim:0")
        with manage(net, placement="gpu:0", manager=manager):
            for size in (1, 1, 2, 1):
                x = torch.ones(size, 8)
                assert torch.equal(net(x).cpu(), plain(x.to("sim:0")).cpu())
                manager.members["model"].managed.unload()
            assert int(net.calls) == 4
        del net.table, plain


def test_copies_of_a_managed_module_are_refused(toys, machine) -> None:
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, manager=manager), pytest.raises(UnsafeState, match="release it before copying"):
            copy.deepcopy(net)
        copy.deepcopy(net)


def test_unsuitable_modules_are_refused_in_one_line(toys, machine) -> None:
    with machine(8) as manager:
        on_device = toys.build_net().to("sim:0")
        hooked = toys.build_net()
        hooked._hf_hook = object()
        other_manager, elsewhere = MemoryManager(), toys.build_net()
        kept = manage(elsewhere.doubles, manager=other_manager)
        for target, words in [
            (on_device, "is on sim:0; allowed: cpu"),
            (torch.nn.Linear(2, 2, device="meta"), "is on meta; allowed: cpu"),
            (hooked, "accelerate's hooks"),
            (elsewhere, "managed already, as 'model' of another MemoryManager"),
        ]:
            with pytest.raises(InvalidInput, match=words):
                manage(target, manager=manager)
            assert manager.members == {}
        kept.release()
        del on_device


def test_a_split_of_blocks_that_share_weights_is_refused(toys, machine) -> None:
    with machine(8, 8) as manager:
        net = toys.build_net()
        net.singles[4].down.weight = net.doubles[0].down.weight
        with pytest.raises(
            InvalidInput, match=r"cannot be split so: doubles.0.down.weight and singles.4.down.weight are one weight"
        ):
            manage(net, placement="gpu:0&gpu:1", manager=manager)
        assert manager.members == {}


def test_pinned_books_are_what_the_allocator_takes(toys, machine, sim) -> None:
    with machine(8) as manager, manage(toys.build_net(), placement="gpu:0", manager=manager):
        assert manager.ledger.used("pinned") == sim.pinned().used_bytes > 0


@torch.no_grad()
def test_splitting_replans_when_memory_shrinks(toys, machine) -> None:
    with machine(2, 2) as manager:
        net = toys.build_net()
        want = net.to("sim:0")(X.to("sim:0")).cpu()
        net.to("cpu")
        manager.set_watermark("*", MIB // 32, MIB // 32)  # what activations take
        with manage(net, placement="gpu:0&gpu:1", manager=manager) as managed:
            foreign = torch.empty(int(1.55 * MIB), dtype=torch.uint8, device="sim:1")
            manager.begin_run("1", "toy")
            assert torch.equal(net(X).cpu(), want)
            assert managed.members[0].managed.plan.shares[1].streamed
            del foreign
        assert isinstance(manager, MemoryManager)


def offload_blocks(net: torch.nn.Module) -> None:
    apply_group_offloading(net, torch.device("sim:0"), offload_type="block_level", num_blocks_per_group=1)


def offload_leaves(net: torch.nn.Module) -> None:
    apply_group_offloading(net, torch.device("sim:0"), offload_type="leaf_level")


def cast_layers(net: torch.nn.Module) -> None:
    apply_layerwise_casting(net, storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def dispatch(net: torch.nn.Module) -> None:
    device_map = dict.fromkeys([name for name, _ in net.named_children()], "cpu")
    accelerate.dispatch_model(net, device_map, main_device="cpu", force_hooks=True)


RIVALS = {
    "group offloading by blocks": (offload_blocks, "diffusers' group offloading"),
    "group offloading by leaves": (offload_leaves, "diffusers' group offloading"),
    "layerwise casting": (cast_layers, "diffusers' layerwise casting"),
    "sequential offload": (lambda net: accelerate.cpu_offload(net, execution_device="sim:0"), "accelerate's hooks"),
    "model offload": (lambda net: accelerate.cpu_offload_with_hook(net, "sim:0"), "accelerate's hooks"),
    "dispatch": (dispatch, "accelerate's hooks"),
}


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", "0.45MiB"])
@pytest.mark.parametrize("rival", RIVALS)
def test_others_that_move_the_same_weights_are_refused_before_and_after(toys, machine, rival: str, profile) -> None:
    act, words = RIVALS[rival]
    with machine(8) as manager:
        net, before = toys.build_net(), toys.build_net()
        saved = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        managed = manage(net, profile, placement="gpu:0", manager=manager)
        net(X)
        act(net)
        for _ in range(2):
            with pytest.raises(UnsafeState, match=f"^model is managed, and has {words}[^\n]*, or release it$"):
                net(X)
        managed.release()
        weights = {name: tensor for name, tensor in net.state_dict().items() if not tensor.is_meta}
        assert all(torch.equal(tensor.cpu(), saved[name]) for name, tensor in weights.items())
        act(before)
        with pytest.raises(InvalidInput, match=f"^model has {words}[^\n]*$"):
            manage(before, profile, placement="gpu:0", manager=manager)
        del net, before, weights, managed
        gc.collect()  # accelerate's hooks are cycles, and hold our memory


def test_a_pipeline_under_management_is_not_offloaded_by_accelerate_as_well(toys, machine) -> None:
    class Pipeline:
        def __init__(self) -> None:
            self.components = {"net": toys.build_net()}

    with machine(8) as manager, manage(pipeline := Pipeline(), placement="gpu:0", manager=manager):
        with pytest.raises(UnsafeState, match=r"^net is managed: release it before"):
            accelerate.hooks.remove_hook_from_module(pipeline.components["net"], recurse=True)
        with torch.no_grad():
            assert pipeline.components["net"](X).device.type == "sim"


@pytest.mark.parametrize("part", ["all of it", "a block"])
def test_two_managers_cannot_have_one_module(toys, machine, part: str) -> None:
    with machine(8) as manager:
        net, other = toys.build_net(), MemoryManager()
        target = net if part == "all of it" else torch.nn.Sequential(net.singles[1])
        with (
            manage({"net": net}, placement="gpu:0", manager=manager),
            pytest.raises(
                InvalidInput, match=r"^model: '[^\n]*' is managed already, as 'net' of another MemoryManager"
            ),
        ):
            manage(target, placement="gpu:0", manager=other)
        manage(target, placement="gpu:0", manager=other).release()


def build_odd(kind: str, toys) -> torch.nn.Module:
    net = toys.build_net()
    match kind:
        case "scripted":
            return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4)))
        case "scripted block":
            net.singles[1].up = torch.jit.script(net.singles[1].up)
        case "scripted rest":
            net.embed = torch.jit.script(net.embed)
        case "lazy":
            net.singles[1].up = torch.nn.LazyLinear(192)
        case "sparse":
            net.singles[1].up.weight = torch.nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
        case "compressed":
            net.singles[1].register_buffer("mask", torch.eye(8).to_sparse_csr())
        case "nested" | "jagged":
            layout = torch.jagged if kind == "jagged" else torch.strided
            nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)], layout=layout)
            net.singles[1].table = torch.nn.Parameter(nested, requires_grad=False)
        case "masked":
            net.register_buffer("table", torch.masked.masked_tensor(torch.ones(8), torch.ones(8) > 0))
        case "zeros":
            net.singles[1].table = torch.nn.Parameter(torch._efficientzerotensor((8, 8)), requires_grad=False)
        case "fake":
            with torch._subclasses.FakeTensorMode():
                net.register_buffer("table", torch.ones(8))
        case "mkldnn":
            net.register_buffer("table", torch.ones(8, 8).to_mkldnn())
        case "torch.ao":
            net.register_buffer("table", torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8))
        case "flat":
            net.flat = net.singles[1].up.weight.detach().flatten()[:8]
    return net


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scripted", "it is a TorchScript module; allowed: the module it was made from"),
        ("scripted block", "singles.1.up is a TorchScript module"),
        ("scripted rest", "embed is a TorchScript module"),
        ("lazy", "'singles.1.up.weight' has no shape yet"),
        ("sparse", "'singles.1.up.weight' is sparse_coo; allowed: dense"),
        ("compressed", "'singles.1.mask' is sparse_csr; allowed: dense"),
        ("nested", "'singles.1.table' is a nested tensor; allowed: dense"),
        ("jagged", "'singles.1.table' is a nested tensor; allowed: dense"),
        ("masked", "'table' is a MaskedTensor without memory; allowed: a dense tensor"),
        ("zeros", "'singles.1.table' is a Parameter without memory; allowed: a dense tensor"),
        ("fake", "'table' is a FakeTensor without memory; allowed: a dense tensor"),
        ("mkldnn", "'table' is _mkldnn; allowed: dense, .to_dense()"),
        ("torch.ao", "'table' is quantized by torch.ao, which is not supported; use optimum-quanto or"),
        ("flat", "flat shares memory with a parameter; register it as a parameter"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_modules_whose_weights_cannot_be_moved_are_refused_by_name(toys, machine, kind: str, words: str) -> None:
    net = build_odd(kind, toys)
    with machine(8) as manager:
        with pytest.raises(InvalidInput, match=f"^model: {words}[^\n]*$"):
            manage(net, placement="gpu:0", manager=manager)
        assert manager.members == {}
