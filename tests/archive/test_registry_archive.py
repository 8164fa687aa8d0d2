"""What ComfyUI's registry gets: enough to run, nothing else, and nothing that its scan hides a version for."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
from PIL import Image

from highwater.tests.archive.registry_archive import REPOSITORY, RULES, archived_files, scan, write_archive

RUNS = {"__init__.py", "LICENSE", "README.md", "pyproject.toml", "requirements.txt"}
# The one place for what cannot be done otherwise, see CONTRIBUTING.md.
PLACES = {"calls into libraries": "memory/weights/page_cache.py"}
FOLDERS = {"memory", "nodes", "web", "locales", "workflows", "subgraphs"}

LOAD = """
import asyncio, importlib.util, json, sys
from pathlib import Path
from aiohttp import web
from highwater.headless.comfy_stub.comfy_api import install

install()
before = set(sys.modules)
pack = Path(sys.argv[1])
name = str(pack).replace(".", "_x_")  # as ComfyUI names it
spec = importlib.util.spec_from_file_location(name, pack / "__init__.py")
module = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
nodes = asyncio.run(asyncio.run(module.comfy_entrypoint()).get_node_list())


class Server:
    routes = web.RouteTableDef()


routes = importlib.import_module(".nodes.routes", name)
routes.add_routes(Server)
for path in sorted(pack.rglob("*.py")):  # all of it, whether a node needs it at once or later
    parts = path.relative_to(pack).with_suffix("").parts
    if "host" in parts or "comfy_models" in parts:
        continue  # wants ComfyUI's own modules
    importlib.import_module("." + ".".join(parts if parts[-1] != "__init__" else parts[:-1]), name)
print(json.dumps({
    "nodes": sorted(node.define_schema().node_id for node in nodes),
    "routes": sorted(route.path for route in Server.routes),
    "foreign": sorted(module for module in set(sys.modules) - before if module.startswith("highwater")),
    "web": (pack / module.WEB_DIRECTORY).is_dir(),
}))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("custom_nodes") / "highwater-memory"
    with zipfile.ZipFile(write_archive(folder.with_suffix(".zip"))) as archive:
        archive.extractall(folder)
    return folder


def test_the_archive_holds_what_runs_and_nothing_else() -> None:
    names = archived_files()
    assert {name.partition("/")[0] for name in names} == RUNS | FOLDERS
    assert {name for name in names if "/" not in name} == RUNS
    assert not [name for name in names if "headless" in name or "test" in name or name.endswith("__main__.py")]


def test_nothing_that_runs_is_left_out() -> None:
    """An unanchored pattern would: ``docs/`` names the help pages in ``web/docs/``, too."""
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=REPOSITORY, capture_output=True, check=True, text=True)
    assert set(listed.stdout.splitlines()) - set(archived_files()) == {"memory/README.md"}


def test_the_scan_finds_nothing_in_it(unpacked: Path) -> None:
    found = []
    for name in archived_files():
        text = (unpacked / name).read_text(encoding="utf-8", errors="replace")
        found += scan(name, "" if name.endswith((".jpg", ".png")) else text)
    assert [finding for finding in found if finding.path != PLACES.get(finding.rule)] == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("python_command_injection_risk", "subprocess.run(['nvidia-smi'])"),
        ("python_environment_manipulation", 'os.environ.get("HOME")'),
        ("python_environment_manipulation", 'os.getenv("HOME")'),
        ("python_network_operations", "this.onResize = this.onResize.bind(this)"),
        ("python_network_operations", "sqlite3.connect(path)"),
        ("python_dynamic_execution", "model.eval()"),
        ("python_dynamic_execution", "base64.b64decode(text)"),
        ("python_bytecode_manipulation", 'importlib.import_module("torch")'),
    ],
)
def test_the_rules_find_what_the_scan_is_known_to_find(rule: str, text: str) -> None:
    assert rule in RULES and rule in {finding.rule for finding in scan("a.py", text)}


