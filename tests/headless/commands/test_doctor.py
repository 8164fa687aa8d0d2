"""What the doctor says of a ComfyUI folder; the folders are made here, the devices are this machine's."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from highwater.headless.cli import main
from highwater.headless.commands.doctor import examine, find_comfyui
from highwater.memory.errors import InvalidInput
from highwater.nodes import doctor
from highwater.nodes.doctor import REQUIRED_COMFYUI

PACK = Path(doctor.__file__).parents[1]


@pytest.fixture
def comfyui(tmp_path: Path) -> Path:
    """A folder that looks like ComfyUI 0.33.0 with this pack, and has all that the features need."""
    root = tmp_path / "ComfyUI"
    for file, name in {need for needs in doctor.FEATURE_NEEDS.values() for need in needs}:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"def {name}(): ...\n")
    for file in ("main.py", "execution.py"):
        (root / file).write_text("raise SystemExit('the doctor only reads')  # get_current_queue_volatile\n")
    (root / "comfyui_version.py").write_text('__version__ = "0.33.0"\n')
    (root / "custom_nodes").mkdir()
    (root / "custom_nodes" / "highwater").symlink_to(PACK, target_is_directory=True)
    return root


def warnings(root: Path) -> dict[str, str]:
    findings = examine(root, {})["findings"]
    return {finding["check"]: finding["text"] for finding in findings if finding["is_warning"]}


def test_a_good_host_has_every_feature_and_no_warning_of_its_own(comfyui: Path) -> None:
    answer = examine(comfyui, {})
    assert set(answer["features"].values()) == {True}
    assert not warnings(comfyui).keys() & {"ComfyUI", "pack", "other packs", "features"}
    texts = {finding["check"]: finding["text"] for finding in answer["findings"]}
    assert texts["ComfyUI"] == f"0.33.0 at {comfyui}, not running"
    assert texts["pack"] == f"installed as {comfyui}/custom_nodes/highwater"


def test_the_required_version_is_that_of_the_package() -> None:
    needed = ".".join(map(str, REQUIRED_COMFYUI))
    assert f'requires-comfyui = ">={needed}"' in (PACK / "pyproject.toml").read_text()


def test_an_old_host_is_said_to_lack_its_features(comfyui: Path) -> None:
    (comfyui / "comfyui_version.py").write_text('__version__ = "0.8.0"\n')
    (comfyui / "comfy_execution" / "cache_provider.py").unlink()
    assert warnings(comfyui)["ComfyUI"].startswith("0.8.0 at")
    features = examine(comfyui, {})["features"]
    missing = "missing: comfy_execution/cache_provider.py has no register_cache_provider"
    assert [name for name, state in features.items() if state == missing] == [
        "run_boundaries",
        "node_boundaries",
        "events",
        "forecast",
    ]
    assert features["nodes"] is True


def test_a_host_that_does_not_tell_its_queue_is_said_to_evict_without_it(comfyui: Path) -> None:
    (comfyui / "execution.py").write_text("class PromptQueue: ...\n")
    answer = examine(comfyui, {})
    assert answer["features"]["forecast"] == "missing: execution.py has no get_current_queue_volatile"
    (told,) = [finding for finding in answer["findings"] if finding["is_warning"] and "forecast" in finding["text"]]
    assert "the least recently used model leaves first" in told["text"]


@pytest.mark.parametrize(
    ("folder", "files", "words"),
    [
        ("ComfyUI-MultiGPU", {}, "load_models_gpu"),
        ("comfyui_multigpu-main", {}, "load_models_gpu"),
        ("ComfyUI-ReservedVRAM", {}, "keeps free"),
        ("ComfyUI-wanBlockswap", {}, "blocks"),
        ("SomeVideo", {"requirements.txt": "numpy\nmmgp>=3.5\n"}, "mmgp"),
        ("ComfyUI-MultiGPU.disabled", {}, None),
        ("SomeVideo", {"requirements.txt": "numpy\nnot-mmgp\n"}, None),
        ("ComfyUI-GGUF", {}, None),
    ],
)
def test_packs_that_decide_over_memory_are_named(
    comfyui: Path, folder: str, files: dict[str, str], words: str | None
) -> None:
    pack = comfyui / "custom_nodes" / folder
    pack.mkdir()
    for name, text in files.items():
        (pack / name).write_text(text)
    found = warnings(comfyui).get("other packs")
    if words is None:
        assert found is None
    else:
        assert found is not None
        assert found.startswith(f"{folder} ")
        assert words in found


def test_a_pack_that_comfyui_does_not_load_is_a_warning(comfyui: Path) -> None:
    (comfyui / "custom_nodes" / "highwater").unlink()
    assert "not in custom_nodes" in warnings(comfyui)["pack"]
    (finding,) = doctor.check_pack(comfyui / "custom_nodes", ["--cpu", "--disable-all-custom-nodes"])
    assert finding.is_warning


def test_flags_switch_dynamic_vram_off(comfyui: Path) -> None:
    package = comfyui / "venv" / "lib" / "python3.12" / "site-packages" / "comfy_aimdo-0.4.13.dist-info"
    assert "not installed" in doctor.check_dynamic_vram(comfyui, None)[0].text
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: comfy-aimdo\nVersion: 0.4.13\n")
    assert doctor.check_dynamic_vram(comfyui, ["--highvram"])[0].text == "off: --highvram (comfy-aimdo 0.4.13)"
    assert doctor.check_dynamic_vram(comfyui, [])[0].text.startswith("on for NVIDIA GPUs")
    assert doctor.check_dynamic_vram(comfyui, [], is_dynamic=True)[0].text.startswith("on (comfy-aimdo 0.4.13); ")
    assert "off: ComfyUI turns it on for" in doctor.check_dynamic_vram(comfyui, [], is_dynamic=False)[0].text


def test_what_a_version_of_comfy_aimdo_lacks_is_a_warning(comfyui: Path) -> None:
    packages = comfyui / "venv" / "lib" / "python3.12" / "site-packages"
    (packages / "comfy_aimdo-0.4.9.dist-info").mkdir(parents=True)
    (packages / "comfy_aimdo-0.4.9.dist-info" / "METADATA").write_text("Name: comfy-aimdo\nVersion: 0.4.9\n")
    (packages / "comfy_aimdo").mkdir()
    names = ("set_watermark", "get_residency", "free_memory")
    (packages / "comfy_aimdo" / "model_vbar.py").write_text("".join(f"def {name}(self):\n" for name in names))
    (packages / "comfy_aimdo" / "control.py").write_text("def init():\n")
    _, *found = doctor.check_dynamic_vram(comfyui, [])
    assert [finding.is_warning for finding in found] == [True, True]
    assert found[0].text.startswith("comfy-aimdo 0.4.9 has no ModelVBAR.deprioritize: ")
    assert "watermark" in found[1].text


@pytest.mark.parametrize(
    ("flags", "value"),
    [(["--base-directory", "/a b"], "/a b"), (["--base-directory=/c"], "/c"), (["--cpu"], None), (None, None)],
)
def test_flags_are_read_in_both_forms(flags: list[str] | None, value: str | None) -> None:
    assert doctor.flag_value(flags, "--base-directory") == value


def test_what_hides_devices_is_named(comfyui: Path) -> None:
    """`test_visible_devices` has what is said of every flag and variable."""
    findings = examine(comfyui, {"CUDA_VISIBLE_DEVICES": "1"})["findings"]
    (found,) = (finding for finding in findings if "CUDA_VISIBLE_DEVICES" in finding["text"])
    assert found["check"] == "devices" and found["text"].startswith("CUDA_VISIBLE_DEVICES='1' ")
    assert found["remedy"].startswith("start without the variable CUDA_VISIBLE_DEVICES")


def test_the_list_of_devices_tells_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["devices"]) == 0
    assert ": start without the variable CUDA_VISIBLE_DEVICES" in capsys.readouterr().out.replace("\n", " ")
    assert main(["devices", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hidden_by"]["CUDA_VISIBLE_DEVICES"] == ""
    (found,) = (finding for finding in answer["findings"] if "CUDA_VISIBLE_DEVICES" in finding["text"])
    assert found["remedy"].startswith("start without the variable CUDA_VISIBLE_DEVICES")


def test_no_compiler_is_a_warning() -> None:
    assert doctor.check_compiler({"CXX": "no-such-compiler -O2"}).is_warning
    assert doctor.check_compiler({"CXX": sys.executable}).text == sys.executable


def test_the_named_folder_comes_before_the_variable(comfyui: Path, tmp_path: Path) -> None:
    assert find_comfyui(None, {"COMFYUI_DIR": str(comfyui)}) == comfyui
    assert find_comfyui(comfyui, {"COMFYUI_DIR": str(tmp_path)}) == comfyui
    for named, environment in ((tmp_path, {}), (None, {"COMFYUI_DIR": str(tmp_path)})):
        with pytest.raises(InvalidInput, match="no ComfyUI found there"):
            find_comfyui(named, environment)


def test_the_command_prints_text_or_json(comfyui: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--comfyui", str(comfyui)]) == 0
    text = capsys.readouterr().out
    assert "warning" in text.splitlines()[-1]
    assert f"0.33.0 at {comfyui}" in text
    assert main(["doctor", "--comfyui", str(comfyui), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["comfyui"] == str(comfyui)


def test_a_folder_that_is_no_comfyui_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--comfyui", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_without_comfyui_the_machine_is_still_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("highwater.headless.commands.doctor.find_comfyui", lambda *_: None)
    assert main(["doctor", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["comfyui"] is None
    assert {finding["check"] for finding in answer["findings"]} >= {"ComfyUI", "torch", "devices", "pinning"}
