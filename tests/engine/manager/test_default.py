"""The manager that a process shares: made by who needs it, seen without torch by who only looks."""

from __future__ import annotations

from collections.abc import Callable


def test_looking_for_the_manager_makes_none_and_loads_no_torch(run_python: Callable[[str], None]) -> None:
    script = (
        "import sys\n"
        "from highwater.memory import default_manager, existing_manager\n"
        "assert existing_manager() is None\n"
        "assert 'torch' not in sys.modules\n"
        "made = default_manager()\n"
        "assert existing_manager() is made is default_manager()\n"
    )
    run_python(script)
