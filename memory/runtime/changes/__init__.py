"""What other code does to weights: found, taken over, or undone and reported."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "other_offloaders": ["ExecutionMark", "find_rival", "is_scripted"],
        "written_weights": ["WrittenWeights", "names_in", "renamed"],
        "forward_writes": ["keep_writes"],
        "steady_look": ["SteadyLook"],
        "converted_weights": ["give_up"],
        "move_guard": ["GONE", "MoveGuard"],
        "state_dict_guard": ["StateGuard"],
    },
)
