"""The manager that a process shares: made by who needs it, seen without torch by who only looks."""

from __future__ import annotations

import subprocess
import sys


def test_looking_for_the_manager_makes_none_and_loads_no_torch() -> None:
    script = (
        "import sys\n"
        "from highwater.memory import default_manager, existing_manager\n"
        "assert existing_manager() is None\n"
        "assert 'torch' not in sys.modules\n"
        "made = default_manager()\n"
        "assert existing_manager() is made is default_manager()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
