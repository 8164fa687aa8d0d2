"""One component on its devices: weights at rest and resident, staging, prefetching, the forward hooks that load its
blocks, the guards against changes by other code, and the ledger of its bytes.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "packing": ["Ending"],
        "weight_places": ["WeightPlaces"],
        "holders": ["attached", "find_holders", "find_sharers", "refuse_managed"],
        "managed_component": ["ManagedComponent", "Phase"],
    },
)
