"""The ledger agrees with a naive count after every step, and policies keep their contract."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from highwater.memory.manager.eviction import LeastRecentlyUsed, Victim
from highwater.memory.runtime.ledger import Kind, Ledger

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
            assert sum(self.ledger.places(owner).values()) == sum(
                n for (_, who, _), n in self.model.items() if who == owner
            )


TestLedger = LedgerMachine.TestCase

victims = st.lists(
    st.builds(Victim, component=st.text("abc", min_size=1), device_bytes=st.integers(1, 9), last_use=st.integers(0, 9))
)


@pytest.mark.parametrize("policy", [LeastRecentlyUsed()])
@given(candidates=victims)
def test_a_policy_returns_every_victim_once(policy, candidates: list[Victim]) -> None:
    assert Counter(policy.order(candidates)) == Counter(candidates)


@given(candidates=victims)
def test_least_recently_used_leaves_first(candidates: list[Victim]) -> None:
    order = LeastRecentlyUsed().order(candidates)
    assert [victim.last_use for victim in order] == sorted(victim.last_use for victim in candidates)
