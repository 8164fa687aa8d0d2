"""What the comparisons stand on: core's own loaders on the random models, on the CPU and on the simulated GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from highwater.tests.comfyui.graphs import CASES
from highwater.tests.comfyui.host_process import HostProcess

# Cases whose results cannot differ from those of another case, and the other.
DIFFERENT = [
    ("plain", "lora_at_1"),
    ("lora_at_1", "lora_at_half"),
    ("lora_at_1", "two_loras"),
    ("plain", "model_sampling"),
    ("guided", "skipped_blocks"),
    ("guided", "two_prompts"),
    ("guided", "weight_hook"),
    ("plain", "merge"),
]


@pytest.mark.parametrize("case", CASES)
def test_the_result_is_finite_and_not_constant(host: HostProcess, case: str, reference: Callable) -> None:
    for tensor in reference(host, case).values():
        if tensor.is_floating_point() and tensor.numel() > 1:
            assert tensor.isfinite().all() and tensor.float().std() > 1e-3


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_a_case_adds_changes_the_result(host: HostProcess, one: str, other: str, reference: Callable) -> None:
    first, second = (next(iter(reference(host, case).values())) for case in (one, other))
    assert (first - second).abs().max() > 0.01


@pytest.mark.parametrize("case", CASES)
def test_the_simulated_gpus_compute_what_the_cpu_does(
    cpu_host: HostProcess, gpu_host: HostProcess, case: str, reference: Callable
) -> None:
    """Not bit-equal: core computes in 32 bits on the CPU and in 16 on a GPU."""
    for on_cpu, on_gpu in zip(reference(cpu_host, case).values(), reference(gpu_host, case).values(), strict=True):
        a, b = on_cpu.double().flatten(), on_gpu.double().flatten()
        assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.99
