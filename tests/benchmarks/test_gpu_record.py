"""`python -m benchmarks gpu`: rows outlive a kill, ``--resume`` measures what is missing, tables hold any rows."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from highwater.benchmarks import gpu_streaming
from highwater.benchmarks.comfy import KEPT_BY_CORE
from highwater.benchmarks.gpu import command, engine_tests, hosts, packages, setting, two_budgets
from highwater.benchmarks.gpu.command import PARTS
from highwater.benchmarks.gpu.model_file import (
    SHAPES,
    NoTimeToWrite,
    ensure_model,
    models_directory,
    remove_models,
    write_model,
)
from highwater.benchmarks.gpu.record import Record, write_tables
from highwater.benchmarks.gpu.setting import REPOSITORY, TIME_IS_UP, Setting, follow
from highwater.benchmarks.gpu_worker import Request, Row
from highwater.tests.comfyui.host_process import HostDidNotStart, HostFiles

CARD = {"name": "a card", "total_bytes": 24 << 30, "link_bytes_per_s": 25e9}


def make(path: Path, part: str = "c", *, left_s: float = 1e6, resume: bool = True, rehearses: bool = True) -> Setting:
    record = Record(path, "a card")
    record.begin(part, resume=resume)
    return Setting(record=record, part=part, rehearses=rehearses, card=CARD, end_s=time.monotonic() + left_s)


# --- The file of rows


@given(cut=st.integers(0, 400), values=st.lists(st.floats(allow_nan=False) | st.text(), min_size=1, max_size=4))
def test_a_file_that_was_cut_anywhere_gives_whole_rows_and_takes_more(
    tmp_path_factory: pytest.TempPathFactory, cut: int, values: list[Any]
) -> None:
    path = tmp_path_factory.mktemp("rows") / "gpu.jsonl"
    record = Record(path, "a card")
    record.begin("a", resume=False)
    for number, value in enumerate(values):
        record.add("a", str(number), {"value": value})
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - min(cut, len(content))])
    kept = Record(path, "a card")
    assert [row.values["value"] for row in kept.rows("a")] == values[: len(kept.rows("a"))]
    kept.begin("a", resume=True)
    kept.add("a", "last", {"value": 1})
    again = Record(path, "a card").rows("a")
    assert [row.key for row in again] == [*map(str, range(len(again) - 1)), "last"]


def test_a_row_takes_the_place_of_the_one_before_and_an_error_is_not_a_measurement(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.jsonl", "a card")
    record.begin("a", resume=True)
    record.add("a", "x", {}, "out of memory")
    record.add("a", "y", {"s": 2})
    assert [*record.measured("a")] == ["y"]
    record.add("a", "x", {"s": 1})
    for each in (record, Record(record.path, "a card")):
        assert {key: row.values for key, row in each.measured("a").items()} == {"x": {"s": 1}, "y": {"s": 2}}
        assert len(each.rows("a")) == 2


def test_a_new_run_drops_the_rows_of_its_part_only(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "gpu.jsonl"
    for part in ("a", "b"):
        make(path, part).add("x", {"s": 1})
    record = make(path, "a", resume=False).record
    assert (record.rows("a"), len(record.rows("b"))) == ([], 1)
    assert Record(path, "a card").rows("a") == []


def test_rows_of_another_machine_are_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    make(path, "a").add("x", {"s": 1})
    other = Record(path, "another card")
    with pytest.raises(SystemExit, match="part a from a card, and this is another card; without --resume"):
        other.begin("a", resume=True)
    other.begin("b", resume=True)
    other.begin("a", resume=False)
    assert other.rows("a") == []


# --- Processes


def tell(*lines: str) -> list[str]:
    return ["-c", "import os, sys, time\n" + "\n".join(lines)]


def test_results_come_as_they_are_told_and_a_failure_in_one_line() -> None:
    seen: list[dict[str, Any]] = []
    script = tell(
        "print('noise')",
        "print('RESULT {\"x\": 1}', flush=True)",
        "print('why', file=sys.stderr)",
        "sys.exit(3)",
    )
    assert follow(script, os.environ, 60, seen.append) == "ended with 3: why"
    assert seen == [{"x": 1}]
    assert follow(tell("pass"), os.environ, 60, seen.append) == ""
    assert follow(tell("os.kill(os.getpid(), 9)"), os.environ, 60, seen.append) == "killed by signal 9"


def test_what_hangs_is_killed_and_its_results_stay() -> None:
    seen: list[dict[str, Any]] = []
    script = tell("print('RESULT {\"x\": 1}', flush=True)", "time.sleep(600)")
    assert follow(script, os.environ, 3, seen.append) == TIME_IS_UP
    assert seen == [{"x": 1}]


# --- Part a


def test_tests_are_rows_and_a_process_that_dies_names_the_one_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cards"
    folder.mkdir()
    (folder / "conftest.py").write_text(
        "def pytest_configure(config):\n    config.addinivalue_line('markers', 'on_simulated: all')\n"
    )
    (folder / "test_card.py").write_text(
        "import os, pathlib, pytest\n"
        "pytestmark = pytest.mark.on_simulated\n"
        "def test_good(record_property):\n    record_property('bytes', 5)\n"
        "def test_bad():\n    assert 1 == 2, 'a | b'\n"
        "def test_not_here():\n    pytest.skip('no such device')\n"
        f"def test_fatal():\n    if not os.path.exists({str(tmp_path / 'mended')!r}): os.kill(os.getpid(), 11)\n"
    )
    monkeypatch.setattr(engine_tests, "FOLDER", str(folder))
    monkeypatch.setattr(engine_tests, "FIRST", ("test_card.py",))
    run = make(tmp_path / "gpu.jsonl", "a")
    engine_tests.run(run)
    rows = {row.key.rpartition("::")[2]: row for row in run.record.rows("a")}
    assert rows["test_good"].values["bytes"] == 5 and not rows["test_good"].error
    assert "a | b" in rows["test_bad"].error and "no such device" in rows["test_not_here"].error
    assert rows["test_fatal"].error == "killed by signal 11"
    (tmp_path / "mended").touch()
    resumed = make(tmp_path / "gpu.jsonl", "a")
    done: list[str] = []
    monkeypatch.setattr(Setting, "add", lambda self, key, values, error="": done.append(key.rpartition("::")[2]))
    engine_tests.run(resumed)
    assert sorted(done) == ["test_bad", "test_fatal", "test_not_here"], "what passed is not run again"
    (table,) = engine_tests.tabulate(run.record.rows("a"), run)
    assert table.ratio == 0.25 and "bytes: 5" in "\n".join(table.markdown())


# --- Part c


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """Sessions are noted instead of run; all but those of one engine give their rows."""
    ran: list[tuple[str, str]] = []

    def run_session(run: Setting, files: HostFiles, session: hosts.Session) -> None:
        ran.append((session.shape, session.engine.label))
        if session.engine.label == "core, static":
            raise RuntimeError("ComfyUI ended with 1\nthe last line")
        for key in session.keys:
            if not run.is_measured(key):
                values = {"s_per_step": 1.5, "peak_bytes": 10**9, "digest": "a", "seconds": {"A": 1.0, "A again": 2.0}}
                run.add(key, values)

    monkeypatch.setattr(hosts, "run_session", run_session)
    monkeypatch.setattr(hosts, "find_host", lambda: HostFiles(directory=tmp_path, python=tmp_path))
    monkeypatch.setattr(hosts, "find_version", lambda: "0")
    return ran


ALL_KEYS = [key for session in hosts.SESSIONS for key in session.keys]


def test_the_most_telling_sessions_come_first_and_errors_are_tried_again(
    sessions: list[tuple[str, str]], tmp_path: Path
) -> None:
    run = make(tmp_path / "gpu.jsonl")
    hosts.run(run)
    assert [label for _, label in sessions[:4]] == [engine.label for engine in hosts.ENGINES]
    assert sorted(row.key for row in run.record.rows("c")) == sorted(ALL_KEYS)
    failed = {row.key: row.error for row in run.record.rows("c") if row.error}
    assert len(failed) == 2 + 3 + 1 and set(failed.values()) == {"RuntimeError: ComfyUI ended with 1 ... the last line"}
    sessions.clear()
    hosts.run(make(tmp_path / "gpu.jsonl"))
    assert {label for _, label in sessions} == {"core, static"}
    tables = hosts.tabulate(run.record.rows("c"), run)
    assert [table.ratio for table in tables] == [1.0, 1.0]


def test_without_time_nothing_begins_and_a_later_run_goes_on(sessions: list[tuple[str, str]], tmp_path: Path) -> None:
    run = make(tmp_path / "gpu.jsonl", left_s=hosts.SESSION_S - 1)
    hosts.run(run)
    assert sessions == [] and {row.error for row in run.record.rows("c")} == {TIME_IS_UP}
    hosts.run(make(tmp_path / "gpu.jsonl"))
    assert len(sessions) == len(hosts.SESSIONS)


def test_a_host_that_does_not_start_is_started_once_for_each_way_to_start_it(
    sessions: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[tuple[str, ...]] = []

    def fail(run: Setting, files: HostFiles, session: hosts.Session) -> None:
        started.append(session.engine.arguments)
        raise HostDidNotStart("ComfyUI ended with 1:\nNo module named x")

    monkeypatch.setattr(hosts, "run_session", fail)
    run = make(tmp_path / "gpu.jsonl")
    hosts.run(run)
    assert sorted(started) == [(), (hosts.STATIC,)]
    assert {row.error[-17:] for row in run.record.rows("c")} == {"No module named x"}
    assert len(run.record.rows("c")) == len(ALL_KEYS)


def test_without_comfyui_each_row_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hosts, "find_host", lambda: None)
    run = make(tmp_path / "gpu.jsonl")
    hosts.run(run)
    assert len(run.record.rows("c")) == len(ALL_KEYS)
    assert all("COMFYUI_DIR" in row.error for row in run.record.rows("c"))


def test_model_files_are_whole_and_have_the_shapes_of_the_large_ones(monkeypatch, tmp_path: Path) -> None:
    import safetensors.torch

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for shape, parameters in zip(SHAPES.values(), (11.8e9, 14.2e9), strict=True):
        assert math.isclose(sum(math.prod(size) for size in shape.full().values()), parameters, rel_tol=0.02)
        folder = ensure_model(shape, True, lambda: 60) / "diffusion_models"
        names = [f"{prefix}{shape.name}.safetensors" for prefix in ("", "other_")]
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)
        weights = safetensors.torch.load_file(folder / names[1])
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == shape.tiny()
        assert all(weight.isfinite().all() and weight.any() for weight in weights.values())
    remove_models(rehearses=True)
    assert not models_directory(rehearses=True).exists()
    with pytest.raises(OSError, match="GB free; the model takes"):
        write_model(tmp_path / "x.safetensors", {"weight": (1 << 30, 1 << 20)}, lambda: 60)
    assert not (tmp_path / "x.safetensors").exists()


def test_a_model_file_that_takes_too_long_is_given_up_and_the_row_says_so(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(hosts, "find_host", lambda: HostFiles(directory=tmp_path, python=tmp_path))
    shape = SHAPES["Flux 12B"]
    left = iter([1.0, 0.5, 0.0])
    with pytest.raises(NoTimeToWrite, match=r"^0\.0 of 0\.0 GB of the model file were written$"):
        ensure_model(shape, True, lambda: next(left))
    assert [path for path in models_directory(rehearses=True).rglob("*") if path.is_file()] == []

    def give_up(run: Setting, files: HostFiles, session: hosts.Session) -> None:
        raise NoTimeToWrite("0.5 of 24.0 GB of the model file were written")

    monkeypatch.setattr(hosts, "run_session", give_up)
    run = make(tmp_path / "gpu.jsonl")
    hosts.run(run)
    assert {row.error for row in run.record.rows("c")} == {
        f"{TIME_IS_UP}: 0.5 of 24.0 GB of the model file were written"
    }


class LoggingHost:
    """Stands for a host: it keeps in order how much it was to leave free and which model each prompt loaded."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.process = SimpleNamespace(pid=os.getpid())

    def forget(self) -> None:
        self.log.append("forget")

    def get(self, path: str) -> dict[str, Any]:
        return {"s_per_step": 1.0, "peak_bytes": 1, "copied_bytes": 1}

    def post(self, path: str, body: Any = None) -> dict[str, Any]:
        if path.endswith("/leave"):
            self.log.append(f"leave {(body['free_bytes'] - KEPT_BY_CORE) >> 19}")
        return dict(body or {})

    def run(self, graph: dict[str, Any]) -> SimpleNamespace:
        (name,) = [node["inputs"]["unet_name"] for node in graph.values() if node["class_type"] == "UNETLoader"]
        self.log.append("B" if name.startswith("other_") else "A")
        return SimpleNamespace(outcome="success", kept=lambda: {"kept": torch.ones(2)})


