"""What the system refuses the command line: permissions, full disks, names too long, a reader that has gone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from highwater.nodes.plans import component_name

ROOT = Path(__file__).parents[2]
WORKFLOW = str(ROOT / "headless" / "workflows" / "demo_sd.json")
# Root reads everything, unless it gives this up.
WITHOUT = "-dac_override,-dac_read_search"


def run(*arguments: str) -> tuple[int, str]:
    """Run a command as one whom permissions bind; returns its exit code and what it said."""
    command = [sys.executable, "-m", "highwater", *arguments]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("NOT TESTED: root needs setpriv to be refused anything")
        command = ["setpriv", "--bounding-set", WITHOUT, "--inh-caps", WITHOUT, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["run", "plan"])
def test_what_may_not_be_read_is_one_line(command: str, tmp_path: Path) -> None:
    for name in ("workflow.json", "model.safetensors"):
        path = tmp_path / name
        path.write_text("{}")
        path.chmod(0)
        assert run(command, str(path)) == (2, f"highwater: {path}: Permission denied\n")


def test_a_folder_that_may_not_be_entered_is_one_line(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    code, said = run("plan", str(closed / "model.safetensors"))
    assert code == 2 and said.startswith(f"highwater: {closed}") and said.count("\n") == 1


def test_an_output_folder_that_may_not_be_written_to_is_one_line(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    code, said = run("run", WORKFLOW, "--out", str(closed / "out"), "--devices", "gpu:0=64MiB")
    assert code in (1, 2) and "Permission denied" in said and said.count("\n") == 1


def test_a_cache_on_a_full_disk_is_one_line_and_nothing_half_written(tmp_path: Path) -> None:
    """Files may not grow past 4 KiB, which fails as a full disk does; without the limit the cache is then built."""

    script = (
        "import resource, sys\n"
        "from highwater.headless.cli import main\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        "for limit in (4096, soft):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))\n"
        "    print('exit', main(['plan', sys.argv[1]]), file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", script, WORKFLOW]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    said, *rest = done.stderr.splitlines()
    assert str(tmp_path) in said and rest == ["exit 1", "exit 0"], done.stderr


def test_a_name_that_is_too_long_is_one_line_that_does_not_show_it_all() -> None:
    code, said = run("plan", "x" * 5000)
    assert code == 2 and said.count("x") <= 300 and "File name too long" in said


def test_a_reader_that_has_gone_ends_the_command_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "highwater", "profiles"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="NOT TESTED: no /dev/full on this system")
@pytest.mark.parametrize("arguments", [["profiles"], ["profiles", "--json"], ["plan", WORKFLOW, "--json"]])
def test_a_full_disk_behind_standard_output_is_named(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "highwater", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "highwater: standard output: No space left on device\n")


def test_an_image_that_finds_no_space_names_its_file_and_leaves_none(tmp_path: Path) -> None:
    script = (
        "import resource, sys, torch\n"
        "from highwater.headless.comfy_stub import comfy_ui, folder_paths\n"
        "folder_paths.configure(models=sys.argv[1], output=sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))\n"
        "try:\n"
        "    comfy_ui.ImageSaveHelper.get_save_images_ui(torch.rand(1, 64, 64, 3), 'a/b', None)\n"
        "except OSError as error:\n"
        "    print(error.filename)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(tmp_path / "a" / "b_00001_.png"), done.stderr
    assert list((tmp_path / "a").iterdir()) == []


ENCODINGS = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "cp1252"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "C.UTF-8"},
]


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("environment", ENCODINGS)
@pytest.mark.parametrize("name", ["\u00fcn\u00ef \u6a21\u578b", "bad \udcff", "tab\t\U0001f600"])
def test_output_never_fails_for_a_character_and_json_is_valid_utf8(
    tmp_path: Path, name: str, environment: dict[str, str]
) -> None:
    path = tmp_path / f"{name}.safetensors"
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "plain.safetensors")
    path.write_bytes((tmp_path / "plain.safetensors").read_bytes())
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "highwater", "plan", os.fsencode(path), "--devices", "gpu:0=1GiB", *options]
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **environment})
        assert b"Traceback" not in done.stderr, done.stderr
        if done.returncode == 0 and options:
            (component,) = json.loads(done.stdout.decode())["files"]["components"]
            component["component"].encode()  # no half of a character
            assert component["component"] == component_name(path)
            assert "\u6a21" not in name or component["component"] == "_\u00fcn\u00ef_\u6a21\u578b"
        else:
            assert done.returncode == 0 or done.stderr.count(b"\n") == 1
