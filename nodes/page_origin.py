"""Whether a request comes from a page of another site. The same for ComfyUI's server and for our own.

A browser sets three headers that a page cannot choose: ``Host``, ``Origin`` and ``Sec-Fetch-Site``. Programs
that are no browsers send none of the last two.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["is_foreign"]

END_OF_HOST = re.compile(r"[/?#]")


def is_foreign(request: web.Request, host: str) -> bool:
    """Whether a page of another site makes a request; following a link from there is allowed.

    Args:
        host: what the request's ``Host`` says.
    """
    headers = request.headers
    origins = headers.getall("Origin", [])
    if any(not same_host(origin, host) for origin in origins):
        return True
    reads = request.method in ("GET", "HEAD")
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        follows = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
        return not (reads and follows)
    # Browsers of before 2020 may send a form with no more than this.
    return not reads and not origins and "Referer" in headers and not same_host(headers["Referer"], host)


def same_host(url: str, host: str) -> bool:
    """Whether an address is below this host and port, as a browser writes them."""
    scheme, _, rest = url.partition("://")
    return scheme in ("http", "https") and END_OF_HOST.split(rest, 1)[0].lower() == host.lower()
