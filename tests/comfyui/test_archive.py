"""The registry's archive, unpacked into custom_nodes: what a user has who installed the pack with ComfyUI Manager."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from highwater.tests.archive.registry_archive import write_archive
from highwater.tests.comfyui.graphs import CORE, Loaders
from highwater.tests.comfyui.host_process import HostFiles, HostProcess

pytestmark = pytest.mark.comfyui_cpu


@pytest.fixture(scope="module")
def archive_host(
    host_files: HostFiles, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostProcess]:
    folder = tmp_path_factory.mktemp("archive")
    with zipfile.ZipFile(write_archive(folder / "node.zip")) as archive:
        archive.extractall(folder / "pack")
    with HostProcess(host_files, models=models, pack=folder / "pack") as host:
        yield host
        assert host.error_lines() == []


def test_it_has_all_nodes_routes_and_help(archive_host: HostProcess, cpu_host: HostProcess) -> None:
    found, expected = (
        {name: info for name, info in host.get("/object_info").items() if name.startswith("Highwater")}
        for host in (archive_host, cpu_host)
    )
    assert found == expected and len(found) >= 15
    assert "components" in archive_host.get("/highwater/report")
    for command in ("profiles", "devices", "doctor", "needs"):
        assert archive_host.get(f"/highwater/{command}")
    assert set(archive_host.get("/highwater/doctor")["features"].values()) == {True}
    answer = archive_host.get("/highwater/plan?file=diffusion_models/tiny_flux.safetensors&profile=4")
    assert answer["text"].startswith("component ") and "tiny_flux: " in answer["text"]
    scripts = [name for name in archive_host.get("/extensions") if "/highwater/" in name]
    assert scripts and all(archive_host.get(name) for name in scripts)
    for name in found:
        assert archive_host.get(f"/extensions/highwater/docs/{name}.md")
        assert archive_host.get(f"/extensions/highwater/docs/{name}.png").startswith(b"\x89PNG")


def test_its_nodes_compute_what_core_does(archive_host: HostProcess, ours: Callable, cpu_host: HostProcess) -> None:
    managed, plain = ours(archive_host, "images", Loaders(profile="4MiB")), ours(cpu_host, "images", CORE)
    assert managed.keys() == plain.keys()
    assert all(torch.equal(managed[name], plain[name]) for name in plain)
