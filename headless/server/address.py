"""Where the page is served unless the user says otherwise; imports nothing, as the command line's help names it."""

__all__ = ["DEFAULT_PORT", "LOOPBACK"]

LOOPBACK = "127.0.0.1"
# ComfyUI's own, so that bookmarks work.
DEFAULT_PORT = 8188