@pytest.mark.slow(one_in=4)
@pytest.mark.parametrize("number", range(len(hosts.SESSIONS)))
def test_whatever_is_there_already_each_measurement_begins_alike(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With every part of a session's rows: levels fill the card, switches begin with the first model on a full one."""
    session = replace(hosts.SESSIONS[number], engine=hosts.ENGINES[0])
    monkeypatch.setattr(hosts, "ensure_model", lambda *_: tmp_path)
    for there in itertools.chain.from_iterable(
        itertools.combinations(session.keys, count) for count in range(len(session.keys))
    ):
        host = LoggingHost()
        monkeypatch.setattr(hosts, "start_host", lambda *_, host=host: nullcontext(host))
        run = make(tmp_path / "gpu.jsonl", resume=False)
        for key in there:
            run.add(key, {"s_per_step": 1.0})
        hosts.run_session(run, HostFiles(directory=tmp_path, python=tmp_path), session)
        assert {*run.record.measured("c")} == {*session.keys}
        levels = [gb for gb in session.free_gb if session.key(gb) not in there]
        expected = [["forget"] * bool(position) + [f"leave {gb}", *"AAA"] for position, gb in enumerate(levels)]
        if session.switches and session.key(hosts.SWITCH) not in there:
            expected += [[] if levels else [f"leave {session.free_gb[-1]}", "A"], [*"ABAB"]]
        assert host.log == [*itertools.chain.from_iterable(expected)]
        rows = {row.key: row for row in run.record.rows("c")}
        fresh = [gb for gb in levels if rows[session.key(gb)].values["first_image_s"] is not None]
        assert fresh == levels[:1], "the first image is that of a new host"


# --- Part d, and the command


def test_two_budgets_on_one_device_equal_one_and_what_is_there_stays(sim, tmp_path: Path) -> None:
    keys = [key for key, _, _ in two_budgets.keys("tiny")]
    run = make(tmp_path / "gpu.jsonl", "d")
    for key in keys[:3]:
        run.add(key, {"s_per_step": 1.0, "notes": {"equal": True}})
    two_budgets.run(run)
    rows = {row.key: row for row in run.record.rows("d")}
    assert [*rows] == keys and [row.error for row in rows.values()] == [""] * len(keys)
    assert all(row.values["notes"]["equal"] for row in rows.values())
    assert len(rows[keys[4]].values["notes"]["streamed"]) == 2, "two shares"
    assert [rows[key].values["s_per_step"] for key in keys[:3]] == [1.0] * 3
    (table,) = two_budgets.tabulate(run.record.rows("d"), run)
    write_tables(tmp_path / "d.md", [table], machine="a machine", command="a command", note="a note")
    assert " 2 of 30.0% |" in (tmp_path / "d.md").read_text()


@pytest.mark.parametrize("part", [*PARTS])
def test_tables_hold_rows_without_any_value(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "find_version", lambda: "0")
    run = make(tmp_path / "gpu.jsonl", part)
    for key in ("x", "tests/gpu/test_x.py::test_y", *ALL_KEYS, *(key for key, _, _ in two_budgets.keys("tiny"))):
        run.add(key, {}, "an | error")
    for table in PARTS[part].tabulate(run.record.rows(part), run):
        widths = {len(line.split("|")) for line in table.markdown()}
        assert len(widths) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["gpu", "--part", "f"], 2, "invalid choice"),
        (["hops", "--resume"], 2, "options of gpu, not of hops"),
        (["gpu", "--json"], 2, "gpu.jsonl"),
        (["gpu"], 1, "no GPU that torch can use; nothing was measured"),
    ],
)
def test_bad_input_and_a_machine_without_a_gpu_are_told_in_one_line(
    arguments: list[str], code: int, message: str
) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and message in done.stderr.splitlines()[-1], done.stderr


