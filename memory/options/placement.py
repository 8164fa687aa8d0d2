"""The placement grammar: which device computes a component, and where its weights rest.

    placement  = item { "," item }
    item       = [ component "=" ] place [ ":" tier ]
    place      = "auto" | device { "&" device [ "@" ratio ] } [ "/" groups ]
    device     = "cpu" | "gpu" | "gpu:" int | torch device name | what only one of these begins with, such as "c"
    tier       = "device" | "pinned" | "host" | "disk" [ "!" ] | device     disk!: nothing of it ever rests in RAM
    ratio      = number [ "%" ]       the device's part of the blocks' bytes; the others divide what is left
    groups     = int | "auto"         of a split: groups of blocks that its devices have in turn, so that they compute
                                      micro-batches at the same time; auto: as many as gain most

Every program reads placements with this parser. Each error names the column, the value and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from ..errors import InvalidInput, allowed_values, quoted, require

__all__ = [
    "AUTO",
    "AUTO_GROUPS",
    "AUTO_PLACEMENT",
    "KINDS",
    "Placement",
    "PlacementItem",
    "Scanner",
    "SplitRatio",
    "no_device",
    "parse_device",
    "parse_placement",
    "resolve_kind",
    "take_component",
]

# Component kinds and the words that other programs use for them.
KINDS: dict[str, tuple[str, ...]] = {
    "diffusion": ("diffusion", "dit", "unet", "transformer", "model", "diffusion_model"),
    "text": ("text", "clip", "te", "t5", "llm", "conditioner", "text_encoder"),
    "vae": ("vae", "autoencoder", "first_stage", "tae"),
    "control": ("control", "controlnet"),
    "vision": ("vision", "clip_vision", "image_encoder"),
}
TIERS = ("device", "pinned", "host", "disk")
AUTO = "auto"
ACCELERATORS = frozenset({"gpu", "cuda", "hip", "rocm", "xpu", "mps", "npu", "mlu", "hpu", "musa", "sim"})
"""The words with which programs begin the name of an accelerator."""
DEVICE = re.compile(r"([a-z]+)(?::0*(\d+))?", re.ASCII)
AUTO_GROUPS = 0
"""As a number of groups: as many as gain most."""
LEAST_GROUPS, MOST_GROUPS = 2, 999
WORD = re.compile(r"[A-Za-z_][\w.\-]*|\*")
INTEGER = re.compile(r"\d+", re.ASCII)
RATIO = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(%?)", re.ASCII)
BUDGETS = "an amount of a device is a budget and stands in the profile, such as auto,gpu:0=50%"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRatio:
    """A device and its ratio of the blocks' bytes; devices without a ratio divide what the others leave."""

    device: str
    ratio: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementItem:
    """Where one component goes; no devices means ``auto``, no tier means that the plan chooses one."""

    component: str
    devices: tuple[SplitRatio, ...] = ()
    tier: str | None = None
    forbids_ram: bool = False
    """Whether nothing of it may ever rest in RAM (``disk!``)."""
    groups: int | None = None
    """The groups of blocks that the devices of a split have in turn; `AUTO_GROUPS`: the plan chooses; None: one run of
    blocks on each."""

    def __str__(self) -> str:
        splits = "&".join(s.device + (f"@{s.ratio:g}" if s.ratio is not None else "") for s in self.devices)
        if self.groups is not None:
            splits += f"/{self.groups or AUTO}"
        target = "" if self.component == "*" else f"{self.component}="
        return target + (splits or AUTO) + (f":{self.tier}" if self.tier else "") + "!" * self.forbids_ram


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """All items of one placement text; `item_for` finds that of a component."""

    items: tuple[PlacementItem, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.items))

    def item_for(self, name: str, kind: str) -> PlacementItem:
        """Return the most specific item: the component's name, its kind, ``*``, else ``auto``."""
        by_component = {item.component: item for item in self.items}
        for key in (name, kind, "*"):
            if key in by_component:
                return by_component[key]
        return PlacementItem(component="*")

    def with_item(self, item: PlacementItem) -> Placement:
        """Return it with another item for that component."""
        return Placement(items=(*(each for each in self.items if each.component != item.component), item))

    def without(self, devices: Collection[str]) -> Placement:
        """Return it without the items that name one of these devices; the plan chooses for their components."""
        left_out = {*devices}
        kept = [item for item in self.items if not left_out & {item.tier, *(split.device for split in item.devices)}]
        return Placement(items=tuple(kept) or (PlacementItem(component="*"),))


