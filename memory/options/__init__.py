"""What the user asks for: which device computes, how many bytes the weights may take, in which precision they rest.
Texts are read into frozen values here, once, and errors give the column. No torch.
"""

from ..lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "placement": [
            "AUTO",
            "AUTO_GROUPS",
            "AUTO_PLACEMENT",
            "INTEGER",
            "KINDS",
            "Placement",
            "PlacementItem",
            "Scanner",
            "SplitRatio",
            "WORD",
            "canonical_device",
            "names_device",
            "no_device",
            "parse_device",
            "parse_placement",
        ],
        "budget": ["BudgetItem", "exact_size", "parse_size"],
        "idle_limits": ["LONGEST_IDLE_S", "MOST_LOADED", "IdleLimits", "parse_num_loaded"],
        "marks": ["ALL", "HOST", "Mark", "Marks", "parse_watermarks", "read_mark"],
        "profile": ["LANGUAGE", "OffloadProfile", "PROFILES", "SETTINGS", "TITLES", "covers", "parse_profile"],
        "profile_arguments": ["build_profile"],
        "precision": [
            "BY_PROFILE",
            "COMPUTE_WORDS",
            "DEFAULT_PRECISION",
            "Precision",
            "PrecisionItem",
            "PrecisionRequest",
            "Precisions",
            "fill_precisions",
            "parse_precision",
            "precision_for",
            "precision_names",
            "why_refused",
        ],
    },
)
