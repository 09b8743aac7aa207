"""What clients say of their next turn moves values as it should, and nothing else: no pins, no lessons."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import Hints, SessionKey
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.policy import Gittins
from pensieve.engine.cache.rates import NO_HINT, apply_hint, apply_hints, hint_from
from pensieve.engine.cost import CostModel

FLAT = CostModel(((0, 0.0), (1000, 0.0)), 1.0, 4)
"""Every chunk costs the same: only rates of return tell them apart."""
SIZE = 4
RATED: tuple[PolicyName, ...] = ("gittins", "retention")
seconds = st.floats(1e-6, 1e9)


def rate(hints: Hints | None, idle: float) -> float:
    """Of a session that would have ``1 / T`` without hints."""
    return apply_hint(1 / idle, 1.0, idle, hint_from(hints))


@given(st.lists(st.tuples(seconds, seconds, st.none() | seconds, seconds), min_size=1, max_size=9))
def test_columns_say_what_single_values_say(rows: list[tuple[float, float, float | None, float]]) -> None:
    told = [hint_from(Hints(next_turn_s=pause, importance=worth)) for _, _, pause, worth in rows]
    costs, idle = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    values = costs / idle
    pauses, weights = np.array([hint.pause for hint in told]), np.array([hint.weight for hint in told])
    expected = [apply_hint(v, c, t, h) for v, c, t, h in zip(values, costs, idle, told, strict=True)]
    alone = apply_hints(values.copy(), costs, idle, pauses, weights)
    assert alone == pytest.approx(expected)
    claims = 1 / idle
    expected = [apply_hint(one, 1.0, t, h) for one, t, h in zip(claims, idle, told, strict=True)]
    assert (apply_hints(values, costs, idle, pauses, weights, claims) == alone).all()
    assert claims == pytest.approx(expected)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=9))
def test_without_a_hint_a_value_stays_to_the_last_bit(rows: list[tuple[float, float]]) -> None:
    costs, idle = np.array(rows).T
    values = costs / idle
    pauses, weights = np.full(len(rows), NO_HINT.pause), np.full(len(rows), NO_HINT.weight)
    assert (apply_hints(values.copy(), costs, idle, pauses, weights) == values).all()
    assert (
        apply_hints(np.full(1, np.inf), np.full(1, np.inf), np.ones(1), pauses[:1], weights[:1]) == np.inf
    ).all()


def test_the_rate_is_that_of_a_return_after_the_pause() -> None:
    for pause in (2.0, 60.0, 3600.0):
        hints = Hints(next_turn_s=pause)
        assert rate(hints, 0.2 * pause) < 1 / (0.2 * pause), "it is known not to come yet"
        assert rate(hints, 0.9 * pause) > 1.3 / (0.9 * pause), "it is about to come"
        assert rate(hints, 0.5 * pause) > 0.9 / pause, "and it is worth holding on until then"
        for late in (6, 20, 1000):
            assert rate(hints, late * pause) == pytest.approx(1 / (late * pause), rel=0.01), "it was wrong"
    at_ten = [rate(Hints(next_turn_s=pause), 10.0) for pause in (10.0, 60.0, 600.0, 7200.0)]
    assert at_ten == sorted(at_ten, reverse=True), "a longer pause costs more"


def test_importance_is_clipped_and_a_finished_session_is_worth_next_to_nothing() -> None:
    assert rate(Hints(importance=1e30), 5.0) == 16 * rate(None, 5.0)
    assert rate(Hints(importance=0.0), 5.0) == rate(None, 5.0) / 16
    # However dear and recent it is, and however important.
    assert rate(Hints(finished=True, importance=16.0), 1.0) < rate(None, 3600.0)


class Rig:
    """A cache of one tier, and sessions whose turns end when they are told to."""

    def __init__(self, policy: PolicyName, pages: int = 6) -> None:
        config = CacheConfig(pages, 0, SIZE, policy, swap_watermark=0.0, decode_reserve=0.0)
        self.cache = CacheManager(config, FLAT)
        self.context = np.arange(2 * SIZE, dtype=np.int32)

    def turn(self, name: str, now: float, hints: Hints | None = None, *, suspended: bool = False) -> None:
        key = SessionKey(name)
        restore = self.cache.admit(key, self.context, 1, now)
        for start, end in restore.missing:
            self.cache.computed(key, start, end)
        self.cache.complete_copies()
        if suspended:
            self.cache.suspend(key, now, self.context)
        else:
            self.cache.release(key, now, hints=hints)
        self.cache.check()

    def kept(self, *names: str) -> set[str]:
        """Of these sessions, those that lost nothing."""
        return {name for name in names if self.cache.residency(SessionKey(name)).device == 2 * SIZE}


@pytest.mark.parametrize("policy", RATED)
def test_who_comes_back_later_or_never_goes_first(policy: PolicyName) -> None:
    rig = Rig(policy)
    rig.turn("finished", 3.0, Hints(finished=True))
    rig.turn("soon", 1.0, Hints(next_turn_s=40.0))
    rig.turn("late", 2.0, Hints(next_turn_s=4000.0))
    assert rig.kept("finished", "soon", "late") == {"finished", "soon", "late"}, "there is room for all"
    rig.turn("a", 31.0)
    assert rig.kept("finished", "soon", "late") == {"soon", "late"}
    rig.turn("b", 32.0)
    assert rig.kept("soon", "late", "a") == {"soon", "a"}


@pytest.mark.parametrize("policy", RATED)
def test_importance_decides_between_equals(policy: PolicyName) -> None:
    rig = Rig(policy)
    rig.turn("much", 0.0, Hints(importance=4.0))
    rig.turn("plain", 1.0)
    rig.turn("little", 2.0, Hints(importance=0.25))
    rig.turn("a", 20.0)
    assert rig.kept("much", "plain", "little") == {"much", "plain"}


def test_policies_that_know_no_rates_ignore_hints() -> None:
    rig = Rig("lru")
    rig.turn("finished", 3.0, Hints(finished=True))
    rig.turn("soon", 1.0, Hints(next_turn_s=40.0, importance=16.0))
    rig.turn("plain", 2.0)
    rig.turn("a", 31.0)
    assert rig.kept("finished", "soon", "plain") == {"finished", "plain"}


@pytest.mark.parametrize("policy", RATED)
def test_nothing_is_pinned_by_a_hint(policy: PolicyName) -> None:
    rig = Rig(policy)
    for number in range(20):
        rig.turn(f"s{number}", float(number), Hints(next_turn_s=30.0, importance=1e9))
    assert len(rig.kept(*(f"s{number}" for number in range(20)))) == 3


@pytest.mark.parametrize("policy", RATED)
def test_a_hint_holds_until_the_next_turn_and_is_not_that_of_a_suspended_one(policy: PolicyName) -> None:
    rig = Rig(policy)
    rig.turn("a", 0.0, Hints(finished=True))
    rig.turn("a", 5.0)
    rig.turn("b", 0.0)
    rig.turn("c", 6.0, suspended=True)
    assert all(session.hint == NO_HINT for session in rig.cache.sessions.values())
    rig.turn("d", 30.0)
    assert rig.kept("a", "b", "c") == {"a", "c"}


def test_hints_are_no_lessons() -> None:
    """However wrong: what is learned of returns is learned from returns."""
    learned = []
    for hints in (None, Hints(next_turn_s=0.5, importance=16.0), Hints(finished=True)):
        rig = Rig("gittins", pages=400)
        for turn in range(300):
            rig.turn(f"s{turn % 75}", 2.0 * turn, hints)
        policy = rig.cache.index.policy
        assert isinstance(policy, Gittins)
        learned.append(policy._factors.copy())
    assert (learned[0] != 1).any(), "something was learned"
    assert (learned[0] == learned[1]).all() and (learned[0] == learned[2]).all()


def test_claims_on_what_is_shared_add_up_with_their_hints() -> None:
    """Two sessions own a prompt: it goes before another's when both are finished, and not when one is."""
    for endings, stays in (((True, True), False), ((True, False), True)):
        config = CacheConfig(7, 0, SIZE, "retention", swap_watermark=0.0, decode_reserve=0.0)
        cache = CacheManager(config, FLAT)
        prompt = list(range(2 * SIZE))
        for number, finished in enumerate(endings):
            key, context = SessionKey(f"s{number}"), np.array([*prompt, number], np.int32)
            path = cache.prefix_path(key, "scope", context)
            for start, end in cache.admit(key, context, 1, 0.0, path).missing:
                cache.computed(key, start, end)
            cache.complete_copies()
            cache.release(key, 9.0, hints=Hints(finished=finished))
        for name, now in (("plain", 5.0), ("new", 30.0)):
            key, context = SessionKey(name), np.arange(50, 50 + 3 * SIZE, dtype=np.int32)
            for start, end in cache.admit(key, context, 1, now).missing:
                cache.computed(key, start, end)
            cache.complete_copies()
            cache.release(key, now)
            cache.check()
        held = cache.residency(SessionKey("s1")).device
        assert (held >= 2 * SIZE) is stays, (endings, held)
