"""What is claimed of a device beside what components hold: bytes kept for a component, bytes lent to other programs."""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "kept": ["EVERYTHING_KEPT", "KeepLimit", "parse_limit"],
        "loans": ["LONGEST_LOAN_S", "Loan", "Loans", "parse_seconds"],
        "alarm": ["Alarm"],
    },
)
