"""The Watermark node: what it takes, what it refuses before the run, and what it says of a device that is elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from highwater.headless.comfy_stub import comfy_api
from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.runner.workflow import InvalidWorkflow, parse_workflow
from highwater.memory import MemoryManager, default_manager
from highwater.memory.errors import InvalidInput
from highwater.memory.transfer.devices import CPU

comfy_api.install()
from highwater.nodes import device_choices  # noqa: E402
from highwater.nodes.watermark import HighwaterWatermark  # noqa: E402

GIB = 1 << 30


class FakeDevice:
    """Stands for one of the engine's: this machine has no two GPUs of different sizes."""

    def __init__(self, name: str, num_gib: float) -> None:
        self.name, self.is_cpu = name, name == "cpu"
        self.total = int(num_gib * GIB)

    def total_bytes(self) -> int:
        return self.total

    def __str__(self) -> str:
        return self.name


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 8 and one of 24 GiB."""
    from highwater.memory.transfer import devices

    found = [FakeDevice("cpu", 64), FakeDevice("gpu:0", 8), FakeDevice("gpu:1", 24)]
    monkeypatch.setattr(devices, "list_devices", lambda: found)
    monkeypatch.setattr(default_manager(), "devices", {device.name: device for device in found})


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(default_manager(), "set_watermark", lambda *marks: calls.append(marks))
    return calls


def offered() -> device_choices.Choices:
    (device,) = (item for item in HighwaterWatermark.GET_SCHEMA().inputs if item.id == "device")
    return device.options["options"]


def test_devices_are_offered_as_the_loaders_call_them(two_gpus: None) -> None:
    assert offered() == ["*", "gpu:0", "gpu:1", "host"]


@pytest.mark.parametrize(
    ("device", "words", "said"),
    [
        ("*", "*", ""),
        ("gpu:1", "gpu:1", ""),
        ("cuda:1", "gpu:1", ""),
        ("host", "host", ""),
        (" Host", "host", ""),
        (" GPU ", "gpu:0", ""),
        (
            "gpu:7",
            "*",
            "watermark gpu:7: this machine has no gpu:7, so it applies to every device (*); did you mean 'gpu:1'? al",
        ),
        ("xpu:3", "*", "this machine has no gpu:3"),
    ],
)
def test_a_device_of_another_machine_means_every_one_and_the_node_says_so(
    two_gpus: None, marks: list[Any], device: str, words: str, said: str
) -> None:
    assert device in offered()
    output = HighwaterWatermark.execute(device, "1GiB", "2GiB")
    assert marks == [(words, GIB, 2 * GIB)]
    assert output.args[0].device == words
    told = output.ui_dict()["text"]  # sent though empty: it takes away what an earlier run said
    assert len(told) == bool(said) and said in "".join(told)


def test_percentages_are_passed_on_as_such(two_gpus: None, marks: list[Any]) -> None:
    """The device knows its own total."""
    HighwaterWatermark.execute("gpu:1", "2.5%", "1GiB")
    assert marks == [("gpu:1", "2.5%", GIB)]


def test_a_device_that_is_too_small_keeps_its_marks_and_the_node_says_so(two_gpus: None, marks: list[Any]) -> None:
    said = "watermark 10.0GiB: gpu:0 has 8.00GiB only and keeps the marks that it has"
    assert HighwaterWatermark.execute("*", "1GiB", "10GiB").ui_dict()["text"] == [said]
    assert marks == [("gpu:1", GIB, 10 * GIB)]
    assert HighwaterWatermark.execute("gpu:0", "1GiB", "10GiB").ui_dict()["text"] == [said]
    assert len(HighwaterWatermark.execute("*", "1GiB", "90GiB").ui_dict()["text"]) == 2
    assert len(marks) == 1
    assert HighwaterWatermark.execute("*", "1GiB", "20%").ui_dict()["text"] == []
    assert marks[1:] == [("*", GIB, "20%")]


def test_a_ram_that_is_too_small_keeps_its_marks_and_the_node_says_so(two_gpus: None, marks: list[Any]) -> None:
    (said,) = HighwaterWatermark.execute("host", "1GiB", "9999999GiB").ui_dict()["text"]
    assert said.startswith("watermark 9999999") and said.endswith("GiB only and keeps the marks that it has")
    assert ": host has " in said and marks == []


def test_marks_that_cross_on_a_larger_device_leave_it_as_it_is(two_gpus: None, marks: list[Any]) -> None:
    """A percentage and a size are compared on the device only."""
    told = HighwaterWatermark.execute("*", "10%", "1GiB").ui_dict()["text"]
    assert told == [
        "watermark 10%:1.00GiB: gpu:1 would have low 10% (2.40GiB) above high 1.00GiB and keeps the marks that it has"
    ]
    assert marks == [("gpu:0", "10%", GIB)]


@pytest.mark.parametrize(
    ("text", "fitting", "told"),
    [
        ("1GiB:2GiB", {"*"}, []),
        ("", set(), []),
        ("gpu:0=1GiB:2GiB,gpu:2=1GiB:2GiB", {"gpu:0"}, ["no gpu:2, so that is left out; it has gpu:0, gpu:1, host"]),
        ("10GiB:20GiB,gpu:0=1GiB:2GiB", {"gpu:0", "gpu:1"}, []),
        ("1GiB:2GiB,gpu:0=8GiB:9GiB", {"*"}, ["watermark 9.00GiB: gpu:0 has 8.00GiB only, left out"]),
        ("10GiB:20GiB,gpu:1=1GiB:25GiB", {"gpu:1"}, ["25.0GiB: gpu:1 has", "20.0GiB: gpu:0 has"]),
        ("host=1GiB:9999999GiB,1%:2%", {"*"}, [": host has "]),
    ],
)
def test_of_a_setting_what_fits_counts(two_gpus: None, text: str, fitting: set[str], told: list[str]) -> None:
    from highwater.memory.options.marks import parse_watermarks

    found, notes = device_choices.fit_marks(parse_watermarks(text), default_manager().devices, instead=", left out")
    assert set(found) == fitting
    assert len(notes) == len(told) and all(part in note for part, note in zip(told, notes, strict=True))


@pytest.mark.parametrize("device", ["moon", "cpu", "", "gpu:", "gpu:x", "gpu:0&gpu:1", "default", 3, None])
def test_what_is_no_accelerator_anywhere_is_refused_on_its_input(two_gpus: None, marks: list[Any], device: Any) -> None:
    assert device not in offered()
    with pytest.raises(InvalidInput, match=r"is not an accelerator and not host; .*, gpu:1, host$") as caught:
        HighwaterWatermark.execute(device, "1GiB", "2GiB")
    assert repr(device) in str(caught.value)
    assert marks == []


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        ("512", "1GiB", "low '512' has no unit; allowed: GiB, MiB, GB, MB"),
        (512, "1GiB", "low '512' has no unit; allowed: GiB, MiB, GB, MB"),
        ("512MiB", "much", "high 'much' is not a size; write a number and a unit"),
        ("2GiB", "1GiB", "low 2.00GiB is above high 1.00GiB; allowed: low <= high"),
        ("20%", "10%", "low 20% is above high 10%; allowed: low <= high"),
        ("1GiB", "110%", "high '110%' is more than all; allowed: 0% to 100%"),
        (
            "ten%",
            "1GiB",
            "low 'ten%' is not a size; write a number and a unit, such as 6GiB or 800MiB, or a part of the",
        ),
        ("512", None, "low '512' has no unit"),
    ],
)
def test_bad_marks_are_refused_before_the_run(two_gpus: None, low: Any, high: Any, said: str) -> None:
    """None is a linked mark, which is known when the node runs."""
    verdict = HighwaterWatermark.validate_inputs(low, high)
    assert isinstance(verdict, str) and said in verdict and "\n" not in verdict


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("0MiB", "24GiB"),
        ("1GiB", "1GiB"),
        ("5%", " 10 %"),
        ("90%", "1GiB"),
        (None, None),
        (None, "24GiB"),
        ("1GiB", "200GiB"),
    ],
)
def test_good_marks_pass(two_gpus: None, low: str | None, high: str | None) -> None:
    assert HighwaterWatermark.validate_inputs(low, high) is True


def test_a_machine_without_accelerators_takes_any_marks(
    runner: WorkflowRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("transfer.devices", "manager.manager"):
        monkeypatch.setattr(f"highwater.memory.{module}.list_devices", lambda: [CPU])
    monkeypatch.setattr("highwater.memory.manager.default.made", [MemoryManager()])
    graph = {"1": {"class_type": "HighwaterWatermark", "inputs": {"device": "gpu:9", "low": "1GiB", "high": "90GiB"}}}
    result = runner.run(parse_workflow(graph), name="test")
    assert "this machine has no gpu:9" in result.outputs["1"]["text"][0]
    graph["1"]["inputs"]["device"] = "moon"
    with pytest.raises(InvalidWorkflow, match=r"node 1 \(Watermark\): input 'device' is \"moon\"; allowed: \*"):
        parse_workflow(graph)


def test_listing_the_node_does_not_load_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = (
        "import sys\n"
        "from highwater.headless.comfy_stub import comfy_api, folder_paths; comfy_api.install()\n"
        "folder_paths.configure(models=sys.argv[1], output=sys.argv[1])\n"
        "required = comfy_api.object_info()['HighwaterWatermark']['input']['required']\n"
        "assert required['device'][1]['options'] == ['*', 'host']\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True)
