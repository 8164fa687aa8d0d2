"""The engine's files keep the order that its README tells, and their hands off what is not theirs."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import highwater.memory
from highwater.headless.comfy_stub.comfy_api import install

MEMORY = Path(highwater.memory.__file__).parent
FILES = sorted(path for path in MEMORY.rglob("*.py") if path.name != "__init__.py")

PACK = MEMORY.parent
ROOMS = [
    PACK / room
    for room in (
        "memory/options",
        "memory/weights",
        "memory/planner",
        "memory/tracing",
        "memory/transfer",
        "memory/runtime",
        "memory/runtime/tensors",
        "memory/runtime/blocks",
        "memory/runtime/changes",
        "memory/runtime/devices",
        "memory/runtime/forwards",
        "memory/manager",
        "memory/manager/policies",
        "memory/manager/claims",
        "memory/verification",
        "headless/commands",
        "headless/runner",
        "headless/server",
        "headless/comfy_stub",
        "headless/simdevice",
        "nodes/comfy_models",
        "nodes/pipelines",
        "nodes/forecast",
        "nodes/workflow_reading",
        "nodes/host",
    )
]
# What most of its files need is only inside ComfyUI: what they give is read in the file.
HOST = PACK / "nodes/host"
# A room imports only rooms before it, of the same folder; single files stand between the rooms where they fit.
OUTER_ROOMS = {
    "nodes": ["forecast", "host", "pipelines", "workflow_reading", "comfy_models"],
    "headless": ["simdevice", "comfy_stub", "runner", "commands", "server"],
}
PACK_FILES = sorted(path for area in ("memory", "nodes", "headless") for path in (PACK / area).rglob("*.py"))


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


def room_of(name: str) -> str:
    return name.rpartition("/")[0]


def test_a_room_imports_only_from_rooms_above_it() -> None:
    """Follows from the order of files where the files of a room stand together."""
    rooms = [room for room, _ in itertools.groupby(map(room_of, reading_order()))]
    inner = [room for room in rooms if room]
    assert len(inner) == len(set(inner))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_options_and_planner_know_no_torch_and_no_device(path: Path) -> None:
    if room_of(name_of(path)) in ("options", "planner"):
        assert not [name for name in imports_of(path) if name.partition(".")[0] == "torch" or "/transfer" in name]


def test_planning_loads_no_torch(run_python: Callable[[str], None]) -> None:
    """Nor anything of devices, whatever of the two rooms is imported, and also while a plan is made."""
    files = [name.replace("/", ".") for name in reading_order() if room_of(name) in ("options", "planner")]
    run_python(f"""
