"""No function assigns attributes of an object that it did not make: what an object holds is changed by calls to it."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Set
from functools import cache
from pathlib import Path

import pytest

import highwater.memory

PACK = Path(highwater.memory.__file__).parent.parent
FILES = sorted(path for area in ("memory", "nodes", "headless") for path in (PACK / area).rglob("*.py"))

# Attributes of classes that are not ours, which these want to be assigned.
ANYWHERE = {
    "__class__": "Python's way to give an object that others refer to another class",
    "_is_param": "torch's mark of tensors of other classes that are parameters",
    "atexit": "`weakref.finalize` has no argument for it",
    "data": "torch's way to point a tensor that others refer to to other memory",
}

# File and assigned expression, with the reason.
CORE = "the only file that sets fields of ComfyUI's objects; ComfyUI itself sets these from outside"
DYNAMO = "torch._dynamo's marks of functions that are not traced"
ERROR = "an exception's text, to which the place is added as it passes"
MODULE = "a module of the user, which has no method for it; undone at release, or after the forward"
CALLERS = "repeats on a caller's container what was done to the copy of it"
TWIN = "a twin on the meta device, which is made for one trace"
OWN_TENSOR = "completes a tensor of our class; tensors are not made by `__init__`"
ALLOWED = {
    "headless/arguments.py": {"setattr(namespace)": "argparse has actions fill its namespace"},
    "memory/lazy_names.py": {"setattr(sys.modules[package])": "a module's own names, once they are imported"},
    "headless/commands/output.py": {"sys.stdout": "what libraries print goes to the other stream meanwhile"},
    "memory/api.py": {"module._hf_hook": "accelerate's attribute, which diffusers asks for the execution device"},
    "memory/runtime/forwards/compiled_blocks.py": {
        "vars(block).pop": "the end of `block.forward`: its class has the plain function",
        "block.forward": "a compiled block computes by another function; undone at release",
        "marked._torchdynamo_disable": DYNAMO,
        "marked._torchdynamo_disable_msg": DYNAMO,
        "marked._torchdynamo_disable_recursive": DYNAMO,
    },
    "memory/runtime/tensors/absent_weight.py": {
        "alias.is_data": OWN_TENSOR,
        "alias.reader": OWN_TENSOR,
        "tensor.reader": OWN_TENSOR,
    },
    "memory/runtime/tensors/unread_weight.py": {"alias.unread": OWN_TENSOR, "tensor.unread": OWN_TENSOR},
    "memory/runtime/tensors/computing_parameter.py": {"weight.alias": OWN_TENSOR, "weight.looked": OWN_TENSOR},
    "memory/weights/quantized_leaves.py": {
        "weight.__dict__": "a tensor of another pack's class shares what the weight's others say of its bytes"
    },
    "memory/manager/oom_message.py": {"error.args": ERROR},
    "memory/runtime/forwards/forward_blocks.py": {"error.args": ERROR},
    "memory/runtime/forwards/device_answers.py": {
        "vars(part)[KEY]": MODULE,
        "vars(part).pop": MODULE,
    },
    "memory/runtime/forwards/module_caches.py": {"vars(module)[name]": MODULE},
    "memory/runtime/tensors/nested_tensors.py": {
        "object.__delattr__(container)": CALLERS,
        "object.__setattr__(container)": CALLERS,
    },
    "memory/verification/argument_copies.py": {"object.__setattr__(copied)": "completes a copy; `copy.copy` made it"},
    "memory/runtime/tensors/encoded_weight.py": {"weight.encoded": OWN_TENSOR},
    "memory/runtime/tensors/watched_data.py": {
        "other.is_view": OWN_TENSOR,
        "other.shown": OWN_TENSOR,
        "tensor.is_view": OWN_TENSOR,
        "tensor.shown": OWN_TENSOR,
        "copied.grad": "torch's gradient of a copied tensor",
        "vars(copied).update": "completes a deep copy, which gets the attributes that others gave the tensor",
        "vars(tensor).pop": "the tensor is given back: it has torch's own class and no attributes of ours any more",
        "weight.shown": OWN_TENSOR,
    },
    "memory/tracing/call_traces.py": {
        "vars(part).clear": TWIN,
        "vars(twin)[method]": TWIN,
    },
    "memory/tracing/forward_trace.py": {"vars(part).clear": TWIN},
    "memory/tracing/known_values.py": {
        "setattr(meta)": "what is known of a tensor without memory, which is made for a trace",
        "setattr(tensor)": "what is known of a tensor without memory, which is made in a trace",
    },
    "nodes/host/tiled_vae.py": {
        "copied.first_stage_model": "completes a copy of a VAE; `copy.copy` made it",
        "copied.memory_used_decode": "completes a copy of a VAE; `copy.copy` made it",
        "copied.memory_used_encode": "completes a copy of a VAE; `copy.copy` made it",
    },
    "nodes/pipelines/tile_settings.py": {
        "setattr(vae)": "diffusers' settings of tiles are attributes; put back after the decode"
    },
    "nodes/pipelines/tiled_decode.py": {
        "vae.decode": "the VAE that our node has loaded decodes by another function while our node runs its pipeline"
    },
    "nodes/host/core_fields.py": {"*": CORE},
}

CHANGES_DICT = frozenset(("clear", "pop", "popitem", "setdefault", "update"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def writes_of(path: Path) -> list[tuple[int, str, str]]:
    return list(foreign_writes(ast.parse(path.read_text())))


def name_of(path: Path) -> str:
    return path.relative_to(PACK).as_posix()


def leaves(target: ast.expr) -> Iterator[ast.expr]:
    """Yield what a target of an assignment assigns."""
    if isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from leaves(each)
    elif isinstance(target, ast.Starred):
        yield from leaves(target.value)
    else:
        yield target


def targets_of(node: ast.AST) -> Iterator[ast.expr]:
    """Yield what a statement assigns or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        for target in node.targets:
            yield from leaves(target)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        yield from leaves(node.target)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield from leaves(node.optional_vars)


