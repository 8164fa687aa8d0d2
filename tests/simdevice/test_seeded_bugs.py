"""A block-streaming engine, clean, and ten bugs seeded into it: the devices must report every one of them."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, ROWS, NUM_BLOCKS = 256, 64, 8
BLOCK_BYTES = (DIM * DIM + DIM) * 4
ACTIVATION_BYTES = ROWS * DIM * 4
# Two slots, and the four activations that a step holds at its peak: the caller's x, the block's x, linear, tanh.
CAPACITY = 2 * BLOCK_BYTES + 4 * ACTIVATION_BYTES


class StreamingEngine:
    """Keeps all blocks in pinned memory and runs them through two slots on the device, copying one block ahead.

    Methods are the steps that a bug replaces.
    """

    def __init__(self, blocks: list[nn.Linear], device: str = "sim:0") -> None:
        self.device = device
        self.host = [self.store(block) for block in blocks]
        self.slots = [{k: torch.empty(v.shape, device=device) for k, v in self.host[0].items()} for _ in range(2)]
        self.ready, self.free = ([torch.Event(device=device) for _ in range(2)] for _ in range(2))
        self.copies, self.main = torch.Stream(device=device), torch.accelerator.current_stream(device)
        self.copies.wait_stream(self.main)

    def store(self, block: nn.Linear) -> dict[str, Tensor]:
        return {name: tensor.detach().pin_memory() for name, tensor in block.state_dict().items()}

    def fetch(self, i: int) -> None:
        with self.copies:
            self.wait_until_free(i)
            for name, tensor in self.host[i].items():
                self.slots[i % 2][name].copy_(tensor, non_blocking=True)
            self.ready[i % 2].record(self.copies)

    def wait_until_free(self, i: int) -> None:
        self.copies.wait_event(self.free[i % 2])

    def wait_until_ready(self, i: int) -> None:
        self.main.wait_event(self.ready[i % 2])

    def weights(self, i: int) -> tuple[Tensor, Tensor]:
        return self.slots[i % 2]["weight"], self.slots[i % 2]["bias"]

    def compute(self, i: int, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, *self.weights(i)))

    def release(self, i: int) -> None:
        self.free[i % 2].record(self.main)

    def run(self, x: Tensor) -> Tensor:
        self.fetch(0)
        self.fetch(1)
        for i in range(len(self.host)):
            self.wait_until_ready(i)
            x = self.compute(i, x)
            self.release(i)
            if i + 2 < len(self.host):
                self.fetch(i + 2)
        self.main.synchronize()
        return x


class BiasLeftOnHost(StreamingEngine):
    def weights(self, i):
        return self.slots[i % 2]["weight"], self.host[i]["bias"]


class HiddenReferenceToEvictedWeights(StreamingEngine):
    def release(self, i):
        self.__dict__.setdefault("seen", []).append(self.slots[i % 2]["weight"].clone())
        super().release(i)


class UnaccountedUpcastCopies(StreamingEngine):
    def weights(self, i):
        weight, bias = super().weights(i)
        return weight.double().float(), bias


class ActivationsNotBudgeted(StreamingEngine):
    def compute(self, i, x):
        return super().compute(i, x.repeat(64, 1)[: len(x)])


class MissingWaitForTheCopy(StreamingEngine):
    def wait_until_ready(self, i):
        pass


class SlotReusedWithoutEvent(StreamingEngine):
    def wait_until_free(self, i):
        pass


class FreedInFlight(StreamingEngine):
    def compute(self, i, x):
        scratch = torch.empty(DIM, device=self.device)
        self.copies.wait_stream(self.main)
        with self.copies:
            scratch.copy_(self.host[i]["bias"], non_blocking=True)
        del scratch
        return super().compute(i, x)


class LayerSplitWithoutHop(StreamingEngine):
    def weights(self, i):
        weights = super().weights(i)
        return tuple(w.to("sim:1") for w in weights) if i == 3 else weights


class UnpinnedSource(StreamingEngine):
    def store(self, block):
        return {name: tensor.detach() for name, tensor in block.state_dict().items()}


class SmallViewKeepsBigBuffer(StreamingEngine):
    def compute(self, i, x):
        self.__dict__.setdefault("rows", []).append(torch.cat([x, x])[:1])
        return super().compute(i, x)


def measure(sim: ModuleType, engine: type[StreamingEngine], capacity: int = CAPACITY) -> tuple[set[str], float]:
    """Run an engine under every check; return the findings by kind, and the virtual seconds."""
    torch.manual_seed(0)
    blocks = [nn.Linear(DIM, DIM).requires_grad_(False) for _ in range(NUM_BLOCKS)]
    x = torch.randn(ROWS, DIM)
    expected = x
    for block in blocks:
        expected = torch.tanh(block(expected))

    findings: set[str] = set()
    elapsed_s = 0.0

    def run() -> None:
        nonlocal elapsed_s
        on_device = x.to("sim:0")
        built = engine(blocks)
        sim.reset_clock()
        output = built.run(on_device)
        elapsed_s = sim.clock_s()
        if sim.stats(0).used_bytes != 2 * BLOCK_BYTES + 2 * ACTIVATION_BYTES:
            findings.add("bytes left")
        if not torch.allclose(output.cpu(), expected, atol=1e-5):
            findings.add("wrong data")

    specs = [sim.SimDeviceSpec(total_bytes=capacity), sim.SimDeviceSpec(total_bytes=1 << 30)]
    with sim.cluster(specs):
        try:
            run()
        except torch.OutOfMemoryError:
            findings.add("out of memory")
        except RuntimeError as error:
            findings.add("device mismatch" if "same device" in str(error) else str(error))
        torch.accelerator.synchronize(0)
        if sim.races():
            findings.add("races")
    return findings, elapsed_s


def test_the_clean_engine_is_clean(sim: ModuleType) -> None:
    findings, first_s = measure(sim, StreamingEngine)
    assert findings == set()
    assert measure(sim, StreamingEngine) == (set(), first_s)
    findings, _ = measure(sim, StreamingEngine, CAPACITY - 1)
    assert "out of memory" in findings, "the capacity is exact, so that one more tensor is one too many"


@pytest.mark.parametrize(
    ("engine", "finding"),
    [
        (BiasLeftOnHost, "device mismatch"),
        (HiddenReferenceToEvictedWeights, "out of memory"),
        (UnaccountedUpcastCopies, "out of memory"),
        (ActivationsNotBudgeted, "out of memory"),
        (MissingWaitForTheCopy, "races"),
        (SlotReusedWithoutEvent, "races"),
        (FreedInFlight, "races"),
        (LayerSplitWithoutHop, "device mismatch"),
        (SmallViewKeepsBigBuffer, "out of memory"),
    ],
)
def test_a_seeded_bug_is_reported(sim: ModuleType, engine: type[StreamingEngine], finding: str) -> None:
    findings, _ = measure(sim, engine)
    assert finding in findings


def test_a_missing_wait_computes_with_poison_too(sim: ModuleType) -> None:
    findings, _ = measure(sim, MissingWaitForTheCopy)
    assert findings == {"races", "wrong data"}


def test_an_unpinned_source_costs_the_overlap(sim: ModuleType) -> None:
    """Nothing is wrong with it but the time, so time is what gives it away."""
    _, clean_s = measure(sim, StreamingEngine)
    findings, unpinned_s = measure(sim, UnpinnedSource)
    assert findings == set()
    assert unpinned_s > 1.15 * clean_s
