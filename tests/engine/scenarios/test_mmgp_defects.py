"""Defects that were found in mmgp 3.8.2, by number: each test fails if ours did the same.

1 to 4: options/test_profiles.py. 7 to 9 are of its LoRAs: here those that Python programs make of modules and weights,
in tests/comfyui/test_lora.py those of ComfyUI.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import InvalidInput, load_model, load_weights, manage
from highwater.tests.engine.process_state import changes_since, snapshot

STREAMED = "0.45MiB"
PROFILES = ["auto", STREAMED]


def on_device(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return what the unmanaged module computes on the first device; it comes back to the CPU."""
    try:
        return net.to("sim:0")(x.to("sim:0")).cpu()
    finally:
        net.to("cpu")


def num_hooks(net: nn.Module) -> int:
    return sum(
        len(hooks)
        for module in net.modules()
        for key, hooks in vars(module).items()
        if key.endswith("_hooks") or key == "_forward_hooks_always_called"
    )


def write_swapped(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a file whose header lists its tensors against the order of their bytes, which the format allows."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    raw = json.dumps({name: header[name] for name in reversed(header)}).encode()
    data = b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def state_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in net.state_dict().items() if name != "out.weight"}  # tied


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", STREAMED, "0.8MiB", "0.8MiB,prefetch=4"])
def test_5_skipped_blocks_leave_nothing_and_unloading_means_zero(toys, machine, sim, profile: str) -> None:
    x = torch.randn(1, 3, 64)
    skips = [{1, 2}, {0, 3, 7}, set(range(8)), {5}, set(range(1, 8)), set()]
    with machine(8) as manager:
        net = toys.build_net()
        with manage(net, profile, placement="gpu:0", manager=manager) as managed:
            net(x)
            held = sim.stats(0).used_bytes
            for skip in skips * 2:
                net.skip = frozenset(skip)
                net(x)
                assert sim.stats(0).used_bytes == held == managed.plan["model"].device_bytes["gpu:0"]
                manager.ledger.check()
            for skip in skips:  # unloaded right after blocks were prefetched that never ran
                net.skip = frozenset(skip)
                net(x)
                manager.free_memory("gpu:0", 8 << 20, "unload all")
                assert sim.stats(0).used_bytes == manager.ledger.used("gpu:0") == 0


@torch.no_grad()
def test_6_a_module_is_managed_again_and_its_hooks_are_gone(toys, machine) -> None:
    x = torch.randn(1, 3, 64)
    with machine(8, 8) as manager:
        net = toys.build_net()
        plain, want = net(x), on_device(net, x)
        before = num_hooks(net)
        for profile, placement in [("auto", "gpu:0"), (STREAMED, "gpu:0"), ("auto", "gpu:0&gpu:1"), ("auto", "gpu:0")]:
            managed = manage(net, profile, placement=placement, manager=manager)
            assert num_hooks(net) > before
            assert torch.equal(net(x).cpu(), want)
            managed.reprofile(STREAMED, placement="gpu:0")
            assert torch.equal(net(x).cpu(), want)
            managed.release()
            assert num_hooks(net) == before
            assert torch.equal(net(x), plain)


@torch.no_grad()
@pytest.mark.parametrize("profile", PROFILES)
def test_6b_the_module_tree_stays_what_it_was(toys, machine, profile: str) -> None:
    """What walks it (saving, moving, printing) meets the same modules, and comes to an end."""
    x = torch.randn(1, 3, 64)
    net = toys.build_net()
    text, names = repr(net), [name for name, _ in net.named_modules(remove_duplicate=False)]
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with machine(8) as manager:
        want = on_device(net, x)
        with manage(net, profile, placement="gpu:0", manager=manager):
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
                assert repr(net) == text
                assert [name for name, _ in net.named_modules(remove_duplicate=False)] == names
                assert list(dict(net.named_parameters(remove_duplicate=False))) == [n for n in state if "gain" not in n]
                assert all(torch.equal(tensor.cpu(), state[name]) for name, tensor in net.state_dict().items())
                visited = []
                net.apply(visited.append)
                assert len(visited) == len(names)
                assert net.train().eval() is net and not net.doubles[0].norm.training
                assert net.to(torch.float32) is net
                manager.free_memory("gpu:0", 8 << 20, "unload all")
                assert net.to("cpu") is net


