"""Which components may stay on a device: registration, admission, watermarks, eviction, what was learned of needs and
speeds, the event log and the report.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "oom_message": ["read_shortage"],
        "needs_file": ["FILE_NAME", "NeedsFile", "cache_path", "size_text"],
        "needs": ["digest_component"],
        "speeds": ["CallKey", "MeasuredCall", "Speeds", "main_dtype"],
        "speeds_file": ["SPEEDS_FILE_NAME", "SpeedsFile"],
        "block_sizes": ["plan_in_blocks"],
        "module_plans": ["Draft", "bytes_in_ram", "plan_modules", "with_file"],
        "vae_room": ["VaePlace", "VaeRoom"],
        "watermark": [
            "Watermark",
            "WatermarkReport",
            "default_host_watermark",
            "default_watermark",
            "in_bytes",
            "unlearned_bytes",
        ],
        "member": ["Member"],
        "departures": ["Departure"],
        "lending": ["LendingReport"],
        "forecast": ["KnownComponent"],
        "observed": ["ObservedModel"],
        "steered": ["SteeredComponent", "SteeringHost"],
        "registered": ["Amounts", "RegisteredComponent"],
        "report": [
            "EVENT_KINDS",
            "ComponentReport",
            "DeviceReport",
            "Event",
            "NodeReport",
            "Report",
            "RunReport",
            "Sample",
            "empty_report",
            "parts_of",
        ],
        "known_loadings": ["KeptOfLoading"],
        "manager": ["MemoryManager"],
        "sharing_check": ["SharingState", "describe_sharing"],
        "default": [
            "default_manager",
            "existing_manager",
            "keep_out_of_user_cache",
            "needs_path",
            "remember_needs_in",
            "share_devices_in",
            "shared_folder",
        ],
    },
)
