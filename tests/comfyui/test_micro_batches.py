"""A split diffusion model computes the halves of a step on its devices at once: the same picture to the bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from highwater.tests.comfyui.graphs import CORE_IN_HALVES, Loaders
from highwater.tests.comfyui.host_process import HostProcess

SPLIT = Loaders(placement="gpu:0&gpu:1")


def said(host: HostProcess) -> list[str]:
    """Return what the event log says of micro-batches."""
    return [event["reason"] for event in host.part("events") if event["reason"].startswith("micro-batches")]


@pytest.mark.parametrize("case", ["guided", "two_prompts"])
def test_halves_at_once_are_what_core_computes_one_after_the_other_on_one_device(
    gpu_host: HostProcess, case: str, reference: Callable, ours: Callable
) -> None:
    expected = reference(gpu_host, case, CORE_IN_HALVES)
    gpu_host.forget()
    got = ours(gpu_host, case, SPLIT)
    assert got.keys() == expected.keys()
    assert all(got[name].equal(tensor) for name, tensor in expected.items())
    assert said(gpu_host)[-1] == "micro-batches: its devices compute the halves of a step at the same time"
    (plan,) = (slot["plan"] for slot in gpu_host.part("components") if slot["name"].startswith("tiny_flux"))
    assert "gpu:0&gpu:1/" in plan["placement"]
    assert any(reason.startswith("micro-batches: gpu:0 and gpu:1 compute") for reason in plan["reasons"])


@pytest.mark.parametrize(
    ("case", "loaders", "why"),
    [
        ("plain", SPLIT, "a step has one conditioning"),
        ("weight_hook", SPLIT, "conditionings have hooks that change weights"),
        (
            "guided",
            Loaders(placement="gpu:0&gpu:1", profile="gpu:0=4MiB,gpu:1=3MiB"),
            "blocks stream, and a second call would fetch them once more",
        ),
    ],
)
def test_what_cannot_be_halves_is_left_to_core(
    gpu_host: HostProcess, case: str, loaders: Loaders, why: str, reference: Callable, ours: Callable
) -> None:
    expected = reference(gpu_host, case)
    gpu_host.forget()
    got = ours(gpu_host, case, loaders)
    assert all(got[name].equal(tensor) for name, tensor in expected.items())
    assert said(gpu_host)[-1] == f"micro-batches: off: {why}"