def is_constructor(value: ast.expr | None, classes: set[str]) -> bool:
    """Whether an expression makes an object: a call of a class by its name, of ``cls``, or of ``__new__``."""
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    name = called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""
    return name in {"cls", "__new__", *classes} or name[:1].isupper()


def made_in(function: Function | ast.Module, classes: set[str]) -> set[str]:
    """Return the names that a function, or a file, gives only to objects that it makes."""
    made: set[str] = set()
    other: set[str] = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    for node in ast.walk(function):
        values: dict[str, ast.expr | None] = {}
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=False)
                    values |= {name.id: value for name, value in pairs if isinstance(name, ast.Name)}
                else:
                    values |= {name.id: node.value for name in leaves(target) if isinstance(name, ast.Name)}
        else:
            value = node.value if isinstance(node, ast.AnnAssign | ast.NamedExpr) else None
            values = {name.id: value for name in targets_of(node) if isinstance(name, ast.Name)}
        for name, value in values.items():
            (made if is_constructor(value, classes) else other).add(name)
    return made - other


def is_named(value: ast.expr, names: Collection[str]) -> bool:
    return isinstance(value, ast.Name) and value.id in names


def owner_of_dict(value: ast.expr) -> ast.expr | None:
    """Return whose attributes ``vars(...)`` or ``....__dict__`` are; None for other expressions."""
    if isinstance(value, ast.Call) and is_named(value.func, ["vars"]) and value.args:
        return value.args[0]
    return value.value if isinstance(value, ast.Attribute) and value.attr == "__dict__" else None


def foreign_writes(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield line, expression and attribute of each assignment to an object that its function did not make."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def walk(node: ast.AST, own: Set[str]) -> Iterator[tuple[int, str, str]]:
        if isinstance(node, ast.ClassDef):
            own = {node.name}
        elif isinstance(node, Function):
            own = own | made_in(node, classes) | ({"self", "cls"} & {each.arg for each in node.args.args[:1]})
        for target in targets_of(node):
            if isinstance(target, ast.Attribute) and not is_named(target.value, own):
                yield target.lineno, ast.unparse(target), target.attr
            owner = owner_of_dict(target.value) if isinstance(target, ast.Subscript) else None
            if owner is not None and not is_named(owner, own):
                yield target.lineno, ast.unparse(target), ""
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute):
            owner, expression = (
                owner_of_dict(called.value) if called.attr in CHANGES_DICT else None,
                ast.unparse(called),
            )
            if expression in ("object.__setattr__", "object.__delattr__"):
                owner, expression = node.args[0], f"{expression}({ast.unparse(node.args[0])})"
            if owner is not None and not is_named(owner, own):
                yield node.lineno, expression, ""
        if isinstance(called, ast.Name) and called.id in ("setattr", "delattr") and not is_named(node.args[0], own):
            yield node.lineno, f"{called.id}({ast.unparse(node.args[0])})", ""
        for child in ast.iter_child_nodes(node):
            yield from walk(child, own)

    made = classes | made_in(tree, classes)
    for child in tree.body:
        yield from walk(child, set() if isinstance(child, Function | ast.ClassDef) else made)


