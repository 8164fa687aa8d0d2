"""A default has one place: a widget and an option of the command line show what the engine does without them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from highwater.headless.arguments import build_parser
from highwater.headless.comfy_stub import comfy_api
from highwater.memory import InvalidInput, Watermark, manage
from highwater.memory.hosted_component import HostedComponent
from highwater.memory.options.precision import DEFAULT_PRECISION
from highwater.memory.options.profile import LARGEST_PREFETCH, OffloadProfile, parse_profile
from highwater.memory.units import parse_bytes

comfy_api.install()
from highwater.nodes.comfy_models.verify import HighwaterVerify  # noqa: E402
from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES  # noqa: E402
from highwater.nodes.widget_values import read_precision  # noqa: E402


def defaults_of(node: Any) -> dict[str, Any]:
    return {item.id: item.options.get("default") for item in node.GET_SCHEMA().inputs}


def test_the_watermarks_widgets_show_the_engines_marks() -> None:
    (node,) = (node for node in NODE_CLASSES if node.GET_SCHEMA().node_id == "HighwaterWatermark")
    shown = defaults_of(node)
    marks = Watermark()
    assert (parse_bytes(shown["low"]), parse_bytes(shown["high"])) == (marks.low_bytes, marks.high_bytes)
    page = Path(inspect.getfile(node)).parents[1] / "web" / "docs" / "HighwaterWatermark.md"
    for mark in ("low", "high"):
        (line,) = (line for line in page.read_text().splitlines() if line.startswith(f"- **{mark}**"))
        assert f"`{shown[mark]}`" in line


@pytest.mark.parametrize(
    "node",
    [node for node in (*NODE_CLASSES, *MODEL_NODES) if "profile" in defaults_of(node) and node is not HighwaterVerify],
    ids=lambda node: node.__name__,
)
def test_loaders_show_the_profile_that_is_none(node: Any) -> None:
    shown = defaults_of(node)
    assert parse_profile(shown["profile"], devices=["cpu"]) == OffloadProfile()
    assert read_precision(shown["precision"]) == DEFAULT_PRECISION
    assert inspect.signature(HostedComponent).parameters["precision"].default == DEFAULT_PRECISION


def test_python_and_the_command_line_have_the_same() -> None:
    parameters = inspect.signature(manage).parameters
    options = build_parser().parse_args(["plan", "a.safetensors"])
    assert options.profile == parameters["profile"].default
    assert options.placement == parameters["placement"].default


def test_the_server_listens_where_its_help_says() -> None:
    from highwater.headless.server.app import serve

    parameters = inspect.signature(serve).parameters
    options = build_parser().parse_args(["serve"])
    assert (options.host, options.port) == (parameters["host"].default, parameters["port"].default)


def test_a_prefetch_depth_is_allowed_in_a_text_where_it_is_in_a_profile() -> None:
    for ahead in range(LARGEST_PREFETCH + 3):
        is_allowed = []
        for make in (
            lambda n: OffloadProfile(prefetch_blocks=n),
            lambda n: parse_profile(f"auto,prefetch={n}", devices=["cpu"]),
        ):
            try:
                make(ahead)
                is_allowed.append(True)
            except InvalidInput:
                is_allowed.append(False)
        assert is_allowed == [1 <= ahead <= LARGEST_PREFETCH] * 2
