"""Who reaches the server: this machine's own pages under its own names, and no page of another site."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from aiohttp import WSServerHandshakeError

from highwater.headless.runner.runner import WorkflowRunner
from highwater.headless.server import app as serve
from highwater.headless.server import page_requests
from highwater.headless.server.page_guard import ServerNames
from highwater.memory import MemoryManager
from highwater.memory.errors import InvalidInput

SHOW_FIVE = {
    "1": {"class_type": "ToyNumber", "inputs": {"value": 5}},
    "2": {"class_type": "ToyShow", "inputs": {"value": ["1", 0]}},
}
FOREIGN_HOSTS = [
    "evil.example", "evil.example:8188", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost",
    "10.0.0.5", "192.168.1.5:8188", "localhost:99999", "localhost:8188:1", "localhost@evil.example",
    "evil.example#localhost", "[::2]", "[::1", "::1", "[localhost]", "0x7f000001", "2130706433", "0", "",
    " localhost", "localhost ..", "lоcalhost",
]  # fmt: skip
OWN_HOSTS = [
    "localhost",
    "LOCALHOST:8188",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:1",
    "127.9.9.9",
    "[::1]",
    "[::1]:8188",
]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_local_server_has_local_names_only(host: str) -> None:
    names = ServerNames.of(host)
    assert [name for name in OWN_HOSTS if not names.accept(name)] == []
    assert [name for name in FOREIGN_HOSTS if names.accept(name)] == []


def test_further_names_are_those_that_were_given() -> None:
    names = ServerNames.of("127.0.0.1", ["Box.local", "10.0.0.5", "[fe80::1]"])
    assert all(
        map(names.accept, [*OWN_HOSTS, "box.local", "BOX.LOCAL.:80", "10.0.0.5:8188", "[fe80::1]", "[FE80:0::1]:9"])
    )
    assert not any(map(names.accept, ["evil.example", "box.local.evil.example", "10.0.0.6"]))
    assert ServerNames.of("192.168.1.5").accept("192.168.1.5:8188")
    assert ServerNames.of("box.local").accept("box.local:8188")
    assert not ServerNames.of("192.168.1.5").accept("evil.example")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_server_for_all_has_any_address_and_no_other_name(host: str) -> None:
    """A name leads where its owner wants, from one moment to the next; an address leads to itself."""
    names = ServerNames.of(host)
    assert all(map(names.accept, [*OWN_HOSTS, "10.0.0.5", "192.168.1.5:8188", "[::2]"]))
    assert not any(map(names.accept, ["evil.example", "localhost.evil.example", "0x7f000001", "[::1", ""]))


@pytest.mark.parametrize("name", ["*", "", "a b", "http://box", "box:8188", "box/", "a" * 3000, "-", "ü", "[::"])
def test_an_allowed_name_is_the_name_of_a_host(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a host name; allowed: a name or address") as error:
        ServerNames.of("127.0.0.1", [name])
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8188", "10.0.0.5"])
def test_a_name_that_is_not_ours_reads_and_runs_nothing(with_server, host: str) -> None:
    """DNS rebinding: the foreign site's own name leads to this machine, so that the browser sees one site only."""

    async def body(server):
        own = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        for method, path in (("GET", "/"), ("GET", "/api/history"), ("GET", "/extensions/highwater/extension.js")):
            response = await server.client.request(method, path, headers=own)
            assert response.status == 403
            assert "start it with --allow-host NAME" in await response.text()
        response = await server.client.post("/api/prompt", json={"prompt": SHOW_FIVE}, headers=own)
        assert response.status == 403
        with pytest.raises(WSServerHandshakeError, match="403"):
            await server.client.ws_connect("/ws?clientId=a", headers=own)
        assert await server.get("/history") == {} and (await server.get("/jobs"))["jobs"] == []

    with_server(body)