def test_what_every_part_needs_is_named_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"platformdirs", "psutil", "aiohttp", "pytest", "hypothesis", "accelerate", "mmgp", "diffusers"}
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in absent else name)
    with pytest.raises(SystemExit, match=r"not installed: aiohttp, psutil; in the clone: pip install"):
        packages.refuse_missing(rehearses=False)
    absent -= {"aiohttp", "psutil"}
    packages.refuse_missing(rehearses=False)
    with pytest.raises(SystemExit, match=r"not installed: platformdirs; in the clone"):
        packages.refuse_missing(rehearses=True)


def test_a_gpu_machine_needs_no_library_that_knows_the_users_folders(sim, run_python: Callable[[str], None]) -> None:
    """Simulated devices are built into such a folder, so it is missing from when they are there."""
    run_python(
        "import sys, torch\n"
        "from highwater.headless import simdevice\n"
        "from highwater.memory.manager import default\n"
        "from highwater.memory.transfer import link_speed\n"
        "simdevice.install('sim', num_devices=1)\n"
        "simdevice.configure([simdevice.SimDeviceSpec(total_bytes=1 << 30)])\n"
        "default.needs_folder.clear()\n"
        "link_speed.links_folder.clear()\n"
        "sys.modules['platformdirs'] = None\n"
        "from highwater.benchmarks.gpu import command\n"
        "from highwater.benchmarks.gpu.setting import bytecode_directory\n"
        "assert bytecode_directory().is_absolute()\n"
        "from highwater.benchmarks import gpu_worker\n"
        "device, rows = torch.device('sim:0'), []\n"
        "gpu_worker.emit = rows.append\n"
        "with torch.no_grad():\n"
        "    request = gpu_worker.Request(method='Highwater', size='tiny', device='sim:0')\n"
        "    gpu_worker.run_highwater(request, device, gpu_worker.Meter(device))\n"
        "assert len(rows) == 1 and not rows[0].error and rows[0].s_per_step, rows\n"
    )


