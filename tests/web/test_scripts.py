"""The page's scripts: those that do not need the page under node, all of them under the type checker."""

from __future__ import annotations

import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def run(*command: str | Path) -> None:
    result = subprocess.run([str(part) for part in command], cwd=HERE, capture_output=True, text=True, timeout=1200)
    assert result.returncode == 0, result.stdout + result.stderr


def test_units(node: str):
    run(node, "--test", *sorted(HERE.glob("*.test.mjs")))


def test_types(node: str, packages: Path):
    run(node, packages / "typescript" / "bin" / "tsc", "-p", "tsconfig.json")
