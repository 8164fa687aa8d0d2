"""What people type, paste and pass by mistake: refused in one line that does not drown in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from highwater import BudgetItem, MemoryManager, OffloadProfile, discover_components, load_model, load_weights, manage
from highwater.memory import Watermark
from highwater.memory.errors import DoesNotFit, InvalidInput, UnsafeState
from highwater.memory.options.placement import parse_placement
from highwater.memory.options.precision import parse_precision
from highwater.memory.options.profile import parse_profile
from highwater.memory.options.profile_arguments import build_profile
from highwater.memory.units import parse_bytes
from highwater.memory.weights.known_forms import FORMS
from highwater.nodes.described_hardware import parse_hardware

DEVICES = ["cpu", "gpu:0", "gpu:1"]
PARTS = ["transformer", "text_encoder", "text_encoder_2", "vae"]
# What an error line may hold of the input, and of everything else: lists of what is allowed are the longest.
MOST_INPUT, MOST_OTHER = 300, 700

GRAMMARS: dict[str, Callable[[str], Any]] = {
    "placement": lambda text: parse_placement(text, devices=DEVICES, components=PARTS),
    "profile": lambda text: parse_profile(text, devices=DEVICES, components=PARTS),
    "budgets": lambda text: build_profile("auto", devices=DEVICES, components=PARTS, budgets=text),
    "reserve": lambda text: build_profile("auto", devices=DEVICES, components=PARTS, reserve=text),
    "pinned": lambda text: build_profile("auto", devices=DEVICES, components=PARTS, pinned=text),
    "devices": parse_hardware,
    "size": parse_bytes,
    "precision": partial(parse_precision, forms=FORMS),
}
WORDS = [
    *("gpu", "gpu:0", "gpu:1", "cpu", "cuda:7", "auto", "host", "disk", "pinned", "diffusion", "vae", "text", "*", "t"),
    *("unlimited", "reserve", "prefetch", "quantize", "compile", "language", "all", "none", "LowRAM_LowVRAM", "5", "0"),
    *("GiB", "MiB", "gb", "G", "TB", "%", "&", "@", ":", "=", ",", "-", "+", "/s", ".", " ", "\n", "\t", "'", '"'),
    *("9" * 400, "9" * 5000, "0.1", "1e9", "-1", "²", "٣", "Ⅷ", "é", "\udc80", "\u2028", "\x1b[31m", "{"),
    *("}", "%s", "x" * 3000, "\0"),
]  # fmt: skip
texts = st.one_of(st.lists(st.sampled_from(WORDS), max_size=12).map("".join), st.text(max_size=40))


def refusal(call: Callable[[], Any]) -> str | None:
    """Return the one line that a call is refused with; None if it is not. Any other exception is a fault."""
    try:
        call()
    except (InvalidInput, UnsafeState, DoesNotFit) as error:
        line = str(error)
        assert line.isprintable(), f"not one line, or with control characters: {line!r}"
        return line
    return None


@pytest.mark.parametrize("grammar", GRAMMARS)
@given(text=texts)
@example(text="gpu:" + "7" * 5000)
@example(text="9" * 400 + "GiB")
@example(text="vae=" + "9" * 5000 + "%")
def test_any_text_is_read_or_refused_in_one_line(grammar: str, text: str) -> None:
    line = refusal(lambda: GRAMMARS[grammar](text))
    assert line is None or len(line) <= MOST_INPUT + MOST_OTHER


@pytest.mark.slow
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_a_hundred_thousand_texts(grammar: str) -> None:
    chance = random.Random(grammar)
    for _ in range(100_000):
        text = "".join(chance.choices(WORDS, k=chance.randrange(1, 10)))
        line = refusal(lambda text=text: GRAMMARS[grammar](text))
        assert line is None or len(line) <= MOST_INPUT + MOST_OTHER, text


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("length", [10, 100, 1000, 100_000])
@pytest.mark.parametrize("shape", ["{}", "gpu:0={}", "vae={}GiB", "'{}", "gpu:{}", '"{}" , {}', "{} {}"])
def test_a_line_shows_little_of_a_long_text(grammar: str, shape: str, length: int) -> None:
    line = refusal(lambda: GRAMMARS[grammar](shape.format(*["Ж" * length] * 2)))
    assert line is None or line.count("Ж") <= MOST_INPUT


class Rude:
    """An object that fails at everything one may do to print or to compare it."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


