"""Eviction policies: in which order idle components leave a device that is short of memory, and why.

A policy only chooses, `Admission.evict` moves. Each is a small class; one test holds for all of them.
"""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "candidate": ["Candidate", "EvictionPolicy", "Victim"],
        "least_recently_used": ["LeastRecentlyUsed"],
        "largest_first": ["LargestFirst"],
        "next_use": ["NextUse", "USUAL_RELOAD_S_PER_BYTE", "worth_per_byte"],
        "newcomer": ["Newcomer"],
        "named": ["POLICIES"],
    },
)
