"""Whether the forwards of a module can come to a name: a look at their code, and at that of what they call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

__all__ = ["forwards_mention"]


def forwards_mention(root: nn.Module, name: str) -> bool:
    """Whether code that the forwards of a module, of its parts or of their hooks may run has a name in it.

    Follows functions of modules and classes by the names under which they are called, but not into
    torch, Python's own library or ours.
    """
    search = Search(name)
    return any(search.finds_in(module) for module in root.modules())


# What runs of an object, or a class, that is called or given to autograd.
CALLED = ("__call__", "__init__", "forward")


class Search:
    """A look for one name, at each function once for each type of object whose method it is."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: set[tuple[CodeType, type]] = set()

    def finds_in(self, module: nn.Module) -> bool:
        own = vars(module)
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        calls = [own.get("forward"), inspect.getattr_static(type(module), "forward", None), *hooks]
        return any(self.finds(function, module) for function in functions_of(calls))

    def finds(self, function: FunctionType, owner: Any) -> bool:
        to_visit: list[tuple[FunctionType, Any]] = [(function, owner)]
        while to_visit:
            function, owner = to_visit.pop()
            code = function.__code__
            if (code, type(owner)) in self.seen or is_foreign(function):
                continue
            self.seen.add((code, type(owner)))
            names = set(names_in(code))
            if self.name in names:
                return True
            to_visit += followed(function, owner, names)
        return False


def followed(function: FunctionType, owner: Any, names: Iterable[str]) -> Iterator[tuple[FunctionType, Any]]:
    """Yield the functions that a function may call, each with the object whose method it may be."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell_is_set(cell)]
    yield from ((each, owner) for each in functions_of([*cells, getattr(function, "__wrapped__", None)]))
    reached = [owner, *(function.__globals__[name] for name in names if name in function.__globals__)]
    yield from ((each, owner) for each in functions_of(reached[1:]))
    attributes = getattr(owner, "__dict__", {})
    reached += [attributes[name] for name in names if name in attributes]
    for holder in reached:
        if isinstance(holder, ModuleType):
            found: list[Any] = [vars(holder).get(name) for name in names]
        elif isinstance(holder, dict):
            found = list(dict.values(holder))  # not its own `values()`: a library's may import all it knows
        elif type(holder) in (list, tuple):
            found = list(holder)
        elif isinstance(holder, FunctionType | str | int | float | None):
            found = [holder]
        else:
            kind = holder if isinstance(holder, type) else type(holder)
            found = [inspect.getattr_static(kind, name, None) for name in (*names, *CALLED)]
        yield from ((each, holder) for each in functions_of(found))


def cell_is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def names_in(code: CodeType) -> Iterator[str]:
    """Yield names and texts in code, and in functions defined there."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from names_in(constant)


def functions_of(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the plain functions behind methods, properties, partials and other callables."""
    for value in values:
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, MethodType | staticmethod | classmethod):
            value = value.__func__
        if not isinstance(value, FunctionType) and not isinstance(value, type) and callable(value):
            value = inspect.getattr_static(type(value), "__call__", None)
        if isinstance(value, FunctionType):
            yield value


def is_foreign(function: FunctionType) -> bool:
    """Whether a function is torch's or Python's own, which write to no weight in a forward, or ours."""
    home = function.__module__ or ""
    first = home.partition(".")[0]
    ours = __name__.rpartition(".")[0] + "."
    return first == "torch" or (first in sys.stdlib_module_names and first != "__main__") or home.startswith(ours)