AUTO_PLACEMENT = Placement(items=(PlacementItem(component="*"),))
"""Nothing is placed: the plan chooses the device."""


class Scanner:
    """Reads one line of text from left to right and knows the column of each error, from 1."""

    def __init__(self, text: str, *, what: str) -> None:
        if not isinstance(text, str):
            raise InvalidInput(f"{what} {quoted(text)} is a {type(text).__name__}; allowed: text")
        self.text = text
        self.what = what
        self.position = 0

    def go_to(self, position: int) -> None:
        """Go on reading there."""
        self.position = position

    def skip_blanks(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    @property
    def at_end(self) -> bool:
        self.skip_blanks()
        return self.position == len(self.text)

    def peek(self, symbol: str) -> bool:
        self.skip_blanks()
        return self.text.startswith(symbol, self.position)

    def take(self, symbol: str) -> bool:
        """Consume the symbol if it comes next."""
        if not self.peek(symbol):
            return False
        self.position += len(symbol)
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume the pattern if it comes next, behind blanks."""
        self.skip_blanks()
        return self.match_here(pattern)

    def match_here(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Consume the pattern if it comes next, without a blank before."""
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def items(self, *others: str) -> Iterator[int]:
        """Yield where each item of a list with commas begins; the caller consumes it. ``others`` may follow an item.

        Raises:
            InvalidInput: an item is followed by something else.
        """
        while True:
            self.skip_blanks()
            yield self.position
            if self.at_end:
                return
            if not self.take(","):
                self.fail_unexpected(*others)

    def fail_unexpected(self, *others: str) -> NoReturn:
        """Refuse what follows an item; ``others`` may follow it beside a comma."""
        allowed = ", ".join(map(repr, [",", *others]))
        self.fail(f"{self.text[self.position]!r} is unexpected; allowed: {allowed} or the end")

    def fail(self, problem: str, *, at: int | None = None) -> NoReturn:
        """Raise the one line that says what is wrong and at which column."""
        column = (self.position if at is None else at) + 1
        raise InvalidInput(f"{self.what} {self.text!r}, column {column}: {problem}")


def parse_placement(text: str, *, devices: Collection[str], components: Sequence[str] = ()) -> Placement:
    """Parse a placement for a machine with these devices (``cpu``, ``gpu:0``, ...).

    Args:
        components: names that may be used beside the kinds, such as ``text_encoder_2``.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    scanner = Scanner(text, what="placement")
    items: list[PlacementItem] = []
    for begin in scanner.items():
        item = parse_item(scanner, devices, components)
        if any(item.component == other.component for other in items):
            scanner.fail(f"{item.component!r} is placed twice", at=begin)
        items.append(item)
    return Placement(items=tuple(items))


def parse_item(scanner: Scanner, devices: Collection[str], components: Sequence[str]) -> PlacementItem:
    component = take_component(scanner, components)
    splits = parse_place(scanner, devices)
    groups = parse_groups(scanner, splits) if scanner.peek("/") else None
    tier = None
    if scanner.take(":"):
        tier = parse_tier(scanner, devices)
    forbids_ram = tier == "disk" and scanner.take("!")
    refuse_what_follows(scanner, splits, tier, groups)
    return PlacementItem(component=component, devices=splits, tier=tier, forbids_ram=forbids_ram, groups=groups)


def take_component(scanner: Scanner, components: Sequence[str]) -> str:
    """Consume the component and the ``=`` that an item may begin with; returns ``*`` where it names none."""
    begin = scanner.position
    if scanner.match(WORD) and scanner.peek("="):
        component = resolve_kind(scanner, scanner.text[begin : scanner.position].strip(), components, begin)
        scanner.take("=")
        return component
    scanner.go_to(begin)
    if scanner.peek("="):
        scanner.fail(
            f"a component is missing before '='; {allowed_values('', dict.fromkeys(['*', *KINDS, *components]))}"
        )
    return "*"


def refuse_what_follows(scanner: Scanner, splits: Sequence[SplitRatio], tier: str | None, groups: int | None) -> None:
    """Refuse anything but a comma or the end behind a place and its tier, and say what may stand there."""
    if scanner.at_end or scanner.peek(","):
        return
    if scanner.peek("@") and tier is None and len(splits) < 2:
        scanner.fail("only the second device of a split, and later ones, have a ratio: write gpu:0&gpu:1@30%")
    if scanner.peek("="):
        scanner.fail(f"'=' is unexpected: {BUDGETS}")
    is_split = tier is None and groups is None and bool(splits)
    may_have_ratio = is_split and len(splits) > 1 and splits[-1].ratio is None
    may_have_groups = is_split and len(splits) > 1
    scanner.fail_unexpected(
        *["&"] * is_split, *["@"] * may_have_ratio, *["/"] * may_have_groups, *[":"] * (tier is None)
    )


def resolve_kind(
    scanner: Scanner,
    word: str,
    components: Sequence[str],
    at: int,
    *,
    others: Sequence[str] = (),
    devices: Collection[str] = (),
) -> str:
    """Return the component name or kind that a word means: exact, alias, or an unambiguous prefix.

    ``others`` are further words that the error lists as allowed; the word may be the beginning of one of ``devices``.
    """
    if word == "*" or word in components:
        return word
    lowered = word.lower()
    for kind, aliases in KINDS.items():
        if lowered in aliases:
            return kind
    meanings = {kind for kind, aliases in KINDS.items() if any(alias.startswith(lowered) for alias in aliases)}
    meanings |= {name for name in components if name.startswith(word)}
    meanings |= {*devices_meant(word, devices)}
    if len(meanings) == 1:
        return meanings.pop()
    if meanings:
        what = "component or device" if devices else "component"
        scanner.fail(f"{what} {word!r} is ambiguous: {', '.join(sorted(meanings))}", at=at)
    allowed = dict.fromkeys(["*", *KINDS, *components, *others])  # components may be called as a kind
    scanner.fail(f"component {word!r} is unknown; {allowed_values(word, allowed)}", at=at)


def parse_place(scanner: Scanner, devices: Collection[str]) -> tuple[SplitRatio, ...]:
    begin = scanner.position
    match = scanner.match(WORD)
    if match and match[0] == AUTO:
        if scanner.peek("&"):
            scanner.fail("'auto' chooses the devices itself; name every device of a split")
        return ()
    scanner.go_to(begin)
    splits = [SplitRatio(device=parse_device_name(scanner, devices))]
    while scanner.take("&"):
        scanner.skip_blanks()
        begin = scanner.position
        device = parse_device_name(scanner, devices)
        if device in {split.device for split in splits}:
            scanner.fail(f"device {device!r} is named twice in one split", at=begin)
        splits.append(SplitRatio(device=device, ratio=parse_ratio(scanner) if scanner.take("@") else None))
        if "cpu" in {split.device for split in splits}:
            scanner.fail("'cpu' cannot share a split with another device; use a tier such as ':host'", at=begin)
    if sum(split.ratio or 0.0 for split in splits) >= 1.0:
        scanner.fail("the ratios of a split must leave a part for its first device: their sum must be below 1")
    return tuple(splits)


def parse_device_name(scanner: Scanner, devices: Collection[str]) -> str:
    """Consume a device and return it as ``cpu`` or ``gpu:N``."""
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(WORD)
    if match is None and scanner.match(RATIO):
        scanner.fail(f"a device is missing: {BUDGETS}", at=begin)
    if match is None:
        scanner.fail(f"a device is missing; {allowed_values('', [AUTO, *devices])}", at=begin)
    name, after_name = match[0], scanner.position
    if scanner.take(":"):
        number = scanner.match(INTEGER)
        if number:
            name = f"{name}:{number[0].lstrip('0') or 0}"
        else:  # the colon begins a tier
            scanner.go_to(after_name)
    found = find_device_name(name, devices)
    if found is None:
        scanner.fail(no_device(name, [AUTO, *devices]), at=begin)
    return found


def canonical_device(name: str) -> str:
    """Return ``cpu`` or ``gpu:N`` for a device as any program writes it (``cuda``, ``CUDA:01``); others as they are."""
    match = DEVICE.fullmatch(name.lower())
    kind, index = match.groups() if match else ("", None)
    if kind == "cpu":
        return "cpu"
    return f"gpu:{index or 0}" if kind in ACCELERATORS else name


def find_device_name(named: str, allowed: Collection[str]) -> str | None:
    """Return the one of these devices that a name means; None if it means none or may mean several."""
    found = devices_meant(named, allowed)
    return found[0] if len(found) == 1 else None


def devices_meant(named: str, allowed: Collection[str]) -> list[str]:
    """Return which of these devices a name may mean: the one of that name, else those whose names begin so.

    A name with a number is complete: ``gpu:1`` never means ``gpu:10``.
    """
    canonical, word = canonical_device(named), named.lower()
    if canonical in allowed:
        return [canonical]
    if names_device(word) or not word:
        return []
    begins_cuda = "cuda".startswith(word)
    return [name for name in allowed if name.startswith(word) or (begins_cuda and name.startswith("gpu:"))]


def parse_device(named: object, allowed: Sequence[str], *, what: str = "") -> str:
    """Return the plain name of a device, one of those that are allowed here, such as ``gpu:0`` for ``cuda``.

    Args:
        what: what names it, for the error.

    Raises:
        InvalidInput: this machine has no such device, several begin so, or it is not a text.
    """
    require(named, str, what="device", allowed=", ".join(allowed))
    assert isinstance(named, str)
    name = find_device_name(named.strip(), allowed)
    if name is None:
        raise InvalidInput(f"{what}: {no_device(named, allowed)}" if what else no_device(named, allowed))
    return name


def no_device(named: str, allowed: Sequence[str]) -> str:
    """Return what is said of a name that means no device here, several, or the CPU where only others are allowed."""
    name = canonical_device(named.strip())
    meant = devices_meant(named.strip(), allowed)
    if len(meant) > 1:
        return f"device {named!r} is ambiguous: {', '.join(meant)}"
    told = f"{named!r} is not allowed here" if name == "cpu" else f"this machine has no device {named!r}"
    return f"{told}; {allowed_values(name, allowed)}"


def names_device(word: str) -> bool:
    """Whether the word is a device's full name, here or elsewhere, rather than a component or a tier."""
    match = DEVICE.fullmatch(word.lower())
    return match is not None and match[1] in ACCELERATORS | {"cpu"}


def parse_ratio(scanner: Scanner) -> float:
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(RATIO)
    ratio = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0.0 < ratio < 1.0:
        scanner.fail("a ratio between 0 and 1, such as 0.3 or 30%, must follow '@'", at=begin)
    return ratio


def parse_groups(scanner: Scanner, splits: Sequence[SplitRatio]) -> int:
    """Consume the slash and the number of groups behind a split."""
    if len(splits) < 2:
        scanner.fail("only a split has groups of blocks in turn: write gpu:0&gpu:1/6")
    scanner.take("/")
    scanner.skip_blanks()
    begin = scanner.position
    word = scanner.match(WORD)
    if word is not None and word[0] == AUTO:
        return AUTO_GROUPS
    scanner.go_to(begin)
    number = scanner.match(INTEGER)
    if number is None or not LEAST_GROUPS <= int(number[0][:9]) <= MOST_GROUPS:
        scanner.fail(f"a number of groups, {LEAST_GROUPS} to {MOST_GROUPS}, or 'auto' must follow '/'", at=begin)
    return int(number[0])


def parse_tier(scanner: Scanner, devices: Collection[str]) -> str:
    scanner.skip_blanks()
    begin = scanner.position
    match = scanner.match(WORD)
    if match and match[0] in TIERS:
        return match[0]
    scanner.go_to(begin)
    if match and (names_device(match[0]) or devices_meant(match[0], devices)):
        return parse_device_name(scanner, devices)
    word = match[0] if match else ""
    scanner.fail(f"tier {word!r} is unknown; {allowed_values(word, [*TIERS, *devices])}", at=begin)
