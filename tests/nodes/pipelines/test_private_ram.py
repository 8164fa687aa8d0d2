"""A pipeline that fits its device has next to no private RAM beside that: no part of it has a copy of its file."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import diffusers
import pytest
import torch

from highwater.memory.units import MIB
from highwater.tests.nodes.pipelines.test_kept_pipelines import Host, bare_host  # noqa: F401 (a fixture)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what is private")


def write_wide(tiny: Path, wide: Path) -> None:
    """Write a pipeline like another one, with a UNet of more than 100 MiB."""
    shutil.copytree(tiny, wide)
    shutil.rmtree(wide / "unet")
    config = json.loads((tiny / "unet" / "config.json").read_text())
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel.from_config({**config, "block_out_channels": [128, 256, 256]})
    unet.save_pretrained(wide / "unet")
    for path in wide.glob("*/*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # until then its pages count as dirty


def private_bytes(host: Host) -> int:
    """Return the dirty pages of this process alone, without those that are its simulated devices' memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    private = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
    devices = host.manager.devices.values()
    return private - sum(device.memory().allocated for device in devices if not device.is_cpu)


def test_a_pipeline_that_fits_its_device_has_no_copy_in_ram(bare_host: Host) -> None:  # noqa: F811
    write_wide(bare_host.diffusers / "tiny-sd", bare_host.diffusers / "wide-sd")
    bare_host.picture("tiny-sd")  # imports what stays
    before = private_bytes(bare_host)
    bare_host.picture("wide-sd")
    (unet,) = (part for part in bare_host.manager.report()["components"] if part["id"] == "wide-sd/unet")
    assert unet["tiers"]["gpu:0"] > 100 * MIB
    assert private_bytes(bare_host) - before <= 64 * MIB
