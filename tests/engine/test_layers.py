"""The engine's files keep the order that its README tells, and their hands off what is not theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import highwater.memory

MEMORY = Path(highwater.memory.__file__).parent
FILES = sorted(path for path in MEMORY.glob("*.py") if path.name != "__init__.py")


def imports_of(path: Path) -> Iterator[str]:
    """Yield absolute names, and relative ones with their dots."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def reading_order() -> list[str]:
    table = (MEMORY / "README.md").read_text().partition("## Reading order")[2].partition("## Rules")[0]
    return re.findall(r"`(\w+)\.py`", table)


def test_every_file_stands_in_the_reading_order_once() -> None:
    assert sorted(reading_order()) == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_only_from_files_above_it(path: Path) -> None:
    above = reading_order()[: reading_order().index(path.stem)]
    own = [name[1:] for name in imports_of(path) if name.startswith(".")]
    assert set(own) <= set(above)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_engine_imports_no_host(path: Path) -> None:
    hosts = {"comfy", "comfy_api", "server", "nodes", "folder_paths", "diffusers", "transformers", "aiohttp", "rich"}
    assert not {name.partition(".")[0] for name in imports_of(path)} & hosts


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_streams_are_touched_in_one_file_and_cuda_in_none(path: Path) -> None:
    code = path.read_text()
    assert "torch.cuda." not in code
    if path.stem != "transfer":
        for made in ("torch.Stream(", "torch.Event(", "wait_event", "wait_stream", "synchronize("):
            assert made not in code
