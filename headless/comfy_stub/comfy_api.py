"""Stand-ins for ``comfy_api.latest`` and ``folder_paths``, so that the very same node classes run without ComfyUI.

Only what our node files import is here. Where the real packages are installed nothing is replaced.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from . import comfy_io, comfy_ui, folder_paths

__all__ = ["ComfyAPISync", "ComfyExtension", "executing_node", "install", "list_node_classes", "object_info"]

PYTHON_MODULE = "custom_nodes.highwater"

# What a progress report of the node that now runs is passed to.
on_progress: ContextVar[Callable[[float, float], None] | None] = ContextVar("on_progress", default=None)


class ComfyExtension(ABC):
    """What an extension module gives the host: its nodes."""

    async def on_load(self) -> None:  # noqa: B027 (optional in the host, too)
        """Called once by the host before any node is listed."""

    @abstractmethod
    async def get_node_list(self) -> list[type[comfy_io.ComfyNode]]:
        """Return the node classes."""


class ComfyAPISync:
    """The host's services for nodes."""

    class Execution:
        @staticmethod
        def set_progress(value: float, max_value: float) -> None:
            """Report progress of the node that now runs; raises what ends the run when it was interrupted."""
            report = on_progress.get()
            if report is None:
                raise ValueError("set_progress was called outside of a node")
            report(value, max_value)

    def __init__(self) -> None:
        self.execution = self.Execution()


def install() -> None:
    """Make ``comfy_api.latest`` and ``folder_paths`` importable; idempotent, and nothing where ComfyUI is.

    Also keeps the Hugging Face libraries from asking the network, which they do even for local folders.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "comfy_api" in sys.modules or importlib.util.find_spec("comfy_api") is not None:
        return
    package, latest = ModuleType("comfy_api"), ModuleType("comfy_api.latest")
    package.__path__ = []
    contents = {
        "io": comfy_io,
        "ui": comfy_ui,
        "ComfyExtension": ComfyExtension,
        "ComfyAPISync": ComfyAPISync,
    }
    for name, value in contents.items():
        setattr(latest, name, value)
    package.latest = latest  # type: ignore[attr-defined]
    sys.modules.update({"comfy_api": package, "comfy_api.latest": latest, "folder_paths": folder_paths})


def list_node_classes() -> dict[str, type[comfy_io.ComfyNode]]:
    """Return our nodes by id; imports neither torch nor diffusers."""
    install()
    from ...nodes.extension import NODE_CLASSES

    return {node_class.GET_SCHEMA().node_id: node_class for node_class in NODE_CLASSES}


def object_info(node_classes: Iterable[type[comfy_io.ComfyNode]] | None = None) -> dict[str, Any]:
    """Return what ComfyUI's ``/object_info`` reports for the classes (ours by default), as JSON would hold it."""
    classes = list_node_classes().values() if node_classes is None else node_classes
    infos = [node_class.GET_SCHEMA().node_info(PYTHON_MODULE) for node_class in classes]
    return {info["name"]: info for info in infos}


@contextmanager
def executing_node(report: Callable[[float, float], None]) -> Iterator[None]:
    """While a node runs in this context, its progress goes to ``report``."""
    token = on_progress.set(report)
    try:
        yield
    finally:
        on_progress.reset(token)