# Of every type that comes by mistake.
VALUES: dict[str, Any] = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "huge": 10**6000,
    "empty text": "",
    "text": "6GiB",
    "long text": "x" * 10_000,
    "bytes": b"gpu:0",
    "list": ["gpu:0", 3],
    "tuple": (None, None),
    "set": {1},
    "dict": {"transformer": 3},
    "deep": {"transformer": [[[{}]]]},
    "other keys": {3: 4, None: None},
    "tensor": torch.zeros(3),
    "module": torch.nn.Linear(2, 2),
    "class": torch.nn.Linear,
    "function": len,
    "complex": 1j,
    "object": object(),
    "rude": Rude(),
}


MISSING = object()


def net() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))


def managed_with(**arguments: Any) -> None:
    manager = MemoryManager()
    target = arguments.pop("target", MISSING)
    manage(net() if target is MISSING else target, manager=arguments.pop("manager", manager), **arguments).release()


def reprofiled_with(**arguments: Any) -> None:
    with manage(net(), manager=MemoryManager()) as managed:
        managed.reprofile(**arguments)


CALLS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "manage": (
        managed_with,
        [
            *("target", "profile", "placement", "precision", "files", "blocks", "name", "node_id", "manager"),
            *("budgets", "pinned", "prefetch_blocks", "quantize", "on_demand", "reserve", "compile", "misspelt"),
        ],
    ),
    "reprofile": (
        reprofiled_with,
        ["profile", "placement", "precision", "budgets", "pinned", "prefetch_blocks", "quantize", "reserve", "compile"],
    ),
    "OffloadProfile": (
        OffloadProfile,
        ["name", "budgets", "pinned", "prefetch_blocks", "quantize", "on_demand", "reserve", "compile"],
    ),
    "BudgetItem": (
        lambda target="*", **numbers: BudgetItem(target=target, **numbers),
        ["target", "limit_bytes", "share", "leave_bytes", "leave_share"],
    ),
    "Watermark": (Watermark, ["low_bytes", "high_bytes"]),
    "set_watermark": (
        lambda device="*", low_bytes=0, high_bytes=0: MemoryManager().set_watermark(device, low_bytes, high_bytes),
        ["device", "low_bytes", "high_bytes"],
    ),
    "watch_loading": (lambda watcher: MemoryManager().watch_loading(watcher), ["watcher"]),
    "subscribe": (lambda listener: MemoryManager().subscribe(listener), ["listener"]),
    "discover_components": (discover_components, ["target"]),
    "load_model": (
        lambda path="none.safetensors", model_class=None, **more: load_model(path, model_class, **more),
        ["path", "model_class", "config", "prefix", "ignore_unexpected"],
    ),
    "load_weights": (
        lambda module=MISSING, path="none.safetensors", **more: load_weights(
            net() if module is MISSING else module, path, **more
        ),
        ["module", "path", "prefix"],
    ),
}


@pytest.mark.parametrize(("call", "argument"), [(call, name) for call, (_, names) in CALLS.items() for name in names])
def test_an_argument_of_any_type_is_taken_or_refused_in_one_line(call: str, argument: str) -> None:
    for kind, value in VALUES.items():
        line = refusal(lambda value=value: CALLS[call][0](**{argument: value}))
        assert line is None or len(line) <= MOST_INPUT + MOST_OTHER, kind


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_a_thousand_combinations_of_arguments(call: str) -> None:
    chance = random.Random(call)
    function, names = CALLS[call]
    for _ in range(1000):
        arguments = {name: chance.choice(list(VALUES)) for name in chance.sample(names, k=min(3, len(names)))}
        line = refusal(lambda arguments=arguments: function(**{name: VALUES[kind] for name, kind in arguments.items()}))
        assert line is None or len(line) <= MOST_INPUT + MOST_OTHER, arguments