def run_command(parts: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, resume: bool = False) -> int:
    """Run parts in a folder, on a device that another process would have told of."""
    machine = [Row(notes=CARD)], ""
    monkeypatch.setattr(command, "run_worker", lambda *_: machine)
    monkeypatch.setattr(command, "REHEARSAL", folder)
    return command.run_parts(parts, resume=resume, rehearses=True, describe_machine=lambda: "a machine")


def test_a_part_whose_package_is_missing_says_so_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    absent = {"pytest", "diffusers"}
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in absent else name)
    for letter, part in PARTS.items():

        def run(setting: Setting, letter: str = letter) -> None:
            ran.append(letter)
            setting.add(f"{letter}::x", {"outcome": "passed"})

        monkeypatch.setitem(PARTS, letter, replace(part, run=run, tabulate=lambda rows, setting: []))
    assert run_command("abcd", tmp_path, monkeypatch) == 1
    assert ran == ["c"]
    rows = {row.key: row.error for row in command.Record(tmp_path / "gpu.jsonl", "").rows("a")}
    assert rows == {"gpu_tests": f"not run: pytest not installed; {packages.REMEDY}"}
    for name in ("gpu_tests", "gpu_streaming", "gpu_two_budgets"):
        assert "pip install -e" in (tmp_path / f"{name}.md").read_text()
    absent.clear()
    assert run_command("abcd", tmp_path, monkeypatch, resume=True) == 0, "no row of what was not run is left"
    assert ran == ["c", *"abcd"]


