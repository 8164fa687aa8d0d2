"""What is claimed of a device beside what components hold: bytes that are kept for a component, bytes that are lent to
other programs, and what other processes with this pack keep free and ask for.
"""

from ...lazy_names import lazy_names

__all__, __getattr__ = lazy_names(
    __name__,
    {
        "kept": ["EVERYTHING_KEPT", "KeepLimit", "parse_limit"],
        "loans": ["LONGEST_LOAN_S", "Loan", "Loans", "parse_seconds"],
        "alarm": ["Alarm"],
        "process_slots": ["SlotFile", "slot_file"],
        "neighbours": ["NO_UUID", "Neighbours", "ProcessUse", "others_on"],
    },
)