class ConvBlock(nn.Module):
    """What LoRAs of U-Nets change: a norm, and a convolution with a bias."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, C, H, W]
        return x + self.conv(nn.functional.silu(self.norm(x)))


class WithLora(nn.Module):
    """A convolution with a LoRA beside it, as PEFT puts one there."""

    def __init__(self, conv: nn.Conv2d, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = conv
        self.down = nn.Conv2d(conv.in_channels, rank, 3, padding=1, bias=False)
        self.up = nn.Conv2d(rank, conv.out_channels, 1, bias=False)
        self.strength = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.strength * self.up(self.down(x))


def build_conv_net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(ConvBlock() for _ in range(8))).eval().requires_grad_(False)


def add_loras(net: nn.Sequential, seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for block in net:
            block.conv = WithLora(block.conv).requires_grad_(False)
    return net


def lora_weights(net: nn.Module, seed: int) -> dict[str, torch.Tensor]:
    """Return other factors for the LoRAs of a network, as their file has them; none at all for seed 0."""
    generator = torch.Generator().manual_seed(seed)
    names = [(name, weight.shape) for name, weight in net.state_dict().items() if ".down." in name or ".up." in name]
    return {name: 0.1 * bool(seed) * torch.randn(shape, generator=generator) for name, shape in names}


def conv_profile(streams: bool, precision: str = "as stored") -> str:
    """Return a profile under which all blocks are resident, or some stream."""
    if not streams:
        return "auto"
    return "0.14MiB" if precision == "as stored" else "0.09MiB"


def assert_streams(managed, streams: bool) -> None:
    assert managed.members[0].managed.plan.streams == streams


@torch.no_grad()
@pytest.mark.parametrize("part", ["norm.weight", "norm.bias", "conv.weight", "conv.bias"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("way", ["in place", "loaded", "by the host", "by the host, in eight bits"])
def test_7_differences_of_norms_biases_and_convolutions_take_effect(
    machine, streams: bool, way: str, part: str
) -> None:
    x = torch.randn(1, 32, 8, 8)
    net, patched = build_conv_net(), build_conv_net()
    for block in patched:
        block.get_parameter(part).add_(0.1 * torch.randn_like(block.get_parameter(part)))
    weights = {name: weight.clone() for name, weight in patched.named_parameters() if name.endswith(part)}
    precision = "fp8 scaled" if "eight bits" in way else "as stored"
    choices = {"placement": "gpu:0", "precision": precision}
    with machine(8) as manager:
        want = on_device(patched, x)
        if precision != "as stored":
            with manage(patched, manager=manager, **choices):
                want = patched(x).cpu()
        with manage(net, conv_profile(streams, precision), manager=manager, **choices) as managed:
            plain = net(x).cpu()
            assert_streams(managed, streams)
            assert not torch.equal(plain, want)
            managed_component = managed.members[0].managed
            torch.accelerator.synchronize(0)  # no copy under way: what was prefetched is old
            if way == "in place":
                for name, weight in weights.items():
                    net.get_parameter(name).copy_(weight)
            elif way == "loaded":
                net.load_state_dict(weights, strict=False)
            else:
                managed_component.settle()
                for group in managed_component.groups:
                    for name in weights.keys() & {slot.spec.name for slot in group.slots}:
                        group.overwrite(name, weights[name])
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)


@torch.no_grad()
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_8_a_lora_on_convolutions_works_and_unknown_keys_do_not_reject_it(
    machine, streams: bool, precision: str
) -> None:
    x = torch.randn(1, 32, 8, 8)
    net = add_loras(build_conv_net())
    weights = lora_weights(net, seed=3)
    unknown = {"9.conv.up.weight": torch.zeros(1), "of_another_program": torch.zeros(1)}
    assert set(net.load_state_dict(weights | unknown, strict=False).unexpected_keys) == set(unknown)
    with machine(8) as manager:
        plain, want = on_device(build_conv_net(), x), on_device(net, x)
        profile = conv_profile(streams, precision)
        with manage(net, profile, placement="gpu:0", precision=precision, manager=manager) as managed:
            for strength, wanted in ((1.0, want), (0.0, plain), (1.0, want)):
                for block in net:
                    block.conv.strength = strength
                error = (net(x).cpu() - wanted).abs().max() / (want - plain).abs().max()
                assert error == 0 if precision == "as stored" else error < 0.1
            assert_streams(managed, streams)


@torch.no_grad()
@pytest.mark.parametrize("streams", [False, True])
def test_9_a_lora_takes_effect_at_once_on_a_resident_model(machine, streams: bool) -> None:
    """Its factors are loaded while the model is on its device: one after the other, and none again."""
    x = torch.randn(1, 32, 8, 8)
    net, other = add_loras(build_conv_net()), add_loras(build_conv_net())
    unknown = {"of_another_program": torch.zeros(1)}
    profile = conv_profile(streams)
    with machine(8) as manager, manage(net, profile, placement="gpu:0", manager=manager) as managed:
        for seed in (1, 2, 0, 1):
            torch.accelerator.synchronize(0)
            net.load_state_dict(lora_weights(net, seed) | unknown, strict=False)
            other.load_state_dict(lora_weights(other, seed), strict=False)
            want = on_device(other, x)
            assert torch.equal(net(x).cpu(), want)
            assert torch.equal(want, on_device(build_conv_net(), x)) == (seed == 0)
            assert manager.ledger.used("gpu:0")
            assert_streams(managed, streams)


@torch.no_grad()
@pytest.mark.parametrize("streams", [False, True])
def test_9_layers_that_are_added_to_a_resident_model_join_it_with_its_next_profile(machine, streams: bool) -> None:
    x = torch.randn(1, 32, 8, 8)
    net = build_conv_net()
    with machine(8) as manager:
        want = on_device(add_loras(build_conv_net()), x)
        profile = conv_profile(streams)
        with manage(net, profile, placement="gpu:0", manager=manager) as managed:
            net(x)
            add_loras(net)
            managed.reprofile(profile, placement="gpu:0")
            assert torch.equal(net(x).cpu(), want)
            assert_streams(managed, streams)
            manager.ledger.check()
        assert all(weight.device.type == "cpu" for weight in net.parameters())


class Upcasting(nn.Linear):
    """A layer that keeps its weight in eight bits and widens it itself, as layerwise casting leaves them."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, dim, dtype=torch.bfloat16)
        self.weight = nn.Parameter(self.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


class MixedBlock(nn.Module):
    """Layers of five dtypes in a row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.eight = Upcasting(dim)
        self.sixteen = nn.Linear(dim, dim, dtype=torch.float16)
        self.sixty_four = nn.Linear(dim, dim, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.eight(self.norm(x).bfloat16())
        return self.sixty_four(self.sixteen(x.half()).double()).float()


@torch.no_grad()
@pytest.mark.parametrize("placement", ["gpu:0", "gpu:0:host", "gpu:0&gpu:1", "cpu"])
@pytest.mark.parametrize("profile", PROFILES)
def test_10_a_model_of_mixed_dtypes_computes_with_its_plain_eight_bit_weights(
    machine, profile: str, placement: str
) -> None:
    x = torch.randn(3, 64)
    with machine(8, 8) as manager:
        net = nn.Sequential(*(MixedBlock(64) for _ in range(12)), nn.Linear(64, 64)).eval()
        dtypes = {name: parameter.dtype for name, parameter in net.named_parameters()}
        assert len(set(dtypes.values())) == 5
        want = net(x) if placement == "cpu" else on_device(net, x)
        with manage(net, profile if placement != "cpu" else "auto", placement=placement, manager=manager):
            for _ in range(2):
                assert torch.equal(net(x).cpu(), want)
            assert {name: parameter.dtype for name, parameter in net.named_parameters()} == dtypes


@torch.no_grad()
@pytest.mark.parametrize("tier", ["disk", "pinned"])
def test_11_offsets_decide_where_a_tensor_is(toys, machine, tmp_path, tier: str) -> None:
    x = torch.randn(1, 3, 64)
    net = toys.build_net()
    path = tmp_path / "net.safetensors"
    write_swapped(path, state_of(net))
    official = load_file(path)
    assert all(torch.equal(official[name], tensor) for name, tensor in state_of(net).items())
    other = toys.build_net(1)
    load_weights(other, path)
    assert all(torch.equal(tensor, official[name]) for name, tensor in state_of(other).items())
    with machine(8) as manager:
        want = on_device(net, x)
        on_meta = load_model(path, toys.Net)
        with manage({"net": on_meta}, STREAMED, placement=f"gpu:0:{tier}", manager=manager):
            assert torch.equal(on_meta(x).cpu(), want)


@torch.no_grad()
@pytest.mark.parametrize("keeps_its_times", [False, True])
def test_13_a_file_rewritten_at_once_in_the_same_size_is_read_anew(toys, machine, tmp_path, keeps_its_times) -> None:
    """A header of two equal weights under each other's names: whoever remembers the old one swaps them."""
    path = tmp_path / "net.safetensors"
    first, second = toys.build_net(0), toys.build_net(1)
    for net, write in [(first, save_file), (second, lambda state, file: write_swapped(file, state))] * 2:
        stat = path.stat() if path.exists() else None
        write(state_of(net), path)
        if keeps_its_times and stat is not None:
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        loaded = toys.build_net(2)
        load_weights(loaded, path)
        assert all(torch.equal(tensor, state_of(net)[name]) for name, tensor in state_of(loaded).items())


@torch.no_grad()
def test_13_a_file_rewritten_after_it_was_planned_is_refused(toys, machine, tmp_path) -> None:
    path = tmp_path / "net.safetensors"
    save_file(state_of(toys.build_net(0)), path)
    num_bytes = path.stat().st_size
    with machine(8) as manager:
        net = load_model(path, toys.Net)
        managed = manage({"net": net}, STREAMED, placement="gpu:0:disk", manager=manager)
        save_file(state_of(toys.build_net(1)), path)
        assert path.stat().st_size == num_bytes
        with pytest.raises(InvalidInput, match=r"net\.safetensors: was (replaced|written)"):
            net(torch.randn(1, 3, 64))
        managed.release()
        with pytest.raises(InvalidInput, match=r"net\.safetensors: was (replaced|written)"):
            load_weights(net)


@pytest.mark.parametrize("profile", PROFILES)
def test_15_three_threads_on_one_model_are_never_wrong(toys, machine, profile: str) -> None:
    with machine(8) as manager, torch.no_grad():
        net = toys.build_net()
        inputs = [torch.randn(1, 3, 64) for _ in range(3)]
        wanted = [on_device(net, x) for x in inputs]
        outcomes: list[bool | BaseException] = []
        elsewhere = []

        def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if module.weight.device.type != "sim":
                elsewhere.append(module)

        for layer in net.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_pre_hook(look)

        def work(x: torch.Tensor, want: torch.Tensor) -> None:
            with torch.no_grad():
                for _ in range(10):
                    try:
                        outcomes.append(torch.equal(net(x).cpu(), want))
                    except BaseException as error:
                        outcomes.append(error)

        with manage(net, profile, placement="gpu:0", manager=manager):
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1e-6)
            try:
                threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, wanted, strict=True)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                sys.setswitchinterval(interval)
            assert outcomes == [True] * 30 and not elsewhere
            loads = [event for event in manager.report()["events"] if event["kind"] == "load"]
            assert len(loads) == 1  # nobody threw out what another was using


