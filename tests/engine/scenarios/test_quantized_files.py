"""Models of files that are quantized already: their codes go as they are to where they rest, and compute alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from highwater.memory import load_model, load_weights, manage, quantize_file
from highwater.memory.errors import InvalidInput
from highwater.memory.transfer import devices
from highwater.memory.weights.known_forms import FORMS

WORDS = {"fp8-scaled": "fp8 scaled", "int8": "int8", "qint8": "qint8", "qint4": "qint4", "qfloat8": "qfloat8"}
X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
MODES = {
    "pinned": {"profile": "auto", "placement": "gpu:0:pinned"},
    "host": {"profile": "auto", "placement": "gpu:0:host"},
    "streamed": {"profile": "gpu:0=0.8MiB", "placement": "gpu:0"},
    "disk": {"profile": "gpu:0=0.8MiB", "placement": "gpu:0:disk"},
    "disk, resident": {"profile": "auto", "placement": "gpu:0:disk"},
    "split": {"profile": "auto", "placement": "gpu:0&gpu:1"},
    "cpu": {"profile": "auto", "placement": "cpu"},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 192), nn.Linear(192, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(256, 256)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def is_quantized(name: str) -> bool:
    return name.endswith(("up.weight", "down.weight"))


def make(folder: Path, word: str, dtype: torch.dtype = torch.float32) -> tuple[Path, Net]:
    """Return a quantized file, and the plain model of what its codes stand for."""
    torch.manual_seed(1)
    plain = Net().to(dtype).eval().requires_grad_(False)
    save_file(plain.state_dict(), folder / "in.safetensors")
    quantize_file(folder / "in.safetensors", folder / "out.safetensors", word)
    for name, weight in plain.named_parameters():
        if is_quantized(name):
            form = FORMS[WORDS[word]][1]().measure(weight, name=name)
            weight.copy_(form.decode(form.encode(weight), dtype))
    return folder / "out.safetensors", plain


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_a_managed_model_computes_what_its_codes_stand_for(tmp_path: Path, machine, word: str, mode: str) -> None:
    path, plain = make(tmp_path, word)
    want = plain(X)
    with machine(4, 4) as manager:
        net = load_model(path, Net)
        assert all(parameter.is_meta and parameter.dtype is torch.float32 for parameter in net.parameters())
        with manage({"diffusion": net}, manager=manager, **MODES[mode]) as managed:
            (plan,) = managed.plan.components
            assert len(plan.forms) == 12 and {numbers.name for numbers in plan.forms.values()} == {WORDS[word]}
            assert (
                f"12 weights rest in {'eight bits' if 'fp8' in word else word}, as in their file" in managed.plan.text()
            )
            for _ in range(2):
                assert torch.equal(net(X).cpu(), want)
                manager.ledger.check()
            assert plan.tier == ("disk" if "disk" in mode else plan.tier)
            found = {name: tensor.cpu().clone() for name, tensor in net.state_dict().items()}
            assert all(torch.equal(found[name], weight) for name, weight in plain.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_it_computes_in_the_dtype_of_its_source(tmp_path: Path, machine, word: str, dtype: torch.dtype) -> None:
    path, plain = make(tmp_path, word, dtype)
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.45MiB", placement="gpu:0", manager=manager):
            assert {parameter.dtype for parameter in net.parameters()} == {dtype}
            assert torch.equal(net(X.to(dtype)).cpu(), plain(X.to(dtype)))


@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_without_being_managed_it_is_decoded_into_memory(tmp_path: Path, word: str) -> None:
    path, plain = make(tmp_path, word)
    loaded = load_model(path, Net)
    load_weights(loaded)
    assert torch.equal(loaded(X), plain(X))
    own = Net().requires_grad_(False)
    load_weights(own, path)
    assert torch.equal(own(X), plain(X))
    half = Net().bfloat16().requires_grad_(False)
    load_weights(half, path)
    assert all(torch.equal(weight, plain.get_parameter(name).bfloat16()) for name, weight in half.named_parameters())


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("word", ["int8", "qint4"])
@torch.no_grad()
def test_another_precision_leaves_codes_as_they_are(tmp_path: Path, machine, word: str, tier: str) -> None:
    path, plain = make(tmp_path, word)
    with machine(4) as manager:
        net = load_model(path, Net)
        asked: dict[str, Any] = {"placement": f"gpu:0:{tier}", "precision": "fp8 scaled"}
        with manage({"diffusion": net}, "gpu:0=0.8MiB", manager=manager, **asked) as managed:
            assert "no block has weights that can rest in eight bits" in managed.plan.text()
            assert torch.equal(net(X).cpu(), plain(X))
            assert managed.verify(lambda: net(X)).is_equal


@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_a_released_model_is_unread_again_or_as_its_codes_say(tmp_path: Path, machine, word: str) -> None:
    path, plain = make(tmp_path, word)
    for tier in ("disk", "host"):
        with machine(4) as manager:
            net = load_model(path, Net)
            with manage({"diffusion": net}, "gpu:0=0.8MiB", placement=f"gpu:0:{tier}", manager=manager):
                net(X)
            if tier == "disk":
                load_weights(net)
            assert torch.equal(net(X), plain(X))


def test_fewer_bytes_reach_the_device(tmp_path: Path, machine) -> None:
    sizes = {}
    for word in ("int8", "qint4"):
        path, _ = make(tmp_path, word, torch.bfloat16)
        with machine(4) as manager, torch.no_grad():
            net = load_model(path, Net)
            with manage({"diffusion": net}, "gpu:0=0.45MiB", placement="gpu:0:disk", manager=manager) as managed:
                net(X.bfloat16())
                sizes[word] = managed.plan.components[0].weight_bytes
        (tmp_path / "out.safetensors").unlink()
    assert sizes["qint4"] < 0.75 * sizes["int8"]


# -- files of others


@torch.no_grad()
def test_a_scale_that_is_no_power_of_two_is_taken_as_it_is(tmp_path: Path, machine) -> None:
    path, plain = make(tmp_path, "fp8-scaled")
    tensors = load_file(path)
    for name in list(tensors):
        if name.endswith("weight_scale"):
            tensors[name] *= 1.37
            weight = plain.get_parameter(name.replace("weight_scale", "weight"))
            weight.copy_(tensors[name.replace("weight_scale", "weight")].float() * tensors[name])
    save_file(tensors, path)
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.8MiB", placement="gpu:0", manager=manager):
            assert torch.equal(net(X).cpu(), plain(X))


@torch.no_grad()
def test_the_older_scaled_fp8_and_scales_per_row_are_read(tmp_path: Path) -> None:
    path, plain = make(tmp_path, "fp8-scaled")
    tensors = load_file(path)
    older = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    rows = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("weight_scale"):
            older[name.replace("weight_scale", "scale_weight")] = tensor
            rows[name] = tensor.expand(tensors[name.replace("weight_scale", "weight")].shape[0], 1).clone()
        elif not name.endswith("comfy_quant"):
            older[name] = tensor
    for content in (older, rows):
        save_file(content, path)
        net = load_model(path, Net)
        load_weights(net)
        assert torch.equal(net(X), plain(X))


@torch.no_grad()
def with_quantized_head(folder: Path, word: str) -> tuple[Path, Net]:
    """Return as `make`, with a matrix quantized that is in no block."""
    path, plain = make(folder, word)
    tensors = load_file(path)
    form: Any = FORMS[WORDS[word]][1]().measure(plain.head.weight, name="w")
    leaves = form.encode(plain.head.weight)
    kind = "int8_tensorwise" if word == "int8" else "float8_e4m3fn"
    told = torch.frombuffer(bytearray(json.dumps({"format": kind}).encode()), dtype=torch.uint8)
    scale = leaves[1][:, None] if word == "int8" else torch.tensor(form.factor)
    tensors |= {"head.weight": leaves[0], "head.weight_scale": scale, "head.comfy_quant": told}
    save_file(tensors, path)
    plain.head.weight.copy_(form.decode(leaves, torch.float32))
    return path, plain


@pytest.mark.parametrize("word", ["int8", "fp8-scaled"])
@pytest.mark.parametrize("tier", ["host", "disk"])
@torch.no_grad()
def test_a_layer_outside_of_blocks_may_be_quantized_too(tmp_path: Path, machine, tier: str, word: str) -> None:
    path, plain = with_quantized_head(tmp_path, word)
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.8MiB", placement=f"gpu:0:{tier}", manager=manager):
            for _ in range(2):
                assert torch.equal(net(X).cpu(), plain(X))
                manager.ledger.check()


def change(path: Path, what: str) -> None:
    tensors = load_file(path)
    layer = "blocks.2.up"
    match what:
        case "no scale":
            del tensors[f"{layer}.weight_scale"]
        case "few scales":
            tensors[f"{layer}.weight_scale"] = tensors[f"{layer}.weight_scale"][:5].clone()
        case "one scale":
            tensors[f"{layer}.weight_scale"] = torch.ones(())
        case "scale dtype":
            tensors[f"{layer}.weight_scale"] = tensors[f"{layer}.weight_scale"].half()
        case "format":
            told = json.dumps({"format": "nvfp4"}).encode()
            tensors[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        case "convrot":
            told = json.dumps({"format": "int8_tensorwise", "convrot": True}).encode()
            tensors[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        case "no JSON":
            tensors[f"{layer}.comfy_quant"] = torch.zeros(7, dtype=torch.uint8)
        case "columns":
            square = torch.zeros(256, 256, dtype=torch.int8)
            tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"] = square, torch.ones(1, 256)
        case "codes":
            tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].view(torch.float8_e5m2)
        case "older, no weight":
            del tensors[f"{layer}.weight"], tensors[f"{layer}.comfy_quant"]
            tensors[f"{layer}.scale_weight"] = torch.ones(())
        case "shape":
            tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"][:, :100].clone()
        case "bitsandbytes":
            tensors[f"{layer}.weight.absmax"] = torch.zeros(3)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("no scale", r"blocks\.2\.up is in ComfyUI's quantized format and lacks 'blocks\.2\.up\.weight_scale'"),
        ("few scales", r"'blocks\.2\.up\.weight_scale' is \[5, 1\], and 'blocks\.2\.up\.weight' has 192 rows"),
        ("one scale", r"blocks\.2\.up is int8_tensorwise with one scale for all rows, which is for ComfyUI's own"),
        ("scale dtype", r"'blocks\.2\.up\.weight_scale' is F16, expected F32"),
        ("format", r"blocks\.2\.up is in ComfyUI's format 'nvfp4', which is for ComfyUI's own loaders"),
        ("convrot", r"format 'int8_tensorwise with convrot', which is for ComfyUI's own loaders"),
        ("no JSON", r"'blocks\.2\.up\.comfy_quant' is no JSON object with a format"),
        ("columns", r"'blocks\.2\.up\.weight_scale' is \[1, 256\], and 'blocks\.2\.up\.weight' has 256 rows"),
        ("codes", r"'blocks\.2\.up\.weight' is F8_E5M2 \[192, 256\], and its format is 'int8_tensorwise'"),
        ("older, no weight", r"blocks\.2\.up is in ComfyUI's quantized format and lacks 'blocks\.2\.up\.weight'"),
        ("shape", r"blocks\.2\.up\.weight is I8 \[192, 100\], F32 \[192, 1\] in int8, which does not fit \[192, 256\]"),
        ("bitsandbytes", "is in bitsandbytes' format, which is for bitsandbytes"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused_in_one_line(tmp_path: Path, what: str, why: str) -> None:
    path, _ = make(tmp_path, "int8")
    change(path, what)
    with pytest.raises(InvalidInput, match=why) as refused:
        load_model(path, Net)
    assert "\n" not in str(refused.value) and str(path) in str(refused.value)


# -- where weights go


@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_another_profile_or_tier_leaves_codes_as_they_are(tmp_path: Path, machine, word: str) -> None:
    path, plain = make(tmp_path, word, torch.bfloat16)
    x = X.bfloat16()
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.45MiB", placement="gpu:0:host", manager=manager) as managed:
            (before,) = managed.plan.components
            for asked in (
                {"profile": "gpu:0=0.5MiB"},
                {"placement": "gpu:0:disk"},
                {"profile": "auto"},
                {"placement": "gpu:0:host"},
                {"placement": "gpu:0:pinned", "profile": "gpu:0=0.45MiB"},
            ):
                managed.reprofile(**asked)
                (plan,) = managed.plan.components
                assert plan.forms == before.forms and plan.weight_bytes == before.weight_bytes
                assert torch.equal(net(x).cpu(), plain(x))
                manager.ledger.check()


@pytest.mark.parametrize("word", ["int8", "fp8-scaled"])
@torch.no_grad()
def test_a_layer_outside_of_blocks_goes_to_disk_and_back(tmp_path: Path, machine, word: str) -> None:
    path, plain = with_quantized_head(tmp_path, word)
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.8MiB", placement="gpu:0:host", manager=manager) as managed:
            for placement in ("gpu:0:host", "gpu:0:disk", "gpu:0:pinned"):
                managed.reprofile(placement=placement)
                assert torch.equal(net(X).cpu(), plain(X))
                manager.ledger.check()


@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_other_code_gets_what_computes(tmp_path: Path, machine, word: str) -> None:
    path, plain = make(tmp_path, word, torch.bfloat16)
    want = plain.blocks[2].up.weight
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "gpu:0=0.45MiB", placement="gpu:0:disk", manager=manager):
            assert torch.equal(net.blocks[2].up.weight.to("sim:0").cpu(), want)
            assert torch.equal(net.blocks[2].up.weight.clone().cpu(), want)
            assert torch.equal(net(X.bfloat16()).cpu(), plain(X.bfloat16()))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("word", ["fp8-scaled", "qfloat8", "int8"])
@torch.no_grad()
def test_a_device_without_float8_gets_wide_weights(
    tmp_path: Path, machine, monkeypatch: pytest.MonkeyPatch, word: str, tier: str
) -> None:
    path, plain = make(tmp_path, word)
    monkeypatch.setitem(devices.WITH_FLOAT8, "sim", False)
    with machine(4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, "auto", placement=f"gpu:0:{tier}", manager=manager) as managed:
            said = "has no float8: 12 weights are widened as they are read, and rest so"
            assert (said in managed.plan.text()) == (word != "int8")
            for _ in range(2):
                assert torch.equal(net(X).cpu(), plain(X))
                manager.ledger.check()


@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_names_may_have_a_prefix(tmp_path: Path, machine, word: str) -> None:
    path, plain = make(tmp_path, word)
    tensors = {f"model.diffusion_model.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    with machine(4) as manager:
        net = load_model(path, Net, prefix="model.diffusion_model.")
        with manage({"diffusion": net}, "gpu:0=0.8MiB", placement="gpu:0", manager=manager):
            assert torch.equal(net(X).cpu(), plain(X))
    other = Net().requires_grad_(False)
    load_weights(other, path, prefix="model.diffusion_model.")
    assert torch.equal(other(X), plain(X))


@torch.no_grad()
def test_the_file_can_be_named_to_manage(tmp_path: Path, machine) -> None:
    path, plain = make(tmp_path, "int8")
    with torch.device("meta"):
        net = Net().eval().requires_grad_(False)
    with machine(4) as manager:
        asked = {"files": {"diffusion": path}, "placement": "gpu:0:disk"}
        with manage({"diffusion": net}, "gpu:0=0.8MiB", manager=manager, **asked):
            assert torch.equal(net(X).cpu(), plain(X))


@torch.no_grad()
def test_without_biases_and_metadata_most_other_weights_say_the_dtype(tmp_path: Path) -> None:
    path, _ = make(tmp_path, "int8", torch.bfloat16)
    save_file({name: tensor for name, tensor in load_file(path).items() if "bias" not in name}, path)

    class WithoutBiases(Net):
        def __init__(self) -> None:
            super().__init__()
            for part in self.modules():
                if getattr(part, "bias", None) is not None:
                    part.bias = None

    net = load_model(path, WithoutBiases)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}


@torch.no_grad()
def test_progress_counts_all_that_is_read(tmp_path: Path, machine) -> None:
    path, _ = make(tmp_path, "int8")
    told: list[tuple[int, int]] = []
    with machine(4) as manager:
        end = manager.watch_loading(lambda name, done, total: told.append((done, total)))
        net = load_model(path, Net)
        with manage({"diffusion": net}, placement="gpu:0:host", manager=manager):
            end()
    assert told and told[-1][0] == told[-1][1] and told == sorted(told)


@pytest.mark.parametrize("word", WORDS)
def test_loading_imports_no_algebra_system(tmp_path: Path, word: str) -> None:
    """Torch imports sympy, which takes half a second, for some operations on tensors without memory."""
    path, _ = make(tmp_path, word)
    script = f"""
