"""The example graphs, against what the real host says of its nodes and of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GRAPHS = sorted((ROOT / "workflows").glob("*.json"))
CORE_NODES = ROOT / "tests" / "core_nodes.json"


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_an_example_fits_the_live_nodes(
    cpu_host: Any, graph_problems: Callable[[Any, Any], list[str]], path: Path
) -> None:
    assert graph_problems(json.loads(path.read_text(encoding="utf-8")), cpu_host.get("/object_info")) == []


def test_what_is_recorded_of_the_hosts_nodes_still_holds(cpu_host: Any) -> None:
    """The tests without a host use the record: names, types and order, nothing else."""
    live = cpu_host.get("/object_info")
    for name, recorded in json.loads(CORE_NODES.read_text(encoding="utf-8")).items():
        assert live[name]["output"] == recorded["output"]
        assert {k: v for k, v in live[name]["input_order"].items() if k != "hidden"} == recorded["input_order"]
        for section, inputs in recorded["input"].items():
            for widget, (kind, _) in inputs.items():
                found = live[name]["input"][section][widget][0]
                assert ("COMBO" if isinstance(found, list) else found) == kind


def test_the_host_offers_the_examples(cpu_host: Any) -> None:
    [names] = [names for pack, names in cpu_host.get("/workflow_templates").items() if pack == "highwater"]
    assert sorted(names) == [path.stem for path in GRAPHS]
