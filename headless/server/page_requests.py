"""Reading requests and answering them, for all routes of the page."""

from __future__ import annotations

import asyncio
import errno
import json
import math
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from ...memory.errors import InvalidInput
from ..runner.workflow_file import reject_constant

__all__ = [
    "MAX_REQUEST_BYTES",
    "Handler",
    "Route",
    "answer_json",
    "answer_with",
    "explain_bad_input",
    "parse_json",
    "read_body",
    "read_count",
    "read_json",
    "read_object",
    "send_file",
    "texts",
    "weigh_json",
]

MAX_REQUEST_BYTES = 64 << 20  # a saved workflow may carry images
MAX_JSON_BYTES = 16 << 20
# Of brackets, braces, commas and colons; a graph of 1,000 nodes with its page has some 100,000.
MAX_JSON_MARKS = 1_000_000
MAX_JSON_DEPTH = 100
MAX_DIGITS = 30
OBJECT_BYTES = 64
BODY_TIMEOUT_S = 120.0

DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EROFS)
NOT_ALLOWED = (errno.EACCES, errno.EPERM)
BAD_NAME = (errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = tuple[str, str, Handler]


def answer_with(content: Any) -> Handler:
    """Return a handler that always answers the same JSON."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(content)

    return answer


# A file that someone else made may be a page: opened by itself, it runs nothing in this one's name.
FILE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "sandbox; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
}


def send_file(path: Path) -> web.StreamResponse:
    if not path.is_file():
        return web.json_response({"error": "no such file"}, status=404)
    return web.FileResponse(path, headers=FILE_HEADERS)


async def read_body(request: web.Request) -> bytes:
    """Return the body of a request; gives up on a body that takes too long.

    Raises:
        InvalidInput: it has not come in time, or is not packed as it says.
    """
    try:
        return await asyncio.wait_for(request.read(), BODY_TIMEOUT_S)
    except web.RequestPayloadError as error:
        reason = " ".join(str(error).split())
        raise InvalidInput(f"the request cannot be read: {reason[:200]}") from None
    except asyncio.TimeoutError:
        raise InvalidInput(f"the request was not complete after {BODY_TIMEOUT_S:g} s; send it again") from None


async def read_json(request: web.Request, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the JSON of a request, read in a thread beside the event loop.

    Raises:
        InvalidInput: it is too long, no JSON, or more than what JSON can hold for a page.
    """
    body = await read_body(request)
    if len(body) > max_bytes:
        raise InvalidInput(f"the request has {len(body)} bytes; allowed: at most {max_bytes}")
    return await asyncio.to_thread(parse_json, body)


def parse_json(body: bytes) -> Any:
    """Return what a JSON text holds; it can be written again as JSON, and costs a bounded number of objects.

    Raises:
        InvalidInput: saying what is wrong with it.
    """
    if count_marks(body) > MAX_JSON_MARKS:
        raise InvalidInput(f"the request contains too many values; allowed: about {MAX_JSON_MARKS}")
    try:
        content = json.loads(
            body or b"{}", parse_int=parse_integer, parse_float=parse_float, parse_constant=reject_constant
        )
    except RecursionError:
        raise InvalidInput(f"the request is nested too deeply; allowed: {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:  # also from the hooks, and of text that is no UTF-8
        raise InvalidInput(f"the request is not valid JSON: {error}") from None
    level, depth = [content], 0
    while level := [inner for value in level for inner in inner_values(value)]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            raise InvalidInput(f"the request is nested too deeply; allowed: {MAX_JSON_DEPTH} levels")
    return content


def count_marks(text: bytes) -> int:
    """Return the largest number of values that a JSON text of these brackets, commas and colons can contain."""
    return sum(map(text.count, b"[{,:"))


def weigh_json(text: bytes) -> int:
    """Estimate the bytes of memory that a JSON text takes when it is parsed: its length, and an object per value."""
    return len(text) + OBJECT_BYTES * count_marks(text)


def inner_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def parse_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits; allowed: at most {MAX_DIGITS}")
    return int(digits)


def parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is too large for a JSON number")
    return number


async def answer_json(content: Any) -> web.Response:
    """Return an answer that may be long: it is written in a thread beside the event loop."""
    text = await asyncio.to_thread(json.dumps, content)
    return web.json_response(text=text)


async def read_object(request: web.Request, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    content = await read_json(request, max_bytes)
    if not isinstance(content, dict):
        raise InvalidInput("the request is not a JSON object")
    return content


def read_count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal() or len(text) > 9:
        raise InvalidInput(f"{name}={text[:50]!r} is not allowed; allowed: a whole number from 0 to 999999999")
    return int(text)


def texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list | tuple) else []


@web.middleware
async def explain_bad_input(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with one line: 400 for values that cannot be used, 507 for a full or read-only disk, 403 where
    the system denies access to a file.
    """
    try:
        return await handler(request)
    except InvalidInput as error:
        return web.json_response({"error": str(error)}, status=400)
    except OSError as error:
        if error.errno in DISK_FULL:
            return web.json_response({"error": f"nothing was saved: {error.strerror}"}, status=507)
        if error.errno in NOT_ALLOWED:
            return web.json_response({"error": f"the system does not allow this: {error.strerror}"}, status=403)
        if error.errno in BAD_NAME:
            return web.json_response(
                {"error": f"this system does not accept the file name: {error.strerror}"}, status=400
            )
        raise
