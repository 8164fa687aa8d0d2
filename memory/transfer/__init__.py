"""Devices and copies to them: page-locked host memory, slabs, bounce buffers, link speeds, and the copy stream. The
only folder that uses device streams and events.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "device_facts": ["DeviceFacts", "find_doubles", "read_facts"],
        "devices": [
            "WITH_FLOAT8",
            "AllocatorBytes",
            "Card",
            "Device",
            "DeviceMemory",
            "HostMemory",
            "find_device",
            "list_devices",
            "list_doubles",
            "peers_of",
        ],
        "pinned_memory": [
            "ArenaLock",
            "HostSlab",
            "allocate_slab",
            "count_slabs",
            "pin_limit_bytes",
            "pinned_used_bytes",
        ],
        "link_speed": ["describe_link", "known_link", "link_bytes_per_s", "remember_links_in", "state_links"],
        "slabs": ["Form", "SlabLayout", "allocate_device"],
        "timing": ["CallTimes", "PassTimes", "Stopwatch"],
        "copy_stream": ["CopyStream", "LastUse"],
        "hop_streams": ["send_beside"],
        "micro_streams": ["MicroStreams"],
        "host_heap": ["describe_return", "give_back_heap", "has_trim"],
        "bounce_buffers": ["BounceBuffers", "WindowCopies", "allocate_slabs"],
        "peer_copies": ["PeerCopies"],
    },
)