CROSS = {"Sec-Fetch-Site": "cross-site"}
FOREIGN = {
    "another site": {"Origin": "http://evil.example"},
    "another port": {"Origin": "http://127.0.0.1:1"},
    "another scheme": {"Origin": "file://"},
    "no site": {"Origin": "null"},
    "no address": {"Origin": "http://["},
    "an empty one": {"Origin": ""},
    "no origin told": CROSS | {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    "another port of this machine": {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"},
    "a frame": CROSS | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"},
    "a script": CROSS | {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_pages_of_other_sites_read_and_run_nothing(with_server, kind: str) -> None:
    async def body(server):
        headers = FOREIGN[kind]
        for method, path in (
            ("GET", "/history"),
            ("GET", "/view?filename=a.png"),
            ("POST", "/prompt"),
            ("POST", "/free"),
            ("POST", "/highwater/follow"),
            ("POST", "/highwater/free"),
            ("POST", "/highwater/watermark"),
            ("POST", "/highwater/lend"),
            ("POST", "/highwater/lend/give-back"),
            ("POST", "/highwater/keep"),
            ("POST", "/highwater/release"),
            ("POST", "/highwater/limits"),
            ("POST", "/highwater/look-ahead"),
            ("POST", "/highwater/default-profile"),
        ):
            response = await server.client.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert response.status == 403, (method, path)
        assert (await server.client.delete("/userdata/workflows%2Fa.json", headers=headers)).status == 403
        with pytest.raises(WSServerHandshakeError, match="403"):
            await server.client.ws_connect("/ws", headers=headers)

    with_server(body)


def test_forms_of_other_sites_are_refused(with_server) -> None:
    async def body(server):
        follows = CROSS | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
        for headers in (follows, {"Referer": "http://evil.example/page"}, {"Referer": "about:blank"}):
            response = await server.client.post("/prompt", json={"prompt": SHOW_FIVE}, headers=headers)
            assert response.status == 403
        assert (await server.get("/jobs"))["jobs"] == []

    with_server(body)


def test_our_own_page_and_a_link_to_it_are_served(with_server) -> None:
    async def body(server):
        host = f"{server.client.host}:{server.client.port}"
        own = {"Origin": f"http://{host}", "Referer": f"http://{host}/", "Sec-Fetch-Site": "same-origin"}
        follows = CROSS | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document", "Referer": "http://evil.example"}
        for headers in (own, follows, {}, {"Sec-Fetch-Site": "none"}):
            assert (await server.client.get("/history", headers=headers)).status == 200
        for headers in (own, {}):  # the second is no browser at all
            response = await server.client.post("/prompt", json={"prompt": SHOW_FIVE}, headers=headers)
            assert response.status == 200
        async with server.client.ws_connect("/ws", headers=own) as socket:
            assert (await socket.receive_json())["type"] == "status"

    with_server(body)


def test_no_other_site_shows_the_page_in_a_frame(with_server) -> None:
    async def body(server):
        for path in ("/", "/?template=x", "/history", "/extensions/highwater/extension.js", "/nothing", "/userdata/x"):
            response = await server.client.get(path, allow_redirects=False)
            assert "frame-ancestors 'self'" in response.headers["Content-Security-Policy"], path
            assert response.headers["X-Frame-Options"] == "SAMEORIGIN"
            assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        refused = await server.client.get("/", headers={"Host": "evil.example"})
        assert "frame-ancestors 'self'" in refused.headers["Content-Security-Policy"]

    with_server(body)


# What a socket sends -----------------------------------------------------------------------------------------


async def exchange(server, sent: bytes) -> bytes:
    """Send bytes as they are; return all that comes back until the server hangs up."""
    reader, writer = await asyncio.open_connection(server.client.host, server.client.port)
    try:
        writer.write(sent)
        return await asyncio.wait_for(reader.read(), timeout=60)
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /history HTTP/1.0\r\n\r\n",
        b"GET /history HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"GET /history HTTP/1.1\r\nHost:\r\nConnection: close\r\n\r\n",
        b"GET /history HTTP/1.0\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET http://localhost/history HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",
        b"GET /extensions/highwater/..%5C..%5Csecret HTTP/1.0\r\nHost: localhost\r\n\r\n",
        b"GET /%5C%5Chost%5Cshare%5Cx HTTP/1.0\r\nHost: localhost\r\n\r\n",
        b"GET /x%00 HTTP/1.0\r\nHost: localhost\r\n\r\n",
    ],
)
def test_a_request_without_a_good_host_or_path_is_refused(with_server, sent: bytes) -> None:
    async def body(server):
        status = int((await exchange(server, sent)).split(b" ", 2)[1])
        assert status in (400, 403)

    with_server(body)


def test_an_older_client_is_served_under_our_name(with_server) -> None:
    async def body(server):
        answer = await exchange(server, b"GET /history HTTP/1.0\r\nHost: localhost:8188\r\n\r\n")
        assert b" 200 OK\r\n" in answer

    with_server(body)


@pytest.mark.parametrize("begun", [b"", b"GET /history HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_header_that_never_ends_is_not_waited_for(tmp_path, monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(serve, "HEADER_TIMEOUT_S", 0.3)
    runner = WorkflowRunner(MemoryManager(), models_directory=tmp_path, output_directory=tmp_path)

    async def main() -> None:
        app = serve.make_app(runner, {}, user_directory=tmp_path)
        address = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve.serve_forever(app, "127.0.0.1", 0, address.set_result))
        port = int((await address).rstrip("/").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(begun)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while True:
                    await asyncio.sleep(0.05)
                    writer.write(b"X-Drop: 1\r\n" if begun else b"")

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), timeout=60) == b""  # it hangs up
        for task in (dripping, serving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving

    asyncio.run(main())


def test_a_body_that_never_ends_is_not_waited_for(with_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_requests, "BODY_TIMEOUT_S", 0.2)

    async def body(server):
        for path in (b"/prompt", b"/userdata/a.json", b"/settings"):
            head = b"POST " + path + b" HTTP/1.0\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
            answer = await exchange(server, head)
            assert b" 400 Bad Request" in answer and b"was not complete after 0.2 s" in answer
        assert not list(server.user.rglob("*"))

    with_server(body)
