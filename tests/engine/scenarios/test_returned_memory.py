"""What a process has of RAM, page-locked memory and devices after it freed everything: what it had before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from highwater.memory.transfer.host_heap import has_trim

MIB = 1 << 20
# The allocators' own rounding, and what Python keeps of its small objects.
TOLERANCE_BYTES = 16 * MIB
PROGRAM = """
import gc, json, sys, time
from pathlib import Path
import torch
from highwater.headless import simdevice as sim
from highwater.memory import default_manager, manage

MIB, TOLERANCE = 1 << 20, 16 << 20

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def books():
    return {"rss": resident_bytes(), "pinned": sim.pinned().used_bytes, "device": sim.stats(0).used_bytes}

def use(num_layers, width):
    # Weights as a host's loader makes them, in torch's own memory, which is in the C library's heap.
    layers = (torch.nn.Linear(width, width) for _ in range(num_layers))
    model = torch.nn.Sequential(*layers).requires_grad_(False)
    managed = manage(model)
    model(torch.ones(1, width))
    found = books()
    getattr(managed, sys.argv[1])()
    return found

sim.install()
with sim.cluster([sim.SimDeviceSpec(total_bytes=512 * MIB)]), torch.no_grad():
    use(4, 64)
    gc.collect()
    before, told = books(), []
    for _ in range(2):
        loaded = use(48, 1024)
        gc.collect()
        left = books()
        if sys.argv[2] == "at once":
            default_manager().commands.free_idle("all is freed")
        else:
            default_manager().follow_free("the host frees its memory")
            until_s = time.monotonic() + 60
            while resident_bytes() > before["rss"] + TOLERANCE and time.monotonic() < until_s:
                time.sleep(0.05)
        told.append({"loaded": loaded, "left": left, "freed": books()})
print(json.dumps({"before": before, "told": told}))
"""
# glibc serves blocks of up to 32 MiB from its heap then, and gives none of it back by itself; it else learns both.
KEEPS_ITS_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(32 * MIB), "MALLOC_TRIM_THRESHOLD_": str(4096 * MIB)}


def run(*arguments: str) -> dict[str, Any]:
    command, environment = [sys.executable, "-c", PROGRAM, *arguments], os.environ | KEEPS_ITS_HEAP
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not has_trim(), reason="this C library has no malloc_trim")
@pytest.mark.parametrize(("end", "freed"), [("release", "at once"), ("discard", "after the host")])
def test_all_memory_is_back_after_each_load(sim, end: str, freed: str) -> None:
    """192 MiB of weights in a process of its own, released or discarded."""
    books = run(end, freed)
    before = books["before"]
    assert before["pinned"] == before["device"] == 0
    for told in books["told"]:
        assert told["loaded"]["pinned"] >= 192 * MIB and told["loaded"]["device"] >= 192 * MIB
        assert told["loaded"]["rss"] > before["rss"] + 192 * MIB
        assert told["freed"]["pinned"] == told["freed"]["device"] == 0
        assert told["freed"]["rss"] <= before["rss"] + TOLERANCE_BYTES
    # Else this would show nothing: freed weights stay in the C library's heap.
    assert any(told["left"]["rss"] > before["rss"] + TOLERANCE_BYTES for told in books["told"])
