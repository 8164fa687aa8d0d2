"""Calls of several modules by other code: what each takes, and what the caller holds meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from highwater.memory.tracing import Kernel, Untraceable, trace_calls, trace_forward


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return F.gelu(self.inner(x))

    def decode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight.t())


@given(rows=st.integers(1, 9), kept=st.integers(0, 9))
def test_each_call_has_its_trace_and_what_the_caller_holds(rows: int, kept: int) -> None:
    first, second = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Coder()

    def run(twins: Mapping[str, nn.Module]) -> None:
        held = torch.zeros(kept, 8, device="meta")
        x = twins["first"](torch.zeros(rows, 8, device="meta"))
        code = twins["second"].encode(x)
        del x
        twins["second"].decode(code)
        twins["second"](held)

    calls = trace_calls({"first": first, "second": second}, run)
    x, code = torch.zeros(rows, 8), torch.zeros(rows, 32)
    held = torch.zeros(kept, 8)
    assert [(call.part, call.method, call.held_bytes) for call in calls] == [
        ("first", "forward", held.nbytes + x.nbytes),
        ("second", "encode", held.nbytes + x.nbytes),
        ("second", "decode", held.nbytes + code.nbytes),
        ("second", "forward", held.nbytes + code.nbytes),
    ]
    assert calls[0].trace == trace_forward(first, (x,))
    assert calls[1].trace.peak_bytes == trace_forward(second, (x,), method="encode").peak_bytes
    assert calls[2].trace == trace_forward(second, (code,), method="decode")
    assert calls[3].trace == trace_forward(second, (held,))
    assert all(call.peak_bytes == call.held_bytes + call.trace.peak_bytes for call in calls)


def test_says_which_call_cannot_be_traced() -> None:
    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    def run(twins: Mapping[str, nn.Module]) -> None:
        twins["asks"](torch.rand(3, device="meta"))

    with pytest.raises(Untraceable, match=r"^asks\.forward cannot be traced: .*reads the values"):
        trace_calls({"asks": Asks()}, run)
    with pytest.raises(Untraceable, match=r"^what lies between the parts cannot be traced: .*reads the values"):
        trace_calls({"asks": Asks()}, lambda twins: torch.rand(3, device="meta").sum().item())


def test_what_a_caller_computes_between_two_calls_stands_behind_the_first() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def run(twins: Mapping[str, nn.Module]) -> None:
        x = twins["first"](torch.zeros(4, 8, device="meta"))
        x = (x + 1) * 2
        x = twins["second"](x)
        x.neg()

    calls = trace_calls({"first": first, "second": second}, run)
    size = torch.zeros(4, 8).nbytes
    assert calls[0].following == (Kernel(0, 2 * size), Kernel(0, 2 * size))
    assert calls[1].following == ()
