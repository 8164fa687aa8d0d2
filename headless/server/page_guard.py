"""Decides which requests the server answers: a local server otherwise trusts every request.

[Note: foreign pages] A page of another site can make this machine's browser ask us. It cannot choose three headers:
``Host`` is the name that the browser looked up, which under DNS rebinding is the foreign site's own; ``Origin`` says
whose page asks, of sockets too; ``Sec-Fetch-Site`` says the same where there is no ``Origin``. A request whose ``Host``
is not ours is refused, then one that another site's page makes. A link to the page may be followed from anywhere.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Middleware

from ...memory.errors import InvalidInput
from ...nodes.page_origin import is_foreign
from .page_requests import Handler

__all__ = ["ServerNames", "add_page_headers", "refuse_foreign_requests"]

LOCALHOST = "localhost"
WILDCARDS = ("", "0.0.0.0", "::")
HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?", re.ASCII)
NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*", re.ASCII)

# No other site shows the page in a frame, nor an image of ours on its own.
PAGE_HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "SAMEORIGIN",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerNames:
    """The names under which a browser may look this server up."""

    names: frozenset[str]
    any_address: bool
    """Whether every IP address is accepted as a name: DNS rebinding needs a host name, which an address is not."""

    @classmethod
    def of(cls, host: str, allowed: Iterable[str] = ()) -> ServerNames:
        """Return the names of a server that listens at ``host``; ``allowed`` are further ones.

        Raises:
            InvalidInput: an allowed name is not the name of a host.
        """
        names = {LOCALHOST, *map(check_name, allowed)}
        address = parse_address(host)
        if not (host in WILDCARDS or (address is not None and address.is_loopback)):
            names.add(host.lower())
        return cls(names=frozenset(names), any_address=host in WILDCARDS)

    def accept(self, host: str) -> bool:
        """Whether the value of a ``Host`` header names this server; its port may be one that is forwarded."""
        found = HOST.fullmatch(host)
        if found is None or int(found["port"] or 0) > 65535:
            return False
        name = found["name"].strip("[]").lower().removesuffix(".")
        address = parse_address(name)
        if address is None:
            return name in self.names
        return self.any_address or address.is_loopback or name in self.names or str(address) in self.names


def check_name(name: str) -> str:
    """Return a name of ``--allow-host`` as a header has it, without a port."""
    if parse_address(name) is not None:
        return name.lower()
    found = HOST.fullmatch(name)
    plain = name.lower().removesuffix(".")
    if found is None or found["port"] or not (NAME.fullmatch(plain) or parse_address(plain.strip("[]"))):
        raise InvalidInput(
            f"--allow-host {name[:100]!r} is not a host name; allowed: a name or address such as box.local or 10.0.0.5"
        )
    plain = plain.strip("[]")
    return plain


def parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def refuse_foreign_requests(server: ServerNames) -> Middleware:
    """Return a middleware that refuses what another site's page asks ([Note: foreign pages])."""

    @web.middleware
    async def refuse(request: web.Request, handler: Handler) -> web.StreamResponse:
        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not server.accept(hosts[0]):
            named = repr(hosts[0][:100]) if len(hosts) == 1 else f"{len(hosts)} names"
            raise web.HTTPForbidden(
                text=f"this server does not answer to {named}; open it as localhost, or start it with --allow-host NAME"
            )
        if is_foreign(request, hosts[0]):
            raise web.HTTPForbidden(text="requests from pages of other sites are refused")
        if "\\" in request.path or "\0" in request.path:  # under Windows a path to another host
            raise web.HTTPBadRequest(text="a path must not contain a backslash or a null byte")
        return await handler(request)

    return refuse


async def add_page_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers that keep other sites' pages from showing ours; what a route has set stays."""
    for name, value in PAGE_HEADERS.items():
        response.headers.setdefault(name, value)
