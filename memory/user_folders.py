"""The folders of the user's files: the cache, data that the user made, and files of what runs now."""

from __future__ import annotations

import warnings
from pathlib import Path

__all__ = ["cache_folder", "data_folder", "runtime_folder"]

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


def runtime_folder() -> Path | None:
    """Return the folder of files that hold only while programs run, which may not exist yet.

    ``$XDG_RUNTIME_DIR/highwater``, ``/run/user/UID/highwater`` or ``runtime-UID/highwater`` in the folder of temporary
    files on Linux, the usual folder on other systems. None where another user has taken its name, and in a ComfyUI
    whose Python lacks platformdirs: all else works there.
    """
    try:
        import platformdirs
    except ModuleNotFoundError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it takes the third
        try:
            folder = platformdirs.user_runtime_path(APP_NAME, appauthor=False)
        except (OSError, RuntimeError):
            return None
    return folder if folder.is_absolute() else None


def below_home(kind: str, usual: Path) -> Path | None:
    import platformdirs

    find = {"cache": platformdirs.user_cache_path, "data": platformdirs.user_data_path}[kind]
    try:
        folder = find(APP_NAME, appauthor=False)
        # Some versions of platformdirs accept a relative folder.
        return folder if folder.is_absolute() else Path.home() / usual / APP_NAME
    except RuntimeError:
        return None
