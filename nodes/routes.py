"""The addresses that the page uses: the report, freeing idle models, and the commands' answers.

The same in ComfyUI and in our own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..memory import default_manager, existing_manager
from .boundaries import features, loader_rows
from .host.waiting_queue import read_queue

if TYPE_CHECKING:
    from aiohttp import web

    from ..memory import MemoryManager

__all__ = ["PROMPT_RUNS", "Route", "add_routes", "make_routes"]

PROMPT_RUNS = "a prompt is running; cancel it, or wait until it ends"
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]
Route = tuple[str, str, Handler]


def add_routes(server: Any) -> None:
    """Add our addresses to ComfyUI's ``PromptServer``, before it listens."""

    def is_running() -> bool:
        return bool(read_queue(server).running)

    def seeing_models() -> AbstractContextManager[None]:
        from .host import seeing_loaded_models

        return seeing_loaded_models(idle=not is_running())

    for method, path, handler in make_routes(
        is_running=is_running, host_features=features, find_loaders=loader_rows, seeing_models=seeing_models
    ):
        server.routes.route(method, path)(handler)


def make_routes(
    *,
    is_running: Callable[[], bool],
    host_features: Callable[[], Mapping[str, bool | str]],
    examine: Callable[[], dict[str, Any]] | None = None,
    find_manager: Callable[[], MemoryManager | None] = existing_manager,
    find_loaders: Callable[[], list[dict[str, Any]]] = list,
    seeing_models: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[Route]:
    """Return our addresses with what answers them.

    Args:
        is_running: whether the host runs a prompt now.
        host_features: what of the report this host keeps up to date, and why not the rest.
        examine: says whether the pack is in effect; looks at the ComfyUI that this process is by default.
        find_manager: returns the manager; None: there is none yet. Only what needs one makes it, and ``follow``.
        find_loaders: returns which components each loader shows (`Loaders.rows`).
        seeing_models: makes the manager see, in its body, what the host has loaded by itself.
    """
    from aiohttp import web

    from ..memory.errors import DoesNotFit, InvalidInput, UnsafeState
    from . import memory_requests

    async def sending(tell: Callable[[], dict[str, Any]]) -> web.StreamResponse:
        """Send what a function returns, or its error; it runs in a thread beside the event loop."""
        try:
            return web.json_response(await asyncio.to_thread(tell))
        except memory_requests.NotThere as error:
            return web.json_response({"error": str(error)}, status=404)
        except (InvalidInput, DoesNotFit) as error:
            return web.json_response({"error": str(error)}, status=400)
        except UnsafeState as error:
            return web.json_response({"error": str(error)}, status=409)

    def telling(tell: Callable[[Mapping[str, str]], dict[str, Any]]) -> Handler:
        """Return a handler that passes the words of an address to a function."""

        async def answer(request: web.Request) -> web.StreamResponse:
            return await sending(partial(tell, request.query))

        return answer

    def changing(path: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Route:
        """Return the address of a function that changes something: it takes JSON from our own pages and programs."""

        async def answer(request: web.Request) -> web.StreamResponse:
            from .json_requests import Refused, read_request
            from .route_schemas import REQUESTS

            try:
                body = await read_request(request, REQUESTS[path])
            except Refused as error:
                return web.json_response({"error": str(error)}, status=error.status)
            except InvalidInput as error:
                return web.json_response({"error": str(error)}, status=400)
            return await sending(partial(change, body))

        return "POST", path, answer

    def requesting(path: str, name: str) -> Route:
        """Return the address of what is asked of the manager (`memory_requests.py`)."""

        def ask(body: Mapping[str, Any]) -> dict[str, Any]:
            found = manager()
            found.commands.ask_before_moving(is_running)
            with seeing_models() if name in ("keep", "lend", "move", "release") else nullcontext():
                answer: dict[str, Any] = getattr(memory_requests, name)(found, body)
            return answer

        return changing(path, ask)

    def asked() -> ModuleType:
        """Import what answers when it is asked: it is no part of a host's start."""
        from . import command_answers

        return command_answers

    def manager() -> MemoryManager:
        return find_manager() or default_manager()

    def set_default(body: Mapping[str, Any]) -> dict[str, Any]:
        from .default_profile import set_default_profile

        return set_default_profile(body)

    def tell_devices() -> dict[str, Any]:
        return asked().describe_devices(manager(), asked().start_environment(), is_host=examine is None)

    def tell_findings() -> dict[str, Any]:
        return asked().examine_host(host_features()) if examine is None else examine()

    def tell_report(words: Mapping[str, str]) -> dict[str, Any]:
        """Return the report; ``?only=nodes,components`` leaves out the rest, ``limit=all`` nothing of it.

        ``after=12.5`` leaves out what was over by then.
        """
        from .report_answers import REPORT_WORDS, check_words, make_report

        check_words(words, REPORT_WORDS)
        only, limit, after = words.get("only"), words.get("limit"), words.get("after")
        return make_report(find_manager(), host_features(), only, find_loaders, limit, after)

    def tell_events(words: Mapping[str, str]) -> dict[str, Any]:
        from .report_answers import select_events

        return select_events(find_manager(), words)

    async def get_findings(request: web.Request) -> web.StreamResponse:
        """Return what `nodes/doctor.py` finds: text for a browser's window, JSON for all others."""
        findings = await asyncio.to_thread(tell_findings)
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(text=asked().findings_text(findings))
        return web.json_response(findings)

    def free_idle() -> dict[str, Any]:
        """Evict every idle component; not while a prompt runs, which would load it all again."""
        if is_running():
            raise UnsafeState(PROMPT_RUNS)
        found = find_manager()
        if found is None:
            return {"freed_bytes": {}}
        found.commands.ask_before_moving(is_running)
        return {"freed_bytes": found.commands.free_between_runs("released on request")}

    return [
        ("GET", "/highwater/report", telling(tell_report)),
        ("GET", "/highwater/events", telling(tell_events)),
        changing("/highwater/follow", lambda _: {"devices": [*manager().devices]}),
        changing("/highwater/free", lambda _: free_idle()),
        requesting("/highwater/lend", "lend"),
        requesting("/highwater/lend/give-back", "give_back"),
        requesting("/highwater/keep", "keep"),
        requesting("/highwater/release", "release"),
        requesting("/highwater/move", "move"),
        requesting("/highwater/limits", "set_limits"),
        requesting("/highwater/watermark", "set_watermarks"),
        requesting("/highwater/look-ahead", "look_ahead"),
        changing("/highwater/default-profile", set_default),
        ("GET", "/highwater/profiles", telling(lambda _: asked().describe_profiles())),
        ("GET", "/highwater/devices", telling(lambda _: tell_devices())),
        ("GET", "/highwater/plan", telling(lambda words: asked().plan_models(manager(), words.items()))),
        ("GET", "/highwater/doctor", get_findings),
        ("GET", "/highwater/needs", telling(lambda _: list_needs())),
        changing("/highwater/tiny-pipelines", lambda _: asked().make_tiny_pipelines()),
        changing("/highwater/needs/forget", lambda _: list_needs(forgets=True)),
    ]


def list_needs(*, forgets: bool = False) -> dict[str, Any]:
    """Return what was learned of models' needs, or delete it: what this process has read it knows until it ends."""
    from ..memory.manager.default import needs_path
    from .learned_needs import describe_needs, forget_needs

    path = needs_path()
    return {"files": (forget_needs if forgets else describe_needs)([path] if path is not None else [])}