def test_no_function_sets_fields_of_an_object_that_it_did_not_make() -> None:
    found = [
        f"{name_of(path)}:{line}: {expression}"
        for path in FILES
        for line, expression, attribute in writes_of(path)
        if attribute not in ANYWHERE and not {"*", expression} & ALLOWED.get(name_of(path), {}).keys()
    ]
    assert not found, "\n".join(["give the object a method that says what happens to it:", *found])


def test_what_is_allowed_is_there() -> None:
    written = {name_of(path): writes_of(path) for path in FILES}
    there = {(name, expression) for name, writes in written.items() for _, expression, _ in writes}
    there |= {(name, "*") for name, writes in written.items() if writes}
    assert not {(name, expression) for name, allowed in ALLOWED.items() for expression in allowed} - there
    assert ANYWHERE.keys() <= {attribute for writes in written.values() for _, _, attribute in writes}


@pytest.mark.parametrize(
    "code",
    [
        "def f(a): a.b = 1",
        "def f(a): a.b += 1",
        "def f(a): a.b: int = 1",
        "def f(a): del a.b",
        "def f(a): a.b, c = 1, 2",
        "def f(a): [*a.b] = 1, 2",
        "def f(a):\n    for a.b in (1, 2): pass",
        "def f(a):\n    with a as a.b: pass",
        "def f(a): setattr(a, 'b', 1)",
        "def f():\n    a = find()\n    a.b = 1",
        "def f(a):\n    a = a or A()\n    a.b = 1",
        "def f(a):\n    if a is None: a = A()\n    a.b = 1",
        "def f():\n    for a in A(): a.b = 1",
        "class A:\n    def f(self): self.a.b = 1",
        "class A:\n    def f(self): B.b = 1",
        "class A:\n    def f(self):\n        def g(a): a.b = 1",
        "def f(self):\n    def g(a): a().b = 1",
        "def f(a): vars(a)['b'] = 1",
        "def f(a): vars(a)['b'] += 1",
        "def f(a): del vars(a)['b']",
        "def f(a): vars(a).pop('b')",
        "def f(a): vars(a).update(b=1)",
        "def f(a): a.__dict__['b'] = 1",
        "def f(a): a.__dict__.setdefault('b', 1)",
        "def f(a): object.__setattr__(a, 'b', 1)",
        "def f(a): object.__delattr__(a, 'b')",
        "class A:\n    def f(self): vars(self.a)['b'] = 1",
        "a = A()\ndef f(): a.b = 1",
        "a = find()\na.b = 1",
    ],
)
def test_it_is_seen(code: str) -> None:
    assert len(list(foreign_writes(ast.parse(code)))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    a = A()\n    a.b = 1",
        "def f():\n    a: A = A()\n    a.b = 1",
        "def f():\n    a, c = A(), 2\n    a.b = 1",
        "def f(): a[0] = 1",
        "def f(): vars()['b'] = 1",
        "def f(a): vars(a).get('b')",
        "def f(a): a.pop('b')",
        "class A:\n    def f(self): vars(self)['b'] = 1",
        "class A:\n    def f(self): object.__setattr__(self, 'b', 1)",
        "class A:\n    def f(self): self.b = 1",
        "class A:\n    def f(self):\n        def g(): self.b = 1",
        "class A:\n    @classmethod\n    def f(cls):\n        a = cls()\n        a.b = 1",
        "class A:\n    def __new__(cls):\n        a = super().__new__(cls)\n        a.b = 1",
        "class A:\n    def f(self): A.b = 1",
        "class A: pass\nA.b = 1",
        "a = A()\na.b = 1",
    ],
)
def test_it_is_an_objects_own(code: str) -> None:
    assert not list(foreign_writes(ast.parse(code)))
