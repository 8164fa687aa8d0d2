"""The files behind the web page: the page itself, our scripts, texts and templates, images, and the user's own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from ...memory.errors import InvalidInput
from ..comfy_stub import folder_paths
from ..comfy_stub.comfy_api import list_node_classes
from .page_requests import Route, answer_with, read_body, read_json, send_file
from .user_directory import UserDirectory, below

__all__ = ["FileRoutes"]

PACK = "highwater"
PACK_ROOT = Path(__file__).parents[2]
WEB, LOCALES, TEMPLATES = PACK_ROOT / "web", PACK_ROOT / "locales", PACK_ROOT / "workflows"
FIRST_TEMPLATE = "highwater-diffusers-pipeline"
NOTES = ("MarkdownNote", "Note")  # which the page has of its own
VISITED = "highwater-visited"  # the cookie of a browser that has been shown the first template

# Where the user has not chosen: all of the canvas is seen, and no other server is asked for news of ComfyUI.
DEFAULT_SETTINGS = {"Comfy.Minimap.Visible": False, "Comfy.Notification.ShowVersionUpdates": False}

# What ComfyUI has and this server has nothing of; asked for at every start of the page.
NOTHING: dict[str, Any] = {
    "/embeddings": [],
    "/experiment/models": [],
    "/features": {},
    "/global_subgraphs": {},
    "/internal/folder_paths": {},
    "/internal/logs": "",
    "/internal/logs/raw": {"entries": [], "size": {"cols": 80, "row": 24}},
    "/models": [],
    "/node_replacements": {},
    "/templates/index.json": [],
    "/templates/index_logo.json": {},
}


class FileRoutes:
    """Answers from folders; the user's is the only one that it writes to."""

    def __init__(self, page: Path, user: UserDirectory) -> None:
        self.page = page
        self.user = user

    def routes(self) -> list[Route]:
        return [
            ("GET", "/extensions", self.get_extensions),
            ("GET", "/i18n", self.get_translations),
            ("GET", "/workflow_templates", self.get_templates),
            ("GET", f"/workflow_templates/{PACK}/{{name}}", self.get_template),
            ("GET", "/view", self.get_image),
            ("GET", "/users", self.get_users),
            ("GET", "/settings", self.get_settings),
            ("POST", "/settings", self.post_settings),
            ("GET", "/settings/{id}", self.get_settings),
            ("POST", "/settings/{id}", self.post_settings),
            ("GET", "/userdata", self.list_user_files),
            ("GET", "/userdata/{file}", self.get_user_file),
            ("POST", "/userdata/{file}", self.post_user_file),
            ("DELETE", "/userdata/{file}", self.delete_user_file),
            ("POST", "/userdata/{file}/move/{target}", self.move_user_file),
            *(("GET", path, answer_with(content)) for path, content in NOTHING.items()),
        ]

    def add_folders(self, app: web.Application) -> None:
        """Add the page, at the root, and our scripts; after every other route, which they would hide."""
        app.router.add_get("/", self.get_page)
        app.router.add_get("/user.css", answer_no_style)
        app.router.add_static(f"/extensions/{PACK}", WEB)
        app.router.add_static("/", self.page)

    # -- the page

    async def get_page(self, request: web.Request) -> web.StreamResponse:
        """Return the page; a browser's first visit opens the first template, ready to run."""
        if not request.query and VISITED not in request.cookies:
            first = web.HTTPFound(f"/?template={FIRST_TEMPLATE}&source={PACK}")
            first.set_cookie(VISITED, "1", max_age=365 * 24 * 3600, httponly=True, samesite="Lax")
            raise first
        return web.FileResponse(self.page / "index.html", headers={"Cache-Control": "no-cache"})

    async def get_extensions(self, request: web.Request) -> web.StreamResponse:
        scripts = sorted(path.relative_to(WEB).as_posix() for path in WEB.rglob("*.js"))
        return web.json_response([f"/extensions/{PACK}/{script}" for script in scripts])

    async def get_translations(self, request: web.Request) -> web.StreamResponse:
        """Return the locales as ComfyUI merges them: main.json at the top, each other file under its name."""
        translations: dict[str, dict[str, Any]] = {}
        for path in sorted(LOCALES.glob("*/*.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            texts = translations.setdefault(path.parent.name, {})
            texts.update(content if path.stem == "main" else {path.stem: content})
        return web.json_response(translations)

    async def get_templates(self, request: web.Request) -> web.StreamResponse:
        """List the graphs whose nodes are all here; the others are for ComfyUI and its models."""
        known = {*list_node_classes(), *NOTES}
        graphs = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(TEMPLATES.glob("*.json"))}
        names = [name for name, graph in graphs.items() if known.issuperset(node["type"] for node in graph["nodes"])]
        return web.json_response({PACK: names})

    async def get_template(self, request: web.Request) -> web.StreamResponse:
        return send_file(below(TEMPLATES, request.match_info["name"]))

    async def get_image(self, request: web.Request) -> web.StreamResponse:
        """Return a file that a node has written; the page names it as the node reported it."""
        if request.query.get("type", "output") != "output":
            return web.json_response({"error": "type must be output: this server keeps no other images"}, status=404)
        subfolder, name = request.query.get("subfolder", ""), request.query.get("filename", "")
        return send_file(below(Path(folder_paths.get_output_directory()), f"{subfolder}/{name}" if subfolder else name))

    # -- the user's files

    async def get_users(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"storage": "server", "migrated": True})

    async def get_settings(self, request: web.Request) -> web.StreamResponse:
        """Return the settings, or one of them.

        The tutorial is never over here: with it the page opens the template that the address names, or the list
        of templates; without it a graph of ComfyUI's own nodes, which this server does not have.
        """
        settings = {**DEFAULT_SETTINGS, **self.user.settings(), "Comfy.TutorialCompleted": False}
        id = request.match_info.get("id")
        return web.json_response(settings if id is None else settings.get(id))

    async def post_settings(self, request: web.Request) -> web.StreamResponse:
        content = await read_json(request)
        changes = {request.match_info["id"]: content} if "id" in request.match_info else content
        if not isinstance(changes, dict):
            raise InvalidInput("settings must be a JSON object of ids and values")
        self.user.change_settings(changes)
        return web.Response()

    async def list_user_files(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("dir", "")
        recurse, full = (request.query.get(key) == "true" for key in ("recurse", "full_info"))
        files = self.user.list_files(name, recurse=recurse) if name else []
        described = [self.user.describe(path, below=self.user.path(name.rstrip("/"))) for path in files]
        return web.json_response(described if full else [file["path"] for file in described])

    async def get_user_file(self, request: web.Request) -> web.StreamResponse:
        return send_file(self.user.path(request.match_info["file"]))

    async def post_user_file(self, request: web.Request) -> web.StreamResponse:
        overwrite = request.query.get("overwrite", "true") != "false"
        try:
            content = await read_body(request)
            path = await asyncio.to_thread(self.user.write, request.match_info["file"], content, overwrite=overwrite)
        except FileExistsError:
            return web.json_response({"error": "the file already exists"}, status=409)
        return self.answer_stored(request, path)

    async def delete_user_file(self, request: web.Request) -> web.StreamResponse:
        try:
            self.user.delete(request.match_info["file"])
        except FileNotFoundError:
            return web.json_response({"error": "no such file"}, status=404)
        return web.Response(status=204)

    async def move_user_file(self, request: web.Request) -> web.StreamResponse:
        overwrite = request.query.get("overwrite") == "true"
        names = request.match_info
        try:
            path = self.user.move(names["file"], names["target"], overwrite=overwrite)
        except FileNotFoundError:
            return web.json_response({"error": "no such file"}, status=404)
        except FileExistsError:
            return web.json_response({"error": "the file already exists"}, status=409)
        return self.answer_stored(request, path)

    def answer_stored(self, request: web.Request, path: Path) -> web.Response:
        file = self.user.describe(path)
        return web.json_response(file if request.query.get("full_info") == "true" else file["path"])


async def answer_no_style(request: web.Request) -> web.StreamResponse:
    """The page asks for the user's own style sheet at every start."""
    return web.Response(content_type="text/css")
