"""The part of ComfyUI's API that our node files use, for running them without ComfyUI."""

from ...memory.lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "comfy_api": ["executing_node", "install", "list_node_classes", "object_info"],
        "comfy_io": ["ComfyNode", "HiddenHolder", "Input", "NodeOutput", "Schema"],
    },
)
