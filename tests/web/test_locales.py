"""The texts of the page and of the nodes: complete in each language, and really in that language."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from highwater.headless.comfy_stub.comfy_api import install, object_info

install()
from highwater.memory.manager.report import EVENT_KINDS  # noqa: E402
from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES  # noqa: E402

ROOT = Path(__file__).parents[2]
LOCALES = ROOT / "locales"
FILES = ("commands", "main", "nodeDefs", "settings")
LANGUAGES = sorted(folder.name for folder in LOCALES.iterdir() if folder.name != "en")
# Names are the same in every language; the last one only joins two others.
NAMES = {"Highwater", "{loaded}; {idle}."}


def load_script() -> ModuleType:
    path = ROOT / "scripts" / "write_node_texts.py"
    spec = importlib.util.spec_from_file_location("write_node_texts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(language: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((LOCALES / language / f"{name}.json").read_text(encoding="utf-8"))
    return content


def leaves(messages: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in messages.items():
        if isinstance(value, dict):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def texts_of(language: str) -> dict[tuple[str, ...], str]:
    return {(name, *path): text for name in FILES for path, text in leaves(read(language, name))}


ENGLISH = texts_of("en")


def test_the_english_texts_of_nodes_are_those_of_their_schemas():
    texts = load_script().node_texts(object_info([*NODE_CLASSES, *MODEL_NODES]))
    assert read("en", "nodeDefs") == texts, "run scripts/write_node_texts.py"


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_has_every_text_and_no_other(language: str):
    assert texts_of(language).keys() == ENGLISH.keys()


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_text_has_the_values_of_the_english_one(language: str):
    def values(text: str) -> list[str]:
        return sorted(re.findall(r"\{\w+\}", text))

    assert {path for path, text in texts_of(language).items() if values(text) != values(ENGLISH[path])} == set()


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_text_is_left_in_english(language: str):
    same = {text for path, text in texts_of(language).items() if text == ENGLISH[path]}
    assert same - NAMES == set()


@pytest.mark.parametrize("language", ["en", *LANGUAGES])
def test_what_the_host_reads_has_no_sign_of_its_message_syntax(language: str):
    """`{`, `|` and `@` mean something there; what only we read is in `highwater`."""
    read_by_host = {path: text for path, text in texts_of(language).items() if path[1] != "highwater"}
    assert [path for path, text in read_by_host.items() if re.search(r"[{}|@]", text)] == []


def test_every_text_that_the_page_asks_for_is_there_and_no_other():
    """Keys that are put together when they are asked for are known by their beginning, here and in the nodes."""
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "web").rglob("*.js")))
    asked = set(re.findall(r"""["'`]((?:[a-z_]+\.)+[a-z_0-9]+)["'`]""", scripts))
    nodes = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "nodes").rglob("*.py")))
    begun = (*re.findall(r"`((?:[a-z_]+\.)+)\$\{", scripts), *re.findall(r'f"((?:[a-z_]+\.)+)\{', nodes))
    there = {".".join(path[2:]) for path in ENGLISH if path[1] == "highwater"}
    areas = {key.split(".")[0] for key in there}
    missing = {key for key in asked if key.split(".")[0] in areas} - there
    unused = {key for key in there - asked if not key.startswith(begun)}
    assert (missing, unused) == (set(), set())


def test_every_kind_of_event_has_a_text():
    assert {path[-1] for path in ENGLISH if path[1:4] == ("highwater", "panel", "event_kind")} == set(EVENT_KINDS)


def test_every_command_and_setting_has_its_texts():
    scripts = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "web").rglob("*.js")))
    ids = {found.replace(".", "_") for found in re.findall(r'"(Highwater\.\w+)"', scripts)}
    assert ids == read("en", "commands").keys() | read("en", "settings").keys()