def test_a_part_that_cannot_go_on_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(setting: Setting) -> None:
        raise ImportError("cannot import name x\nfrom y")

    def run(setting: Setting) -> None:
        setting.add("x", {"s": 1})

    for letter in "abd":
        monkeypatch.setitem(PARTS, letter, replace(PARTS[letter], run=fail))
    monkeypatch.setitem(PARTS, "c", replace(PARTS["c"], run=run, tabulate=lambda rows, setting: []))
    assert run_command("abcd", tmp_path, monkeypatch) == 1
    record = command.Record(tmp_path / "gpu.jsonl", "")
    assert [*record.measured("c")] == ["x"]
    for letter in "abd":
        (row,) = record.rows(letter)
        assert row.error == "not run to its end: ImportError: cannot import name x"
        assert "cannot import name x" in (tmp_path / f"{PARTS[letter].name}.md").read_text()


def test_methods_of_packages_that_are_missing_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_streaming, "find_spec", lambda name: name if name == "diffusers" else None)
    missing = {method.name: method.missing for method in gpu_streaming.list_methods()}
    for name in ("accelerate", "mmgp"):
        assert missing[name] == f"not run: {name} is not installed"
    assert missing["diffusers"] == missing["accelerate"], "its groups call it"


def test_a_streaming_run_that_is_interrupted_leaves_the_table_of_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def answer(request: Request, *_: Any) -> tuple[list[Row], str]:
        asked.append(request.method)
        if request.method == "machine":
            return [Row(notes=CARD)], ""
        if asked.count("accelerate"):
            raise KeyboardInterrupt
        return [Row(s_per_step=1.25, peak_bytes=10**9)], ""

    monkeypatch.setattr(gpu_streaming, "run_worker", answer)
    with pytest.raises(KeyboardInterrupt):
        run_command("b", tmp_path, monkeypatch)
    lines = (tmp_path / "gpu_streaming.md").read_text().splitlines()
    assert any("diffusers" in line and "1.250" in line for line in lines)


def test_the_tests_of_the_card_need_pytest_alone() -> None:
    """A GPU machine may have no hypothesis and none of pytest's plugins."""
    script = (
        "import sys; sys.modules['hypothesis'] = None; import pytest\n"
        "sys.exit(pytest.main(['tests/gpu', '-m', 'on_cuda', '--collect-only', '-q', '-p', 'no:cacheprovider']))"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "test_equal.py" in done.stdout, done.stdout + done.stderr


def test_a_part_ends_within_nine_minutes() -> None:
    assert setting.LIMIT_S + 30 <= 9 * 60
    assert json.dumps([*PARTS]) == '["a", "b", "c", "d", "e"]'
