"""The folders of the user's files: the cache, and data that the user made."""

from __future__ import annotations

from pathlib import Path

__all__ = ["cache_folder", "data_folder"]

APP_NAME = "highwater"


def cache_folder() -> Path | None:
    """Return the folder of cached files, which may not exist yet. None if the user has no home folder.

    ``$XDG_CACHE_HOME/highwater`` or ``~/.cache/highwater`` on Linux, the usual folder on other systems. A relative
    XDG_CACHE_HOME is ignored, as its specification requires.
    """
    return below_home("cache", Path(".cache"))


def data_folder() -> Path | None:
    """Return the folder of data that the user made, such as saved workflows. Uses XDG_DATA_HOME in the same way."""
    return below_home("data", Path(".local", "share"))


def below_home(kind: str, usual: Path) -> Path | None:
    import platformdirs

    find = {"cache": platformdirs.user_cache_path, "data": platformdirs.user_data_path}[kind]
    try:
        folder = find(APP_NAME, appauthor=False)
        # Some versions of platformdirs accept a relative folder.
        return folder if folder.is_absolute() else Path.home() / usual / APP_NAME
    except RuntimeError:
        return None
