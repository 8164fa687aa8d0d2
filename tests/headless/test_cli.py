"""The command line: what it prints, and one line for every bad value."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from highwater.headless.arguments import build_parser
from highwater.headless.cli import COMMANDS, main
from highwater.memory.errors import InvalidInput
from highwater.memory.options.profile import OffloadProfile
from highwater.memory.transfer.devices import find_device, peers_of
from highwater.memory.units import GIB, MIB
from highwater.memory.weights.file_layouts import FILE_FORMS
from highwater.nodes.described_hardware import parse_hardware

WORKFLOWS = Path(__file__).parents[2] / "headless" / "workflows"
TWO = "gpu:0=16GiB@25GB/s,gpu:1=10GiB@12GB/s,host=32GiB"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    weights = {
        f"layers.{n}.{part}.weight": torch.zeros(256, 256, dtype=torch.bfloat16) for n in range(8) for part in "ab"
    }
    save_file(weights | {"norm.weight": torch.ones(256)}, path)
    return path


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "highwater", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done


def test_plan_of_a_file_for_described_hardware(model_file: Path, capsys) -> None:
    assert main(["plan", str(model_file), "--devices", TWO, "--placement", "gpu:0&gpu:1@0.25", "--json"]) == 0
    (component,) = json.loads(capsys.readouterr().out)["files"]["components"]
    assert [(share["device"], share["blocks"]) for share in component["shares"]] == [("gpu:0", 6), ("gpu:1", 2)]
    assert component["placement"] == "model=gpu:0&gpu:1@0.25:pinned"


def test_what_streams_is_stored_on_another_gpu_where_it_is_said_to_be_as_fast(model_file: Path, capsys) -> None:
    """Its two links are as fast as the first one's; over a slower one, RAM stores what streams."""
    for speed, rests in (("25GB/s", "on gpu:1"), ("12GB/s", "pinned RAM")):
        devices = f"gpu:0=1.6MB@25GB/s,gpu:1=1.5MB@{speed}"
        assert main(["plan", str(model_file), "--devices", devices, "--watermark", "0.01MB:0.01MB"]) == 0
        told = capsys.readouterr().out
        assert rests in told
        assert ("peer copies at 25 GB/s" in told) == ("it stores" in told) == (speed == "25GB/s")


def test_a_printed_plan_can_be_pasted_back(model_file: Path, capsys) -> None:
    assert main(["plan", str(model_file), "--devices", TWO]) == 0
    first = capsys.readouterr().out
    placement = first.strip().splitlines()[-1].removeprefix("placement: ")
    assert main(["plan", str(model_file), "--devices", TWO, "--placement", placement]) == 0
    again = capsys.readouterr().out
    without_reasons = [[line for line in text.splitlines() if ": auto: " not in line] for text in (first, again)]
    assert without_reasons[0] == without_reasons[1]


def test_a_plan_imports_what_it_needs_by_itself(model_file: Path, run_python) -> None:
    """In a process in which nothing is imported yet."""
    run_python(f"""
from highwater.headless.cli import main
assert main(["plan", {str(model_file)!r}, "--devices", {TWO!r}]) == 0
""")


def test_the_picture_of_a_plan_is_that_of_the_node(tmp_path: Path, models_directory: Path, capsys) -> None:
    from PIL import Image, ImageChops

    from highwater.headless.commands.planning import plan_workflow
    from highwater.nodes.plan_picture import draw_plan

    workflow, picture = WORKFLOWS / "demo_flux.json", tmp_path / "plan.png"
    picture.write_bytes(b"of an earlier plan")
    options = ["--devices", TWO, "--models", str(models_directory), "--picture", str(picture)]
    assert main(["plan", str(workflow), *options]) == 0
    planned = plan_workflow(workflow, parse_hardware(TWO), models_directory, {})
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
        expected = draw_plan(planned.plans, planned.run, planned.machine)
        assert drawn.size == expected.size and ImageChops.difference(drawn.convert("RGB"), expected).getbbox() is None
    assert list(tmp_path.iterdir()) == [picture]


