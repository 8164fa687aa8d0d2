"""Policies keep their contract, and each its own order."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from highwater.memory.manager.forecast import Forecast
from highwater.memory.manager.policies.candidate import Candidate
from highwater.memory.manager.policies.largest_first import LargestFirst
from highwater.memory.manager.policies.least_recently_used import LeastRecentlyUsed
from highwater.memory.manager.policies.named import POLICIES
from highwater.memory.manager.policies.next_use import NextUse, worth_per_byte

ALL = [kind() for kind in POLICIES.values()]

candidates = st.lists(
    st.builds(
        Candidate,
        component=st.text("abcd", min_size=1, max_size=3),
        device_bytes=st.integers(1, 9),
        last_use=st.integers(0, 9),
        idle_s=st.none() | st.floats(0, 1e6),
        evict_last=st.booleans(),
        next_use=st.none() | st.integers(0, 9),
        reload_s_per_byte=st.none() | st.floats(1e-12, 1e-8),
    ),
    unique_by=lambda candidate: candidate.component,
)


@pytest.mark.parametrize("policy", ALL, ids=lambda policy: type(policy).__name__)
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


@given(given=candidates)
def test_with_nothing_known_next_use_orders_as_lru_does(given: list[Candidate]) -> None:
    blind = [replace(each, next_use=None) for each in given]
    names = [[victim.component for victim in policy.order(blind)] for policy in (NextUse(), LeastRecentlyUsed())]
    assert names[0] == names[1]


@given(given=candidates)
def test_what_no_prompt_names_leaves_first_and_of_the_others_what_is_worth_least(given: list[Candidate]) -> None:
    known = {each.component: each for each in given}
    order = [known[victim.component] for victim in NextUse().order(given)]
    for earlier, later in itertools.pairwise(order):
        if earlier.evict_last == later.evict_last:
            assert worth_per_byte(earlier) <= worth_per_byte(later)
            if earlier.next_use is None and later.next_use is None:
                assert earlier.last_use <= later.last_use


@given(given=candidates, rate=st.floats(1e-12, 1e-8))
def test_where_all_reload_alike_the_one_used_last_leaves_first(given: list[Candidate], rate: float) -> None:
    """Belady's rule."""
    alike = [replace(each, reload_s_per_byte=rate, next_use=each.next_use or 0) for each in given]
    uses = {each.component: (each.evict_last, -(each.next_use or 0)) for each in alike}
    order = NextUse().order(alike)
    assert [uses[victim.component] for victim in order] == sorted(uses.values())


def test_what_takes_long_to_reload_stays_longer() -> None:
    """From a file at 1 GB/s against page-locked memory at 20: worth to be kept for a use 20 times as far away."""
    file, locked = (
        Candidate(component=name, device_bytes=9, last_use=1, next_use=steps, reload_s_per_byte=1 / speed)
        for name, steps, speed in (("file", 15, 1e9), ("locked", 0, 20e9))
    )
    assert [victim.component for victim in NextUse().order([file, locked])] == ["locked", "file"]
    far = replace(file, next_use=25)
    assert [victim.component for victim in NextUse().order([far, locked])] == ["file", "locked"]


def test_the_reasons_of_next_use() -> None:
    def reason(next_use: int | None, **fields: object) -> str:
        (victim,) = NextUse().order([Candidate(component="a", device_bytes=1, last_use=1, next_use=next_use, **fields)])
        return victim.reason

    assert reason(None, idle_s=3.21) == "least recently used, 3.2 s ago, next use unknown"
    assert reason(None) == "never used, next use unknown"
    assert [reason(steps) for steps in (0, 1, 7)] == [
        "used in this step",
        "next use in the next step",
        "next use in 7 steps",
    ]


def test_the_largest_leaves_first() -> None:
    sizes = [Candidate(component=str(size), device_bytes=size, last_use=-size) for size in (3, 1, 2)]
    assert [victim.component for victim in LargestFirst().order(sizes)] == ["3", "2", "1"]


# -- the forecast


@given(steps=st.lists(st.frozensets(st.sampled_from("abc"))), num_running=st.integers(0, 4))
def test_a_use_begins_the_first_step_of_the_node_that_names_it(steps: list[frozenset[str]], num_running: int) -> None:
    """Also where fewer steps are known than the node is said to have."""
    for name in "abcd":
        forecast = Forecast()
        forecast.foresee(steps, num_running)
        here = next((n for n, step in enumerate(steps[:num_running]) if name in step), 0)
        assert forecast.note_use(name) == (here > 0)
        assert forecast.steps == tuple(steps[here:])


@given(steps=st.lists(st.frozensets(st.sampled_from("abc"))))
def test_the_next_use_is_the_first_step_that_names_a_component(steps: list[frozenset[str]]) -> None:
    forecast = Forecast()
    assert forecast.foresee(iter(steps)) == bool(steps)
    assert not forecast.foresee(list(steps)), "nothing new"
    for name in "abcd":
        assert forecast.next_use(name) == next((n for n, step in enumerate(steps) if name in step), None)
