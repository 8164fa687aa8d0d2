"""The nodes in the real ComfyUI web page, without ComfyUI's backend.

The page is the installed ``comfyui-frontend-package``; what it asks for is answered by `FileRoutes` and
`RunRoutes`, at the path itself and below ``/api``. Every route exists because that page calls it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from aiohttp import web

from ...memory.errors import InvalidInput
from ..comfy_stub.comfy_api import list_node_classes
from ..comfy_stub.comfy_io import ComfyNode
from ..runner.runner import WorkflowRunner
from .address import DEFAULT_PORT, LOOPBACK
from .page_files import FileRoutes
from .page_guard import ServerNames, add_page_headers, refuse_foreign_requests
from .page_requests import MAX_REQUEST_BYTES, explain_bad_input
from .page_runs import RunRoutes
from .user_directory import UserDirectory, default_user_directory

__all__ = ["make_app", "serve"]

# From a connection, or from the end of its last answer, to the end of the next request's header.
HEADER_TIMEOUT_S = 30.0


def serve(
    runner: WorkflowRunner,
    *,
    host: str = LOOPBACK,
    port: int = DEFAULT_PORT,
    allowed_hosts: Iterable[str] = (),
    announce: Callable[[str], None] | None = None,
) -> None:
    """Serve the page until Ctrl+C; announces its address once it answers, in words by default. Port 0 is a free one.

    Args:
        allowed_hosts: names beside ``host`` under which browsers may ask for it.

    Raises:
        InvalidInput: the page's package is missing, or the address or an allowed name cannot be used.
    """
    app = make_app(runner, list_node_classes(), names=ServerNames.of(host, allowed_hosts))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_forever(app, host, port, announce or announce_in_words))


def announce_in_words(url: str) -> None:
    print(f"Highwater runs at {url} (Ctrl+C stops it)", flush=True)
    if not url.startswith(("http://127.0.0.1:", "http://[::1]:", "http://localhost:")):
        print("Every computer that reaches this address can run workflows and see the images.", flush=True)


async def serve_forever(app: web.Application, host: str, port: int, announce: Callable[[str], None]) -> None:
    app_runner = web.AppRunner(app, access_log=None, shutdown_timeout=2, keepalive_timeout=HEADER_TIMEOUT_S)
    await app_runner.setup()
    try:
        try:
            await web.TCPSite(app_runner, host, port).start()
        except (OSError, OverflowError, UnicodeError) as error:
            raise InvalidInput(describe_bind_error(error, host, port)) from None
        bound_port = app_runner.addresses[0][1]
        shown = f"[{host}]" if ":" in host else host
        announce(f"http://{shown}:{bound_port}/")
        await asyncio.Event().wait()
    finally:
        await app_runner.cleanup()


def describe_bind_error(error: Exception, host: str, port: int) -> str:
    """Return why the address cannot be used, and what to do, in one line."""
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another with --port, or 0 for any free one"
    if isinstance(error, OSError) and error.errno == errno.EACCES:
        return f"port {port} of {host} needs administrator rights; allowed without them: 1024 to 65535"
    return f"cannot listen at {host} port {port}: {error}"


def find_page() -> Path:
    """Return the folder of the page's files.

    Raises:
        InvalidInput: the package that holds them is not installed.
    """
    package = importlib.util.find_spec("comfyui_frontend_package")
    folder = Path(package.origin).parent / "static" if package and package.origin else None
    if folder is None or not (folder / "index.html").is_file():
        raise InvalidInput("the ComfyUI web page is not installed; run: pip install comfyui-frontend-package")
    return folder


def make_app(
    runner: WorkflowRunner,
    node_classes: Mapping[str, type[ComfyNode]],
    *,
    user_directory: Path | None = None,
    names: ServerNames | None = None,
) -> web.Application:
    """Return the application; its worker starts and ends with it.

    Args:
        node_classes: by class id.
        user_directory: where settings and saved workflows are kept; in the user's data folder by default.
        names: of this server; those of a loopback address by default.

    Raises:
        InvalidInput: the page's package is not installed.
    """
    page = find_page()
    guards = [refuse_foreign_requests(names or ServerNames.of(LOOPBACK)), explain_bad_input]
    app = web.Application(middlewares=guards, client_max_size=MAX_REQUEST_BYTES)
    app.on_response_prepare.append(add_page_headers)
    runs = RunRoutes(runner, node_classes)
    files = FileRoutes(page, UserDirectory(user_directory or default_user_directory()))
    for method, path, handler in [*runs.routes(), *files.routes()]:
        for prefix in ("", "/api"):
            app.router.add_route(method, prefix + path, handler)
    files.add_folders(app)
    app.cleanup_ctx.append(runs.run)
    app.on_shutdown.append(runs.close_sockets)
    return app