def test_a_picture_is_of_plans_of_files_too(model_file: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "other.safetensors"
    other.write_bytes(model_file.read_bytes())
    picture = tmp_path / "of both.PNG"
    assert main(["plan", str(model_file), str(other), "--devices", TWO, "--picture", str(picture), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plan.jpg", "ends in .jpg; allowed: .png"),
        ("plan", "has no ending; allowed: .png"),
        ("missing/plan.png", "missing: no such folder"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_bad_path_of_a_picture_is_one_line(model_file: Path, tmp_path: Path, name: str, said: str, capsys) -> None:
    (tmp_path / "folder.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert main(["plan", str(model_file), "--devices", TWO, "--picture", str(tmp_path / name)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_picture_is_of_one_plan(model_file: Path, tmp_path: Path, capsys) -> None:
    paths = [str(model_file), str(WORKFLOWS / "demo_flux.json")]
    assert main(["plan", *paths, "--devices", TWO, "--picture", str(tmp_path / "plan.png")]) == 2
    assert "draws one plan" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_leaves_the_one_before(model_file: Path, tmp_path: Path, monkeypatch) -> None:
    from PIL import Image

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    picture = tmp_path / "plan.png"
    picture.write_bytes(b"of an earlier plan")
    monkeypatch.setattr(Image.Image, "save", fail)
    assert main(["plan", str(model_file), "--devices", TWO, "--picture", str(picture)]) == 1
    assert picture.read_bytes() == b"of an earlier plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "plan.png"]


def test_precision_changes_the_plan(model_file: Path, capsys) -> None:
    sizes = []
    for precision in ("as stored", "fp8 scaled"):
        assert main(["plan", str(model_file), "--devices", TWO, "--precision", precision, "--json"]) == 0
        sizes.append(json.loads(capsys.readouterr().out)["files"]["components"][0]["weight_bytes"])
    assert sizes[0] == pytest.approx(2 * sizes[1], rel=0.01)


@pytest.mark.parametrize("form", FILE_FORMS)
def test_quantize_writes_a_smaller_file_once(form: str, tmp_path: Path, capsys) -> None:
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_file({f"blocks.{number}.up.weight": torch.randn(64, 256) for number in range(4)}, source)
    asked = ["quantize", str(source), str(target), "--to", form, "--exclude", r"blocks\.3"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_weights"] == 3 and told["file_bytes"] == target.stat().st_size < 0.6 * told["source_bytes"]
    assert main(asked) == 2 and "exists already" in capsys.readouterr().err
    assert main([*asked, "--force"]) == 0
    text = capsys.readouterr().out
    assert f"3 weights in {FILE_FORMS[form]}" in text and r"stay as they are: excluded by 'blocks\\.3'" in text


@pytest.mark.parametrize("value", ["-1GiB", "-.5GiB", "-80%"])
def test_a_value_that_begins_with_a_minus_is_one(value: str, model_file: Path, capsys) -> None:
    told = []
    for arguments in (["--profile", value], [f"--profile={value}"]):
        code = main(["plan", *arguments, str(model_file), "--devices", TWO])
        told.append((code, *capsys.readouterr()))
    assert told[0] == told[1] and "expected one argument" not in told[0][2]
    assert told[0][0] == 0 or value == "-.5GiB"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "none.safetensors"], "none.safetensors: no such file"),
        (["plan", "MODEL", "--profile", "fast"], "profile 'fast', column 1: 'fast' is unknown; allowed: auto, 1 to 5"),
        (
            ["plan", "MODEL", "--profile", "7"],
            "profile '7', column 1: '7' is not a profile and has no unit; allowed: 1 to 5",
        ),
        (["plan", "MODEL", "--placement", "gpu:7", "--devices", TWO], "column 1: this machine has no device 'gpu:7'"),
        (["plan", "MODEL", "--precision", "ternary"], "precision 'ternary' is unknown; allowed: as stored, fp8 scaled"),
        (["plan", "MODEL", "--profile", "0.1MiB", "--devices", TWO], "is too small: model needs at least"),
        (["plan", "MODEL", "--devices", "gpu:0=16"], "column 7: size '16' has no unit"),
        (["plan", "MODEL", "--devices", "gpu:1=16GiB"], "without gaps"),
        (["plan", "MODEL", "--profile", "4", "--profile", "5"], "--profile is given twice; it takes one value"),
        (["plan", "MODEL", "--profile"], "argument --profile: expected one argument"),
        (["plan", "MODEL", "--profile", "-1XiB", "--devices", TWO], "'-1XiB'"),
        (["plan", "MODEL", "--profile", "--json"], "argument --profile: expected one argument"),
        (["needs", "--file", "a", "--file", "b"], "--file is given twice"),
        (["run", "none.json"], "none.json: no such file"),
        (["serve", "--port", "many"], "invalid int value: 'many'"),
        (["plan", "MODEL", "--devices", ""], "column 1: a device is missing"),
        (["serve", "--out", "MODEL"], "is a file; --out expects a folder"),
        (["plan", ""], "the path is empty; see highwater plan --help"),
        (["run", "a.json", "--out", ""], "argument --out: the path is empty"),
        (["plan", "."], ".: is a folder; name a file in it, expected a .safetensors file"),
        (["plan", "NOTHING"], "nothing.safetensors: holds no weights, so there is nothing to plan"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "COMMAND"),
        (["plan", "MODEL", "--models", "nowhere", "--devices", TWO], ""),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, model_file: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(model_file.parent)
    nothing = model_file.parent / "nothing.safetensors"
    save_file({}, nothing)
    arguments = [str(nothing) if argument == "NOTHING" else argument for argument in arguments]
    arguments = [str(model_file) if argument == "MODEL" else argument for argument in arguments]
    if not words:
        assert main(arguments) == 0  # a file's plan needs no models folder
        return
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def plan_demo(name: str, devices: str, capsys) -> dict:
    workflow = Path(__file__).parents[2] / "headless" / "workflows" / f"{name}.json"
    assert main(["plan", str(workflow), "--devices", devices, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out).values()
    (plan,) = found["plans"].values()
    return {component["component"]: component for component in plan["components"]}


def test_a_plan_keeps_out_of_eight_bits_what_the_class_beside_the_file_declares(tmp_path: Path, capsys) -> None:
    """With a config that names the class the plan is the module's; else it says what it cannot know."""
    from diffusers import FluxTransformer2DModel

    shape = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    model = FluxTransformer2DModel(**shape, joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8))
    model.save_pretrained(tmp_path)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    plans = []
    for _ in range(2):
        assert main(["plan", str(path), "--devices", TWO, "--precision", "fp8 scaled"]) == 0
        plans.append(capsys.readouterr().out)
        (tmp_path / "config.json").unlink(missing_ok=True)
    assert "of the blocks stay as stored: 'norm' of FluxTransformer2DModel" in plans[0]
    assert "planned from a header" not in plans[0]
    assert "'norm'" not in plans[1]
    assert "planned from a header: which weights its class keeps as stored is not known" in plans[1]


def test_a_config_that_is_another_models_is_no_help_and_no_harm(model_file: Path, capsys) -> None:
    config = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}
    (model_file.parent / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert main(["plan", str(model_file), "--devices", TWO, "--precision", "fp8 scaled"]) == 0
    assert "planned from a header" in capsys.readouterr().out


def test_a_workflow_is_planned_for_gpus_that_are_not_here(capsys) -> None:
    shares = plan_demo("demo_flux_two_gpus", "gpu:0=64MiB,gpu:1=48MiB", capsys)["transformer"]["shares"]
    assert [share["device"] for share in shares] == ["gpu:0", "gpu:1"]


def test_a_workflow_is_planned_under_its_own_watermark(capsys) -> None:
    # demo_flux keeps 8 MiB free: what is left of 40 MiB does not hold its 34 MiB.
    (share,) = plan_demo("demo_flux", "gpu:0=40MiB", capsys)["transformer"]["shares"]
    assert share["streamed_blocks"] > 0 and share["device_bytes"] <= 32 << 20


def test_a_plan_leaves_free_what_the_command_line_says(model_file: Path, capsys) -> None:
    held = {}
    for marks in ("50%:75%", "3MiB:3MiB", "gpu:1=60MiB:60MiB,host=10%:2GiB", ""):
        more = ["--watermark", marks] if marks else []
        command = ["plan", str(model_file), "--devices", "gpu:0=4MiB,gpu:1=64MiB,host=8GiB", "--placement", "gpu:0"]
        assert main([*command, *more, "--json"]) == 0
        (component,) = json.loads(capsys.readouterr().out)["files"]["components"]
        held[marks] = component["shares"][0]["device_bytes"]
    assert held["50%:75%"] <= 2 * MIB < held["gpu:1=60MiB:60MiB,host=10%:2GiB"] == held[""]
    assert held["3MiB:3MiB"] <= MIB


def test_the_marks_of_a_workflow_count_before_those_of_the_command_line(tmp_path: Path, capsys) -> None:
    workflow = json.loads((WORKFLOWS / "demo_flux.json").read_text(encoding="utf-8"))
    (node,) = (node for node in workflow.values() if node["class_type"] == "HighwaterWatermark")
    for device, limit in (("*", 32 * MIB), ("gpu:0", 32 * MIB), ("host", 10 * MIB)):
        node["inputs"]["device"] = device
        path = tmp_path / "marks.json"
        path.write_text(json.dumps(workflow), encoding="utf-8")
        assert main(["plan", str(path), "--devices", "gpu:0=40MiB", "--watermark", "75%:80%", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out).values()
        (plan,) = found["plans"].values()
        (share,) = next(part for part in plan["components"] if part["component"] == "transformer")["shares"]
        assert limit * 0.5 < share["device_bytes"] <= limit


def test_a_plan_leaves_ram_free(model_file: Path, capsys) -> None:
    """A header's weights are in their file: what the RAM cannot hold beside its mark stays there."""
    for low, tier in ((None, "pinned"), ("7.999GiB", "pinned"), ("8GiB", "disk")):
        marks = ["--watermark", f"host={low}:8GiB"] if low else []
        assert main(["plan", str(model_file), "--devices", "gpu:0=1GiB,host=8GiB", *marks, "--json"]) == 0
        (component,) = json.loads(capsys.readouterr().out)["files"]["components"]
        assert component["tier"] == tier
        told = [reason for reason in component["reasons"] if "in its file: it needs" in reason]
        assert bool(told) == bool(marks) == bool(component["file_bytes"])
        assert all(reason.endswith("8.00GiB reserved") for reason in told)
        assert component["host_bytes"] <= (1.03 * MIB if low == "7.999GiB" else component["weight_bytes"])


@pytest.mark.parametrize("command", ["run", "demo", "serve", "verify", "plan"])
def test_a_bad_watermark_is_refused_before_anything_is_read(command: str, tmp_path: Path, capsys) -> None:
    words = {"run": [str(tmp_path)], "verify": [str(tmp_path)], "plan": [str(tmp_path)]}.get(command, [])
    models = ["--models", str(tmp_path)]
    for text, said in (
        ("gpu:0=1GiB", "watermark 'gpu:0=1GiB', column 11: ':' and the high mark must follow, such as 1GiB:2GiB"),
        ("2%:1%", "watermark '2%:1%', column 1: low 2% is above high 1%; allowed: low <= high"),
    ):
        assert main([command, *words, *models, "--watermark", text]) == 2
        assert capsys.readouterr().err == f"highwater: {said}\n"


def test_a_watermark_for_a_device_that_is_not_there_is_refused(model_file: Path, capsys) -> None:
    assert main(["plan", str(model_file), "--devices", TWO, "--watermark", "gpu:2=1GiB:2GiB"]) == 2
    assert "watermark device 'gpu:2' does not exist; did you mean 'gpu:1'? allowed: *" in capsys.readouterr().err
    assert main(["plan", str(model_file), "--devices", TWO, "--watermark", "5%:12GiB"]) == 2
    assert "watermark high=12.0GiB exceeds gpu:1; allowed: up to 10.0GiB" in capsys.readouterr().err


def test_profiles_lists_every_value_of_every_profile(capsys) -> None:
    assert main(["profiles", "--json"]) == 0
    profiles = {profile["name"]: profile for profile in json.loads(capsys.readouterr().out)["profiles"]}
    assert list(profiles) == ["auto", "1", "2", "3", "4", "5"]
    assert profiles["4"]["budgets"] == {"diffusion": "1200MiB", "*": "3000MiB"}
    fields = {field.name for field in dataclasses.fields(OffloadProfile) if field.compare}
    assert all(fields <= profile.keys() for profile in profiles.values())
    assert main(["profiles"]) == 0
    printed = capsys.readouterr().out
    for profile in profiles.values():
        for value in (profile["title"], *profile["budgets"].values(), profile["pinned"]):
            assert value in printed


def test_a_plan_shows_the_choice_of_profile(model_file: Path, capsys) -> None:
    assert main(["plan", str(model_file), "--devices", TWO, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["files"]["profile"]
    assert (chosen["name"], chosen["like"]) == ("auto", "1")
    assert chosen["explicit"] == "model=unlimited,pinned=model"
    assert main(["plan", str(model_file), "--devices", TWO, "--profile", "lowram_low"]) == 0
    assert "\nprofile: 4 (LowRAM_LowVRAM)\n" in capsys.readouterr().out


def test_a_profile_quantizes_unless_a_precision_is_given(model_file: Path, capsys) -> None:
    precisions = []
    chosen = (["--profile", "4", "--precision", name] for name in ("by profile", "as stored"))
    for options in ([], ["--profile", "4"], *chosen):
        assert main(["plan", str(model_file), "--devices", TWO, *options, "--json"]) == 0
        precisions.append(json.loads(capsys.readouterr().out)["files"]["components"][0]["precision"])
    assert precisions == ["as stored", "fp8 scaled", "fp8 scaled", "as stored"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("flux1-dev", "diffusion"),
        ("t5xxl_fp16", "text"),
        ("umt5_xxl_fp8_e4m3fn_scaled", "text"),
        ("clip_l", "text"),
        ("ae", "vae"),
        ("wan_2.1_vae", "vae"),
        ("aether", "diffusion"),
    ],
)
def test_a_file_is_of_the_kind_that_its_name_says(model_file: Path, name: str, kind: str, capsys) -> None:
    path = model_file.rename(model_file.with_name(f"{name}.safetensors"))
    assert main(["plan", str(path), "--devices", TWO, "--json"]) == 0
    (component,) = json.loads(capsys.readouterr().out)["files"]["components"]
    assert component["kind"] == kind


def test_the_described_link_speed_is_in_the_plan(model_file: Path, capsys) -> None:
    assert main(["plan", str(model_file), "--devices", "gpu:0=2MiB@7GB/s"]) == 0
    assert "at 7 GB/s" in capsys.readouterr().out


def test_a_truncated_file_is_bad_input(model_file: Path, capsys) -> None:
    model_file.write_bytes(model_file.read_bytes()[:-5])
    assert main(["plan", str(model_file)]) == 2
    assert "truncated" in capsys.readouterr().err


def test_devices_lists_the_simulated_ones() -> None:
    devices = json.loads(run("devices", "--devices", "gpu:0=64MiB,gpu:1=48MiB", "--json").stdout)["devices"]
    assert [(device["name"], device["total_bytes"]) for device in devices[1:]] == [
        ("gpu:0", 64 << 20),
        ("gpu:1", 48 << 20),
    ]


def test_simulated_devices_are_not_asked_for_as_peers_of_cuda(sim, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # a machine with both
    with sim.cluster([sim.SimDeviceSpec(total_bytes=1 << 20, has_peer_access=False)] * 2):
        devices = [find_device(name) for name in ("cpu", "gpu:0", "gpu:1")]
        assert [peers_of(device) for device in devices] == [[], [], []]
        one_way = lambda device, other: (device.index, other.index) == (0, 1)  # noqa: E731
        monkeypatch.setattr(devices[1].module, "can_device_access_peer", one_way, raising=False)
        assert [peers_of(device) for device in devices] == [[], ["gpu:1"], []]


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("gpu:0", 6, "'=' and a size"),
        ("gpu:0=1GiB@5GB", 15, "'/s' must follow"),
        ("gpu:0=1GiB,gpu:0=2GiB", 12, "given twice"),
        ("cpu=3GiB", 1, "allowed: gpu:0, gpu:1, ... or host"),
        ("gpu:0=0GiB", 7, "more than 0"),
        ("gpu:0=1GiB;", 11, "';' is unexpected"),
        ("gpu:0=1GiB@5GB/s@80", 18, "a number of TFLOPS"),
        ("gpu:0=1GiB@0TFLOPS", 12, "more than 0"),
        ("gpu:0=1GiB,host=2GiB@9TFLOPS", 22, "only devices compute"),
    ],
)
def test_bad_hardware_is_located(text: str, column: int, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_hardware(text)
    assert f"column {column}:" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize("option", [["--profile", "4"], ["--placement", "gpu:0"], ["--precision", "as stored"]])
def test_options_for_files_are_refused_for_workflows(capsys: pytest.CaptureFixture[str], option: list[str]) -> None:
    assert main(["plan", "workflow.json", *option]) == 2
    assert f"{option[0]} is for model files" in capsys.readouterr().err


@given(
    st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 100) | st.none(), st.integers(1, 2000) | st.none()),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 512),
)
def test_hardware_is_read_as_written(devices: list[tuple[int, int | None, int | None]], host: int) -> None:
    parts = [
        f"gpu:{index}={size}GiB" + (f"@{speed}GB/s" if speed else "") + (f" @{flops}TFLOPS" if flops else "")
        for index, (size, speed, flops) in enumerate(devices)
    ]
    hardware = parse_hardware(", ".join([*parts, f"host={host}GiB"]))
    assert [device.total_bytes for device in hardware.devices] == [size * GIB for size, _, _ in devices]
    assert [device.link_bytes_per_s for device in hardware.devices] == [
        speed and speed * 10**9 for _, speed, _ in devices
    ]
    assert [device.flops_per_s for device in hardware.devices] == [flops and flops * 10**12 for _, _, flops in devices]
    assert parse_hardware(str(hardware)) == hardware
    assert hardware.host_bytes == host * GIB
    assert parse_hardware(str(hardware)).device_names == hardware.device_names


def test_every_command_of_the_help_is_there() -> None:
    (commands,) = (action for action in build_parser()._actions if action.choices)
    assert set(commands.choices) == set(COMMANDS)
