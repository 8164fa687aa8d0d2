"""The marks of a watermark as users name them: how much of a device, or of the RAM, stays free.

watermarks = watermark { "," watermark }
watermark  = [ ( device | "*" | "host" ) "=" ] low ":" high
low, high  = number unit | number "%"         a percentage is a part of the device's total, or of the RAM's
unit       = "GiB" | "MiB" | "GB" | "MB" | "G" | "M", in any case; G is GiB, and 0 needs none
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from decimal import Decimal

from ..errors import InvalidInput, allowed_values, quoted
from ..units import LARGEST_SIZE, format_bytes, parse_bytes
from .budget import percent
from .placement import INTEGER, WORD, Scanner, canonical_device, names_device

__all__ = ["ALL", "HOST", "Mark", "Marks", "parse_watermarks", "read_mark"]

# Every accelerator; and the RAM, as in a description of hardware.
ALL, HOST = "*", "host"

PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)
AMOUNT = re.compile(r"\d[\w.]*\s*(?:%|[A-Za-z]+)?", re.ASCII)
# A longer number is no one's choice: such a mark is shown in bytes.
LONGEST_TEXT = 16
OR_SHARE = "or a part of the total, such as 10%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """How much stays free: bytes, or a share of the total; one of the two is set."""

    num_bytes: int | None = None
    share: float | None = None
    """From 0 to 1."""
    text: str = field(default="", compare=False)
    """As a user wrote it, without blanks, such as ``8GB`` or ``10%``; empty for one that no user wrote."""

    def of(self, total_bytes: int) -> int:
        """Return the bytes that it means for a device with so many."""
        return int(total_bytes * self.share) if self.share is not None else self.num_bytes or 0

    def says(self, total_bytes: int) -> str:
        """Return it as text for a device with so many bytes, such as ``512MiB`` or ``10% (2.40GiB)``."""
        size = format_bytes(self.of(total_bytes))
        return size if self.share is None else f"{self} ({size})"

    @property
    def setting(self) -> int | str:
        """The same mark as `read_mark` takes it."""
        return self.num_bytes or 0 if self.share is None else percent(self.share)

    def __str__(self) -> str:
        return format_bytes(self.num_bytes or 0) if self.share is None else percent(self.share)


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The two marks of a watermark. A size and a percentage are compared when the device is known.

    Raises:
        InvalidInput: low is above high.
    """

    low: Mark
    high: Mark

    def __post_init__(self) -> None:
        for low, high in ((self.low.num_bytes, self.high.num_bytes), (self.low.share, self.high.share)):
            if low is not None and high is not None and low > high:
                raise InvalidInput(f"low {self.low} is above high {self.high}; allowed: low <= high")


def read_mark(value: object, *, what: str) -> Mark:
    """Return what Python code, a widget or a text names: bytes as an int, or text such as ``512MiB`` or ``10%``.

    Raises:
        InvalidInput: anything else; less than 0 bytes or more than 2**63 - 1; more than 100%.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if not 0 <= value <= LARGEST_SIZE:
            raise InvalidInput(f"{what} {quoted(value)}; allowed: 0 to 2**63 - 1 bytes")
        return Mark(num_bytes=value)
    if not isinstance(value, str):
        raise InvalidInput(f"{what} {quoted(value)}; allowed: a whole number of bytes, or text such as 512MiB or 10%")
    text = "".join(value.split())
    text = text if len(text) <= LONGEST_TEXT else ""
    match = PERCENT.fullmatch(value.strip())
    if match is None:
        try:
            return Mark(num_bytes=parse_bytes(value, what=what), text=text)
        except InvalidInput as error:
            raise InvalidInput(f"{error}, {OR_SHARE}") from None
    share = float(Decimal(match[1]).scaleb(-2))
    if share > 1:
        raise InvalidInput(f"{what} {value!r} is more than all; allowed: 0% to 100%")
    return Mark(share=share, text=text)


def parse_watermarks(text: str, *, what: str = "watermark") -> dict[str, Marks]:
    """Parse ``gpu:0=1GiB:2GiB,host=10%:15%``; returns the marks by device, ``*`` where none is named. Empty: none.

    Whether this machine has the devices is not checked.

    Raises:
        InvalidInput: names the column, the value and what is allowed.
    """
    scanner = Scanner(text, what=what)
    found: dict[str, Marks] = {}
    if scanner.at_end:
        return found
    for begin in scanner.items():
        device = parse_device(scanner)
        low = parse_amount(scanner, "low")
        if not scanner.take(":"):
            scanner.fail("':' and the high mark must follow, such as 1GiB:2GiB")
        high = parse_amount(scanner, "high")
        if device in found:
            scanner.fail(f"{device!r} has marks already; allowed: one pair", at=begin)
        try:
            found[device] = Marks(low=low, high=high)
        except InvalidInput as error:
            scanner.fail(str(error), at=begin)
    return found


def parse_device(scanner: Scanner) -> str:
    """Consume ``gpu:0=``, ``*=`` or ``host=``, and return the plain name; ``*`` where a mark comes at once."""
    begin = scanner.position
    match = scanner.match(WORD)
    if match is None:
        return ALL
    word = match[0]
    if names_device(word) and scanner.take(":"):
        number = scanner.match(INTEGER)
        word += f":{number[0].lstrip('0') or 0}" if number else ":"
    name = HOST if word.lower() == HOST else canonical_device(word)
    if name not in (ALL, HOST) and (not name.startswith("gpu:") or word.endswith(":")):
        scanner.fail(
            f"device {word!r} is unknown; {allowed_values(word, ['gpu:0', 'gpu:1, ...', ALL, HOST])}", at=begin
        )
    if not scanner.take("="):
        scanner.fail(f"'=' and two marks must follow, such as {name}=1GiB:2GiB")
    return name


def parse_amount(scanner: Scanner, name: str) -> Mark:
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(AMOUNT)
    if match is None:
        scanner.fail(f"the {name} mark is missing; write a number and a unit, such as 1GiB, {OR_SHARE}", at=begin)
    try:
        return read_mark(match[0].strip(), what=name)
    except InvalidInput as error:
        scanner.fail(str(error), at=begin)
