"""What a command writes: it never fails for a character that the terminal lacks, and its JSON is always valid."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from typing import Any

from ...nodes.prompts import HALF

__all__ = ["OUTPUT", "drop_output", "json_line", "open_output", "print_json"]

OUTPUT = "standard output"
ESCAPES = "backslashreplace"

# Halves that do not stand for a byte of a file's name that the system's encoding lacks.
OTHER_HALF = re.compile("[\ud800-\udc7f\udd00-\udfff]")
ESCAPED_HALF = re.compile(r"\\ud[89a-f]")


class Output(io.FileIO):
    """Standard output, which the error names when it cannot be written: on a full disk, say."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            raise type(error)(error.errno, error.strerror, OUTPUT) from None


def open_output() -> None:
    """Make standard output name itself in errors, and write a character that its encoding lacks as an escape."""
    out = sys.stdout
    if out is sys.__stdout__ and sys.platform != "win32":  # Windows' console is no plain file
        raw = Output(out.fileno(), "w", closefd=False)
        buffered = io.BufferedWriter(raw)
        is_live = raw.isatty()
        sys.stdout = io.TextIOWrapper(buffered, encoding=out.encoding, errors=ESCAPES, line_buffering=is_live)
    elif isinstance(out, io.TextIOWrapper):
        out.reconfigure(errors=ESCAPES)


def drop_output() -> None:
    """Send what is still buffered for standard output, which cannot be written, nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: Any) -> None:
    print(json_line(value))


def json_line(value: Any) -> str:
    """Return a value as JSON in ASCII, without halves of characters, which no UTF-8 text may have.

    A file's name has such halves where the system's encoding is not that of the name: they become the name in UTF-8,
    or U+FFFD.
    """
    text = json.dumps(value)
    if ESCAPED_HALF.search(text):
        wide = json.dumps(value, ensure_ascii=False)
        if HALF.search(wide):
            wide = OTHER_HALF.sub("\ufffd", wide).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            text = json.dumps(json.loads(wide))
    return text