import importlib, sys
for name in {files!r}:
    importlib.import_module(f"highwater.memory.{{name}}")
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.profile import parse_profile
from highwater.memory.planner.capacity import DeviceCapacity, Machine
from highwater.memory.planner.planning import plan_components
from highwater.memory.weights.component import Block, Component, TensorSpec
weight = TensorSpec(name="b.0.weight", dtype="BF16", shape=(4, 4), encodable=True)
blocks = (Block(name="b.0", tensors=(weight,)),)
part = Component(name="net", kind="diffusion", blocks=blocks, non_block=Block(name="", tensors=()))
gpu, cpu = (DeviceCapacity(name=name, total_bytes=1 << 30, available_bytes=1 << 30) for name in ("gpu:0", "cpu"))
profile = parse_profile("3", devices=["cpu", "gpu:0"])
placement = parse_placement("auto", devices=["cpu", "gpu:0"])
plan_components([part], Machine(devices=(cpu, gpu)), placement=placement, profile=profile).text()
found = [name for name in sys.modules if name == "torch" or ".memory.transfer" in name or ".memory.runtime" in name]
assert not found, found
""")


def test_outer_rooms_have_a_reading_order() -> None:
    """Of nodes/ and headless/: no two files or rooms need each other, and rooms stand in the order above.

    headless/ may import from nodes/, never the other way.
    """
    needs: dict[str, set[str]] = {}
    for path in PACK_FILES:
        here = outer_noun(path.relative_to(PACK).with_suffix("").as_posix())
        if here is None or path.name == "__init__.py":
            continue
        wanted = {outer_noun(name) for name in files_imported(path)} - {None, here}
        needs.setdefault(here, set()).update(name for name in wanted if name is not None)
    for here, wanted in needs.items():
        area, _, room = here.partition("/")
        assert area == "headless" or not [name for name in wanted if name.startswith("headless/")], here
        order = OUTER_ROOMS[area]
        later = order[order.index(room) :] if room in order else []
        assert not wanted & {f"{area}/{other}" for other in later}, here
    assert list(graphlib.TopologicalSorter(needs).static_order())


def outer_noun(name: str) -> str | None:
    """Return the room of a file of nodes/ or headless/, or the file where it is in none; None for the engine."""
    area, _, rest = name.partition("/")
    if area not in OUTER_ROOMS or not rest:
        return None
    return f"{area}/{rest.partition('/')[0]}"


def files_imported(path: Path) -> Iterator[str]:
    """Yield the files and rooms that a file imports, by their paths in the pack."""
    folder = path.parent.relative_to(PACK).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = "/".join([*folder[: len(folder) + 1 - node.level], *filter(None, (node.module or "").split("."))])
            is_file = base and (PACK / f"{base}.py").is_file()
            yield from [base] if is_file else (f"{base}/{alias.name}" for alias in node.names)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.relative_to(PACK).as_posix())
def test_a_room_gives_what_its_init_names(room: Path) -> None:
    package = importlib.import_module(f"highwater.{room.relative_to(PACK).as_posix().replace('/', '.')}")
    assert package.__doc__
    assert not {path.stem for path in room.glob("*.py")} & set(package.__all__)
    if room == HOST:
        tree = ast.parse((HOST / "__init__.py").read_text())
        (named,) = (ast.literal_eval(node) for node in ast.walk(tree) if isinstance(node, ast.Dict))
        for file, names in named.items():
            assert set(names) <= set(names_given(HOST / f"{file}.py")), file
        return
    if room.is_relative_to(PACK / "nodes"):
        install()
    for name in package.__all__:
        getattr(package, name)


@functools.cache
def given_by(room: Path) -> Sequence[str]:
    """Return the names that other rooms may import from a room."""
    return importlib.import_module(f"highwater.{'.'.join(room.relative_to(PACK).parts)}").__all__


def names_given(file: Path) -> Sequence[str]:
    """Return a file's ``__all__`` without importing it."""
    given = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in given if ast.unparse(node.targets[0]) == "__all__")


@pytest.mark.parametrize("path", PACK_FILES, ids=lambda path: path.relative_to(PACK).as_posix())
def test_a_room_is_asked_only_for_what_it_gives(path: Path) -> None:
    """What stands in no ``__init__`` is private to its folder."""
    folder = path.parent.relative_to(PACK).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        target = PACK.joinpath(*folder[: len(folder) + 1 - node.level], *(node.module or "").split("."))
        if target.parent in ROOMS and target.parent != path.parent and target.with_suffix(".py").is_file():
            assert {alias.name for alias in node.names} <= set(given_by(target.parent))


# What a host may know of the engine: one facade, what the user's texts mean, errors and units.
FOR_HOSTS = {"memory/hosted_component", "memory/errors", "memory/lazy_names", "memory/units"}
HOST_FILES = sorted((PACK / "nodes/host").glob("*.py"))
INNER_WORDS = {
    "admission",
    "event_log",
    "groups",
    "ledger",
    "managed",
    "measures",
    "member",
    "members",
    "mapped_weights",
    "packing",
    "registry",
    "shares",
    "slots",
}


def engine_imports(path: Path) -> Iterator[str]:
    """Yield what a file imports of the engine, by its path in the pack; a name of the package itself, too."""
    folder = path.parent.relative_to(PACK).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*folder[: len(folder) + 1 - node.level], *filter(None, (node.module or "").split("."))]
            if parts[:1] == ["memory"]:
                named = [alias.name for alias in node.names] if len(parts) == 1 else [""]
                yield from ("/".join([*parts, name]).rstrip("/") for name in named)


@pytest.mark.parametrize("path", HOST_FILES, ids=lambda path: path.name)
def test_the_host_knows_one_facade_of_the_engine(path: Path) -> None:
    assert {name for name in engine_imports(path) if not name.startswith("memory/options/")} <= FOR_HOSTS
    used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not used & INNER_WORDS
