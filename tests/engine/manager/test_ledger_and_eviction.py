"""The ledger agrees with a naive count after every step, and the mover moves by any policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from highwater.memory import manage
from highwater.memory.manager.policies.candidate import Candidate, Victim
from highwater.memory.runtime.devices.ledger import Kind, Ledger
from highwater.memory.units import MIB

PLACES = st.sampled_from(["gpu:0", "gpu:1", "pinned"])
OWNERS = st.sampled_from(["a", "b"])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: Counter = Counter()

    @rule(place=PLACES, owner=OWNERS, kind=st.sampled_from(list(Kind)), num_bytes=st.integers(0, 1000))
    def charge(self, place, owner, kind, num_bytes) -> None:
        self.ledger.charge(place, owner, kind, num_bytes)
        self.model[place, owner, kind] += num_bytes

    @rule(place=PLACES, owner=OWNERS, kind=st.sampled_from(list(Kind)), num_bytes=st.integers(0, 1000))
    def credit(self, place, owner, kind, num_bytes) -> None:
        if num_bytes > self.model[place, owner, kind]:
            with pytest.raises(AssertionError):
                self.ledger.credit(place, owner, kind, num_bytes)
        else:
            self.ledger.credit(place, owner, kind, num_bytes)
            self.model[place, owner, kind] -= num_bytes

    @invariant()
    def agrees(self) -> None:
        self.ledger.check()
        for place in ["gpu:0", "gpu:1", "pinned"]:
            assert self.ledger.used(place) == sum(n for (where, _, _), n in self.model.items() if where == place)
            held = {owner: self.ledger.held(owner, place) for owner in "ab"}
            assert {owner: n for owner, n in held.items() if n} == self.ledger.by_component(place)
        for owner in "ab":
            assert sum(self.ledger.bytes_by_place(owner).values()) == sum(
                n for (_, who, _), n in self.model.items() if who == owner
            )


TestLedger = LedgerMachine.TestCase


@torch.no_grad()
def test_the_mover_moves_by_any_policy_and_says_its_reasons(toys, machine) -> None:
    """A policy of ten lines: the smallest leave first."""

    class SmallestFirst:
        def order(self, candidates: Iterable[Candidate]) -> list[Victim]:
            ranked = sorted(candidates, key=lambda each: each.device_bytes)
            return [
                Victim(component=each.component, device_bytes=each.device_bytes, reason="the smallest")
                for each in ranked
            ]

    with machine(4, low=MIB // 4, high=MIB // 4) as manager:
        manager.admission.policy = SmallestFirst()
        nets = {name: toys.build_net(dim=dim) for name, dim in {"old": 96, "small": 48, "new": 80}.items()}
        for name, net in nets.items():
            manage({name: net}, placement="gpu:0", manager=manager)
            net(torch.ones(1, 3, net.embed.in_features))
        evictions = [event for event in manager.report()["events"] if event["kind"] == "evict"]
        assert [event["component"] for event in evictions][:1] == ["small"]
        assert all("; the smallest; " in event["reason"] for event in evictions)
