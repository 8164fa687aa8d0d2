"""One card for the tests in here: the GPU where there is one, and a simulated device, so that every test runs anywhere.

Both never meet in one process: where the simulated devices are installed, torch takes them for the accelerator.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from highwater.memory import MemoryManager
from highwater.memory.transfer.devices import Device

MIB = 1 << 20
SIMULATED_BYTES = 512 * MIB
NO_GPU = "NOT TESTED: no GPU that torch can use"
OTHER_DEVICES = (
    "NOT TESTED: this process has simulated devices; python -m benchmarks gpu --part a tests the GPU in others"
)
CARDS = (
    pytest.param("cuda", marks=pytest.mark.on_cuda),
    pytest.param("simulated", marks=pytest.mark.on_simulated),
)


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device to test on; ``width`` makes a model large enough that copies and kernels take time on it.

    Torch rounds allocations up to ``rounding`` bytes, and takes segments of ``segment`` bytes from the driver. What it
    takes beyond the plans of these tests (large segments are rounded to 2 MiB, a stream that multiplies matrices has a
    workspace of 32 MiB) fits in ``spare`` bytes.
    """

    device: Device
    is_real: bool
    width: int
    dtype: torch.dtype
    rounding: int
    segment: int
    spare: int

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.torch_device)

    def empty_caches(self) -> None:
        """Give back what torch keeps: cached blocks, and a workspace for every stream that multiplied matrices."""
        if self.is_real:
            torch._C._cuda_clearCublasWorkspaces()
        self.device.empty_cache()

    def delay(self) -> None:
        """Keep the current stream busy for some milliseconds, so that what is queued behind it waits."""
        if self.is_real:
            torch.cuda._sleep(20_000_000)
        else:
            from highwater.headless import simdevice

            simdevice.advance(self.torch_device, 0.01)

    @contextmanager
    def manager(self) -> Iterator[MemoryManager]:
        """Yield a manager that keeps the spare bytes free; after it nothing of the engine's is there or locked."""
        from highwater.memory.transfer.pinned_memory import pinned_used_bytes

        before = pinned_used_bytes()
        manager = MemoryManager()
        manager.set_watermark("*", self.spare, self.spare)
        try:
            yield manager
            manager.ledger.check()
        finally:
            manager.release_all()
        manager.ledger.check()
        assert manager.ledger.used(self.device.name) == 0
        assert pinned_used_bytes() == before

    @contextmanager
    def free(self, num_bytes: int) -> Iterator[None]:
        """Leave this much of the card free for the body, and the spare bytes."""
        self.empty_caches()
        left_bytes = num_bytes + self.spare
        ballast = torch.empty(self.device.free_bytes() - left_bytes, dtype=torch.uint8, device=self.torch_device)
        try:
            yield
        finally:
            del ballast
            self.device.empty_cache()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "on_cuda: runs on a real GPU, see tests/gpu/conftest.py")
    config.addinivalue_line("markers", "on_simulated: the same test on a simulated device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all tests that lack a GPU the same place, for pytest to say it once."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple):
        for reason in (NO_GPU, OTHER_DEVICES):
            if reason in report.longrepr[2]:
                report.longrepr = (str(Path(__file__).parent), 1, report.longrepr[2])
    return report


@pytest.fixture(scope="session", params=CARDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Which card a test is for: all tests of the GPU run before the first of the simulated device."""
    from highwater.headless import simdevice

    if request.param == "simulated":
        request.getfixturevalue("sim")
    elif not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    elif simdevice.installed():
        pytest.skip(OTHER_DEVICES)
    return request.param


@pytest.fixture
def card(kind: str) -> Iterator[Card]:
    """The card; after a test that passed no tensor is left on it, and a simulated one saw no race."""
    torch.manual_seed(0)
    if kind == "cuda":
        yield from lend(
            Card(
                device=Device("gpu:0", torch.device("cuda:0")),
                is_real=True,
                width=1024,
                dtype=torch.bfloat16,
                rounding=512,
                segment=20 * MIB,
                spare=96 * MIB,
            )
        )
        return
    from highwater.headless import simdevice

    with simdevice.cluster([simdevice.SimDeviceSpec(total_bytes=SIMULATED_BYTES)]):
        yield from lend(
            Card(
                device=Device("gpu:0", torch.device("sim:0")),
                is_real=False,
                width=64,
                dtype=torch.float32,
                rounding=1,
                segment=0,
                spare=0,
            )
        )


def lend(card: Card) -> Iterator[Card]:
    gc.collect()
    card.empty_caches()
    allocated = card.device.allocated_bytes()
    with torch.no_grad():
        yield card
    card.synchronize()
    gc.collect()  # errors that a test expected hold its frames
    card.empty_caches()
    # Less where an earlier test failed, and the last frames that hold its tensors ended here.
    assert card.device.allocated_bytes() <= allocated, "the test left tensors on the card"
