"""The setting of the page for loaders whose profile is left at auto."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from highwater.headless.comfy_stub import comfy_api
from highwater.memory import InvalidInput, MemoryManager, manage
from highwater.memory.options.profile import OffloadProfile

comfy_api.install()
from highwater.nodes import default_profile  # noqa: E402
from highwater.nodes.default_profile import chosen_profile, profile_fingerprint, set_default_profile  # noqa: E402
from highwater.nodes.extension import MODEL_NODES, NODE_CLASSES  # noqa: E402

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_setting() -> Iterator[None]:
    yield
    set_default_profile({"profile": ""})


def test_it_counts_where_a_loader_says_auto_and_nowhere_else() -> None:
    assert chosen_profile("auto")[0] == OffloadProfile()
    assert set_default_profile({"profile": "4"}) == {"profile": "4", "title": "LowRAM_LowVRAM"}
    profile, text = chosen_profile("auto")
    assert (profile.name, text) == ("4", "4")
    profile, text = chosen_profile("8GiB")
    assert (str(profile), text, profile.origin) == ("8GiB", "8GiB", "")
    assert set_default_profile({"profile": " "}) == {"profile": "auto", "title": "auto"}
    assert chosen_profile("auto") == (OffloadProfile(), "auto")


def test_what_is_no_profile_changes_nothing() -> None:
    set_default_profile({"profile": "2"})
    with pytest.raises(InvalidInput, match="'12' is not a profile"):
        set_default_profile({"profile": "12"})
    assert default_profile.setting == ["2"]


def test_a_changed_setting_makes_the_host_run_loaders_at_auto_again() -> None:
    loaders = [node for node in (*NODE_CLASSES, *MODEL_NODES) if "profile" in {i.id for i in node.GET_SCHEMA().inputs}]
    assert len(loaders) == 10
    before = [(node.fingerprint_inputs(profile="auto"), node.fingerprint_inputs(profile="3")) for node in loaders]
    set_default_profile({"profile": "4"})
    for node, (auto, own) in zip(loaders, before, strict=True):
        assert node.fingerprint_inputs(profile="auto") != auto
        assert node.fingerprint_inputs(profile="3") == own
    assert profile_fingerprint(None) == ""  # a linked widget's value is not known before the run


def test_the_plan_says_where_the_profile_comes_from(sim) -> None:
    set_default_profile({"profile": "1MiB"})
    with sim.cluster([sim.SimDeviceSpec(total_bytes=64 * MIB)]):
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
        manager = MemoryManager()
        managed = manage({"model": model}, profile=chosen_profile("auto")[0], manager=manager, name="part")
        (component,) = manager.report()["components"]
        managed.release()
        assert "profile 1MiB: from the setting Default profile" in component["plan"]["reasons"]
