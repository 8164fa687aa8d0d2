"""Templates and help pages agree with the nodes: each is written by hand, and a node changes quickly."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest

from highwater.headless.comfy_stub.comfy_api import install, object_info
from highwater.headless.server.page_files import FIRST_TEMPLATE, TEMPLATES, WEB
from highwater.tests.web.help_graphs import HELP_GRAPHS

install()
from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES  # noqa: E402
from highwater.nodes.tiny_models import tiny_models  # noqa: E402

LARGEST_PICTURE = 50_000  # bytes, of a help page
INFO = object_info([*NODE_CLASSES, *MODEL_NODES])
# What ComfyUI 0.33 says of its own nodes that our graphs use, shortened; the real host is asked in tests/comfyui.
CORE_INFO = json.loads((Path(__file__).parents[1] / "core_nodes.json").read_text())
GRAPHS = sorted(TEMPLATES.glob("*.json"))
# The widget of a loader that names a file, and the model folder that it is in.
FOLDERS = {
    "unet_name": "diffusion_models",
    "clip_name1": "text_encoders",
    "vae_name": "vae",
    "ckpt_name": "checkpoints",
    "control_net_name": "controlnet",
    "clip_name": "clip_vision",
}


def test_the_first_template_is_there():
    assert FIRST_TEMPLATE in [path.stem for path in GRAPHS]


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_has_no_id(path: Path):
    """The page gives each opening one of its own; two of the same id would show each other's badges."""
    assert "id" not in json.loads(path.read_text())


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_fits_the_nodes(path: Path, graph_problems):
    assert graph_problems(json.loads(path.read_text()), INFO | CORE_INFO) == []


def test_a_template_that_does_not_fit_is_found(graph_problems):
    graph = json.loads(GRAPHS[0].read_text())
    widgets = next(node["widgets_values"] for node in graph["nodes"] if node["type"].startswith("HighwaterLoad"))
    widgets.pop()
    graph["links"][0][5] = "LATENT"
    first, *_, last = graph_problems(graph, INFO | CORE_INFO)
    assert "values for ['" in first and "link 1 is LATENT from" in last


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_explains_itself_and_asks_for_what_passes(path: Path):
    """Its devices may be missing here, but the texts are right; where files are named, the page can offer them."""
    nodes = json.loads(path.read_text())["nodes"]
    first, *_ = (node for node in sorted(nodes, key=lambda node: node["order"]) if node["type"] == "MarkdownNote")
    (needs,) = (line for line in first["widgets_values"][0].splitlines() if line.startswith("**Needs**"))
    named = [file for node in nodes for file in node["properties"].get("models", [])]
    assert bool(named) == ("If a file is missing, ComfyUI offers to download it" in needs)
    loaders = {node.GET_SCHEMA().node_id: node for node in MODEL_NODES}
    for node in nodes:
        if node["type"] not in loaders:
            continue
        values = dict(zip(widget_names(node["type"]), node["widgets_values"], strict=True))
        loader = loaders[node["type"]]
        assert loader.validate_inputs(values["profile"]) is True
        (placement,) = (item for item in loader.GET_SCHEMA().inputs if item.id == "placement")
        assert values["placement"] in placement.options["options"]
        (folder,) = {folder for widget, folder in FOLDERS.items() if widget in values}
        files = [value for value in node["widgets_values"] if value.endswith(".safetensors")]
        offered = node["properties"].get("models", [])
        assert [file["name"] for file in offered] == [name for name in files if name not in tiny_models(folder)]
        assert all(file["directory"] == folder for file in offered)
        assert all(file["url"] == f"{file['url'].rpartition('/')[0]}/{file['name']}" for file in offered)


def widget_names(node_id: str) -> list[str]:
    """Return the widgets of a node without a seed, in the page's order."""
    sockets = {**INFO[node_id]["input"]["required"], **INFO[node_id]["input"].get("optional", {})}
    return [name for name, (kind, _) in sockets.items() if kind in ("STRING", "COMBO")]


def test_the_headless_host_offers_the_templates_that_it_can_run(graph_problems):
    from highwater.headless.comfy_stub.comfy_api import list_node_classes
    from highwater.headless.server.page_files import FileRoutes

    routes = FileRoutes(TEMPLATES, None)  # neither the page nor the user's folder is asked
    listed = json.loads(asyncio.run(routes.get_templates(None)).body)["highwater"]
    here = object_info(list_node_classes().values())
    assert listed == [path.stem for path in GRAPHS if not graph_problems(json.loads(path.read_text()), here)]
    assert FIRST_TEMPLATE in listed


@pytest.mark.parametrize("path", GRAPHS, ids=lambda path: path.stem)
def test_a_template_has_a_picture(path: Path):
    assert path.with_suffix(".jpg").is_file()


