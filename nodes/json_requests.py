"""Reads requests that change something: JSON from our own pages and from programs, and nothing else.

[Note: own pages] A page of another site can make a browser post to this machine. ComfyUI refuses that only under the
names of this machine, and not with ``--enable-cors-header``; here it is refused always. What a browser sends without
asking first (a form, an image) cannot be ``application/json``, and what it asks first about has an ``Origin``.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from ..memory.errors import InvalidInput, one_line, quoted
from .json_schema import Schema, check_json
from .page_origin import is_foreign

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["Refused", "read_request"]

MAX_BYTES = 64 << 10
TIMEOUT_S = 30.0
JSON = "application/json"


class Refused(Exception):
    """A request is refused with a ``status`` of HTTP, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(one_line(message))
        self.status = status


async def read_request(request: web.Request, schema: Schema) -> dict[str, Any]:
    """Return the body of a request that changes something.

    Raises:
        Refused: another site's page sends it (403), or it is not JSON (415).
        InvalidInput: it cannot be read, or is not what the schema allows.
    """
    hosts = request.headers.getall("Host", [])
    if len(hosts) != 1 or is_foreign(request, hosts[0]):
        raise Refused(403, "requests from pages of other sites are refused; a proxy must pass the header Host on")
    if request.content_type != JSON:
        raise Refused(415, f"the request's Content-Type is {quoted(request.content_type)}; allowed: {JSON}")
    if request.query:
        raise InvalidInput(f"{quoted(next(iter(request.query)))} is in the address; send it in the body, as JSON")
    try:
        body = await asyncio.wait_for(read_body(request), TIMEOUT_S)
    except asyncio.TimeoutError:
        raise InvalidInput(f"the request was not complete after {TIMEOUT_S:g} s; send it again") from None
    found = parse_body(body)
    check_json(found, schema, "the request")
    return dict(found)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request; stops where it is too long, unpacked or not."""
    from aiohttp import web

    body = bytearray()
    try:
        async for part in request.content.iter_any():
            body += part
            if len(body) > MAX_BYTES:
                raise InvalidInput(f"the request is too long; allowed: at most {MAX_BYTES} bytes")
    except web.RequestPayloadError as error:
        raise InvalidInput(f"the request cannot be read: {error}") from None
    return bytes(body)


def parse_body(body: bytes) -> Any:
    """Return what a JSON text holds. Raises `InvalidInput`."""
    try:
        return json.loads(body.decode(), parse_constant=refuse_constant)
    except RecursionError:
        raise InvalidInput("the request is nested too deeply") from None
    except ValueError as error:  # also of text that is no UTF-8, and of numbers with thousands of digits
        raise InvalidInput(f"the request is not valid JSON: {error}") from None


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
