"""A process that has a slot in a file and writes there what it is told, line by line; imports no torch.

Run as ``python other_process.py FILE``. Each line of its input is an entry in hexadecimal digits, or ``read``; it
answers with the number of its slot, or with the entries of others.
"""

from __future__ import annotations

import sys
from pathlib import Path

from highwater.memory.manager.claims.process_slots import slot_file


def main() -> None:
    path, slot = Path(sys.argv[1]), None
    for line in map(str.strip, sys.stdin):
        file = slot_file(path)
        if line == "read":
            print(*(entry.hex() for entry in file.read()), flush=True)
            continue
        entry = bytes.fromhex(line)
        if slot is None:
            slot = file.claim(entry)
        else:
            file.write(slot, entry)
        print(slot, flush=True)


if __name__ == "__main__":
    main()
