"""Reading requests and answering them, for all routes of the page."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from ..memory.errors import InvalidInput

__all__ = ["Handler", "Route", "answer_with", "read_count", "read_json", "read_object", "send_file", "texts"]

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
    "Content-Security-Policy": "sandbox",
    "X-Content-Type-Options": "nosniff",
}


def send_file(path: Path) -> web.StreamResponse:
    if not path.is_file():
        return web.json_response({"error": "no such file"}, status=404)
    return web.FileResponse(path, headers=FILE_HEADERS)


async def read_json(request: web.Request) -> Any:
    try:
        return json.loads(await request.read() or b"{}")
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"the request is not valid JSON: {error}") from None


async def read_object(request: web.Request) -> dict[str, Any]:
    content = await read_json(request)
    if not isinstance(content, dict):
        raise InvalidInput("the request is not a JSON object")
    return content


def read_count(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not text.isdecimal():
        raise InvalidInput(f"{name}={text!r} is not allowed; allowed: a whole number from 0")
    return int(text)


def texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list | tuple) else []
