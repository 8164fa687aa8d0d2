"""The ledger agrees with a naive count after every step, and policies keep their contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from highwater.memory import manage
from highwater.memory.manager import eviction
from highwater.memory.manager.eviction import Candidate, EvictionPolicy, LeastRecentlyUsed, Victim
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

POLICIES = [
    kind()
    for kind in vars(eviction).values()
    if isinstance(kind, type) and kind is not EvictionPolicy and hasattr(kind, "order")
]

candidates = st.lists(
    st.builds(
        Candidate,
        component=st.text("abcd", min_size=1, max_size=3),
        device_bytes=st.integers(1, 9),
        last_use=st.integers(0, 9),
        idle_s=st.none() | st.floats(0, 1e6),
        evict_last=st.booleans(),
    ),
    unique_by=lambda candidate: candidate.component,
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
class TestEveryPolicy:
    """What the mover relies on, whatever the policy."""

    @given(given=candidates)
    def test_every_candidate_is_a_victim_once(self, policy, given: list[Candidate]) -> None:
        def sizes(each: list) -> Counter:
            return Counter((one.component, one.device_bytes) for one in each)

        assert sizes(policy.order(iter(given))) == sizes(given)

    @given(given=candidates)
    def test_each_comes_with_a_reason_of_one_line(self, policy, given: list[Candidate]) -> None:
        for victim in policy.order(given):
            assert victim.reason and victim.reason == victim.reason.strip(" .;") and "\n" not in victim.reason

    @given(given=candidates)
    def test_those_to_evict_last_come_last_and_are_told_so(self, policy, given: list[Candidate]) -> None:
        last = {candidate.component for candidate in given if candidate.evict_last}
        order = policy.order(given)
        assert {victim.component for victim in order[len(given) - len(last) :]} == last
        assert {victim.component for victim in order if "no other component can be evicted" in victim.reason} == last

    @given(given=candidates, data=st.data())
    def test_it_chooses_by_what_they_are_not_by_how_they_come(self, policy, given: list[Candidate], data) -> None:
        distinct = list({(one.last_use, one.device_bytes): one for one in given}.values())
        before = list(distinct)
        assert policy.order(distinct) == policy.order(data.draw(st.permutations(distinct)))
        assert distinct == before


@given(given=candidates)
def test_least_recently_used_leaves_first(given: list[Candidate]) -> None:
    uses = {candidate.component: (candidate.evict_last, candidate.last_use) for candidate in given}
    order = LeastRecentlyUsed().order(given)
    assert [uses[victim.component] for victim in order] == sorted(uses.values())


def test_the_reason_says_since_when() -> None:
    used, unused, kept = LeastRecentlyUsed().order(
        [
            Candidate(component="kept", device_bytes=1, last_use=1, idle_s=0.04, evict_last=True),
            Candidate(component="unused", device_bytes=1, last_use=7),
            Candidate(component="used", device_bytes=1, last_use=2, idle_s=3.21),
        ]
    )
    assert used.reason == "least recently used, 3.2 s ago"
    assert unused.reason == "never used"
    assert (
        kept.reason
        == "least recently used, 0.0 s ago; marked to be evicted last, but no other component can be evicted"
    )


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
