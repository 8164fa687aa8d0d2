"""The precision in which weights rest, as the user names it.

    precision = item { "," item }
    item      = [ component "=" ] form
    form      = "by profile" | "as stored" | a storage form, such as "fp8 scaled"

A text chooses the form of each component; `Precision` also says which weights have it, and where they are widened.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from ..errors import InvalidInput, allowed_values, quoted, require
from .placement import Scanner, take_component

__all__ = [
    "BY_PROFILE",
    "COMPUTE_WORDS",
    "DEFAULT_PRECISION",
    "FLOAT_NAMES",
    "GRANULARITIES",
    "Precision",
    "PrecisionItem",
    "PrecisionRequest",
    "Precisions",
    "fill_precisions",
    "parse_precision",
    "precision_for",
    "precision_names",
    "take_form",
    "why_refused",
]

# The word that leaves the choice to the profile.
BY_PROFILE = "by profile"
GRANULARITIES = ("layer", "block", "component")
FORM = re.compile(r"[^,=]+")
BLANKS = re.compile(r"\s+")
# The dtypes in which weights compute, as safetensors calls them, by the names that torch and users have for them.
FLOAT_NAMES = {
    "float32": "F32", "float": "F32", "fp32": "F32", "bfloat16": "BF16", "bf16": "BF16",
    "float16": "F16", "half": "F16", "fp16": "F16",
}  # fmt: skip
STORAGE_NAMES = {
    "float8_e4m3fn": "float8_e4m3fn", "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
    "e5m2": "float8_e5m2", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16",
    "half": "float16", "int8": "int8", "qint8": "qint8", "qint4": "qint4", "qfloat8": "qfloat8",
}  # fmt: skip
STORAGE_DTYPES = tuple(dict.fromkeys(STORAGE_NAMES.values()))
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
COMPUTE_WORDS = {FLOAT_NAMES[name]: name for name in COMPUTE_DTYPES}
SCALES = ("tensor", "row", "none", "group")
FORM_OF = {
    ("float8_e4m3fn", "tensor"): "fp8 scaled",
    ("float8_e4m3fn", "row"): "fp8 per row",
    ("float8_e4m3fn", "none"): "fp8 plain",
    ("float8_e5m2", "tensor"): "e5m2 scaled",
    ("float8_e5m2", "row"): "e5m2 per row",
    ("float8_e5m2", "none"): "e5m2 plain",
    ("bfloat16", "none"): "bf16",
    ("float16", "none"): "fp16",
    ("int8", "row"): "int8",
    ("qint8", "row"): "qint8",
    ("qint4", "group"): "qint4",
    ("qfloat8", "row"): "qfloat8",
}


@dataclass(frozen=True, slots=True)
class Precision:
    """The storage form in which weights of a component rest, by its name, and which of them have it.

    They compute in the dtype in which they were stored. `Precision.of` makes one from a storage dtype.

    Args:
        granularity: what is widened at once: a layer, a block, or the whole component for the length of a call.
        exclude: regular expressions; weights whose names they are found in stay as stored.
        exclude_classes: the names of layers' classes, and of classes that they derive from, whose weights stay so.
        honours_declared: whether what the component's classes declare, and layers of positions, stay as stored.
        error_limit: weights whose rows lose more, relative to their size, stay as stored; None: the form's own limit
            (`FormNumbers.error_limit`), `math.inf`: all are cast.
        compute: the dtype in which the component must compute, as safetensors calls it; empty: any.

    Raises:
        InvalidInput: a field of another type or out of its range. Names are looked up where they are used.
    """

    name: str
    granularity: str = "block"
    exclude: tuple[str, ...] = ()
    exclude_classes: tuple[str, ...] = ()
    honours_declared: bool = True
    error_limit: float | None = None
    compute: str = ""

    AS_STORED: ClassVar[Precision]
    """Nothing is encoded."""
    ENCODED: ClassVar[Precision]
    """The storage form that a profile's ``quantize`` chooses."""

    def __post_init__(self) -> None:
        require(self.name, str, what="precision", allowed="the name of a storage form")
        if self.granularity not in GRANULARITIES:
            allowed = allowed_values(quoted(self.granularity), GRANULARITIES)
            raise InvalidInput(f"granularity {quoted(self.granularity)} is unknown; {allowed}")
        for which in ("exclude", "exclude_classes"):
            names = getattr(self, which)
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise InvalidInput(f"{which} {quoted(names)}; allowed: a list of texts, such as ['norm']")
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidInput(f"exclude {pattern!r} is no regular expression: {error}") from None
        if not isinstance(self.honours_declared, bool):
            raise InvalidInput(f"honours_declared {quoted(self.honours_declared)}; allowed: True or False")
        limit = self.error_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0):
            raise InvalidInput(f"error_limit {quoted(limit)}; allowed: a number above 0, such as 0.06, or None")

    @classmethod
    def of(
        cls,
        storage_dtype: Any,
        compute_dtype: Any = None,
        *,
        scale: str | None = None,
        exclude: Iterable[str] = (),
        exclude_classes: Iterable[str | type] = (),
        **options: Any,
    ) -> Precision:
        """Return the precision that rests weights in one dtype and computes in another.

        Args:
            storage_dtype: ``torch.float8_e4m3fn``, ``float8_e5m2``, ``int8``, ``bfloat16`` or ``float16``, or its
                name; or the name of a form of optimum-quanto, ``qint8``, ``qint4`` or ``qfloat8``.
            compute_dtype: that of the component when None; another one is refused when the component is planned.
            scale: of float8 weights ``tensor``, the default, ``row`` or ``none``; the others have one choice.
            options: the other fields.

        Raises:
            InvalidInput: one line that names the value and what is allowed.
        """
        stored = dtype_name(storage_dtype, STORAGE_NAMES, "storage_dtype", STORAGE_DTYPES)
        compute = "" if compute_dtype is None else read_compute(compute_dtype, stored)
        if scale is None:
            scale = next(each for each in SCALES if (stored, each) in FORM_OF)
        if (stored, scale) not in FORM_OF:
            allowed = allowed_values(str(scale), [each for each in SCALES if (stored, each) in FORM_OF])
            raise InvalidInput(f"scale {quoted(scale)} of {stored}; {allowed}")
        return cls(
            FORM_OF[stored, scale],
            exclude=read_names(exclude, "exclude"),
            exclude_classes=read_names(exclude_classes, "exclude_classes"),
            compute=compute,
            **options,
        )

    @property
    def is_as_stored(self) -> bool:
        return self.name == Precision.AS_STORED.name

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """What is excluded, compiled; `re` keeps those that were compiled before."""
        return tuple(map(re.compile, self.exclude))