@torch.no_grad()
@pytest.mark.parametrize("profile", ["auto", f"{STREAMED},compile=on"])
@pytest.mark.parametrize("precision", ["as stored", "fp8 scaled"])
def test_16_what_a_process_shares_is_untouched(toys, machine, tmp_path, profile: str, precision: str) -> None:
    import accelerate  # noqa: F401
    import diffusers.models.modeling_utils  # noqa: F401
    import optimum.quanto  # noqa: F401
    import torch._dynamo
    import transformers.modeling_utils  # noqa: F401

    path = tmp_path / "net.safetensors"
    save_file(state_of(toys.build_net()), path)
    x = torch.randn(1, 3, 64)
    torch.compile(nn.Identity(), backend="eager")(x)  # what torch itself does to torch.nn when it first compiles
    with machine(8) as manager:
        before = snapshot()
        net = load_model(path, toys.Net)
        managed = manage(net, profile, placement="gpu:0", precision=precision, manager=manager)
        net(x)
        assert changes_since(before) == []  # not while it is managed
        managed.release()
        assert changes_since(before) == []  # nor afterwards
        load_weights(net, path)
        assert changes_since(before) == []
        torch._dynamo.reset()


def test_16_importing_the_engine_changes_nothing_either(run_python: Callable[[str], None]) -> None:
    script = (
        "import accelerate, diffusers.models.modeling_utils, optimum.quanto, transformers.modeling_utils\n"
        "import safetensors.torch, torch._dynamo\n"
        "from highwater.tests.engine.process_state import changes_since, snapshot\n"
        "before = snapshot()\n"
        "import highwater.memory\n"
        "for name in highwater.memory.__all__:\n"
        "    getattr(highwater.memory, name)\n"
        "highwater.memory.default_manager()\n"
        "assert not changes_since(before), changes_since(before)\n"
    )
    run_python(script)
