"""Offload profiles: how much memory of each kind the weights may take, and how they rest.

profile = [ base ] { "," item }                  a base alone, items alone ("auto" is then the base), or both
base    = "auto" | "1" to "5" | a profile's name, such as "LowRAM_LowVRAM"
item    = bitem | setting                        bitem: a budget, see budget.py
setting = "pinned=" names | "prefetch=" ( "1" to "4" | "auto" ) | "quantize=" names | "disk=" names
        | "unload=" names | "reserve" [ ":" ( device | component ) ] "=" amount | "compile=" ( "on" | "off" )
        | "form=" a storage form, such as "int8"
names   = "all" | "none" | component { "&" component }

Profiles 1 to 5 have the names and the meaning of mmgp's. Where mmgp says "transformer", they say ``diffusion``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import InvalidInput, allowed_values, quoted
from ..units import GIB, MIB
from .budget import (
    BudgetItem,
    add_item,
    as_left_free,
    parse_budget_item,
    parse_size,
    parse_target,
)
from .placement import AUTO, WORD, Scanner, resolve_kind
from .precision import Precision, take_form

__all__ = [
    "LANGUAGE",
    "PROFILES",
    "SETTINGS",
    "TITLES",
    "BudgetItem",
    "OffloadProfile",
    "parse_profile",
]

TITLES = {
    "1": "HighRAM_HighVRAM",
    "2": "HighRAM_LowVRAM",
    "3": "LowRAM_HighVRAM",
    "4": "LowRAM_LowVRAM",
    "5": "VerylowRAM_LowVRAM",
}
# The GiB of RAM and VRAM for which mmgp made each of them; they work on any machine.
MADE_FOR = {"1": (48, 24), "2": (48, 12), "3": (32, 24), "4": (32, 12), "5": (24, 10)}
ALL_COMPONENTS = ("*",)
# Among the text encoders, those that are language models (T5, Llama and their like); CLIP is not one.
LANGUAGE = "language"
LARGEST_PREFETCH = 4
NAMES = ("pinned", "quantize", "on_demand", "unload")
SETTINGS = ("pinned", "prefetch", "quantize", "disk", "unload", "reserve", "compile", "form")
NUMBER = re.compile(r"\d+(?=\s*(,|$))", re.ASCII)
# A profile's number with what no size has behind it.
WRONGLY_SEPARATED = re.compile(r"[1-5]\s*(?=[;:+&|/])", re.ASCII)
# A profile and a budget, or an amount with a decimal comma.
AMBIGUOUS = re.compile(r"([1-5]),(\d[\d.]*\s*(?:[A-Za-z]+|%))", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadProfile:
    """How much memory the weights may take, and how they rest; ``auto`` fills what is free.

    ``pinned``, ``quantize``, ``on_demand`` and ``unload`` name components or kinds; ``("*",)`` means all, ``()`` none.

    Raises:
        InvalidInput: a field of another type or out of its range. Names are looked up where the profile is used.
    """

    name: str = AUTO
    budgets: tuple[BudgetItem, ...] = ()
    pinned: tuple[str, ...] = ALL_COMPONENTS
    """Whose weights are page-locked, as far as the machine allows."""
    prefetch_blocks: int | None = None
    """How many blocks are prefetched beside the one that computes, 1 to 4; None: the planner chooses."""
    quantize: tuple[str, ...] = ()
    """The components that rest in ``form`` where no precision was chosen; may name ``language``."""
    form: str = Precision.ENCODED.name
    """The storage form of what ``quantize`` names."""
    on_demand: tuple[str, ...] = ()
    """The components that are not kept in RAM, where a file has their weights."""
    unload: tuple[str, ...] = ()
    """The components that leave their devices after use; others stay as long as memory is not short."""
    reserve: tuple[BudgetItem, ...] = ()
    """Bytes of a device that stay free whatever the budgets say; what the watermark keeps free counts towards them."""
    compile: bool = False
    origin: str = field(default="", compare=False)
    """What a plan says of where it comes from, where no node or command named it."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in (AUTO, *TITLES):
            raise InvalidInput(
                f"profile {quoted(self.name)} is unknown; {allowed_values(quoted(self.name), [AUTO, *TITLES])}"
            )
        refuse_wrong_items(self.budgets, "budgets")
        refuse_wrong_items(self.reserve, "reserve")
        for item in self.reserve:
            if item.limit_bytes is not None or item.share is not None:
                raise InvalidInput(
                    f"reserve of {item.target!r} has limit_bytes or share; allowed: leave_bytes or leave_share"
                )
        for which in NAMES:
            names = getattr(self, which)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise InvalidInput(f"{which} {quoted(names)}; allowed: a tuple of names, such as ('diffusion',)")
        ahead = self.prefetch_blocks
        if ahead is not None and (type(ahead) is not int or not 1 <= ahead <= LARGEST_PREFETCH):
            raise InvalidInput(f"prefetch_blocks {quoted(ahead)}; allowed: 1 to {LARGEST_PREFETCH}, or None")
        if not isinstance(self.form, str):
            raise InvalidInput(f"form {quoted(self.form)}; allowed: the name of a storage form, such as 'int8'")
        if not isinstance(self.compile, bool):
            raise InvalidInput(f"compile {quoted(self.compile)}; allowed: True or False")

    @property
    def title(self) -> str:
        """The profile's name in words, such as ``LowRAM_LowVRAM``."""
        return TITLES.get(self.name, self.name)

    def budgets_for(self, device: str, component: str, kind: str) -> tuple[BudgetItem, ...]:
        """Return the budgets that count: the component's (by name, else kind, else ``*``) and the device's.

        The user's budgets, or where none of them applies, the profile's own.
        """
        own = find_items([item for item in self.budgets if not item.from_profile], device, component, kind)
        return own or find_items([item for item in self.budgets if item.from_profile], device, component, kind)

    def reserve_for(self, device: str, component: str, kind: str, total_bytes: int) -> int:
        """Return the bytes of a device that the reserve keeps free beside a component."""
        return most_left_free(find_items(self.reserve, device, component, kind), total_bytes)

    def left_free(self, device: str, component: str, kind: str, total_bytes: int) -> int:
        """Return the bytes of a device that stay free beside a component, by the reserve or by a budget."""
        by_budget = most_left_free(self.budgets_for(device, component, kind), total_bytes)
        return max(by_budget, self.reserve_for(device, component, kind, total_bytes))

    def without(self, is_left_out: Callable[[BudgetItem], bool]) -> OffloadProfile:
        """Return it without some of the user's budgets and reserves; what it brings itself counts in their place."""
        own = [item for item in self.budgets if not item.from_profile and not is_left_out(item)]
        reserve = tuple(item for item in self.reserve if not is_left_out(item))
        return replace(self, budgets=(*own, *brought_beside(own, PROFILES[self.name])), reserve=reserve)

    def for_all_together(self, devices: Collection[str]) -> OffloadProfile:
        """Return it with the user's budget for each component (``*``) as one for all of them on each of these devices.

        A device with a budget of its own keeps that. Without devices nothing changes.
        """
        if not devices:
            return self
        together = []
        for item in self.budgets:
            if item.target != "*" or item.from_profile:
                together.append(item)
                continue
            own = {other.target for other in self.budgets}
            together += [replace(item, target=device) for device in devices if device not in own]
        return replace(self, budgets=tuple(together))

    def is_for_all_together(self, device: str) -> bool:
        """Whether it has a budget of the user's for a device, which components share."""
        return any(item.target == device and not item.from_profile for item in self.budgets)

    def to_json(self) -> dict[str, Any]:
        """Return every value, and the RAM and VRAM that the profile was made for."""
        ram, vram = MADE_FOR.get(self.name, (None, None))
        return {
            "name": self.name,
            "title": self.title,
            "ram_bytes": ram and ram * GIB,
            "vram_bytes": vram and vram * GIB,
            "budgets": {item.target: item.size for item in self.budgets},
            "pinned": names_text(self.pinned),
            "prefetch_blocks": self.prefetch_blocks,
            "quantize": names_text(self.quantize),
            "form": self.form,
            "on_demand": names_text(self.on_demand),
            "unload": names_text(self.unload),
            "reserve": {item.target: item.size.removeprefix("-") for item in self.reserve},
            "compile": self.compile,
        }

    def __str__(self) -> str:
        """The profile as text that `parse_profile` reads: its name, and what differs from it."""
        base = PROFILES[self.name]
        own = [item for item in self.budgets if not item.from_profile]
        brought = [item for item in self.budgets if item.from_profile]
        targets = {item.target for item in own}
        if "*" not in targets and {item for item in base.budgets if item.target not in targets} != set(brought):
            own += [replace(item, from_profile=False) for item in brought if item.target not in targets]
            if "*" not in {item.target for item in own}:
                own.append(BudgetItem(target="*"))  # or the text would bring what was replaced
        items = [str(item) for item in own]
        for word, which in (
            ("pinned", "pinned"),
            ("quantize", "quantize"),
            ("disk", "on_demand"),
            ("unload", "unload"),
        ):
            names = getattr(self, which)
            if names != getattr(base, which):
                items.append(f"{word}={names_text(names)}")
        if self.prefetch_blocks != base.prefetch_blocks:
            items.append(f"prefetch={self.prefetch_blocks or AUTO}")
        for item in self.reserve:
            target = "" if item.target == "*" else f":{item.target}"
            items.append(f"reserve{target}={item.size.removeprefix('-')}")
        if self.form != base.form:
            items.append(f"form={self.form}")
        if self.compile != base.compile:
            items.append(f"compile={'on' if self.compile else 'off'}")
        if self.name != AUTO and items and items[0][0].isdecimal():
            items[0] = f" {items[0]}"
        return ",".join(items if items and self.name == AUTO else [self.name, *items])


