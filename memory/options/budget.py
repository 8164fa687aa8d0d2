"""Budgets: how many bytes of a device the weights may take, or have to leave free.

budget = bitem { "," bitem }
bitem  = [ ( device | component | "*" ) "=" ] size
size   = amount | "-" amount (leave that much free) | "unlimited"
amount = number unit | number "%"
unit   = "GiB" | "MiB" | "GB" | "MB" | "G" | "M", in any case; G is GiB, and 0 needs none
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from ..errors import InvalidInput, allowed_values, quoted
from ..units import ALLOWED_UNITS, LARGEST_SIZE, MIB, UNITS, parse_bytes, unit_problem
from .placement import INTEGER, KINDS, WORD, Scanner, canonical_device, names_device, no_device, resolve_kind

__all__ = [
    "BudgetItem",
    "add_item",
    "as_left_free",
    "exact_size",
    "parse_budget_item",
    "parse_size",
    "parse_target",
    "read_mmgp_budgets",
    "read_target",
]

# The types and the range of each number of an item, and both in words.
NUMBERS: dict[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "limit_bytes": ((int,), lambda number: 0 <= number <= LARGEST_SIZE, "a whole number from 0 to 2**63 - 1"),
    "share": ((int, float), lambda number: 0 < number <= 1, "more than 0 to 1"),
    "leave_bytes": ((int,), lambda number: 0 <= number <= LARGEST_SIZE, "a whole number from 0 to 2**63 - 1"),
    "leave_share": ((int, float), lambda number: 0 < number < 1, "more than 0 and less than 1"),
}
SIZE = re.compile(r"(-?)\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)", re.ASCII)
# What is no end of a size, as in 1e3GiB.
MORE_OF_IT = re.compile(r"[\w.]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetItem:
    """A limit for a device, a component or everything (``*``); at most one of the four numbers is set.

    A component's limit, and that of ``*``, is for each component by itself. A device's limit is for all components
    that were managed together: idle ones leave it to the one that computes. Where both are set the smaller one counts.

    ``limit_bytes`` caps the device bytes of the weights, ``share`` does so as a part of the device's total.
    ``leave_bytes`` and ``leave_share`` keep that much of the device free. All None means unlimited.
    """

    target: str
    limit_bytes: int | None = None
    share: float | None = None
    leave_bytes: int | None = None
    leave_share: float | None = None
    from_profile: bool = False
    """It comes from a profile, not from the user: it is raised to the least that a component needs."""

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or not self.target:
            raise InvalidInput(f"budget target {quoted(self.target)}; allowed: a device, a component or '*'")
        given = {name: number for name in NUMBERS if (number := getattr(self, name)) is not None}
        if len(given) > 1:
            raise InvalidInput(f"budget of {self.target!r}: {' and '.join(given)} are set; allowed: one of them")
        for name, number in given.items():
            types, is_allowed, allowed = NUMBERS[name]
            if isinstance(number, bool) or not isinstance(number, types) or not is_allowed(number):
                raise InvalidInput(f"budget of {self.target!r}: {name} {quoted(number)}; allowed: {allowed}")

    def limit(self, total_bytes: int, available_bytes: int, kept_free_bytes: int = 0) -> int:
        """Return the most bytes that weights may take of a device with so many total and available bytes.

        What the watermark keeps free counts towards what the budget leaves free.
        """
        most = self.most(total_bytes)
        if most is not None:
            return min(most, available_bytes)
        return max(0, available_bytes - max(0, self.left_free(total_bytes) - kept_free_bytes))

    def most(self, total_bytes: int) -> int | None:
        """Return the cap on the weights' bytes, for a device of this size; None where the item sets none."""
        if self.share is not None:
            return int(total_bytes * self.share)
        return self.limit_bytes

    def left_free(self, total_bytes: int) -> int:
        """Return the bytes of a device that have to stay free."""
        if self.leave_bytes is not None:
            return self.leave_bytes
        return int(total_bytes * (self.leave_share or 0.0))

    @property
    def size(self) -> str:
        """The amount in the grammar, exact to the byte."""
        if self.limit_bytes is not None:
            return exact_size(self.limit_bytes)
        if self.leave_bytes is not None:
            return f"-{exact_size(self.leave_bytes)}"
        if self.share is not None:
            return percent(self.share)
        return f"-{percent(self.leave_share)}" if self.leave_share is not None else "unlimited"

    def __str__(self) -> str:
        return self.size if self.target == "*" else f"{self.target}={self.size}"


