"""Integers in, plan out: which blocks of which component rest where, through how much staging memory the others
stream, and why. Neither torch nor a device is needed to compute a plan.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "sizes": ["bounce_buffer_bytes", "explain_non_block", "fixed_tensors", "least_bytes", "side_factors"],
        "form_choice": ["encoded_bytes", "explain_unmatched", "limit_of", "sort_weights"],
        "precision_table": ["PrecisionRow", "tabulate_precision"],
        "staging_layout": ["Occupancy", "Offsets"],
        "capacity": ["DeviceCapacity", "EVERYTHING", "KeptFree", "Machine", "PeerLink"],
        "calls_at_once": ["WHY_ONE_SCRATCH", "WHY_STREAMS"],
        "tiles": [
            "LEAST_PIXELS",
            "TileChoice",
            "TileCost",
            "TiledSize",
            "Tiles",
            "choose_tiles",
            "halve_tiles",
            "tile_lengths",
        ],
        "plan": ["ComponentPlan", "DeviceCapacity", "DevicePlan", "Machine", "Plan"],
        "device_store": ["StoreRoom", "store_room"],
        "replanning": ["confirm_plan", "fresh_plan_holds", "replan"],
        "planning": ["chosen_precision", "granularity_of", "plan_components", "weights_to_measure"],
        "request": ["PlanRequest", "plan_request", "plan_together"],
        "run": ["BlockTimes", "Stretch", "Tiling", "Use", "largest_activations", "usual_uses", "with_slack"],
        "run_plan": ["RunPlan", "UsePlan"],
    },
)