def help_page(node_id: str) -> str:
    return (WEB / "docs" / f"{node_id}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("node_id", INFO)
def test_every_node_has_a_help_page_that_explains_its_inputs_and_outputs(node_id: str):
    page = help_page(node_id)
    assert page.startswith(f"# {INFO[node_id]['display_name']}\n")
    about_inputs, _, about_outputs = page.partition("\n**Output")
    sockets = INFO[node_id]["input"]
    inputs = [*sockets["required"], *sockets.get("optional", {})]
    assert [name for name in inputs if f"**{name}**" not in about_inputs] == []
    assert [name for name in INFO[node_id]["output_name"] if f"**{name}**" not in about_outputs] == []


@pytest.mark.parametrize("node_id", INFO)
def test_every_help_page_has_a_picture_and_an_example(node_id: str):
    """The picture comes with the page, each time that it is opened: it is small."""
    page = help_page(node_id)
    ((told, name),) = re.findall(r"^!\[(.+)\]\((.+)\)$", page, re.MULTILINE)
    picture = WEB / "docs" / name
    assert name == f"{node_id}.png" and told
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size <= LARGEST_PICTURE
    _, _, rest = page.partition("\n**Example**\n\n")
    example, _, _ = rest.partition("\n**Inputs**\n")
    assert len(example.split()) > 30 and "picture" in example
    shown = [*chosen_in_picture(node_id), *filter(None, [HELP_GRAPHS[node_id].badge])]
    assert [value for value in shown if f"`{value}`" not in example] == []


def chosen_in_picture(node_id: str) -> list[str]:
    """Return what the node in the picture is given that is no default, of what loaders ask for."""
    (shown,) = (node["inputs"] for node in HELP_GRAPHS[node_id].graph.values() if node["class_type"] == node_id)
    chosen = [shown.get(name, "auto") for name in ("profile", "precision", "placement", "engine")]
    return [value for value in chosen if value not in ("auto", "as stored", "default")]


WITH_PROFILE = [
    node_id
    for node_id in INFO
    if "profile" in {**INFO[node_id]["input"]["required"], **INFO[node_id]["input"].get("optional", {})}
]


@pytest.mark.parametrize("node_id", WITH_PROFILE)
def test_every_profile_that_a_page_shows_is_one(node_id: str):
    from highwater.memory.options.profile import parse_profile

    page = help_page(node_id)
    (row,) = (line for line in page.splitlines() if line.startswith("- **profile**"))
    _, _, examples = page.partition("**Profiles by example**")
    shown = re.findall(r"`([^`]+)`", row) + re.findall(r"^- `([^`]+)`", examples, re.MULTILINE)
    assert {"auto", "1", "5", "4", "-2GiB"} <= set(shown) and any("," in profile for profile in shown)
    for profile in shown:
        parse_profile(profile, devices=["cpu", "gpu:0", "gpu:1"])


def test_every_precision_that_a_page_shows_can_be_chosen():
    from highwater.memory.options.precision import parse_precision, precision_names
    from highwater.memory.weights.known_forms import FORMS

    for node_id in WITH_PROFILE:
        sockets = {**INFO[node_id]["input"]["required"], **INFO[node_id]["input"].get("optional", {})}
        page = help_page(node_id)
        (row,) = (line for line in page.splitlines() if line.startswith("- **precision**"))
        assert sockets["precision"][1]["default"] == "as stored"
        assert all(f"`{option}`" in row for option in precision_names(FORMS))
        for shown in re.findall(r"`([^`]+)`", row):
            if shown != "auto" and not shown.isdigit() and shown != "fp8_e4m3fn":
                parse_precision(shown, forms=FORMS)


def test_the_scripts_folder_holds_scripts_and_help_only():
    """The host imports every script below it, also one that was meant for tests."""
    found = {path.relative_to(WEB).as_posix() for path in WEB.rglob("*") if path.is_file()}
    assert found == {
        "badges.js",
        "commands.js",
        "detail.js",
        "extension.js",
        "kept_texts.js",
        "limits.js",
        "manage_extension.js",
        "manage_menu.js",
        "mark_setting.js",
        "node_boxes.js",
        "node_reports.js",
        "page_settings.js",
        "page_texts.js",
        "panel/bars.js",
        "panel/component_table.js",
        "panel/components.js",
        "panel/device_news.js",
        "panel/elements.js",
        "panel/event_log.js",
        "panel/events.js",
        "panel/history.js",
        "panel/marks.js",
        "panel/panel.js",
        "panel/style.js",
        "panel/time_scale.js",
        "panel/timeline.js",
        "panel/view.js",
        "readout.js",
        "report.js",
        "server.js",
        "settings.js",
        "texts.js",
        "turns.js",
        "units.js",
        "watermark.js",
        *(f"docs/{node_id}.{kind}" for node_id in INFO for kind in ("md", "png")),
    }