def exact_size(num_bytes: int) -> str:
    """Return bytes in the largest unit that divides them, such as ``1200MiB``; `parse_bytes` gives them back."""
    for name in ("GiB", "GB", "MiB", "MB"):
        if num_bytes and num_bytes % UNITS[name] == 0:
            return f"{num_bytes // UNITS[name]}{name}"
    # A byte is 2**-20 MiB, so twenty decimals are all there are; most need few to mean the same byte.
    texts = (f"{num_bytes / MIB:.{decimals}f}MiB" for decimals in range(21))
    return next(text for text in texts if parse_bytes(text) == num_bytes)


def percent(share: float) -> str:
    """Return a share so that it is read back as the very same number, such as ``30%``."""
    return f"{Decimal(repr(float(share))).scaleb(2).normalize():f}%"


# -- the grammar


def parse_budget_item(
    scanner: Scanner, devices: Collection[str], components: Sequence[str], *, others: Sequence[str] = ()
) -> BudgetItem:
    """Consume ``6GiB``, ``gpu:0=80%`` or ``vae=unlimited``. Raises `InvalidInput` with the column.

    ``others`` are further words that the error lists as allowed.
    """
    target = "*"
    begin = scanner.position
    match = scanner.match(WORD)
    scanner.go_to(begin)
    if scanner.peek("="):
        parse_target(scanner, devices, components, others=others)
    if match and match[0] != "unlimited":
        target = parse_target(scanner, devices, components, others=others)
        if not scanner.take("="):
            scanner.fail("'=' and a size must follow; allowed: 6GiB, 80%, -1GiB or unlimited")
    return parse_size(scanner, target)


def parse_target(
    scanner: Scanner, devices: Collection[str], components: Sequence[str], *, others: Sequence[str] = ()
) -> str:
    """Consume a device, a component, a kind or ``*``, and return its plain name."""
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(WORD)
    if match is None:
        allowed = allowed_values("", dict.fromkeys(["*", *KINDS, *components, *devices, *others]))
        scanner.fail(f"a device or a component is missing; {allowed}", at=begin)
    word = match[0]
    if names_device(word):
        if scanner.take(":"):
            number = scanner.match(INTEGER)
            word += f":{number[0].lstrip('0') or 0}" if number else ":"
        target = canonical_device(word)
        if target not in devices:
            scanner.fail(no_device(word, [*devices]), at=begin)
        return target
    return resolve_kind(scanner, word, components, begin, others=others, devices=devices)


def parse_size(scanner: Scanner, target: str) -> BudgetItem:
    """Consume a size and return it as the target's. Raises `InvalidInput` with the column."""
    scanner.skip_blanks()
    begin = scanner.position
    word = scanner.match(WORD)
    if word and word[0] == "unlimited":
        return BudgetItem(target=target)
    scanner.go_to(begin)
    match = scanner.match(SIZE)
    if match is None:
        scanner.fail("a size is missing; allowed: 6GiB, 80%, -1GiB or unlimited", at=begin)
    if rest := scanner.match_here(MORE_OF_IT):
        scanner.fail(f"{match[0] + rest[0]!r} is not a size; allowed: 6GiB, 80%, -1GiB or unlimited", at=begin)
    minus, number, unit = match.groups()
    if unit == "%":
        share = float(Decimal(number).scaleb(-2))
        if not 0 < share <= 1 or (minus and share == 1):
            most = "and less than 100%" if minus else "to 100%"
            scanner.fail(f"{match[0]!r} is not a share; allowed: more than 0% {most}", at=begin)
        return BudgetItem(target=target, leave_share=share) if minus else BudgetItem(target=target, share=share)
    problem = unit_problem(number, unit)
    if problem is not None:
        scanner.fail(f"{match[0].strip()!r} {problem}; allowed: {', '.join(ALLOWED_UNITS)} or %", at=begin)
    try:
        num_bytes = parse_bytes(number + unit)
    except InvalidInput as error:
        scanner.fail(str(error), at=begin)
    return (
        BudgetItem(target=target, leave_bytes=num_bytes) if minus else BudgetItem(target=target, limit_bytes=num_bytes)
    )


