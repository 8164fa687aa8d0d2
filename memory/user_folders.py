"""Where this user's files lie: what can be made again, and what the user made."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cache_folder", "data_folder"]

APP_NAME = "highwater"


def cache_folder() -> Path | None:
    """Return the folder of what can be made again; it need not exist. None where the user has no home.

    ``$XDG_CACHE_HOME/highwater`` or ``~/.cache/highwater`` on Linux, the system's own place elsewhere. A relative
    XDG_CACHE_HOME is ignored, as its specification says.
    """
    return below_home("cache", Path(".cache"))


def data_folder() -> Path | None:
    """Return the folder of what the user made, such as saved workflows, with XDG_DATA_HOME likewise."""
    return below_home("data", Path(".local", "share"))


def below_home(kind: str, usual: Path) -> Path | None:
    import platformdirs

    find = {"cache": platformdirs.user_cache_path, "data": platformdirs.user_data_path}[kind]
    try:
        folder = find(APP_NAME, appauthor=False)
        return folder if folder.is_absolute() else Path.home() / usual / APP_NAME  # some versions take a relative one
    except RuntimeError:
        return None
