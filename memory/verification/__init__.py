"""Parts of `verify`: comparison of results, snapshots of the state that a call may change, recordings of what each
module returned, and a component that computes without the engine.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "comparison": ["leaves_in", "same_bits", "show"],
        "saved_values": ["CONTAINERS", "SavedValues", "write"],
        "snapshot": ["RandomState", "Snapshot", "go_through", "hook_tables", "is_our_hook"],
        "argument_copies": ["copy_arguments"],
        "recording": ["Recording", "places_of"],
        "reference": ["Reference", "find_changed_weights", "read_at_rest"],
        "findings": ["Difference", "NUM_LISTED", "Side", "Verification", "compare_sides", "kept_bytes", "run_side"],
    },
)
