"""Hosts for the tests in here: one per kind and worker, or per file. Without a ComfyUI all is skipped, and says so."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
import torch

from highwater.tests.comfyui.fake_cuda.install import AIMDO_VARIABLE
from highwater.tests.comfyui.graphs import CASES, CORE, Graph, Loaders
from highwater.tests.comfyui.host_process import HostFiles, HostProcess, find_host
from highwater.tests.comfyui.model_files import ensure_model_files
from highwater.tests.comfyui.page_script import (  # noqa: F401 (fixtures)
    chromium,
    frontend,
    frontend_arguments,
    in_page,
    node,
    packages,
)

MIB, GIB = 1 << 20, 1 << 30
# Core keeps 0.8 GiB free by its own rule, whatever is reserved: 1 GiB is left for weights.
DEVICE_BYTES = 1844 * MIB
NO_HOST = "NOT TESTED: no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR, its Python in COMFYUI_PYTHON"
Tensors = dict[str, torch.Tensor]

NO_OLD_HOST = (
    "NOT TESTED: no ComfyUI 0.8.0 at ~/comfy/ComfyUI-0.8.0; name one in COMFYUI_OLD_DIR, its Python in "
    "COMFYUI_OLD_PYTHON"
)
DYNAMIC = "DynamicVRAM support detected and enabled"  # what ComfyUI writes to its log
NO_COMPILER = "NOT TESTED: simulated GPUs need a C++ compiler; install g++, or name one in CXX"

# What each kind of host stands for in the last line of a run.
TIERS = {
    "cpu_host": "comfyui_cpu",
    "gpu_host": "comfyui_gpus",
    "start_gpu_host": "comfyui_gpus",
    "dynamic_host": "comfyui_dynamic",
    "start_dynamic_host": "comfyui_dynamic",
    "plain_host": "comfyui_cpu",
    "old_host": "comfyui_old",
}


def pytest_configure(config: pytest.Config) -> None:
    for tier in (*TIERS.values(), "expects_errors"):
        config.addinivalue_line("markers", f"{tier}: see tests/comfyui/conftest.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tiers = {TIERS[fixture] for fixture in set(TIERS) & set(getattr(item, "fixturenames", ()))}
        if "comfyui_dynamic" in tiers:
            tiers.discard("comfyui_gpus")  # the dynamic hosts are made with that fixture, and compared with its host
        for tier in tiers:
            item.add_marker(tier)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all tests that lack a host the same place, for pytest to say it once."""
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and NO_HOST in report.longrepr[2]:
        report.longrepr = (str(Path(__file__).parent), 1, report.longrepr[2])
    return report


@pytest.fixture(scope="session")
def host_files() -> HostFiles:
    files = find_host()
    if files is None:
        pytest.skip(NO_HOST)
    return files


@pytest.fixture(scope="session")
def models() -> Path:
    return ensure_model_files()


@pytest.fixture(scope="session")
def cpu_host(host_files: HostFiles, models: Path) -> Iterator[HostProcess]:
    with HostProcess(host_files, models=models) as host:
        yield host


@pytest.fixture(scope="module")
def plain_host(host_files: HostFiles, models: Path) -> Iterator[HostProcess]:
    """The host without the pack, on the CPU."""
    with HostProcess(host_files, models=models, with_pack=False) as host:
        yield host


@pytest.fixture(scope="session")
def start_gpu_host(host_files: HostFiles, models: Path) -> Callable[..., HostProcess]:
    """Return a function that makes a host on two simulated GPUs, which defer copies and look for races."""
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        pytest.fail(NO_COMPILER) if os.environ.get("CI") == "true" else pytest.skip(NO_COMPILER)
    return functools.partial(HostProcess, host_files, models=models, total_bytes=[DEVICE_BYTES, DEVICE_BYTES])


