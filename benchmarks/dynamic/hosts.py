"""The hosts that the tables compare, and what is asked of each: a graph's tensors, and what its devices did."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from highwater.tests.comfyui.graphs import Graph, new_run
from highwater.tests.comfyui.host_process import HostFiles, HostProcess, PromptResult, find_host
from highwater.tests.comfyui.model_files import ensure_model_files

from ..case import Rows

__all__ = ["DEVICE_BYTES", "MIB", "PAGE_BYTES", "Part", "Rig", "Tensors", "difference", "kept_by", "leave"]

MIB = 1 << 20
PAGE_BYTES = 32 * MIB
DEVICE_BYTES = 1844 * MIB
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One table of the case, the sentence above it, and how many of its checks hold."""

    sentence: str
    rows: Rows
    num_held: int
    num_checks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rig:
    """A ComfyUI and its models, to start hosts on two simulated devices with."""

    files: HostFiles
    models: Path = field(default_factory=ensure_model_files)

    @classmethod
    def find(cls) -> Rig:
        """Return the rig of this machine.

        Raises:
            SystemExit: it has no ComfyUI, or the fake driver is not for its system.
        """
        files = find_host()
        if files is None:
            raise SystemExit("benchmarks dynamic: no ComfyUI at ~/comfy/ComfyUI; name one in COMFYUI_DIR")
        if sys.platform != "linux":
            raise SystemExit("benchmarks dynamic: the driver that comfy-aimdo needs is made for Linux")
        return cls(files=files)

    def start(self, *, with_pack: bool, dynamic: bool = True) -> HostProcess:
        """Return a host that is not started yet."""
        return HostProcess(
            self.files,
            models=self.models,
            with_pack=with_pack,
            total_bytes=[DEVICE_BYTES, DEVICE_BYTES],
            dynamic="core" if dynamic else "",
            arguments=[] if dynamic else ["--disable-dynamic-vram"],
        )


def leave(host: HostProcess, free_bytes: int) -> None:
    """Occupy the first device but for so many bytes; none of it for a negative number."""
    graph = Graph()
    graph.add("TestOccupy", device=0, free_bytes=free_bytes, run=next(new_run))
    assert host.run(graph.nodes).outcome == "success"


def kept_by(graph: Graph, result: PromptResult) -> Tensors:
    """Return all tensors that a prompt kept."""
    names = [node["inputs"]["name"] for node in graph.nodes.values() if node["class_type"] == "TestKeep"]
    return {f"{name} {key}": tensor for name in names for key, tensor in result.kept(name).items()}


def difference(actual: Tensors, expected: Tensors) -> str:
    """Return "equal", or by how much the tensors differ."""
    if actual.keys() != expected.keys():
        return f"DIFFERS: keeps {sorted(actual)}, expected {sorted(expected)}"
    differences = {
        name: (actual[name].double() - expected[name].double()).abs().max().item()
        for name in expected
        if not torch.equal(actual[name], expected[name])
    }
    worst: Any = max(differences.values(), default=0)
    return f"DIFFERS by up to {worst:.3g}" if differences else "equal"
