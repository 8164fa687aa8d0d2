"""Which functions of comfy-aimdo are called, whatever its version, and what is said where one is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "nodes" / "host" / "aimdo.py"
GIB, MIB = 1 << 30, 1 << 20
METHODS = ("set_watermark", "get_residency", "free_memory", "deprioritize")

Load = Callable[..., ModuleType]


class Calls(list):
    """What was called, with its arguments."""

    def taker(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.append((name, *args, kwargs))


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that imports the file over stand-ins for ComfyUI's options and a version of comfy-aimdo."""

    def load(control: Any, methods: tuple[str, ...] = METHODS, *, enabled: bool = True, **options: Any) -> ModuleType:
        args = SimpleNamespace(**{"reserve_vram": None, "disable_nvml_pressure": False, "cpu": False, **options})
        vbar = type("ModelVBAR", (), dict.fromkeys(methods, lambda self: None))
        modules: dict[str, Any] = {
            "comfy": ModuleType("comfy"),
            "comfy.cli_args": SimpleNamespace(args=args),
            "comfy.memory_management": SimpleNamespace(aimdo_enabled=enabled),
            "comfy_aimdo": ModuleType("comfy_aimdo"),
            "comfy_aimdo.control": control,
            "comfy_aimdo.model_vbar": SimpleNamespace(ModelVBAR=vbar),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        spec = importlib.util.spec_from_file_location("highwater.nodes.host.aimdo_under_test", FILE)
        assert spec is not None and spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    return load


def version_0_6(calls: Calls) -> Any:
    return SimpleNamespace(set_simple_vram_headroom=calls.taker("set"), get_devctx=lambda index: 1, init=None)


def version_0_4_13(calls: Calls) -> Any:
    def init(implementation: Any = None, simple_vram_headroom: Any = None, nvml_pressure: bool = False) -> None:
        calls.append(("init", simple_vram_headroom, nvml_pressure))

    return SimpleNamespace(init=init, get_devctx=lambda index: 1)


def version_0_4_10(calls: Calls) -> Any:
    def init(implementation: Any = None, simple_vram_headroom: Any = None) -> None:
        calls.append(("init", simple_vram_headroom))

    return SimpleNamespace(init=init)


@pytest.mark.parametrize("reserve", [None, 0.25, 2.0])
def test_the_headroom_is_the_larger_of_the_mark_and_the_users_reserve(load: Load, calls: Calls, reserve: Any) -> None:
    own = 256 * MIB if reserve is None else int(reserve * GIB)
    aimdo = load(version_0_6(calls), reserve_vram=reserve)
    for mark in (GIB, 3 * GIB, 1, None):
        aimdo.keep_free(mark)
    assert [call[1] for call in calls] == [max(GIB, own), 3 * GIB, own, own]


@pytest.mark.parametrize("disable", [False, True])
def test_an_older_version_takes_it_by_init_with_what_core_passed(load: Load, calls: Calls, disable: bool) -> None:
    load(version_0_4_13(calls), disable_nvml_pressure=disable).keep_free(GIB)
    assert calls == [("init", GIB, not disable)]


def test_one_older_still_is_not_passed_what_it_does_not_know(load: Load, calls: Calls) -> None:
    aimdo = load(version_0_4_10(calls))
    aimdo.keep_free(GIB)
    assert calls == [("init", GIB)]
    assert aimdo.is_on_for(1)  # it names no devices
    assert aimdo.lost() == []


@pytest.mark.parametrize("missing", METHODS)
def test_what_a_version_lacks_is_named_with_what_is_lost(load: Load, calls: Calls, missing: str) -> None:
    aimdo = load(version_0_6(calls), tuple(name for name in METHODS if name != missing))
    (line,) = aimdo.lost()
    assert line.startswith("comfy-aimdo") and f" has no ModelVBAR.{missing}: " in line and "\n" not in line


def test_a_version_without_headroom_says_so_and_nothing_is_called(load: Load, calls: Calls) -> None:
    aimdo = load(SimpleNamespace(init=lambda: calls.append("init")))
    aimdo.keep_free(GIB)
    assert calls == []
    (line,) = aimdo.lost()
    assert "watermark" in line and "set_simple_vram_headroom" in line


def test_a_device_that_was_not_initialised_is_not_dynamic(load: Load, calls: Calls) -> None:
    def get_devctx(index: int) -> int:
        if index:
            raise RuntimeError(f"comfy-aimdo device {index} is not initialized")
        return 1

    aimdo = load(SimpleNamespace(get_devctx=get_devctx, set_simple_vram_headroom=None))
    assert aimdo.is_on_for(0) and not aimdo.is_on_for(1)


@pytest.mark.parametrize(("option", "said"), [("cpu", "--cpu"), ("disable_dynamic_vram", "--disable-dynamic-vram")])
def test_why_it_is_off_names_the_flag(load: Load, calls: Calls, option: str, said: str) -> None:
    aimdo = load(version_0_6(calls), enabled=False, **{option: True})
    assert not aimdo.is_on() and not aimdo.is_on_for(0)
    assert said in aimdo.why_off()
    aimdo.keep_free(GIB)
    assert calls == [] and aimdo.lost() == []
