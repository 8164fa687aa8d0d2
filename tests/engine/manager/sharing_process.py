"""A process with a model on a simulated device, which does what it is told, line by line, and answers in JSON.

Run as ``python sharing_process.py FOLDER MIB``. The simulated devices of two processes share no memory: what the other
has is told by ``occupy``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from highwater.headless import simdevice

MIB = 1 << 20


def main() -> None:
    folder, mebibytes = Path(sys.argv[1]), float(sys.argv[2])
    simdevice.install("sim")
    from highwater.memory import MemoryManager, manage
    from highwater.tests.engine.conftest import build_net

    simdevice.configure([simdevice.SimDeviceSpec(total_bytes=int(mebibytes * MIB))])
    manager = MemoryManager(shared_folder=folder)
    manager.set_watermark("*", 0, 0)
    gpu = manager.devices["gpu:0"]
    net, x = build_net(), torch.ones(2, 5, 64)
    with torch.no_grad():
        expected = net(x)
        managed = manage(net, manager=manager)

        def answer(word: str, *arguments: str) -> Any:
            match word:
                case "forward":
                    assert torch.equal(net(x).cpu(), expected)
                    return None
                case "begin":
                    return manager.begin_run("r", "run")
                case "end":
                    return manager.end_run()
                case "look":
                    return manager.look()
                case "mark":
                    return manager.set_watermark("gpu:0", *map(int, arguments))
                case "keep":
                    return managed.keep()
                case "foresee":
                    return manager.foresee([[managed.members[0].id]])
                case "occupy":
                    return simdevice.occupy(0, int(arguments[0]))
                case "state":
                    manager.ledger.check()
                    report = manager.recent_report(1000)
                    return {
                        "pid": os.getpid(),
                        "used": gpu.allocated_bytes(),
                        "whole": not managed.members[0].managed.plan.streams,
                        "low": manager.capacity.mark_of("gpu:0").low_bytes,
                        "device": next(device for device in report["devices"] if device["name"] == "gpu:0"),
                        "events": [event["reason"] for event in report["events"]],
                    }
            raise AssertionError(word)

        for line in sys.stdin:
            print(json.dumps(answer(*line.split())), flush=True)


if __name__ == "__main__":
    main()
