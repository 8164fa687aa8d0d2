"""The weights of one block: where they rest, their copies on devices, the staging memory, and what moves together."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "block_state": ["BlockState"],
        "weight_store": ["FileStore", "HostStore", "SharedStore"],
        "slab_sharing": ["SlabSharing"],
        "resident_copy": ["ResidentCopy"],
        "stored_copy": ["StoredCopy"],
        "staging": ["StagingArea", "StagingSlot"],
        "read_on_use": ["ReadOnUse"],
        "computing_views": ["FactorLayer"],
        "weight_group": ["WeightGroup"],
        "pristine_slab": ["KnownOrigins", "PristineSlab", "find_origins", "lying_in", "slab_of"],
        "group_reading": ["read_into_memory", "read_resting"],
        "unpacking": ["discard", "unpack"],
        "weight_swaps": ["Swaps", "foreign_tensors"],
        "added_layers": ["Structure", "Tree", "describe_tensor", "return_to_host", "walk"],
        "bundle": ["Bundle"],
        "claimed_weights": ["read_claimed"],
    },
)
