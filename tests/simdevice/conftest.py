"""Small hardware for the tests of the simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def hardware(sim: ModuleType) -> Iterator[ModuleType]:
    """Three devices of 64 MiB and 64 MiB of pinned memory, strict; at the end nothing may be left on them."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)] * 3, pinned_bytes=64 * MIB):
        yield sim
