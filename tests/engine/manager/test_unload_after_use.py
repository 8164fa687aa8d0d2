"""What a profile unloads after use leaves its device as soon as another component computes, or its node ends."""

from __future__ import annotations

import pytest
import torch

from highwater.memory import InvalidInput, OffloadProfile, manage

X = torch.ones(2, 5, 64)
REASON = "its profile unloads it after use"


def loaded(manager) -> set[str]:
    return set(manager.ledger.by_component("gpu:0"))


def parts(toys) -> dict[str, torch.nn.Module]:
    return {name: toys.build_net(seed) for seed, name in enumerate(("text_encoder", "transformer", "vae"))}


@torch.no_grad()
@pytest.mark.parametrize("how", ["text", "name", "python"])
def test_it_leaves_when_another_is_loaded_and_the_others_stay(toys, machine, how: str) -> None:
    profile = {
        "text": "auto,unload=text",
        "name": "auto,unload=text_encoder",
        "python": OffloadProfile(unload=("text",)),
    }
    nets = parts(toys)
    want = {name: net(X) for name, net in nets.items()}
    with machine(32) as manager, manage(nets, profile[how], placement="gpu:0", manager=manager):
        for _ in range(2):
            nets["text_encoder"](X), nets["text_encoder"](X)
            assert "text_encoder" in loaded(manager), "as long as it is used"
            for name in ("transformer", "vae"):
                assert torch.equal(nets[name](X).cpu(), want[name])
                assert "text_encoder" not in loaded(manager) and name in loaded(manager)
            manager.ledger.check()
        assert loaded(manager) == {"transformer", "vae"}
        left = {e["component"]: e["reason"] for e in manager.report()["events"] if e["kind"] == "evict"}
        assert left.keys() == {"text_encoder"} and REASON in left["text_encoder"]
        assert torch.equal(nets["text_encoder"](X).cpu(), want["text_encoder"])


@torch.no_grad()
@pytest.mark.parametrize("end", ["node", "run"])
def test_the_last_one_leaves_when_its_node_or_the_run_ends(toys, machine, end: str) -> None:
    nets = parts(toys)
    with machine(32) as manager, manage(nets, "unload=all", placement="gpu:0", manager=manager):
        manager.begin_run("one", "test")
        manager.begin_node("1", "Decode")
        nets["transformer"](X), nets["vae"](X)
        assert loaded(manager) == {"vae"}
        if end == "node":
            manager.end_node()
        else:
            manager.end_run()
        assert not loaded(manager)


@torch.no_grad()
def test_it_stays_where_the_next_step_uses_it_and_where_it_is_kept(toys, machine) -> None:
    nets = parts(toys)
    with machine(32) as manager, manage(nets, "unload=text", placement="gpu:0", manager=manager) as handle:
        manager.begin_run("one", "test")
        manager.foresee([["text_encoder"], ["text_encoder"], ["transformer"]])
        manager.begin_node("1", "Positive")
        nets["text_encoder"](X)
        manager.end_node()
        assert loaded(manager) == {"text_encoder"}
        manager.foresee([["text_encoder"], ["transformer"]])
        manager.begin_node("2", "Negative")
        nets["text_encoder"](X)
        manager.end_node()
        assert not loaded(manager)
        handle.keep()
        nets["text_encoder"](X), nets["transformer"](X)
        manager.end_run()
        assert "text_encoder" in loaded(manager)


@torch.no_grad()
def test_one_that_computes_inside_another_leaves_when_it_is_idle(toys, machine) -> None:
    outer, inner = toys.build_net(), toys.build_net(seed=1)
    want, found = inner(X), []
    with machine(32) as manager:
        outer.doubles[1].register_forward_hook(lambda *_: found.append(inner(X)))
        with manage({"outer": outer, "inner": inner}, "unload=all", placement="gpu:0", manager=manager):
            for _ in range(2):
                outer(X)
                assert torch.equal(found.pop().cpu(), want)
                assert loaded(manager) == {"outer", "inner"}, "neither was idle when the other began"
            inner(X)
            assert loaded(manager) == {"inner"}
        left = [e["component"] for e in manager.report()["events"] if e["kind"] == "evict" and REASON in e["reason"]]
        assert set(left) == {"outer", "inner"}


@torch.no_grad()
def test_a_model_whose_weights_another_one_uses_stays_while_that_computes(toys, machine) -> None:
    first, second = toys.build_net(), toys.build_net(seed=1)
    second.doubles = first.doubles
    want = second(X)
    parts = {"first": first, "second": second}
    with machine(32) as manager, manage(parts, "unload=all", placement="gpu:0", manager=manager):
        second(X)
        before = len(manager.report()["events"])
        for _ in range(3):
            assert torch.equal(second(X).cpu(), want)
        assert not [event for event in manager.report()["events"][before:] if event["kind"] in ("evict", "load")]


def test_the_text_says_whose_and_unknown_names_are_refused(toys, machine) -> None:
    with machine(32) as manager:
        handle = manage({"vae": toys.build_net()}, "4,unload=vae", placement="gpu:0", manager=manager)
        assert "unload=vae" in handle.plan.text()
        with pytest.raises(InvalidInput, match="allowed: "):
            manage(toys.build_net(), "auto,unload=nothing", placement="gpu:0", manager=manager)