def find_items(items: Sequence[BudgetItem], device: str, component: str, kind: str) -> tuple[BudgetItem, ...]:
    by_target = {item.target: item for item in items}
    of_component = next((by_target[key] for key in (component, kind, "*") if key in by_target), None)
    return tuple(item for item in (of_component, by_target.get(device)) if item is not None)


def most_left_free(items: Sequence[BudgetItem], total_bytes: int) -> int:
    return max((item.left_free(total_bytes) for item in items), default=0)


def refuse_wrong_items(items: Any, field: str) -> None:
    if not isinstance(items, tuple) or not all(isinstance(item, BudgetItem) for item in items):
        raise InvalidInput(f"{field} {quoted(items)}; allowed: a tuple of BudgetItem")
    seen = set()
    for item in items:
        if (item.target, item.from_profile) in seen:
            raise InvalidInput(f"{field}: {item.target!r} has a {field.removesuffix('s')} already; allowed: one")
        seen.add((item.target, item.from_profile))


def covers(names: Collection[str], component: str, *kinds: str) -> bool:
    """Whether names cover this component, by its name or by one of its kinds."""
    return any(name in names for name in ("*", component, *kinds))


def names_text(names: Sequence[str]) -> str:
    return "all" if "*" in names else "&".join(names) or "none"