import sys
from highwater.memory import load_model, manage
from highwater.tests.engine.scenarios.test_quantized_files import Net, X
import torch
assert "sympy" not in sys.modules
net = load_model({str(path)!r}, Net)
with torch.no_grad(), manage({{"diffusion": net}}, placement="cpu"):
    net(X)
assert "sympy" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("word", WORDS)
@torch.no_grad()
def test_its_state_before_any_call_and_its_verification_are_of_the_codes_in_the_file(
    tmp_path: Path, machine, word: str, mode: str
) -> None:
    """What was decoded from codes is not encoded again: that gives other codes in some forms."""
    path, plain = make(tmp_path, word, torch.bfloat16)
    with machine(4, 4) as manager:
        net = load_model(path, Net)
        with manage({"diffusion": net}, manager=manager, **MODES[mode]) as managed:
            for found in (net.state_dict(), net.blocks.state_dict(prefix="blocks.")):
                assert all(torch.equal(weight.cpu(), plain.get_parameter(name)) for name, weight in found.items())
                found.clear()  # it holds the memory of weights
            net(X.bfloat16())
            verified = managed.verify(X.bfloat16())
            assert verified.is_equal, verified.differences


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["matrices", "all"])
@torch.no_grad()
def test_a_file_in_eight_bits_without_scales_computes_in_the_dtype_of_the_others(
    tmp_path: Path, machine, mode: str, which: str
) -> None:
    torch.manual_seed(1)
    plain = Net().bfloat16().eval().requires_grad_(False)
    state = {}
    for name, weight in plain.named_parameters():
        narrow = weight.to(torch.float8_e4m3fn)
        is_narrow = which == "all" or weight.dim() > 1
        state[name] = narrow if is_narrow else weight.clone()
        weight.copy_(narrow if is_narrow else weight)
    save_file(state, tmp_path / "plain.safetensors")
    want = plain(X.bfloat16())
    with machine(4, 4) as manager:
        net = load_model(tmp_path / "plain.safetensors", Net)
        assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
        asked = MODES[mode] | ({"profile": "gpu:0=1MiB"} if "MiB" in MODES[mode]["profile"] else {})
        with manage({"diffusion": net}, manager=manager, **asked):
            for _ in range(2):
                assert torch.equal(net(X.bfloat16()).cpu(), want)
    loaded = load_model(tmp_path / "plain.safetensors", Net)
    load_weights(loaded)
    assert torch.equal(loaded(X.bfloat16()), want)