def add_item(scanner: Scanner, at: int, items: list[BudgetItem], item: BudgetItem, what: str) -> None:
    """Append an item; refuse a second one of the same target."""
    if any(item.target == other.target for other in items):
        scanner.fail(f"{item.target!r} has a {what} already; allowed: one", at=at)
    items.append(item)


# -- mmgp's form


def read_mmgp_budgets(
    budgets: Any, *, devices: Collection[str], components: Sequence[str] = (), what: str = "budgets"
) -> tuple[BudgetItem, ...]:
    """Return budgets that Python code gives in mmgp's form, which this project accepts in Python only.

    A number is in MB of 2**20 bytes, 0 is unlimited, ``"30%"`` is a part of the device's total; a dict has one of
    these per component, ``"*"`` for all others. A text may be anything that the budget grammar knows.

    Raises:
        InvalidInput: naming the value and what is allowed.
    """
    if isinstance(budgets, Mapping):
        items: dict[str, BudgetItem] = {}
        for name, value in budgets.items():
            target = read_target(name, devices=devices, components=components, what=what)
            if target in items:
                raise InvalidInput(f"{what}: {target!r} has a {what.removesuffix('s')} already; allowed: one")
            items[target] = read_mmgp_size(value, target, what)
        return tuple(items.values())
    if isinstance(budgets, str) and not is_size(budgets):
        scanner = Scanner(budgets, what=what)
        parsed: list[BudgetItem] = []
        for begin in scanner.items():
            add_item(scanner, begin, parsed, parse_budget_item(scanner, devices, components), what.removesuffix("s"))
        return tuple(parsed)
    return (read_mmgp_size(budgets, "*", what),)


def read_target(name: Any, *, devices: Collection[str], components: Sequence[str], what: str) -> str:
    """Return the plain name of the device, component or kind that Python code names. Raises `InvalidInput`."""
    scanner = Scanner(name, what=what)
    target = parse_target(scanner, devices, components)
    if not scanner.at_end:
        scanner.fail("more text follows the name; allowed: the name of one component or device")
    return target


def is_size(text: str) -> bool:
    return bool(SIZE.fullmatch(text.strip()))


def read_mmgp_size(value: Any, target: str, what: str) -> BudgetItem:
    if isinstance(value, str):
        scanner = Scanner(value, what=what)
        item = parse_size(scanner, target)
        if not scanner.at_end:
            scanner.fail(f"{value[scanner.position]!r} is unexpected; allowed: one size")
        return item
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_SIZE // MIB:
        raise InvalidInput(
            f"{what} {quoted(value)}; allowed: a number of MB from 0 (unlimited), text such as '30%' or '6GiB', "
            "or a dict of these by component"
        )
    return BudgetItem(target=target, limit_bytes=int(value * MIB)) if value else BudgetItem(target=target)


def as_left_free(item: BudgetItem) -> BudgetItem:
    """Return an item that leaves the same amount free."""
    return replace(
        item,
        limit_bytes=None,
        share=None,
        leave_bytes=item.limit_bytes if item.limit_bytes is not None else item.leave_bytes,
        leave_share=item.share if item.share is not None else item.leave_share,
    )