def brought(**megabytes: int) -> tuple[BudgetItem, ...]:
    """Return a profile's own budgets; ``others`` stands for all components that are not named."""
    return tuple(
        BudgetItem(target="*" if target == "others" else target, limit_bytes=number * MIB, from_profile=True)
        for target, number in megabytes.items()
    )


# mmgp 3.8.2, `profile()`: the same five rows. It prefetches one block; here the schedule chooses how many.
PROFILES: dict[str, OffloadProfile] = {
    AUTO: OffloadProfile(),
    "1": OffloadProfile(name="1", quantize=("diffusion",)),
    "2": OffloadProfile(name="2", quantize=("diffusion",), budgets=brought(diffusion=1200, others=3000)),
    "3": OffloadProfile(name="3", pinned=("diffusion",), quantize=("diffusion", LANGUAGE)),
    "4": OffloadProfile(
        name="4",
        pinned=("diffusion",),
        quantize=("diffusion", LANGUAGE),
        budgets=brought(diffusion=1200, others=3000),
    ),
    "5": OffloadProfile(
        name="5", pinned=(), quantize=("diffusion", LANGUAGE), budgets=brought(diffusion=400, others=3000)
    ),
}
ALLOWED = f"allowed: auto, 1 to 5, {', '.join(TITLES.values())}, or a budget such as 6GiB, 80%, -1GiB, unlimited"


def parse_profile(text: str, *, devices: Collection[str], components: Sequence[str] = ()) -> OffloadProfile:
    """Parse ``auto``, ``4``, ``LowRAM_LowVRAM``, ``6GiB``, ``4,diffusion=2GiB`` or ``auto,reserve=2GiB``.

    Raises:
        InvalidInput: an unknown profile, component, device, unit or setting, or a bare number; names the column.
    """
    scanner = Scanner(text, what="profile")
    profile = PROFILES[parse_base(scanner) or AUTO]
    if scanner.position and scanner.at_end:
        return profile
    if scanner.position and not scanner.take(","):
        scanner.fail(f"{scanner.text[scanner.position]!r} is unexpected; allowed: ',' or the end")
    budgets: list[BudgetItem] = []
    settings: dict[str, Any] = {}
    reserve: list[BudgetItem] = []
    for begin in scanner.items():
        setting = parse_setting(scanner, devices, components)
        if setting is None:
            item = parse_budget_item(scanner, devices, components, others=SETTINGS)
            add_item(scanner, begin, budgets, item, "budget")
        elif setting[0] == "reserve":
            add_item(scanner, begin, reserve, setting[1], "reserve")
        elif setting[0] in settings:
            scanner.fail(f"{setting[0]!r} is set twice", at=begin)
        else:
            settings[setting[0]] = setting[1]
    brought = brought_beside(budgets, profile)
    return replace(profile, budgets=(*budgets, *brought), reserve=tuple(reserve), **settings)


