"""The line that the pack writes to the host's log as it starts."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from highwater import __version__
from highwater.nodes.driver_gpus import DriverGpu
from highwater.nodes.start_line import hidden_lines, start_line, what_stays
from highwater.nodes.visible_devices import Sight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "models stay until a prompt does not name their loader (--cache-lru or --cache-ram change that)"),
        ({"cache_ram": []}, "models stay until a prompt does not name their loader"),
        ({"cache_ram": [4.0]}, "models stay until a prompt does not name their loader"),
        ({"cache_classic": True, "cache_ram": [4.0, 4.0]}, "models stay until a prompt does not name their loader"),
        ({"cache_ram": [4.0, 6.5]}, "models stay while 6.5 GB of RAM are free (--cache-ram)"),
        ({"cache_lru": 10}, "models stay while their loader is among the last 10 nodes (--cache-lru)"),
        ({"cache_none": True}, "models are dropped after each prompt (--cache-none)"),
    ],
)
def test_whether_models_outlive_a_prompt_is_told_by_the_hosts_flags(options: dict[str, object], said: str) -> None:
    assert what_stays(SimpleNamespace(**options)).startswith(said)


def test_devices_are_told_with_their_size_and_what_stays_free(sim: ModuleType) -> None:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 30), sim.SimDeviceSpec(total_bytes=1 << 30)]):
        line = start_line()
        assert [sim.stats(index).peak_bytes for index in (0, 1)] == [0, 0]
    told = re.fullmatch(
        r"Highwater ([\d.]+): gpu:0 \((.*)\), gpu:1 \((.*)\); dynamic VRAM is off; models stay .*", line
    )
    assert told is not None, line
    assert told[1] == __version__
    assert told[2].endswith("8.00GiB, 512MiB reserved") and told[3].endswith("1.00GiB, 102MiB reserved")


def test_a_host_without_an_accelerator_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("highwater.memory.transfer.devices.list_devices", list)
    host = ModuleType("comfy.memory_management")
    host.aimdo_enabled = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy.memory_management", host)
    line = start_line()
    assert "no accelerator, models compute on the CPU; dynamic VRAM is on; models stay" in line
    assert "\n" not in line


def test_a_hidden_gpu_is_told_with_its_flag_and_what_was_chosen_is_not() -> None:
    gpus = tuple(DriverGpu(vendor="nvidia", model=f"card {number}", uuid=str(number)) for number in range(2))
    sight = Sight(vendor="nvidia", drivers=gpus, flags=["--cuda-device", "1"])
    assert hidden_lines(sight) == [
        "Highwater: --cuda-device 1 hides 1 of 2 NVIDIA GPUs: start ComfyUI with --cuda-device 0,1, or without the flag"
    ]
    assert hidden_lines(Sight(vendor="amd", environment={"HIP_VISIBLE_DEVICES": "0"})) == []