def test_it_runs_without_the_rest_of_the_repository(unpacked: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-c", LOAD, str(unpacked)], cwd=unpacked.parent, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout.splitlines()[-1])
    assert found["foreign"] == [] and found["web"]
    assert {"HighwaterLoadPipeline", "HighwaterMemoryReport"} <= set(found["nodes"])
    assert {"/highwater/report", "/highwater/free"} <= set(found["routes"])


@cache
def archived_trees() -> dict[str, ast.Module]:
    """Return the syntax trees of the archive's Python files by name; each file is parsed once."""
    names = [name for name in archived_files() if name.endswith(".py")]
    return {name: ast.parse((REPOSITORY / name).read_text(encoding="utf-8")) for name in names}


@cache
def archived_names() -> dict[str, set[str]]:
    """Return what `names_in` finds in each Python file of the archive."""
    return {name: names_in(tree) for name, tree in archived_trees().items()}


def test_what_is_archived_imports_nothing_that_is_not() -> None:
    kept_out = {"headless", "benchmarks", "tests", "scripts"}
    for path, tree in archived_trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names = {*(node.module or "").split("."), *(alias.name for alias in node.names)}
            else:
                names = {part for alias in getattr(node, "names", ()) for part in getattr(alias, "name", "").split(".")}
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not names & kept_out, f"{path}:{node.lineno}"


def listed_dependencies() -> list[tuple[str, str]]:
    """Return each requirement of the project, with the comment behind it."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    return re.findall(r'^    "([^"]+)",(?:  # (.+))?$', listed, re.MULTILINE)


def imported_modules() -> set[str]:
    """Return the top-level modules that files of the archive import, whenever they do."""
    found: set[str] = set()
    for tree in archived_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.partition(".")[0])
    return found


def test_every_dependency_is_imported_or_says_why_it_is_one() -> None:
    """And none says so that is imported, so that no reason outlives its truth."""
    modules = imported_modules()
    dependencies = {re.split(r"[<>=~!]", requirement)[0]: reason for requirement, reason in listed_dependencies()}
    assert len(dependencies) == 5
    for name, reason in dependencies.items():
        module = {"optimum-quanto": "optimum"}.get(name, name.replace("-", "_"))
        assert (module in modules) != bool(reason), f"{name}: {'imported' if module in modules else 'not imported'}"


def test_the_requirements_are_the_projects_dependencies() -> None:
    """But for the page, which ComfyUI brings in a version of its own."""
    dependencies = {requirement for requirement, _ in listed_dependencies()}
    required = (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines()
    wanted = {line for line in required if line and not line.startswith("#")}
    assert {name for name in dependencies if not name.startswith("comfyui-frontend-package")} == wanted


def test_what_is_installed_has_every_folder_of_the_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'^    "(highwater[\w.]*)",$', text, re.MULTILINE))
    folders = [
        path.parent for area in ("memory", "nodes", "headless") for path in (REPOSITORY / area).rglob("__init__.py")
    ]
    assert listed == {
        "highwater",
        *(".".join(("highwater", *folder.relative_to(REPOSITORY).parts)) for folder in folders),
    }


def test_what_is_installed_has_every_file_of_the_page() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^highwater = \[(.*)\]$", text, re.MULTILINE)
    installed = {path for pattern in re.findall(r'"([^"]+)"', listed) for path in REPOSITORY.glob(pattern)}
    for area in ("web", "workflows", "locales"):
        files = {path for path in (REPOSITORY / area).rglob("*") if path.is_file()}
        assert sorted(path.relative_to(REPOSITORY).as_posix() for path in files - installed) == []


def test_the_registrys_pictures_are_there_in_the_sizes_that_it_wants() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    named = dict(re.findall(r'^(Icon|Banner) = ".*/main/([\w.]+)"', text, re.MULTILINE))
    sizes = {key: Image.open(REPOSITORY / name).size for key, name in named.items()}
    assert sizes["Icon"] == (400, 400)
    width, height = sizes["Banner"]
    assert width * 9 == height * 21


# What a reader of the archive would look at twice, by the names that it goes by, and the one file that may use each.
NEAR_A_FINDING = {
    ("environ", "environb", "getenv", "putenv", "unsetenv"): "nodes/command_answers.py",
    ("import_module", "runpy", "spec_from_file_location"): "memory/lazy_names.py",
    ("ctypes", "cffi"): "memory/weights/page_cache.py",
    ("sqlite3",): "memory/manager/needs_file.py",
    ("platformdirs", "expanduser"): "memory/user_folders.py",
    ("subprocess", "multiprocessing", "popen", "Popen", "fork", "startfile", "pty"): None,
    ("socket", "ssl", "urllib", "httpx", "requests", "ftplib", "smtplib", "webbrowser", "ClientSession"): None,
    ("eval(", "exec(", "compile(", "__import__(", "marshal", "pickle", "shelve", "base64"): None,
}


def names_in(tree: ast.Module) -> set[str]:
    """Return the modules, attributes and functions that a file uses; a builtin that is called ends with a bracket."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names} | set(
                (node.module or "").split(".") if not node.level else ()
            )
        elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self"):
            names.add(node.attr)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(f"{node.func.id}(")
    return names


@pytest.mark.parametrize(("names", "place"), NEAR_A_FINDING.items(), ids=lambda value: str(value)[:20])
def test_what_comes_near_a_finding_stands_in_one_place_that_is_documented(
    names: tuple[str, ...], place: str | None
) -> None:
    """However it is imported: the scan reads lines, and may learn more of them."""
    used = {name for name, found in archived_names().items() if found & set(names)}
    assert used == ({place} if place is not None else set())
    assert place is None or f"`{place}`" in (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "line",
    ["import os; os.environ", "from os import getenv", "import subprocess as s", "exec('1')", "psutil.x().environ()"],
)
def test_a_name_is_found_however_it_is_imported(line: str) -> None:
    assert names_in(ast.parse(line)) & {name for names in NEAR_A_FINDING for name in names}


def find_client() -> str | None:
    return os.environ.get("COMFY_CLI") or shutil.which("comfy")


@pytest.mark.skipif(find_client() is None, reason="comfy-cli is not installed (see CONTRIBUTING.md)")
def test_the_registrys_client_packs_the_same_and_finds_nothing(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", REPOSITORY.as_uri(), str(clone)], check=True)
    environment = {**os.environ, "HOME": str(tmp_path), "DO_NOT_TRACK": "1", "COMFY_NO_TELEMETRY": "1"}
    for command in ("validate", "pack"):
        told = subprocess.run(
            [str(find_client()), "--skip-prompt", "node", command],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert told.returncode == 0, told.stdout + told.stderr
        assert "warning" not in told.stdout.lower()
    with zipfile.ZipFile(clone / "node.zip") as archive:
        assert sorted(archive.namelist()) == archived_files(clone)
