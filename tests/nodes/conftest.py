"""One folder of tiny pipelines for all node tests; every test gets its own runner and output folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from highwater.headless.runner.runner import WorkflowRunner
from highwater.memory import default_manager
from highwater.nodes.pipelines.tiny_pipelines import ensure_pipelines


@pytest.fixture(scope="session")
def models_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    ensure_pipelines(directory / "diffusers")
    return directory


@pytest.fixture
def runner(models_directory: Path, tmp_path: Path) -> Iterator[WorkflowRunner]:
    runner = WorkflowRunner(default_manager(), models_directory=models_directory, output_directory=tmp_path / "output")
    yield runner
    default_manager().ledger.check()
    runner.cache.clear()
    assert default_manager().report()["components"] == []