Precision.AS_STORED = Precision("as stored")
Precision.ENCODED = Precision("fp8 scaled")

DEFAULT_PRECISION = Precision.AS_STORED
"""What a host's components have where no precision was chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionItem:
    """The precision of one component or kind, ``*`` for all; None leaves it to the profile."""

    component: str
    precision: Precision | None

    def __str__(self) -> str:
        name = BY_PROFILE if self.precision is None else self.precision.name
        return name if self.component == "*" else f"{self.component}={name}"


@dataclass(frozen=True)
class Precisions:
    """All items of one precision text."""

    items: tuple[PrecisionItem, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.items))

    @cached_property
    def by_component(self) -> dict[str, Precision | None]:
        return {item.component: item.precision for item in self.items}

    def for_component(self, name: str, kind: str) -> Precision | None:
        """Return the most specific one: the component's, its kind's, that of ``*``, else what the profile says."""
        for key in (name, kind, "*"):
            if key in self.by_component:
                return self.by_component[key]
        return None


PrecisionRequest: TypeAlias = Precision | Precisions | None
"""What a user asks for: one precision for all components, one for each, or what the profile says."""


def precision_for(request: PrecisionRequest, name: str, kind: str) -> Precision | None:
    """Return what is asked for of one component; None: what the profile says."""
    return request.for_component(name, kind) if isinstance(request, Precisions) else request


def fill_precisions(own: Precisions, others: PrecisionRequest) -> Precisions:
    """Return what was asked for in one place, and for components that are not named there, what was in another."""
    named = {item.component for item in own.items}
    more = others.items if isinstance(others, Precisions) else (PrecisionItem(component="*", precision=others),)
    return Precisions((*own.items, *(item for item in more if item.component not in named)))


def precision_names(forms: Iterable[str]) -> tuple[str, ...]:
    """Return all that a user may write for one component where these storage forms are known."""
    return (Precision.AS_STORED.name, *forms, BY_PROFILE)


def parse_precision(text: str | None, *, forms: Iterable[str], components: Sequence[str] = ()) -> PrecisionRequest:
    """Return the precisions that a text names; None, for no text, leaves them to the profile.

    Args:
        forms: the names of the storage forms that are known.
        components: names that may be used beside the kinds, such as ``text_encoder_2``.

    Raises:
        InvalidInput: naming the column and what is allowed there.
    """
    if text is None:
        return None
    names = precision_names(forms)
    require(text, str, what="precision", allowed=f"one of {', '.join(names)}, or component=one of them")
    scanner = Scanner(text, what="precision")
    items: list[PrecisionItem] = []
    for begin in scanner.items():
        item = parse_item(scanner, names, components)
        if any(item.component == other.component for other in items):
            scanner.fail(f"{item.component!r} has two precisions", at=begin)
        items.append(item)
    if len(items) == 1 and items[0].component == "*":
        return items[0].precision
    return Precisions(tuple(items))


def why_refused(word: str) -> str:
    """Return what is wrong with a word that names no storage form."""
    if word.lower() == "qint2":
        return "is not offered: two bits lose 0.6 of each weight"
    return "is unknown"


def take_form(scanner: Scanner) -> str:
    """Consume the name of a storage form, which is looked up where it is used; empty if there is none."""
    match = scanner.match(FORM)
    return BLANKS.sub(" ", match[0]).strip() if match else ""


def parse_item(scanner: Scanner, names: Sequence[str], components: Sequence[str]) -> PrecisionItem:
    component = take_component(scanner, components)
    scanner.skip_blanks()
    at = scanner.position
    word = take_form(scanner)
    name = next((name for name in names if name.lower() == word.lower()), None)
    if name is None:
        problem = f"precision {word!r} {why_refused(word)}" if word else "a precision is missing"
        scanner.fail(f"{problem}; {allowed_values(word, names)}", at=at)
    return PrecisionItem(component=component, precision=None if name == BY_PROFILE else Precision(name))


def read_compute(value: Any, stored: str) -> str:
    """Return the dtype in which weights compute, which is another one than that in which they rest."""
    word = str(value).removeprefix("torch.").strip().lower()
    if STORAGE_NAMES.get(word) == stored:
        raise InvalidInput(f"storage_dtype and compute_dtype are both {stored}: nothing would be cast")
    if STORAGE_NAMES.get(word, "").startswith("float8"):
        raise InvalidInput(f"compute_dtype {word}: no layer computes in it; allowed: {', '.join(COMPUTE_DTYPES)}")
    return dtype_name(value, FLOAT_NAMES, "compute_dtype", COMPUTE_DTYPES)


def dtype_name(value: Any, names: dict[str, str], what: str, allowed: Sequence[str]) -> str:
    """Return the usual name of a dtype that is given as itself, or by one of its names."""
    word = str(value).removeprefix("torch.").strip().lower()
    if word not in names:
        raise InvalidInput(f"{what} {quoted(str(value))}; {allowed_values(word, allowed)}")
    return names[word]


def read_names(names: Iterable[str | type], what: str) -> tuple[str, ...]:
    """Return texts, or classes by their names, as a tuple."""
    if isinstance(names, str | type) or not isinstance(names, Iterable):
        example = "['norm']" if what == "exclude" else "['Conv2d']"
        raise InvalidInput(f"{what} {quoted(names)}; allowed: a list of them, such as {example}")
    return tuple(name.__name__ if isinstance(name, type) else name for name in names)
