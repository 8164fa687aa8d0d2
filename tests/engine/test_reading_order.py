"""The engine's files keep the order that its README tells, and their hands off what is not theirs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import highwater.memory

MEMORY = Path(highwater.memory.__file__).parent
FILES = sorted(path for path in MEMORY.rglob("*.py") if path.name != "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(MEMORY).with_suffix("").as_posix()


def imports_of(path: Path) -> Iterator[str]:
    """Yield absolute names, and paths of the engine's own files below its folder."""
    folder = path.parent.relative_to(MEMORY.parent).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*folder[: len(folder) + 1 - node.level], *(node.module or "").split(".")] if node.level else []
            yield "/".join(["", *filter(None, parts[1:])]) if parts else node.module or ""


def reading_order() -> list[str]:
    table = (MEMORY / "README.md").read_text().partition("## Reading order")[2].partition("## Rules")[0]
    return re.findall(r"`([\w/]+)\.py`", table)


def test_every_file_stands_in_the_reading_order_once() -> None:
    assert sorted(reading_order()) == sorted(map(name_of, FILES))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_from_files_above_it(path: Path) -> None:
    above = reading_order()[: reading_order().index(name_of(path))]
    own = [name[1:] for name in imports_of(path) if name.startswith("/")]
    assert set(own) <= set(above)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_engine_imports_no_host(path: Path) -> None:
    hosts = {"comfy", "comfy_api", "server", "nodes", "folder_paths", "diffusers", "transformers", "aiohttp", "rich"}
    assert not {name.partition(".")[0] for name in imports_of(path)} & hosts


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_streams_are_touched_in_one_file_and_cuda_in_none(path: Path) -> None:
    code = path.read_text()
    assert "torch.cuda." not in code
    if "transfer" not in name_of(path).split("/"):
        for made in ("torch.Stream(", "torch.Event(", "wait_event", "wait_stream", "synchronize("):
            assert made not in code
