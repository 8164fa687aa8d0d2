"""What the user chose: a frozen profile whose budgets say how many bytes the weights may take.

budget = bitem { "," bitem }
bitem  = [ ( device | component | "*" ) "=" ] size
size   = number unit | number "%" | "-" number unit (leave that much free) | "unlimited"
unit   = "GiB" | "MiB" | "GB" | "MB"
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .errors import InvalidInput
from .placement import INTEGER, WORD, Scanner, canonical_device, names_device, resolve_kind
from .units import UNITS, format_bytes, parse_bytes

__all__ = ["BudgetItem", "OffloadProfile", "parse_profile"]

SIZE = re.compile(r"(-?)\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetItem:
    """A limit for a device, a component or everything (``*``); exactly one of the three numbers is set.

    ``limit_bytes`` caps the device bytes of the weights, ``leave_bytes`` keeps that much of the device free,
    ``share`` is a part of the device's total. All three None means unlimited.
    """

    target: str
    limit_bytes: int | None = None
    leave_bytes: int | None = None
    share: float | None = None

    def limit(self, total_bytes: int, available_bytes: int) -> int:
        """Return the most bytes that weights may take on a device with these bytes in all and to have."""
        if self.limit_bytes is not None:
            return min(self.limit_bytes, available_bytes)
        if self.leave_bytes is not None:
            return max(0, available_bytes - self.leave_bytes)
        if self.share is not None:
            return min(int(total_bytes * self.share), available_bytes)
        return available_bytes

    def __str__(self) -> str:
        target = "" if self.target == "*" else f"{self.target}="
        if self.limit_bytes is not None:
            return target + format_bytes(self.limit_bytes)
        if self.leave_bytes is not None:
            return f"{target}-{format_bytes(self.leave_bytes)}"
        return target + (f"{self.share:.0%}" if self.share is not None else "unlimited")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadProfile:
    """``auto`` fills what is free; budgets narrow that per device or component."""

    name: str = "auto"
    budgets: tuple[BudgetItem, ...] = ()

    def budget_for(self, device: str, component: str, kind: str) -> BudgetItem | None:
        """Return the most specific budget: component name, kind, device, then ``*``."""
        by_target = {item.target: item for item in self.budgets}
        for key in (component, kind, device, "*"):
            if key in by_target:
                return by_target[key]
        return None


def parse_profile(text: str, *, devices: Collection[str], components: Sequence[str] = ()) -> OffloadProfile:
    """Parse ``auto`` or a budget such as ``6GiB``, ``80%``, ``gpu:0=8GiB,vae=unlimited``.

    Raises:
        InvalidInput: an unknown profile, component, device or unit, or a bare number; names the column.
    """
    if text.strip() == "auto":
        return OffloadProfile()
    if re.fullmatch(r"\s*[A-Za-z_]*\s*", text) and text.strip() != "unlimited":
        raise InvalidInput(
            f"profile {text!r} is unknown; allowed: auto, or a budget such as 6GiB, 80%, -1GiB, unlimited"
        )
    scanner = Scanner(text, what="budget")
    items: list[BudgetItem] = []
    while True:
        scanner.skip_blanks()
        begin = scanner.position
        item = parse_budget_item(scanner, devices, components)
        if any(item.target == other.target for other in items):
            scanner.fail(f"{item.target!r} has two budgets", at=begin)
        items.append(item)
        if scanner.at_end:
            return OffloadProfile(name="budget", budgets=tuple(items))
        if not scanner.take(","):
            scanner.fail(f"{scanner.text[scanner.position]!r} is unexpected; allowed: ',' or the end")


def parse_budget_item(scanner: Scanner, devices: Collection[str], components: Sequence[str]) -> BudgetItem:
    target = "*"
    begin = scanner.position
    match = scanner.match(WORD)
    if match and match[0] != "unlimited":
        word = match[0]
        if scanner.take(":"):
            number = scanner.match(INTEGER)
            word += f":{number[0]}" if number else ":"
        if names_device(word):
            target = canonical_device(word)
            if target not in devices:
                scanner.fail(f"device {word!r} is not here; allowed: {', '.join(devices)}", at=begin)
        else:
            target = resolve_kind(scanner, word, components, begin)
        if not scanner.take("="):
            scanner.fail("'=' and a size must follow; allowed: 6GiB, 80%, -1GiB or unlimited")
    else:
        scanner.position = begin
    return parse_size(scanner, target)


def parse_size(scanner: Scanner, target: str) -> BudgetItem:
    scanner.skip_blanks()
    begin = scanner.position
    word = scanner.match(WORD)
    if word and word[0] == "unlimited":
        return BudgetItem(target=target)
    scanner.position = begin
    match = scanner.match(SIZE)
    if match is None:
        scanner.fail("a size is missing; allowed: 6GiB, 80%, -1GiB or unlimited", at=begin)
    minus, number, unit = match.groups()
    if unit == "%":
        if minus or not 0 < float(number) <= 100:
            scanner.fail(f"{match[0]!r} is not a share; allowed: more than 0% to 100%", at=begin)
        return BudgetItem(target=target, share=float(number) / 100)
    if unit not in UNITS:
        problem = "has no unit" if not unit else f"has the unknown unit {unit!r}"
        scanner.fail(f"{match[0].strip()!r} {problem}; allowed: {', '.join(UNITS)} or %", at=begin)
    num_bytes = parse_bytes(number + unit)
    return (
        BudgetItem(target=target, leave_bytes=num_bytes) if minus else BudgetItem(target=target, limit_bytes=num_bytes)
    )
