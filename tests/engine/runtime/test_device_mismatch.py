"""Errors of tensors on two devices: torch's own say component, block and remedy; all others stay what they are."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from highwater.memory import manage
from highwater.memory.runtime.forwards.device_mismatch import explain_mismatch

DIM = 64
X = torch.randn(2, DIM)
ONE, TWO = {"cuda:0": "gpu:0"}, {"cuda:0": "gpu:0", "cuda:1": "gpu:1"}

# As torch writes them.
SENTENCES = [
    "Expected all tensors to be on the same device, but found at least two devices, {}:0 and {}!",
    "Expected all tensors to be on the same device, but got mat2 is on {1}, different from other tensors on {0}:0 "
    "(when checking argument in method wrapper_CUDA_addmm)",
    "expected self and mask to be on the same device, but got mask on {1} and self on {0}:0",
    "expected condition, x and y to be on the same device, but condition is on {}:0 and x and y are on {} and cpu",
    "grid_sampler(): expected input and grid to be on same device, but input is on {}:0 and grid is on {}",
    "index_copy_(): self, index and source expected to be in the same device, but got (self) {0}:0, (index) {1}, and "
    "(source) {0}:0",
    "stft input and window must be on the same device but got self on {}:0 and window on {}",
    "Input and hidden tensors are not at the same device, found input tensor at {}:0 and hidden tensor at {}",
    "Tensor on device {1} is not on the expected device {0}:0!",
]
CPU_SENTENCES = [
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
    "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking arguments for addmm)",
    "Input type (torch.cuda.HalfTensor) and weight type (torch.HalfTensor) should be the same",
    "Input type (torch.FloatTensor) and bias type (torch.cuda.FloatTensor) should be the same",
]


def explain(error: BaseException, devices: dict[str, str], *, streams: bool = False) -> str | None:
    return explain_mismatch(error, "dit", "in block blocks.3", "gpu:0", devices, streams=streams)


@pytest.mark.parametrize("devices", [ONE, TWO])
@pytest.mark.parametrize("sentence", [*(said.format("cuda", "cpu") for said in SENTENCES), *CPU_SENTENCES])
def test_a_tensor_on_the_cpu_is_told_as_that(sentence: str, devices: dict[str, str]) -> None:
    line = explain(RuntimeError(f"{sentence}\nmore"), devices) or ""
    assert line.startswith("dit: a tensor on cpu was used with weights on gpu:0 in block blocks.3: ")
    assert line.endswith(f"({sentence})")
    assert "reprofile()" in line and "alone" not in line and "\n" not in line


@pytest.mark.parametrize("rests", ["cpu", "meta"])
def test_a_weight_that_streams_is_told_with_the_profile_that_helps(rests: str) -> None:
    said = RuntimeError(f"Tensor on device {rests} is not on the expected device cuda:0!")
    assert f"a tensor on {rests} was used" in (explain(said, ONE, streams=True) or "")
    assert "choose a profile with all blocks resident" in (explain(said, ONE, streams=True) or "")
    assert "a profile" not in (explain(said, ONE) or "")


@pytest.mark.parametrize("sentence", [said.format("cuda", "cuda:1") for said in SENTENCES if "and cpu" not in said])
def test_a_tensor_of_the_other_device_is_told_as_what_cannot_be_split(sentence: str) -> None:
    line = explain(RuntimeError(sentence), TWO) or ""
    assert line.startswith(
        "dit cannot be split: in block blocks.3 an operation got tensors on gpu:0 and gpu:1; place it on gpu:0 "
    )
    assert (explain(RuntimeError(sentence), ONE) or "").startswith(
        "dit: a tensor on cuda:1 was used with weights on gpu:0 "
    )


def test_the_indices_of_another_device_are_not_taken_for_ones_on_the_cpu() -> None:
    said = RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cuda:0)")
    assert (explain(said, TWO) or "").startswith(
        "dit cannot be split: in block blocks.3 an operation got tensors on gpu:0 and gpu:1"
    )
    assert (explain(said, ONE) or "").startswith("dit: a tensor on another device was used with weights on gpu:0 ")


def test_an_operator_that_only_the_device_has_met_a_tensor_on_the_cpu() -> None:
    said = NotImplementedError("Could not run 'lib::op' with arguments from the 'CPU' backend. This could be because")
    assert (explain(said, ONE) or "").startswith("dit: a tensor on cpu was used with weights on gpu:0 ")
    assert explain(said, {"cpu": "cpu"}) is None


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the feature is on by default; run it on cpu, on gpu:0 or on the same device"),
        ValueError(SENTENCES[0].format("cuda", "cpu")),
        RuntimeError("the feature is on by default, on the CPU and on another device type"),
        RuntimeError("CUDA error: device-side assert triggered, on cuda:0"),
        RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x64 and 65x64) on cuda:0"),
        RuntimeError("Input type (float) and bias type (c10::Half) should be the same"),
        RuntimeError("Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same"),
        RuntimeError("dit cannot be split: in block 3 an operation got tensors on gpu:0 and gpu:1 (Expected all)"),
        NotImplementedError("Could not run 'aten::_thnn_fused_lstm_cell' with arguments from the 'CPU' backend. This"),
        torch.OutOfMemoryError("Expected all tensors to be on the same device"),
        KeyboardInterrupt(),
        None,
    ],
)
def test_all_else_stays_what_it_is(error: BaseException) -> None:
    assert explain(error, ONE) is None
    assert explain(error, TWO, streams=True) is None


class Layer(nn.Module):
    def __init__(self, *, makes_on_cpu: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.makes_on_cpu = makes_on_cpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.ones(DIM) if self.makes_on_cpu else self.linear(x)


WAYS = {
    "resident": {"placement": "gpu:0"},
    "streamed": {"placement": "gpu:0", "profile": "0.04MiB"},
    "split": {"placement": "gpu:0&gpu:1@0.5"},
}


@pytest.mark.parametrize(("way", "device"), [("resident", "gpu:0"), ("streamed", "gpu:0"), ("split", "gpu:1")])
@torch.no_grad()
def test_the_entry_tells_component_block_and_remedy(machine, way: str, device: str) -> None:
    net = nn.Sequential(*(Layer(makes_on_cpu=number == 3) for number in range(6))).requires_grad_(False)
    words = f"^dit: a tensor on cpu was used with weights on {device} in block 3: make it on .*reprofile.*Expected"
    with machine(4, 4) as manager, manage({"dit": net}, manager=manager, **WAYS[way]) as managed:
        assert bool(managed.plan.components[0].shares[0].streamed) is (way == "streamed")
        for _ in range(2):
            with pytest.raises(RuntimeError, match=words) as raised:
                net(X)
            assert "alone" not in str(raised.value)
            del raised  # its traceback has the tensors
            assert not managed.members[0].leases
    net(X)


@pytest.mark.parametrize(("way", "device"), [("resident", "gpu:0"), ("streamed", "gpu:0"), ("split", "gpu:1")])
@torch.no_grad()
def test_so_it_does_after_passes_that_went_well(machine, way: str, device: str) -> None:
    net = nn.Sequential(*(Layer() for _ in range(6))).requires_grad_(False)
    with machine(4, 4) as manager, manage({"dit": net}, manager=manager, **WAYS[way]):
        for _ in range(3):
            net(X)
        net[3].makes_on_cpu = True
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"was used with weights on {device} in block 3: "):
                net(X)
        net[3].makes_on_cpu = False
        net(X)


def take_out_parametrization(layer: nn.Module) -> None:
    nn.utils.parametrize.remove_parametrizations(layer, "weight")  # a frozen weight becomes a buffer


def make_plain(layer: nn.Module) -> None:
    take_out_parametrization(layer)
    layer.__dict__["weight"] = layer._buffers.pop("weight")


def make_buffer(layer: nn.Module) -> None:
    layer.register_buffer("weight", layer.__dict__.pop("weight"))


ADDED = "call reprofile() if weight 'linear.weight' of the block was added or replaced"
PLAIN = "if it is 'linear.weight' of the block, a plain attribute, register it as a buffer and call reprofile()"


@pytest.mark.parametrize(
    ("change", "line", "remedy"), [(take_out_parametrization, ADDED, None), (make_plain, PLAIN, make_buffer)]
)
@torch.no_grad()
def test_a_tensor_in_the_block_is_told_first_and_the_remedy_helps(machine, change, line: str, remedy) -> None:
    layers = [Layer() for _ in range(6)]
    for layer in layers:
        nn.utils.parametrizations.weight_norm(layer.linear)
    net = nn.Sequential(*layers).requires_grad_(False)
    words = re.escape(f" in block 3: {line}; else make it on the input's device (")
    with machine(4, 4) as manager, manage({"dit": net}, manager=manager, **WAYS["streamed"]) as managed:
        want = net(X).cpu()
        change(net[3].linear)
        with pytest.raises(RuntimeError, match=words) as raised:
            net(X)
        del raised
        if remedy is not None:
            remedy(net[3].linear)
        managed.reprofile()
        assert torch.allclose(net(X).cpu(), want, atol=1e-6)
