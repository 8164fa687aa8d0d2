"""What a module holds in place of its weights, and what reads and writes of these tensors tell."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "deep_copies": ["Copied", "OwnHook"],
        "recomputing": ["RestingWeight", "in_backward"],
        "reported_device": ["Asked", "device_of", "plainly"],
        "unread_weight": ["Unread", "UnreadWeight", "mark_unread", "unread_of"],
        "watched_data": [
            "Aliases",
            "WatchedTensor",
            "end_sharing",
            "is_same_view",
            "point_into",
            "retire_data",
            "take_own_memory",
            "unwatch",
            "watch",
        ],
        "absent_weight": ["AbsentWeight", "stand_for"],
        "computing_parameter": ["ComputingWeight", "DATA", "note_data"],
        "parameter_slots": [
            "OWN_DICTS",
            "ParameterSlot",
            "add_up",
            "as_held",
            "become",
            "differs_from_file",
            "fill_slots",
            "find_slots",
            "in_list",
            "put_in_list",
            "read_weights",
            "repoint",
            "split_owner",
            "store_weight",
        ],
        "encoded_weight": ["EncodedLeaves", "EncodedWeight", "NOT_TRACED"],
        "nested_tensors": ["Lent", "OPAQUE", "find_tensors", "replace_tensors"],
    },
)
