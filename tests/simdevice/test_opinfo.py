"""Every entry of torch's own operator database on a simulated device, against the CPU."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "sim:1"
NUM_PARTS = 8

EXCEPTIONS = {
    "empty": "returns whatever is in memory",
    "empty_like": "returns whatever is in memory",
    "empty_permuted": "returns whatever is in memory",
    "empty_strided": "returns whatever is in memory",
    "new_empty": "returns whatever is in memory",
    "new_empty_strided": "returns whatever is in memory",
    "sparse.sampled_addmm": "sparse tensors are not simulated",
    "sparse.mm": "sparse tensors are not simulated",
    "to_sparse": "sparse tensors are not simulated",
    "to": "its samples name the CPU as the target",
    "tensor_split": "takes its indices from the host, as on every accelerator",
}


@pytest.fixture(scope="module")
def op_db(sim: ModuleType) -> list[Any]:
    # torch.testing._internal takes a base class from expecttest; nothing here uses it, so it is no dependency.
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def samples_to_try(op: Any) -> list[tuple[torch.dtype, int]]:
    supported = op.supported_dtypes("cpu")
    if torch.float32 not in supported:
        return [(torch.int64, 2)] if torch.int64 in supported else []
    return [(torch.float32, 2), (torch.bfloat16, 1)] if torch.bfloat16 in supported else [(torch.float32, 2)]


def run(op: Any, sample: Any, device: str | None) -> list[Any]:
    """Call the operator on fresh copies of the sample's tensors, moved to ``device`` if there is one; flat results."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.clone() if device is None else value.to(device)

    kwargs = {k: fresh(v) if isinstance(v, Tensor) else tree_map(fresh, v) for k, v in sample.kwargs.items()}
    if device is not None and "device" in kwargs:
        kwargs["device"] = torch.device(device)
    torch.manual_seed(0)
    return tree_flatten(op(tree_map(fresh, sample.input), *tree_map(fresh, sample.args), **kwargs))[0]


def differences(op: Any, dtype: torch.dtype, num_samples: int) -> Iterator[str]:
    """Yield what is wrong with an operator, in words; nothing where the CPU itself cannot run the sample."""
    rtol = 1.6e-2 if dtype == torch.bfloat16 else 1e-4
    # Not op.sample_inputs: it inspects the whole stack at every call to find a unittest, 0.1 s each.
    for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), num_samples):
        try:
            expected = run(op, sample, None)
        except (RuntimeError, ValueError, TypeError, ImportError, AssertionError):
            continue
        try:
            results = run(op, sample, DEVICE)
        except (RuntimeError, ValueError, TypeError) as error:
            yield f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
            return
        if len(results) != len(expected):
            yield f"{len(results)} results, not {len(expected)}"
        for result, reference in zip(results, expected, strict=False):
            if not isinstance(reference, Tensor):
                continue
            if result.device.type != "sim":
                yield f"a result on {result.device}"
            elif result.shape != reference.shape:
                yield f"shape {tuple(result.shape)}, not {tuple(reference.shape)}"
            else:
                try:
                    torch.testing.assert_close(result.cpu(), reference, atol=rtol, rtol=rtol, equal_nan=True)
                except AssertionError as error:
                    yield f"values: {str(error).splitlines()[0]}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(NUM_PARTS))
@torch.no_grad()
def test_operators_equal_the_cpu(sim: ModuleType, op_db: list[Any], part: int) -> None:
    wrong = []
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 30)] * 2):
        for op in op_db[part::NUM_PARTS]:
            if op.name in EXCEPTIONS:
                continue
            for dtype, num_samples in samples_to_try(op):
                wrong += [f"{op.full_name} ({dtype}): {text}" for text in differences(op, dtype, num_samples)]
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_still_exist(op_db: list[Any]) -> None:
    assert set(EXCEPTIONS) <= {op.name for op in op_db}
