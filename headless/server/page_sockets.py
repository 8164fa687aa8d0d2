"""Messages to the open pages, in order for each of them, from any thread."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientConnectionError, WSMsgType, web

__all__ = ["PageSockets"]

MAX_OUTBOX = 4096  # messages that a page has not read
MAX_MESSAGE_BYTES = 1 << 16  # a page only ever sends its feature flags
MAX_ID_LENGTH = 128


@dataclass(eq=False)
class Client:
    """One open page and the messages that it has not taken yet."""

    socket: web.WebSocketResponse
    transport: asyncio.Transport | None = None
    outbox: asyncio.Queue[dict[str, Any]] = field(default_factory=lambda: asyncio.Queue(MAX_OUTBOX))

    async def send_all(self) -> None:
        with contextlib.suppress(ClientConnectionError):  # the page was closed
            while True:
                await self.socket.send_json(await self.outbox.get())

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class PageSockets:
    """The open pages by client id. Everything but `publish` belongs to the event loop."""

    def __init__(self) -> None:
        self.clients: dict[str, Client] = {}
        self.loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Begin to deliver messages, on the event loop that runs here."""
        self.loop = asyncio.get_running_loop()

    def publish(self, event: str, data: Mapping[str, Any], client_id: str | None = None) -> None:
        """Queue a message for one page, or for all of them; nothing once the loop has ended."""
        if self.loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no page is connected
                self.loop.call_soon_threadsafe(self.deliver, event, data, client_id)

    def deliver(self, event: str, data: Mapping[str, Any], client_id: str | None) -> None:
        for key, client in self.clients.items():
            if client_id in (None, key):
                try:
                    client.outbox.put_nowait({"type": event, "data": data})
                except asyncio.QueueFull:  # it reads nothing any more; a page opens its socket again
                    client.drop()

    async def serve_page(self, request: web.Request, greetings: list[tuple[str, dict[str, Any]]]) -> web.StreamResponse:
        """Hold one page's socket open; it is told its id first, then the greetings meant for that id."""
        client_id = request.query.get("clientId", "")[:MAX_ID_LENGTH] or uuid.uuid4().hex
        socket = web.WebSocketResponse(
            heartbeat=30, max_msg_size=MAX_MESSAGE_BYTES
        )  # a page that went silent is dropped
        await socket.prepare(request)
        client = self.clients[client_id] = Client(socket, request.transport)
        for event, data in greetings:
            self.deliver(event, {**data, "sid": client_id} if event == "status" else data, client_id)
        sender = asyncio.create_task(client.send_all())
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT and '"feature_flags"' in message.data:
                    self.deliver("feature_flags", {}, client_id)
        finally:
            sender.cancel()
            if self.clients.get(client_id) is client:  # not one that came after it under the same id
                del self.clients[client_id]
        return socket

    async def close(self) -> None:
        for client in list(self.clients.values()):
            await client.socket.close()
