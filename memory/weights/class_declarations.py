"""Declarations of a module's classes: which parts are one piece, and which weights stay as stored.

diffusers and transformers classes list the classes of their blocks (``_no_split_modules``, ``_repeated_blocks``) and,
as regular expressions on paths, what loses too much in few bits. Models inside of others declare for themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

__all__ = ["Declarations"]

WHOLE = ("_no_split_modules", "_repeated_blocks")
WIDE = ("_skip_layerwise_casting_patterns", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@dataclass(frozen=True, kw_only=True, slots=True)
class WidePattern:
    """A regular expression on the paths below one module, and the class that declares it."""

    outer: str
    expression: re.Pattern[str]
    reason: str

    def matches(self, name: str) -> bool:
        """Whether the expression is found in the path of the weight or of a module that contains it."""
        if self.outer and not name.startswith(f"{self.outer}."):
            return False
        words = name[len(self.outer) + 1 :].split(".") if self.outer else name.split(".")
        return any(self.expression.search(".".join(words[: index + 1])) for index in range(len(words)))


class Declarations:
    """The declarations of a module and of all models inside it; reads class attributes, costs a walk over the tree."""

    def __init__(self, module: nn.Module) -> None:
        self.whole: frozenset[str] = frozenset(find_whole(module))
        """The paths of parts that are one piece."""
        self.patterns = tuple(
            dict.fromkeys(pattern for path, inner in module.named_modules() for pattern in wide_patterns(path, inner))
        )

    def why_wide(self, name: str) -> str:
        """Return which class keeps a weight as stored, and by which pattern; empty where none does."""
        return next((pattern.reason for pattern in self.patterns if pattern.matches(name)), "")


def find_whole(module: nn.Module) -> Iterator[str]:
    for path, owner in module.named_modules():
        names = {name for attribute in WHOLE for name in words_of(owner, attribute)}
        if names:
            for inner_path, inner in owner.named_modules(prefix=path):
                if inner is not owner and type(inner).__name__ in names:
                    yield inner_path


def wide_patterns(path: str, module: nn.Module) -> Iterator[WidePattern]:
    for attribute in WIDE:
        for text in words_of(module, attribute):
            reason = f"{text!r} of {type(module).__name__}"
            yield WidePattern(outer=path, expression=compile_pattern(text), reason=reason)


def words_of(module: nn.Module, attribute: str) -> list[str]:
    """Return the texts that a class lists; a value that is no list of texts declares nothing."""
    # Not from parametrized or wrapped modules' __getattr__: a declaration is an attribute of a class or an instance.
    value = vars(module).get(attribute, getattr(type(module), attribute, None))
    if not isinstance(value, Collection) or isinstance(value, str):
        return []
    return sorted({text for text in value if isinstance(text, str) and text})


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the expression that a text means; transformers writes a star for any text."""
    try:
        return re.compile(re.sub(r"(?<![.)\]])\*", ".*", text))
    except re.error:
        return re.compile(re.escape(text))
