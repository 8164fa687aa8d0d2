"""One device's part of a component: its bytes, its memory for computing, prefetching, and what is resident."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "ledger": ["Entry", "Kind", "Ledger"],
        "early_copies": ["EarlyCopy"],
        "device_share": ["DeviceShare", "wait_for_copies"],
    },
)
