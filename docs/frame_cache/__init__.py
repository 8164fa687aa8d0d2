"""A custom node pack with a cache of its own, which Highwater shows and may ask for: see docs/pack_authors.md."""

import torch
from comfy.model_management import get_torch_device

import nodes

frames: dict[str, torch.Tensor] = {}
registered = []


def count_bytes():
    found = {}
    for frame in frames.values():
        found[frame.device] = found.get(frame.device, 0) + frame.nbytes
    return found


def free(device, num_bytes):
    """Drop the oldest frames until so many bytes are free. All of them are on one device here."""
    while frames and num_bytes > 0:
        num_bytes -= frames.pop(next(iter(frames))).nbytes


def register():
    """Register the cache when it is first used: when this file is imported, Highwater may not be loaded yet."""
    highwater = nodes.NODE_CLASS_MAPPINGS.get("HighwaterMemoryReport")
    if highwater is not None and not registered and hasattr(highwater, "register_component"):
        registered.append(highwater.register_component("frame cache", count_bytes, evict=free))


class CacheFrames:
    INPUT_TYPES = classmethod(lambda cls: {"required": {"image": ("IMAGE",), "name": ("STRING", {"default": "a"})}})
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "cache"
    CATEGORY = "example"

    def cache(self, image, name):
        register()
        frames[name] = image.to(get_torch_device())
        for cache in registered:
            cache.used()
        return (frames[name].to(image.device),)


NODE_CLASS_MAPPINGS = {"ExampleCacheFrames": CacheFrames}
