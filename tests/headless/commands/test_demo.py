"""The demo end to end, in its own process: its numbers against the simulated devices' own counters."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from highwater.headless.commands.demo import WORKFLOWS, without_marks
from highwater.headless.commands.timeline import samples_at

SCRIPT = """
import json, sys, dataclasses
from pathlib import Path
from types import SimpleNamespace
import torch
from highwater.headless import simdevice
from highwater.headless.cli import models_directory
from highwater.headless.commands.console import Console
from highwater.headless.commands.demo import choose_hardware, run_demo
from highwater.headless.commands.hardware import simulate
from highwater.headless.commands.session import make_runner
out = Path(sys.argv[1])
torch.set_num_threads(1)
simulate(choose_hardware())
runner = make_runner(models_directory(SimpleNamespace(models=None)), out)
run_demo(runner, out, Console(), simulated=True)
manager = runner.manager
devices = {f"gpu:{n}": dataclasses.asdict(simdevice.stats(n)) for n in range(2)}
ledger = {name: manager.ledger.used(name) for name in devices}
manager.ledger.check()
manager.release_all()
left = [simdevice.stats(n).used_bytes for n in range(2)], simdevice.pinned().used_bytes
json.dump({"devices": devices, "ledger": ledger, "left": left}, (out / "counters.json").open("w"))
"""


@pytest.fixture(scope="module")
def demo(sim, tmp_path_factory) -> SimpleNamespace:
    """The demo's printed text, its report, and what the devices counted meanwhile."""
    out, cache = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("cache")
    compiled = sim.default_build_directory()
    shutil.copytree(compiled, cache / "highwater" / "simdevice" / compiled.name)
    if (models := compiled.parents[1] / "models").exists():
        (cache / "highwater" / "models").symlink_to(models)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "report.json").read_text())
    counters = json.loads((out / "counters.json").read_text())
    return SimpleNamespace(out=out, cache=cache, text=done.stdout, report=report, **counters)


def test_simulated_devices_teach_the_users_cache_nothing(demo) -> None:
    """What they need, and how fast they are reached, is of no use to a run on real ones."""
    assert {path.name for path in (demo.cache / "highwater").iterdir()} == {"models", "simdevice"}


def test_runs_a_b_a_and_evicts_for_the_watermark(demo) -> None:
    runs = demo.report["runs"]
    assert [run["name"] for run in runs] == ["A", "B", "A again", "A on two"]
    assert [bool(run["num_evictions"]) for run in runs] == [False, True, True, True]
    evictions = [event for event in demo.report["events"] if event["kind"] == "evict"]
    for event in evictions:
        assert event["bytes"] > 0 and (
            "reserved; " in event["reason"] or event["reason"].startswith("the VAE decodes; ")
        ), event
    first, *others = (event for event in evictions if event["run_id"] == runs[1]["run_id"])
    assert first["component"] == "tiny-sd/text_encoder", "which has done its part; A runs again"
    assert "least recently used" in first["reason"] and "next use unknown" in first["reason"]
    assert {event["component"].partition("/")[0] for event in others} == {"tiny-flux"}
    assert all("next use in " in event["reason"] for event in others)
    assert "tiny-sd" in {event["component"].partition("/")[0] for event in evictions}


def test_books_and_devices_agree(demo) -> None:
    for device in demo.report["devices"][1:]:
        counted = demo.devices[device["name"]]
        assert device["total_bytes"] == counted["total_bytes"]
        assert device["managed_bytes"] == demo.ledger[device["name"]]
        # What is not ours is a scheduler's few numbers, never a weight.
        assert device["managed_bytes"] + device["other_bytes"] == counted["used_bytes"]
        assert device["other_bytes"] < 1024
    moved = sum(run["bytes_moved"] for run in demo.report["runs"])
    arrived = sum(counted["h2d_bytes"] for counted in demo.devices.values())
    inputs = arrived - moved  # prompts, noise and latents of four small images
    # What rests in its file comes without the gaps that slabs have between tensors.
    assert -0.001 * moved <= inputs < 0.02 * moved
    others = [device["other_bytes"] for device in demo.report["devices"][1:]]
    assert demo.left == [others, 0]


