"""Stands in for Huawei's ``torch_npu``: ComfyUI imports that name, and finds simulated devices called ``npu``.

The harness puts this folder on PYTHONPATH and says in HIGHWATER_TEST_SIMDEVICE, as JSON, where the simulated devices'
package is, where it is compiled, how large each device is, and on which socket to answer: one JSON request per
connection, one JSON answer. If it names a driver, too, comfy-aimdo gets one here (``fake_cuda``): torch is there, and
comfy-aimdo has not looked yet.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import socket
import sys
import threading
from dataclasses import asdict
from types import ModuleType
from typing import Any

SETTINGS = json.loads(os.environ["HIGHWATER_TEST_SIMDEVICE"])


def load_simdevice(folder: str) -> ModuleType:
    """Import the package from its folder: the repository root, with its ``nodes``, must not be on ``sys.path``.

    It belongs to a bare root package here; the pack's own is imported under the name that ComfyUI gives it.
    """
    name = "highwater_test_root"
    root = ModuleType(name)
    root.__path__ = [os.path.dirname(os.path.dirname(folder))]
    sys.modules[name] = root
    for part in ("headless", "memory"):  # bare, too: their own would import the engine a second time
        package = ModuleType(f"{name}.{part}")
        package.__path__ = [os.path.join(root.__path__[0], part)]
        sys.modules[package.__name__] = package
    module = importlib.import_module(f"{name}.headless.simdevice")
    sys.modules["highwater_test_simdevice"] = module
    return module


def start_driver(start: str, path: str, kind: str) -> Any:
    """Run the rig's start file, which is known to the helper pack as ``highwater_test_fake_cuda``."""
    name = "highwater_test_fake_cuda"
    specification = importlib.util.spec_from_file_location(name, start)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module.start(path, os.path.join(SETTINGS["build_directory"], "highwater_simdevice.so"), kind)


simdevice = load_simdevice(SETTINGS["simdevice"])
simdevice.install("npu", num_devices=len(SETTINGS["total_bytes"]), build_directory=SETTINGS["build_directory"])
specs = [simdevice.SimDeviceSpec(total_bytes=total) for total in SETTINGS["total_bytes"]]
simdevice.configure([spec.slowed(SETTINGS["slowed"]) for spec in specs])
simdevice.strict(defer_copies=SETTINGS["strict"], check_races=SETTINGS["strict"])
driver = start_driver(**SETTINGS["driver"]) if "driver" in SETTINGS else None
simdevice.share_pages(driver is not None)  # core registers its copies of weights one by one, every 1 KiB


def answer(request: dict[str, Any]) -> Any:
    """Do one request. ``read`` changes nothing but the list of races, which it empties."""
    match request["do"]:
        case "read":
            return {
                "devices": [asdict(simdevice.stats(index)) for index in range(len(SETTINGS["total_bytes"]))],
                "pinned": asdict(simdevice.pinned()),
                "clock_s": simdevice.clock_s(),
                "races": simdevice.races(),
                **({} if driver is None else {"driver": driver.read()}),
            }
        case "reset":
            simdevice.reset_stats()
            if driver is not None:
                driver.reset()
        case "fail_alloc":
            simdevice.fail_alloc(request["device"], request["nth"])
        case "occupy":
            simdevice.occupy(request["device"], request["num_bytes"])
        case "fail_call":
            driver.fail(request["function"], request["nth"])
        case unknown:
            raise ValueError(unknown)
    return None


def serve() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(SETTINGS["socket"])
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as file:
                try:
                    reply = {"result": answer(json.loads(file.readline()))}
                except Exception as error:
                    reply = {"error": repr(error)}
                file.write(json.dumps(reply) + "\n")


threading.Thread(target=serve, name="simulated device books", daemon=True).start()