def brought_beside(own: Sequence[BudgetItem], profile: OffloadProfile) -> list[BudgetItem]:
    """Return the budgets that a profile brings itself beside a user's own."""
    named = {item.target for item in own}
    return [item for item in profile.budgets if not named & {item.target, "*"}]


def parse_base(scanner: Scanner) -> str | None:
    """Consume the name or number of a profile if the text begins with one."""
    scanner.skip_blanks()
    begin = scanner.position
    if begin == len(scanner.text):
        scanner.fail(f"it is empty; {ALLOWED}")
    ambiguous = scanner.match(AMBIGUOUS)
    if ambiguous:
        number, amount = ambiguous.groups()
        either = f"{number}.{amount}, or '{number}, {amount}' for profile {number} with a budget of {amount}"
        scanner.fail(f"{ambiguous[0]!r} can be read in two ways; write {either}", at=begin)
    numbered = scanner.match(WRONGLY_SEPARATED)
    if numbered:
        found = scanner.text[scanner.position]
        scanner.fail(f"{found!r} is unexpected after profile {numbered[0].strip()}; allowed: ','")
    number = scanner.match(NUMBER)
    if number and not number[0].strip("0"):  # an amount, the only one without a unit
        scanner.go_to(0)
        return None
    if number:
        if number[0] not in TITLES:
            scanner.fail(
                f"{number[0]!r} is not a profile and has no unit; allowed: 1 to 5, auto, or a size such as 6GiB or 80%",
                at=begin,
            )
        return number[0]
    word = scanner.match(WORD)
    if word is None or word[0] == "unlimited" or scanner.peek("=") or scanner.peek(":"):
        scanner.go_to(0)
        return None
    lowered = word[0].lower()
    if lowered == AUTO:
        return AUTO
    titles = {number: title for number, title in TITLES.items() if title.lower().startswith(lowered)}
    exact = [number for number, title in titles.items() if title.lower() == lowered]
    if len(titles) == 1 or exact:
        return (exact or list(titles))[0]
    if titles:
        scanner.fail(f"{word[0]!r} is ambiguous: {', '.join(titles.values())}", at=begin)
    scanner.fail(f"{word[0]!r} is unknown; {ALLOWED}", at=begin)


def parse_setting(scanner: Scanner, devices: Collection[str], components: Sequence[str]) -> tuple[str, Any] | None:
    """Consume a setting and return its field and value; None if a budget comes next."""
    begin = scanner.position
    match = scanner.match(WORD)
    word = match[0] if match else ""
    if word not in SETTINGS or word in components:
        scanner.go_to(begin)
        return None
    target = "*"
    if word == "reserve" and scanner.take(":"):
        target = parse_target(scanner, devices, components)
    if not scanner.take("="):
        scanner.fail(f"'=' must follow {word!r}")
    if word == "reserve":
        scanner.skip_blanks()
        begin = scanner.position
        item = parse_size(scanner, target)
        if item.size == "unlimited" or item.share == 1:
            scanner.fail("nothing would be left for weights; allowed: more than 0% and less than 100%", at=begin)
        return word, as_left_free(item)
    if word == "prefetch":
        numbers = {str(number): number for number in range(1, LARGEST_PREFETCH + 1)}
        return "prefetch_blocks", parse_choice(scanner, word, {AUTO: None, **numbers})
    if word == "form":
        form = take_form(scanner).lower()
        if not form:
            scanner.fail("a storage form is missing, such as int8")
        return word, form
    if word == "compile":
        return word, parse_choice(scanner, word, {"on": True, "off": False})
    return {"disk": "on_demand"}.get(word, word), parse_names(scanner, components, with_language=word == "quantize")


def parse_choice(scanner: Scanner, word: str, choices: dict[str, Any]) -> Any:
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(re.compile(r"[^\s,]+"))
    value = match[0] if match else ""
    if value not in choices:
        scanner.fail(f"{word} {value!r} is unknown; {allowed_values(value, choices)}", at=begin)
    return choices[value]


def parse_names(scanner: Scanner, components: Sequence[str], *, with_language: bool) -> tuple[str, ...]:
    """Consume ``all``, ``none``, or components joined by ``&``."""
    names: list[str] = []
    while not names or scanner.take("&"):
        scanner.skip_blanks()
        begin = scanner.position
        match = scanner.match(WORD)
        if match is None:
            scanner.fail("a component is missing; allowed: all, none, or components joined by '&'", at=begin)
        if not names and match[0] in ("all", "none", "*"):
            return () if match[0] == "none" else ALL_COMPONENTS
        is_plain = match[0] == LANGUAGE and with_language
        others = [*(() if names else ("all", "none")), *((LANGUAGE,) if with_language else ())]
        names.append(match[0] if is_plain else resolve_kind(scanner, match[0], components, begin, others=others))
    return tuple(dict.fromkeys(names))
