"""Several Python threads on the same devices."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from types import ModuleType

import torch
from torch import Tensor


def run_in_threads(work: Callable[[int], None], values: Iterable[int]) -> None:
    threads = [threading.Thread(target=work, args=(value,), daemon=True) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=1200)
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def test_threads_under_memory_pressure(sim: ModuleType) -> None:
    """Six threads, two small devices, hundreds of failed allocations: no wrong value, no byte lost, no deadlock."""
    errors: list[object] = []

    def work(seed: int) -> None:
        chance, live = random.Random(seed), {}

        def step() -> None:
            slot, device, action = chance.randrange(12), chance.randrange(2), chance.randrange(7)
            try:
                if action == 0:
                    on_cpu = torch.full((chance.randrange(1, 200_000),), float(seed))
                    live[slot] = (on_cpu.to(f"sim:{device}"), on_cpu)
                elif slot in live:
                    on_sim, on_cpu = live[slot]
                    actions: dict[int, Callable[[], tuple[Tensor, Tensor]]] = {
                        1: lambda: (on_sim + 1, on_cpu + 1),
                        2: lambda: (on_sim.mul_(0.5), on_cpu.mul_(0.5)),
                        3: lambda: (on_sim[::2], on_cpu[::2]) if len(on_cpu) > 4 else (on_sim, on_cpu),
                        4: lambda: (on_sim.to(f"sim:{1 - on_sim.device.index}"), on_cpu),
                        5: lambda: (on_cpu.pin_memory().to(on_sim.device, non_blocking=True), on_cpu),
                    }
                    if action in actions:
                        live[slot] = actions[action]()
                    else:
                        if not torch.equal(on_sim.cpu(), on_cpu):
                            errors.append(("wrong data", seed))
                        del live[slot]
            except torch.OutOfMemoryError:
                live.pop(slot, None)

        try:
            for _ in range(1500):
                step()
        except BaseException as error:
            errors.append(error)

    specs = [sim.SimDeviceSpec(total_bytes=8 << 20)] * 2
    with sim.cluster(specs, check_races=False):
        run_in_threads(work, range(6))
        assert not errors
        assert sum(sim.stats(i).num_ooms for i in range(2)) > 50
        assert all(sim.stats(i).peak_bytes <= 8 << 20 for i in range(2))


def test_two_threads_enqueue_copies_that_the_other_one_runs(sim: ModuleType) -> None:
    """One lock, held by a thread that never needs the GIL: deferred copies and frees cross threads freely."""
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 << 20)], check_races=False):
        side = torch.Stream(device="sim:0")
        wrong: list[int] = []

        def work(value: int) -> None:
            for _ in range(300):
                with side:
                    target = torch.full((500,), float(value)).pin_memory().to("sim:0", non_blocking=True)
                torch.accelerator.current_stream(0).wait_stream(side)
                if target[:2].sum().item() != 2 * value:
                    wrong.append(value)

        run_in_threads(work, (1, 2))
        assert not wrong
