"""Streams of micro-batches, and of their hops, that are each another one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from highwater.memory.transfer import hop_streams, micro_streams, stream_pool


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(others=st.lists(st.integers(0, 70), min_size=8, max_size=8))
def test_no_two_micro_batches_share_a_stream_however_many_others_there_are(
    sim, monkeypatch: pytest.MonkeyPatch, others: list[int]
) -> None:
    monkeypatch.setattr(micro_streams, "known_streams", {})
    monkeypatch.setattr(hop_streams, "hop_streams", {})
    monkeypatch.setattr(stream_pool, "taken", set())
    device, found = torch.device("sim", 0), []
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20)]):
        for call, count in enumerate(others):
            for _ in range(count):
                torch.Stream(device=device)
            stream = micro_streams.stream_for(device, call)
            found += [stream.stream_id, hop_streams.hop_stream(stream).stream_id]
    assert len({*found}) == len(found)
