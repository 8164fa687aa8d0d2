"""Asks the ComfyUI, or the Highwater server, that runs: one client for all commands."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import Future, wait
from typing import Any

from ...memory.errors import InvalidInput, one_line, quoted

__all__ = ["HostFailed", "ask", "given"]

NOTICE_S = 3.0
"""After so long without an answer, standard error says for what the command waits."""
TIMEOUT_S = 120.0


class HostFailed(RuntimeError):
    """The host is not there, or cannot do what was asked."""


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post to a host and return its answer; no proxy stands between. Waits up to `TIMEOUT_S`, and says so.

    Args:
        body: sent as JSON.

    Raises:
        InvalidInput: not an address, or the host calls a value invalid or knows nothing of that name.
        HostFailed: no host answers there in time, or it refuses.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        has_host = bool(parts.hostname) and parts.port != 0  # raises where it is no port
        is_url = parts.scheme in ("http", "https") and has_host and not parts.query and not parts.fragment
    except ValueError:
        is_url = False
    if not is_url or not url.isprintable() or " " in url:
        raise InvalidInput(f"--url {quoted(url)} is no address; allowed: such as http://127.0.0.1:8188")
    headers = {"Content-Type": "application/json"}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, json.dumps(body).encode(), headers, method="POST")
        answer = fetch_in_time(request, url)
    except urllib.error.HTTPError as error:
        refused = read_error(error)
        if refused is None:
            where = error.url.partition("?")[0]
            raise HostFailed(f"the host at {where} answers HTTP {error.code}: is Highwater installed there?") from error
        if error.code in (400, 404):
            raise InvalidInput(refused) from error
        raise HostFailed(refused) from error
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise HostFailed(f"no Highwater answers at {url}: {reason}; name its host with --url") from error
    if not isinstance(answer, dict):
        raise HostFailed(f"what answers at {url} is not Highwater; name its host with --url")
    return answer


def fetch_in_time(request: urllib.request.Request, url: str) -> Any:
    """Return the JSON that a host answers. Raises `HostFailed` when the time is up, else as `fetch`.

    A thread asks: a host that sends one byte now and then would make a socket wait for ever.
    """
    answer: Future[Any] = Future()
    threading.Thread(target=fetch, args=(request, answer), name="highwater-ask", daemon=True).start()
    if wait([answer], NOTICE_S).not_done:
        print(f"highwater: {url} has not answered yet: waiting up to {TIMEOUT_S:g} s", file=sys.stderr, flush=True)
        if wait([answer], TIMEOUT_S - NOTICE_S).not_done:
            raise HostFailed(
                f"{url} has not answered within {TIMEOUT_S:g} s: it is busy or hangs, and may still do what was asked; "
                "look there, or name another host with --url"
            )
    return answer.result()


def fetch(request: urllib.request.Request, answer: Future[Any]) -> None:
    """Send a request, and set what the host answers, or the error."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=TIMEOUT_S + NOTICE_S) as response:
            answer.set_result(json.load(response))
    except BaseException as error:
        answer.set_exception(error)


def read_error(error: urllib.error.HTTPError) -> str | None:
    """Return why a host refuses, in one line; None where it does not say, as a host without Highwater."""
    try:
        told = json.loads(error.read())
        return one_line(str(told["error"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def given(**values: Any) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
