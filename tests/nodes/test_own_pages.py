"""What changes something takes JSON from our own pages and from programs, and says why it takes nothing else."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from highwater.memory.errors import InvalidInput
from highwater.nodes import json_requests
from highwater.nodes.json_requests import parse_body
from highwater.nodes.json_schema import find_fault
from highwater.nodes.route_schemas import REQUESTS
from highwater.nodes.routes import make_routes

ROUTES = make_routes(is_running=bool, host_features=dict, find_manager=lambda: None)
CHANGING = sorted(path for method, path, _ in ROUTES if method == "POST")
JSON = {"Content_Type": "application/json"}


def post(path: str, body: bytes = b"{}", host: str | None = None, **headers: str) -> tuple[int, Any]:
    """Post bytes to a server of its own; returns the status, and the error or the answer. OWN is its origin."""

    async def main() -> tuple[int, Any]:
        app = web.Application()
        for method, address, handler in ROUTES:
            app.router.add_route(method, address, handler)
        async with TestClient(TestServer(app)) as client:
            named = f"{client.host}:{client.port}" if host is None else host
            sent = {name.replace("_", "-"): text.replace("OWN", f"http://{named}") for name, text in headers.items()}
            response = await client.post(path, data=body, headers={"Host": named, **sent})
            answer = await response.json()
            return response.status, answer.get("error", answer)

    return asyncio.run(main())


def test_every_address_that_changes_something_has_a_schema() -> None:
    assert sorted(REQUESTS) == CHANGING
    assert {method for method, _, _ in ROUTES} == {"GET", "POST"}


@pytest.mark.parametrize("path", CHANGING)
def test_other_sites_change_nothing(path: str) -> None:
    """ComfyUI itself would let them under any name but this machine's, and with --enable-cors-header."""
    for host in (None, "box.local:8188", "10.0.0.5", "[fe80::1]:8188"):
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": ""},
            {"Origin": "file://"},
            {"Origin": "OWN.evil.example"},
            {"Origin": "OWN", "Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
            {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
            {"Referer": "http://evil.example/page"},
        ):
            status, error = post(path, host=host, **headers, **JSON)
            assert status == 403 and "other sites" in error, headers


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Type": ""},
        {"Content_Type": "text/plain"},
        {"Content_Type": "application/x-www-form-urlencoded"},
        {"Content_Type": "multipart/form-data; boundary=a"},
        {"Content_Type": "text/plain; a=application/json"},
        {"Content_Type": "application/jsonp"},
    ],
)
def test_what_a_form_of_any_site_may_send_is_not_read(path: str, headers: dict[str, str]) -> None:
    status, error = post(path, **headers)
    assert status == 415 and "allowed: application/json" in error


def test_our_own_page_and_programs_are_heard() -> None:
    for headers in (
        {},
        {"Origin": "OWN"},
        {"Origin": "OWN", "Sec_Fetch_Site": "same-origin", "Referer": "OWN/"},
        {"Sec_Fetch_Site": "none"},
    ):
        for content_type in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
            for host in (None, "box.local:8188"):
                assert post("/highwater/free", host=host, Content_Type=content_type, **headers) == (
                    200,
                    {"freed_bytes": {}},
                )


@pytest.mark.parametrize("path", CHANGING)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "allowed: an object"),
        (b"null", "allowed: an object"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": Infinity}', "Infinity is no number"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 60_000, "nested too deeply"),
        (b'{"path": "/etc/passwd"}', "'path' is unknown"),
        (b" " * (65 << 10), "too long"),
    ],
)
def test_a_body_that_cannot_be_used_is_one_line(path: str, body: bytes, told: str) -> None:
    needed = REQUESTS[path]["required"]
    status, error = post(path, body, **JSON)
    assert status == 400 and (told in error or (needed and f"{needed[0]} is missing" in error)), error
    assert len(error.splitlines()) == 1 and len(error) < 400


def test_words_of_the_address_are_not_read() -> None:
    status, error = post("/highwater/keep?component=a", **JSON)
    assert status == 400 and "'component' is in the address; send it in the body, as JSON" in error


def test_a_body_that_unpacks_to_much_more_is_cut_short() -> None:
    packed = {"Content_Type": "application/json", "Content_Encoding": "gzip"}
    status, error = post("/highwater/free", gzip.compress(b" " * (32 << 20)), **packed)
    assert status == 400 and "too long" in error
    assert post("/highwater/free", gzip.compress(b"{}"), **packed) == (200, {"freed_bytes": {}})
    status, error = post("/highwater/free", b"no such thing" * 9, **packed)
    assert status == 400


def test_a_body_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_requests, "TIMEOUT_S", 0.2)

    async def main() -> bytes:
        app = web.Application()
        for method, address, handler in ROUTES:
            app.router.add_route(method, address, handler)
        async with TestServer(app) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            head = b"POST /highwater/free HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(head + b"Content-Length: 9\r\n\r\n{")
            answer = await asyncio.wait_for(reader.read(), timeout=60)
            writer.close()
            return answer

    answer = asyncio.run(main())
    assert b" 400 Bad Request" in answer and b"not complete after 0.2 s" in answer


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted({name for schema in REQUESTS.values() for name in schema["properties"]})


@settings(max_examples=300)
@given(st.sampled_from(CHANGING), VALUES | st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_whatever_a_body_holds_is_taken_or_refused_in_one_line(path: str, value: Any) -> None:
    """And what is taken has the types of its schema."""
    fault = find_fault(value, REQUESTS[path], "the request")
    if fault is not None:
        assert str(InvalidInput(fault)).isprintable() and len(fault) < 600
        return
    fields = REQUESTS[path]["properties"]
    assert set(REQUESTS[path]["required"]) <= value.keys() <= fields.keys()
    types = {"string": str, "integer": int, "boolean": bool, "null": type(None)}
    for name, part in value.items():
        allowed = fields[name]["type"]
        allowed = [allowed] if isinstance(allowed, str) else allowed
        assert type(part) in [types[kind] for kind in allowed]


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,0e-+NaIt\\', max_size=20).map(str.encode))
def test_any_bytes_are_json_or_one_line(body: bytes) -> None:
    try:
        found = parse_body(body)
    except InvalidInput as error:
        assert str(error).isprintable() and len(str(error)) < 400
    else:
        json.dumps(found)
