"""``python -m highwater``: the same as the ``highwater`` command."""

import sys

from .headless.cli import main

if __name__ == "__main__":
    sys.exit(main())
