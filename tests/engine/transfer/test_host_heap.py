"""Memory that was freed goes back to the system when all idle components are freed."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from highwater.memory.transfer.host_heap import describe_return, give_back_heap, has_trim


@pytest.mark.skipif(not has_trim(), reason="this C library has no malloc_trim")
def test_small_tensors_that_were_freed_leave_the_process(run_python: Callable[[str], None]) -> None:
    """Small ones come from the heap, and one that is left at its end keeps all of it, unless it is trimmed."""
    run_python("""
import gc, psutil, torch
from highwater.memory import MemoryManager
MIB = 1 << 20
rss = lambda: psutil.Process().memory_info().rss
manager = MemoryManager()
manager.commands.free_idle("warm up")
before = rss()
tensors = [torch.ones(15_000) for _ in range(4_000)]  # 60 KB each, 229 MiB
last = torch.ones(15_000)
assert rss() - before > 200 * MIB
del tensors
gc.collect()
kept = rss() - before
manager.commands.free_idle("all of it")
assert kept > 100 * MIB, kept  # else this shows nothing
assert rss() - before < 16 * MIB, (rss() - before) // MIB
""")


def test_it_may_be_asked_at_any_time() -> None:
    for _ in range(3):
        give_back_heap()


@pytest.mark.parametrize(
    ("platform", "trims", "said"),
    [("win32", False, "copied out of"), ("darwin", False, "marked as reusable"), ("linux", False, "has no call"),
     ("linux", True, "MALLOC_ARENA_MAX=1")],
)  # fmt: skip
def test_what_each_system_takes_back_is_said(platform: str, trims: bool, said: str) -> None:
    texts = {name: describe_return(name, trims=trims) for name in ("win32", "darwin", "linux")}
    assert said in texts[platform] and len(set(texts.values())) == 3
    assert ("malloc_trim" in texts[platform]) == trims
    assert describe_return() == describe_return(sys.platform, trims=has_trim())