def test_peaks_stay_below_capacity_and_above_the_weights(demo) -> None:
    totals = {device["name"]: device["total_bytes"] for device in demo.report["devices"]}
    samplers = [node for node in demo.report["nodes"] if node["title"] == "Sample Pipeline"]
    assert len(samplers) == 4
    for node in samplers:
        for name, peak in node["peak_bytes"].items():
            assert node["weights_bytes"].get(name, 0) <= peak <= totals[name]
            assert node["activation_bytes"][name] <= peak
    assert set(samplers[-1]["weights_bytes"]) == {"gpu:0", "gpu:1"}


def test_the_watermark_holds_whenever_nothing_computes(demo) -> None:
    low = {device["name"]: device["watermark"]["low_bytes"] for device in demo.report["devices"]}
    totals = {device["name"]: device["total_bytes"] for device in demo.report["devices"]}
    for sample in demo.report["samples"]:
        kept = totals[sample["device"]] - sum(sample["component_bytes"].values())
        assert kept >= low[sample["device"]]


def test_prints_plan_table_evictions_and_runs(demo) -> None:
    for words in (
        "kept in pinned RAM",
        "blocks resident",
        "Memory per node",
        "evicted",
        "weights moved to devices",
        "cached: ",
    ):
        assert words in demo.text


def test_writes_images_and_a_picture(demo) -> None:
    from PIL import Image

    sizes = {path.name: Image.open(path).size for path in demo.out.glob("*.png")}
    assert sizes.pop("memory.png")[0] > 1000
    assert len(sizes) == 4 and set(sizes.values()) == {(64, 64)}
    assert len({Image.open(demo.out / name).tobytes() for name in sizes}) == 4


def test_the_split_in_eight_bits_shows_nearly_the_same_image(demo) -> None:
    import numpy
    from PIL import Image

    whole, split = (
        numpy.asarray(Image.open(next(demo.out.glob(f"{name}_0*.png")))).astype(float)
        for name in ("demo_flux", "demo_flux_two_gpus")
    )
    error = ((whole - split) ** 2).mean()
    assert 0 < error < 255**2 / 10**2.0  # better than 20 dB


def test_json_is_one_document(sim, tmp_path: Path) -> None:
    workflow = Path(__file__).parents[3] / "headless" / "workflows" / "demo_sd.json"
    command = ["run", str(workflow), "--devices", "gpu:0=64MiB", "--out", str(tmp_path), "--json"]
    done = subprocess.run([sys.executable, "-m", "highwater", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["version"] == 2


def test_a_run_keeps_free_what_the_command_line_says(sim, tmp_path: Path) -> None:
    graph = without_marks(json.loads((WORKFLOWS / "demo_sd.json").read_text(encoding="utf-8")))
    assert "HighwaterWatermark" not in {node["class_type"] for node in graph.values()}
    path = tmp_path / "sd.json"
    path.write_text(json.dumps(graph), encoding="utf-8")
    hardware = ["--devices", "gpu:0=64MiB,gpu:1=32MiB", "--watermark", "25%:50%,gpu:1=1MiB:10%,host=1%:1%"]
    command = ["run", str(path), *hardware, "--out", str(tmp_path), "--json"]
    done = subprocess.run([sys.executable, "-m", "highwater", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    devices = {device["name"]: device for device in json.loads(done.stdout)["devices"]}
    assert devices["gpu:0"]["watermark"] == {"low_bytes": 16 << 20, "high_bytes": 32 << 20}
    assert devices["gpu:1"]["watermark"] == {"low_bytes": 1 << 20, "high_bytes": (32 << 20) // 10}
    assert devices["gpu:0"]["free_bytes"] >= 16 << 20


def test_every_panel_of_the_picture_has_every_point(demo) -> None:
    """A device has points of its own only where it changed; side by side all runs have the same width."""
    samples = demo.report["samples"]
    times = sorted(sample["t_s"] for sample in samples)
    for name in ("gpu:0", "gpu:1"):
        own = [sample for sample in samples if sample["device"] == name]
        drawn = samples_at(times, samples, name)
        assert len(drawn) == len(times) > len(own)
        assert [sample for time, sample in zip(times, drawn, strict=True) if sample.get("t_s") == time] == own
        begun = [sample for sample in drawn if "t_s" in sample]
        assert begun[-1]["component_bytes"] == own[-1]["component_bytes"]
