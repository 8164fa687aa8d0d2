"""The Keep and Release nodes over a pipeline of our own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from highwater.headless.comfy_stub import comfy_api
from highwater.memory import InvalidInput, manage
from highwater.memory.errors import UnsafeState

comfy_api.install()
from highwater.memory import MemoryManager  # noqa: E402
from highwater.nodes.keep import HighwaterKeep, HighwaterRelease  # noqa: E402
from highwater.nodes.pipelines.sampling import LoadedPipeline  # noqa: E402

X = torch.ones(1, 64)


@pytest.fixture
def loaded(sim: Any) -> Iterator[tuple[MemoryManager, LoadedPipeline, torch.nn.Module]]:
    with sim.cluster([sim.SimDeviceSpec(total_bytes=8 << 20)]), torch.no_grad():
        manager = MemoryManager()
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        managed = manage({"model": model}, manager=manager, name="part")
        model(X)
        yield manager, LoadedPipeline(pipe=None, managed=managed), model
        manager.release_all()


def test_keep_passes_its_model_through_and_keep_off_undoes_it(loaded: Any) -> None:
    manager, pipeline, _ = loaded
    output = HighwaterKeep.execute(pipeline, True, "4MiB")
    assert output.args == (pipeline,)
    assert output.ui_dict()["text"] == ["model: evicted last, up to 4MiB of a device"]
    assert manager.members["part/model"].evict_last
    HighwaterKeep.execute(pipeline, False)
    assert not manager.members["part/model"].evict_last


@pytest.mark.parametrize("amount", ["", "6", "-1GiB", "much"])
def test_a_wrong_amount_is_refused_before_the_run(amount: str) -> None:
    assert "allowed: 6GiB, 80% or unlimited" in str(HighwaterKeep.validate_inputs(amount))


def test_an_amount_beyond_the_device_is_refused_in_one_line(loaded: Any) -> None:
    with pytest.raises(InvalidInput, match=r"gpu:0 has 8.00MiB; allowed: up to 8.00MiB"):
        HighwaterKeep.execute(loaded[1], True, "9MiB")


def test_release_says_what_is_free_again_and_passes_both_on(loaded: Any) -> None:
    manager, pipeline, model = loaded
    after = object()
    output = HighwaterRelease.execute(pipeline, after)
    assert output.args == (pipeline, after)
    (text,) = output.ui_dict()["text"]
    assert text.startswith("released part/model: ") and "of gpu:0 are free again" in text
    assert not manager.ledger.used("gpu:0")
    assert "released by a Release node" in manager.report()["events"][-1]["reason"]
    assert HighwaterRelease.execute(pipeline).ui_dict()["text"] == ["model: has nothing on a device"]
    assert torch.isfinite(model(X).cpu()).all()


def test_a_model_that_computes_is_not_released(loaded: Any) -> None:
    manager, pipeline, _ = loaded
    with manager.lease(pipeline.managed.members[0]), pytest.raises(UnsafeState, match="computes now"):
        HighwaterRelease.execute(pipeline)
