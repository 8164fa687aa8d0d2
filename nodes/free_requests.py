"""Hears that the user asks ComfyUI to free its memory.

[Note: hearing of free] ``/free`` only sets flags on the queue. The host's worker takes them when no prompt runs,
unloads its models and forgets all results. It calls no cache provider and no progress handler then, and a model of ours
that leaves does not know why. While a prompt runs the flags are read where it ends (`host/waiting_queue.py`). Between
prompts the worker takes them at once, so the request itself is heard, by ``on_response_prepare`` of the server's
application: aiohttp's public signal for those who only listen. Nothing of the host's is replaced or wrapped, as a
middleware of ours would wrap each of its handlers: the answer is made by then, and is sent as it is. Like all of an
application's signals it is complete when the server starts; packs are loaded before that. Not heard: another pack that
sets the flags between prompts without this address; what is kept then leaves with the next ``/free``, or when RAM is
short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["hear_free_requests"]

FREE_PATHS = ("/free", "/api/free")


def hear_free_requests(server: Any, heard: Callable[[], None]) -> None:
    """Call a function, in another thread, for each request to free memory that the host accepted.

    Args:
        server: the host's ``PromptServer``, before it listens.
    """

    async def hear(request: Any, response: Any) -> None:
        if request.method == "POST" and request.path in FREE_PATHS and response.status < 400:
            await asyncio.to_thread(heard)

    server.app.on_response_prepare.append(hear)
