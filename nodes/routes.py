"""What the page asks ComfyUI's server about memory: the report, and to free what is idle."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ..memory import existing_manager
from .boundaries import features

if TYPE_CHECKING:
    from ..memory import MemoryManager

__all__ = ["add_routes", "free_idle", "make_report"]


def add_routes(server: Any) -> None:
    """Add our addresses to the host's ``PromptServer``, before it listens."""
    from aiohttp import web

    from ..memory.errors import InvalidInput

    @server.routes.get("/highwater/report")
    async def get_report(request: web.Request) -> web.StreamResponse:
        """Return the report; ``?only=nodes,components`` leaves out the rest, which can be long."""
        try:
            return web.json_response(await asyncio.to_thread(make_report, request.query.get("only")))
        except InvalidInput as error:
            return web.json_response({"error": str(error)}, status=400)

    @server.routes.post("/highwater/free")
    async def post_free(request: web.Request) -> web.StreamResponse:
        """Evict every idle component; not while a prompt runs, which would load it all again."""
        running, _ = server.prompt_queue.get_current_queue_volatile()
        if running:
            return web.json_response({"error": "a prompt is running; cancel it or wait for it"}, status=409)
        manager = existing_manager()
        freed = await asyncio.to_thread(free_idle, manager) if manager is not None else {}
        return web.json_response({"freed_bytes": freed})


def make_report(only: str | None = None) -> dict[str, Any]:
    """Return the manager's report and what of it this host lets be in effect; no manager is made for it.

    Args:
        only: comma-separated names of the wanted parts.

    Raises:
        InvalidInput: a name is no part of the report.
    """
    from ..memory.errors import InvalidInput, allowed_values
    from ..memory.manager.report import Report

    manager = existing_manager()
    empty = Report(devices=[], components=[], nodes=[], runs=[], events=[], samples=[])
    report = (empty.to_json() if manager is None else manager.report()) | {"host_features": features()}
    if only is None:
        return report
    wanted = only.split(",")
    for name in wanted:
        if name not in report:
            raise InvalidInput(f"only={name!r} is no part of the report; {allowed_values(name, report)}")
    return {name: part for name, part in report.items() if name in (*wanted, "version")}


def free_idle(manager: MemoryManager) -> dict[str, int]:
    """Evict every idle component, and return the driver its memory; returns the bytes freed per device."""
    freed = {}
    for device in manager.devices.values():
        if not device.is_cpu:
            freed[device.name] = manager.free_memory(device.name, device.total_bytes(), "asked for in the page")
            device.module.empty_cache()
    return freed
