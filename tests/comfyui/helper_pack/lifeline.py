"""Ends this process when the one that started it has ended, however that came: nothing else would stop a host."""

from __future__ import annotations

import os
import signal
import sys
import threading

__all__ = ["end_with_standard_input"]


def end_with_standard_input() -> None:
    """Terminate as soon as the other end of the pipe on standard input is closed; returns at once."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
