"""One component on its devices: weights at rest and resident, staging, prefetching, the forward hooks that load its
blocks, the guards against changes by other code, and the ledger of its bytes.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "deferring_lock": ["DeferringLock"],
        "ledger": ["Entry", "Ledger"],
        "other_offloaders": ["ExecutionMark", "find_rival", "is_scripted"],
        "parameter_slots": ["ParameterSlot", "as_held", "split_owner"],
        "weight_store": ["FileStore", "HostStore"],
        "weight_group": ["WeightGroup"],
        "bundle": ["Bundle"],
        "move_guard": ["MoveGuard"],
        "device_hops": ["DeviceHops", "Visit"],
        "device_share": ["DeviceShare"],
        "packing": ["Ending"],
        "input_size": ["Size"],
        "forward_pass": ["Guest", "Hold", "Pass"],
        "module_caches": ["address_of", "computed_weights"],
        "execution_order": ["in_execution_order"],
        "weight_places": ["WeightPlaces"],
        "holders": ["attached", "find_holders", "find_sharers", "refuse_managed"],
        "managed_component": ["ManagedComponent", "Phase"],
    },
)