@pytest.fixture(scope="session")
def gpu_host(start_gpu_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    with start_gpu_host() as host:
        kinds = [device["type"] for device in host.get("/system_stats")["devices"]]
        assert "npu" in kinds, f"ComfyUI did not take the simulated GPUs but {kinds}:\n{host.log()[-4000:]}"
        yield host


@pytest.fixture(scope="session")
def start_dynamic_host(start_gpu_host: Callable[..., HostProcess]) -> Callable[..., HostProcess]:
    """Return a function that makes a host on two simulated GPUs with core's dynamic VRAM, as on most NVIDIA cards.

    It has the comfy-aimdo that the host requires, or the one in COMFY_AIMDO_DIR (`fake_cuda.install`).
    """
    if sys.platform != "linux":
        pytest.skip("NOT TESTED: the driver that comfy-aimdo needs is made for Linux")
    aimdo = os.environ.get(AIMDO_VARIABLE)
    return functools.partial(start_gpu_host, dynamic="core", aimdo=Path(aimdo) if aimdo else None)


@pytest.fixture(scope="session")
def dynamic_host(start_dynamic_host: Callable[..., HostProcess]) -> Iterator[HostProcess]:
    with start_dynamic_host() as host:
        assert DYNAMIC in host.log(), f"ComfyUI did not turn dynamic VRAM on:\n{host.log()[-4000:]}"
        yield host


@pytest.fixture(scope="module")
def old_host(models: Path) -> Iterator[HostProcess]:
    files = find_host("COMFYUI_OLD_DIR", default="~/comfy/ComfyUI-0.8.0")
    if files is None:
        pytest.skip(NO_OLD_HOST)
    with HostProcess(files, models=models, arguments=["--cache-classic"]) as host:  # its default
        yield host


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("cpu_host", marks=pytest.mark.comfyui_cpu, id="cpu"),
        pytest.param("gpu_host", marks=pytest.mark.comfyui_gpus, id="gpus"),
    ],
)
def host(request: pytest.FixtureRequest) -> HostProcess:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def no_errors_in_the_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test but those that ask for errors leaves one in a host's log, nor a race on the simulated GPUs."""
    names = {"cpu_host", "gpu_host", "dynamic_host", "plain_host", "old_host", "host"} & set(request.fixturenames)
    hosts = [request.getfixturevalue(name) for name in sorted(names)]
    before = [(len(host.error_lines()), len(host.races)) for host in hosts]
    yield
    for host, (num_errors, num_races) in zip(hosts, before, strict=True):
        if request.node.get_closest_marker("expects_errors") is None:
            assert host.error_lines()[num_errors:] == []
        if host.total_bytes:
            host.ask_devices("read")
            assert host.races[num_races:] == []


@contextlib.contextmanager
def watermark(host: HostProcess, low_bytes: int, high_bytes: int) -> Iterator[None]:
    """Set both marks of all devices for the body; then the defaults for devices as small as these."""

    def set_marks(low: int, high: int) -> None:
        graph = Graph()
        graph.add("HighwaterWatermark", device="*", low=f"{low / MIB}MiB", high=f"{high / MIB}MiB")
        assert host.run(graph.nodes).outcome == "success"

    set_marks(low_bytes, high_bytes)
    try:
        yield
    finally:
        set_marks(DEVICE_BYTES // 10, DEVICE_BYTES * 3 // 20)


Comparison = Callable[[HostProcess, str, Loaders], Tensors]


def run_case(host: HostProcess, name: str, loaders: Loaders) -> Tensors:
    """Run a case; returns all tensors that it kept. Models that should be managed are, or the node said why not.

    What it used is in effect; models of earlier prompts that core still keeps may have left for it.
    """
    graph = Graph()
    CASES[name](graph, loaders)
    is_ours = loaders.kind != "core" and bool(host.total_bytes)
    before = {component["id"]: component["last_use_s"] for component in host.part("components")} if is_ours else {}
    result = host.run(graph.nodes)
    told = [line for output in result.outputs.values() for line in output.get("text", [])]
    assert [line for line in told if "not managed" in line] == []
    if is_ours:
        used = [part for part in host.part("components") if part["last_use_s"] != before.get(part["id"])]
        assert all(part["in_effect"] for part in used if part["engine"] != "core")
    names = [each["inputs"]["name"] for each in graph.nodes.values() if each["class_type"] == "TestKeep"]
    return {f"{kept} {key}": tensor for kept in names for key, tensor in result.kept(kept).items()}


@pytest.fixture(scope="session")
def reference() -> Callable[[HostProcess, str], Tensors]:
    """What core's own loaders give for a case in a host; run once per host."""
    known: dict[tuple[int, str, Loaders], Tensors] = {}

    def find(host: HostProcess, name: str, loaders: Loaders = CORE) -> Tensors:
        key = (host.port, name, loaders)
        if key not in known:
            known[key] = run_case(host, name, loaders)
        return known[key]

    return find


@pytest.fixture(scope="session")
def ours() -> Comparison:
    return run_case
