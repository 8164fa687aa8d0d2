"""The server's files: images and the user's own are reached by name, and nothing outside their folders is."""

from __future__ import annotations

import json
import os
from urllib.parse import quote

import pytest

ESCAPES = [
    "../secret.png",
    "sub/../../secret.png",
    "ABSOLUTE",  # stands for the secret's whole path
    "..",
    "",
    "link.png",
    "nul\x00l.png",
]


@pytest.fixture
def with_files(with_server):
    """Run a test body against a server whose folders hold a file, beside a secret."""

    def run(body):
        async def prepared(server):
            for folder in (server.output, server.user):
                (folder / "sub").mkdir(parents=True, exist_ok=True)
                (folder / "sub" / "one.png").write_bytes(b"one")
                os.symlink("../secret.png", folder / "link.png")
            (server.output.parent / "secret.png").write_bytes(b"secret")
            await body(server)

        with_server(prepared)

    return run


def test_an_image_is_found_by_its_name_and_subfolder(with_files):
    async def body(server):
        response = await server.client.get("/api/view?filename=one.png&subfolder=sub&type=output")
        assert response.status == 200 and await response.read() == b"one"
        assert response.headers["Content-Type"] == "image/png"
        assert response.headers["Content-Security-Policy"].startswith("sandbox;")
        assert (await server.client.get("/view?filename=two.png&subfolder=sub")).status == 404
        assert (await server.client.get("/view?filename=one.png&subfolder=sub&type=input")).status == 404

    with_files(body)


@pytest.mark.parametrize("name", ESCAPES)
def test_no_image_outside_the_output_folder_is_sent(with_files, name):
    async def body(server):
        path = name.replace("ABSOLUTE", str(server.output.parent / "secret.png"))
        for query in ({"filename": path}, {"filename": "secret.png", "subfolder": path}):
            response = await server.client.get("/api/view", params={**query, "type": "output"})
            assert response.status in (400, 404)
            assert b"secret" not in (await response.read()).replace(b"secret.png", b"")

    with_files(body)


@pytest.mark.parametrize("name", [name for name in ESCAPES if name])
def test_no_user_file_outside_the_users_folder_is_touched(with_files, name):
    async def body(server):
        secret = server.output.parent / "secret.png"
        outside = quote(name.replace("ABSOLUTE", str(secret)), safe="")
        path = f"/api/userdata/{outside}"
        for method in ("GET", "POST", "DELETE"):
            response = await server.client.request(method, path, data=b"changed" if method == "POST" else None)
            assert response.status in (400, 404, 405), (method, response.status)
        moved = await server.client.post(f"/api/userdata/sub%2Fone.png/move/{outside}")
        assert moved.status in (400, 404, 405)
        assert secret.read_bytes() == b"secret"
        assert (server.user / "sub" / "one.png").read_bytes() == b"one"

    with_files(body)


def test_a_workflow_is_saved_listed_renamed_and_deleted(with_server):
    async def body(server):
        client = server.client
        new = "/api/userdata/workflows%2Fa.json?overwrite=false"
        saved = await client.post(f"{new}&full_info=true", data=b'{"nodes": []}')
        assert (await saved.json())["path"] == "workflows/a.json"
        refused = await client.post(new, data=b"{}")
        assert refused.status == 409
        [listed] = await server.get("/api/userdata?dir=workflows&recurse=true&split=false&full_info=true")
        assert (listed["path"], listed["size"]) == ("a.json", 13)
        moved = await client.post("/api/userdata/workflows%2Fa.json/move/workflows%2Fdeep%2Fb.json?overwrite=false")
        assert await moved.json() == "workflows/deep/b.json"
        assert await server.get("/api/userdata?dir=workflows&recurse=true") == ["deep/b.json"]
        assert await server.get("/api/userdata/workflows%2Fdeep%2Fb.json") == {"nodes": []}
        assert (await client.delete("/api/userdata/workflows%2Fdeep%2Fb.json")).status == 204
        assert (await client.delete("/api/userdata/workflows%2Fdeep%2Fb.json")).status == 404

    with_server(body)


def test_settings_are_kept_in_the_users_folder(with_server):
    async def body(server):
        await server.client.post("/api/settings/Comfy.VueNodes.Enabled", data=b"true")
        await server.client.post("/api/settings", json={"Comfy.Locale": "en", "Comfy.Minimap.Visible": True})
        settings = await server.get("/api/settings")
        assert settings["Comfy.VueNodes.Enabled"] is True and settings["Comfy.Minimap.Visible"] is True
        assert await server.get("/api/settings/Comfy.Locale") == "en"
        assert json.loads((server.user / "comfy.settings.json").read_text())["Comfy.Locale"] == "en"

    with_server(body)


def test_the_page_never_falls_back_to_a_graph_of_nodes_that_are_not_here(with_server):
    async def body(server):
        await server.client.post("/api/settings/Comfy.TutorialCompleted", data=b"true")
        assert (await server.get("/api/settings"))["Comfy.TutorialCompleted"] is False

    with_server(body)


def test_broken_settings_do_not_keep_the_page_from_opening(with_server):
    async def body(server):
        server.user.mkdir(exist_ok=True)
        (server.user / "comfy.settings.json").write_text("{")
        assert "Comfy.TutorialCompleted" in await server.get("/api/settings")

    with_server(body)
