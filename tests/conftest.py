"""Fixtures that every part of the test suite shares."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import sysconfig
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from highwater.headless.runner.runner import WorkflowRunner

with contextlib.suppress(ModuleNotFoundError):  # a GPU machine may lack it: tests/gpu does not use it
    from hypothesis import HealthCheck, settings

    # No test may fail because the machine is busy; fixtures that tests share between examples are made for that.
    settings.register_profile(
        "busy", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )
    settings.load_profile("busy")

# What an activated virtual environment has: torch looks there for ninja when it loads an extension.
os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])

# A shell without job control lets what it starts with & ignore Ctrl+C, and so would what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Which part of the slow tests comes along: another one each day. Workers get it from the process that started them. A
# mark says how large a part of its tests that is: `slow(one_in=4)`.
DAY = int(os.environ.setdefault("HIGHWATER_TEST_DAY", str(int(time.time() // 86400))))
ONE_IN = 40

NUM_DEVICES = 4  # simulated ones

# Models this small gain nothing from more threads, which get in each other's way: in here and in what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NOTES = ("MarkdownNote", "Note")  # of the page itself, no node of any host
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
CONTROL = "control_after_generate"  # a widget that the page adds beside a seed
# What the last line of every run tells of, and where its tests are, or the mark of the host or card that they use.
TIERS = {
    "engine": ("tests/engine/",),
    "simulated devices": ("tests/simdevice/", "on_simulated"),
    "ComfyUI on the CPU": ("comfyui_cpu",),
    "ComfyUI on simulated GPUs": ("comfyui_gpus",),
    "ComfyUI with dynamic VRAM": ("comfyui_dynamic",),
    "ComfyUI 0.8.0": ("comfyui_old",),
    "browser": (
        "tests/web/test_browser.py",
        *(f"tests/comfyui/test_{name}.py" for name in ("first_minutes", "languages", "manage_menu", "page", "panel")),
    ),
    "GPU": ("on_cuda",),
}
outcomes: defaultdict[str, Counter[str]] = defaultdict(Counter)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all tests marked slow, not only the day's sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests but the day's sample, unless all are asked for, or one by its name."""
    if config.getoption("--slow") or any("::" in argument for argument in config.args):
        return
    slow = ((item, item.get_closest_marker("slow")) for item in items)
    left_out = [item for item, mark in slow if mark and not is_in_sample(item.nodeid, DAY, **mark.kwargs)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


def is_in_sample(name: str, day: int, one_in: int = ONE_IN) -> bool:
    """Return whether a slow test runs on a day: each does once in so many days."""
    return zlib.crc32(name.encode()) % one_in == day % one_in


@pytest.fixture(scope="module", autouse=True)
def little_to_look_through() -> None:
    """Exempt what exists already from garbage collection: hundreds of thousands of objects of libraries.

    Tests that collect would spend half a second on each collection otherwise.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_links_remembered() -> Iterator[None]:
    """Links and needs that were measured in an earlier session, or by another test, would change plans."""
    from highwater.memory.manager.default import remember_needs_in, share_devices_in

    remember_needs_in(None)
    share_devices_in(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("highwater.memory.manager.live_capacity.known_link", lambda device, store=None: None)
        patch.setattr("highwater.memory.manager.live_capacity.link_bytes_per_s", lambda device, measure, **_: measure())
        yield


@pytest.fixture(autouse=True)
def no_calls_remembered() -> None:
    """Calls that another test measured would tell seconds to plans."""
    default = sys.modules.get("highwater.memory.manager.default")
    manager = default.existing_manager() if default is not None else None
    if manager is not None:
        speeds = manager.capacity.speeds
        for learned in (speeds.known, speeds.changed, speeds.written, *speeds.left.values()):
            learned.clear()


@pytest.fixture(scope="module", autouse=True)
def devices_as_installed() -> Iterator[None]:
    """Leave no small simulated devices to the next module: where there are any they are as `sim` installs them."""
    yield
    simdevice = sys.modules.get("highwater.headless.simdevice")
    if simdevice is not None and simdevice.installed():
        gc.collect()
        simdevice.configure([simdevice.SimDeviceSpec(total_bytes=1 << 40)] * NUM_DEVICES)


@pytest.fixture(scope="session")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of tiny pipelines for all tests of nodes and workflows."""
    from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines

    directory = tmp_path_factory.mktemp("models")
    ensure_pipelines(directory / "diffusers")
    return directory


@pytest.fixture
def runner(models_directory: Path, tmp_path: Path) -> Iterator[WorkflowRunner]:
    """A runner of the test's own, and an output folder; nothing of it may stay under management."""
    from highwater.headless.runner.runner import WorkflowRunner
    from highwater.memory import default_manager

    runner = WorkflowRunner(default_manager(), models_directory=models_directory, output_directory=tmp_path / "output")
    yield runner
    default_manager().ledger.check()
    runner.cache.clear()
    assert default_manager().report()["components"] == []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    for tier, places in TIERS.items():
        if any(place in report.keywords or report.nodeid.startswith(place) for place in places):
            outcomes[tier][report.outcome] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which tiers ran: a skipped one looks like a passed one otherwise. Why it was skipped stands below."""
    told = []
    for tier in TIERS:
        counts = outcomes[tier]
        ran = [f"{counts[word]} {word}" for word in ("passed", "failed") if counts[word]]
        if ran and counts["skipped"]:
            ran.append(f"{counts['skipped']} skipped")
        missing = "NOT TESTED" if counts["skipped"] else "not asked for"
        told.append(f"{tier}: {', '.join(ran) or missing}")
    terminalreporter.section("tiers")
    terminalreporter.write_line("; ".join(told))
    if not terminalreporter.config.getoption("--slow"):
        sample = f"of the slow tests, the sample of a day ran (HIGHWATER_TEST_DAY={DAY})"
        terminalreporter.write_line(f"{sample}; all of them: make test-slow")


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """`highwater.headless.simdevice`, installed as "sim" with four devices; compiles for about 20 s the first time.

    Without a C++ compiler the tests that need it are skipped, on CI they fail: nothing else would notice.
    """
    from highwater.headless import simdevice

    try:
        simdevice.install("sim", num_devices=NUM_DEVICES)
    except simdevice.CompilerMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(f"NOT TESTED: {error}")
    return simdevice


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], None]:
    """Run a script in a process of its own, where nothing is imported yet; what it raises fails the test."""

    def run(script: str) -> None:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="session")
def graph_problems() -> Callable[[Any, Mapping[str, Any]], list[str]]:
    """Return a check of a graph in the page's own format against what ``object_info`` says of its nodes."""
    return lambda graph, info: list(find_problems(graph, info))


def choices_of(spec: Any) -> list[Any]:
    """Return what an input's choices are, in any of the host's forms; none where it has none, or those are unknown."""
    if isinstance(spec[0], list):
        return spec[0]
    choices = spec[1].get("options", []) if len(spec) > 1 else []
    return [choice["key"] if isinstance(choice, dict) else choice for choice in choices]


def find_problems(graph: Any, info: Mapping[str, Any]) -> Iterator[str]:
    nodes = {node["id"]: node for node in graph["nodes"]}
    for node in nodes.values():
        kind = node["type"]
        if kind in NOTES:
            continue
        if kind not in info:
            yield f"{kind} is unknown"
            continue
        sockets = {**info[kind]["input"].get("required", {}), **info[kind]["input"].get("optional", {})}
        types = {name: "COMBO" if isinstance(spec[0], list) else spec[0] for name, spec in sockets.items()}
        options = {name: spec[1] if len(spec) > 1 else {} for name, spec in sockets.items()}
        listed = {name: choices_of(spec) for name, spec in sockets.items()}
        widgets = []
        for name, type_name in types.items():
            if type_name in WIDGETS:
                widgets += [name, CONTROL] if options[name].get(CONTROL) else [name]
        if len(node["widgets_values"]) != len(widgets):
            yield f"{kind} has {len(node['widgets_values'])} values for {widgets}"
        for name, value in zip(widgets, node["widgets_values"], strict=False):
            # A file or a device may be one that this machine lacks.
            choices = listed.get(name) or [value]
            if (
                value not in choices
                and name not in ("placement", "pipeline")
                and not str(value).endswith(".safetensors")
            ):
                yield f"{kind}: {name} is {value!r}; allowed: {choices}"
            limits = options.get(name, {})
            if "min" in limits and not limits["min"] <= value <= limits["max"]:
                yield f"{kind}: {name} is {value!r}; allowed: {limits['min']} to {limits['max']}"
        if [output["type"] for output in node["outputs"]] != list(info[kind]["output"]):
            yield f"{kind} gives {info[kind]['output']}"
        for given in node["inputs"]:
            if types.get(given["name"]) != given["type"]:
                yield f"{kind} takes {given['name']} as {types.get(given['name'])}"
        linked = {given["name"] for given in node["inputs"] if given.get("link") is not None}
        for name in info[kind]["input"].get("required", {}):
            if types[name] not in WIDGETS and name not in linked:
                yield f"{kind}: nothing is linked to {name}"
    for number, source, output, target, slot, type_name in graph["links"]:
        given, taken = nodes[source]["outputs"][output], nodes[target]["inputs"][slot]
        if given["type"] not in (type_name, "*") or taken["type"] not in (type_name, "*"):
            yield f"link {number} is {type_name} from {given['type']} to {taken['type']}"
        if taken["link"] != number or number not in given["links"]:
            yield f"link {number} is not known to both its nodes"
