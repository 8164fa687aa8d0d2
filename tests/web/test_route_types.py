"""The page's types are those of the schemas that the server checks requests against."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "write_route_types.py"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_route_types", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_types_are_those_of_the_schemas() -> None:
    script = load_script()
    assert script.FILE.read_text(encoding="utf-8") == script.types_text(), f"run {SCRIPT.name}"
