"""An interrupt behind any call of the engine that moves or notes something: the next pass is right in any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from highwater.memory import MemoryManager, manage
from highwater.memory.attachment import Attachment
from highwater.memory.passes import Passes
from highwater.memory.residency import Unit
from highwater.memory.share import Share
from highwater.memory.split import Hops
from highwater.memory.staging import StagingArea
from highwater.memory.streaming import Streamer

CASES = {
    "streamed": ("0.45MiB", "gpu:0"),
    "pageable": ("0.45MiB,pinned=none", "gpu:0"),
    "split": ("gpu:0=unlimited,gpu:1=0.3MiB", "gpu:0&gpu:1@0.5"),
}
STEPS = [
    (MemoryManager, "acquire"),
    (MemoryManager, "enter"),
    (MemoryManager, "learn_times"),
    (Attachment, "finish_pass"),
    (Passes, "begin"),
    (Passes, "end"),
    (Passes, "leave"),
    (Share, "begin_pass"),
    (Share, "end_pass"),
    (Share, "enter"),
    (Share, "leave"),
    (Streamer, "acquire"),
    (Streamer, "prefetch"),
    (StagingArea, "claim"),
    (StagingArea, "fill"),
    (StagingArea, "give_back"),
    (StagingArea, "use"),
    (Unit, "compute_from"),
    (Unit, "rest"),
    (Hops, "move"),
]


def in_another_thread(work: Callable[[], torch.Tensor]) -> torch.Tensor | str:
    outcome: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    thread.join(20)
    return outcome[0] if outcome else "hangs"


@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("kind", "step"), STEPS, ids=lambda part: part if isinstance(part, str) else part.__name__)
def test_the_next_pass_is_right(toys, machine, monkeypatch, case: str, kind: type, step: str, nth: int) -> None:
    profile, placement = CASES[case]
    net, x = toys.build_net(), torch.randn(1, 3, 64)
    original, left = getattr(kind, step), [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return result

    @torch.no_grad()
    def compute() -> torch.Tensor:
        return net(x).cpu()

    monkeypatch.setattr(kind, step, interrupted)
    with machine(8, 8) as manager, manage(net, profile=profile, placement=placement, manager=manager) as managed:
        want = compute()
        for another in (True, False):
            left[0] = nth
            while left[0] > 0:  # some steps come once in a pass
                try:
                    compute()
                except KeyboardInterrupt:
                    break
                assert left[0] < nth, "a pass does not take this step"
            left[0] = 0
            got = in_another_thread(compute) if another else compute()
            assert isinstance(got, torch.Tensor) and torch.equal(got, want)
        assert not managed.members[0].leases
