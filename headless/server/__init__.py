"""ComfyUI's web page without ComfyUI's backend: its routes, its queue of prompts, its files."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "address": ["DEFAULT_PORT", "LOOPBACK"],
        "app": ["serve"],
    },
)
