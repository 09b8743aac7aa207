"""Learning when sessions come back: hazards match the distributions they come from, indices match a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.engine.cache import policy as policies
from pensieve.engine.cache import rates as returns
from pensieve.engine.cache.policy import UNKNOWN, Gittins, Retention
from pensieve.engine.cache.rates import (
    BINS,
    CELLS,
    EDGES,
    PRIOR,
    WIDTHS,
    Floats,
    ReturnRates,
    bins_of,
    cell_of,
    columns_of,
    factors,
    gittins_indices,
)

NEVER = math.inf


def learn(
    draw: Callable[[np.random.Generator, int], float], sessions: int, per_s: float = 20.0, seed: int = 0
) -> tuple[ReturnRates, float]:
    """Sessions with one turn each, one every 1 / ``per_s``, that come back after what ``draw`` says for their cell."""
    rng = np.random.default_rng(seed)
    rates = ReturnRates()
    events: list[tuple[float, int, int]] = []
    for number in range(sessions):
        cell = int(rng.integers(0, 4)) * returns.INPUTS
        gap = draw(rng, cell)
        events.append((number / per_s, number, cell))
        if gap < NEVER:
            events.append((number / per_s + gap, number, -1))
    ends = sessions / per_s
    for now, number, cell in sorted(events):
        if now > ends:
            break
        if cell >= 0:
            rates.on_idle(number, cell, now)
        else:
            rates.on_return(number, now)
    return rates, ends


def two_in_five(rng: np.random.Generator, cell: int) -> float:
    """A session comes back with a chance of 40 %, then after 60 s on average."""
    return rng.exponential(60.0) if rng.random() < 0.4 else NEVER


def searched(hazard: Floats, start: int) -> float:
    """The index by its definition: try every time of giving up."""
    best, there, came, held = 0.0, 1.0, 0.0, 0.0
    for rate, width in zip(hazard[start:].tolist(), WIDTHS[start:].tolist(), strict=True):
        comes = -math.expm1(-rate * width)
        came += there * comes
        held += there * comes / rate
        there *= math.exp(-rate * width)
        best = max(best, came / held)
    return best


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_bins_hold_the_ages_between_their_edges(ages: list[float]) -> None:
    found = bins_of(np.array(ages))
    expected = np.clip(np.searchsorted(EDGES, ages, side="right") - 1, 0, BINS - 1)
    assert found.tolist() == expected.tolist()
    assert bins_of(EDGES[1:-1].copy()).tolist() == list(range(1, BINS))


def test_columns_rise_with_the_age() -> None:
    ages = np.geomspace(returns.YOUNGEST, returns.OLDEST, 5000)
    found = columns_of(ages)
    assert found[0] == 0 and found[-1] == returns.COLUMNS - 1
    assert set(np.diff(found).tolist()) <= {0, 1}


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_cells_are_told_apart_by_context_and_input(new: int, context: int) -> None:
    cell = cell_of(new, context)
    assert 0 <= cell < CELLS
    assert cell <= cell_of(new, 2 * context) and cell <= cell_of(4 * new, context)
    assert (cell == cell_of(new, 2 * context)) == (context >= 65536 or context < 32)
    assert (cell == cell_of(4 * new, context)) == (new == 0 or new >= 65536)


@given(st.lists(st.floats(1e-6, 1e3), min_size=BINS, max_size=BINS), st.integers(0, BINS - 1))
def test_an_index_is_the_best_of_all_times_of_giving_up(hazard: list[float], start: int) -> None:
    found = gittins_indices(np.array([hazard, hazard]))
    assert found.shape == (2, BINS)
    assert found[1, start] == pytest.approx(searched(np.array(hazard), start), rel=1e-9)


def test_indices_of_known_distributions() -> None:
    middle = slice(8, BINS - 8)
    constant = gittins_indices(np.full((1, BINS), 0.02))[0]
    assert constant == pytest.approx(np.full(BINS, 0.02))  # exponential: the past does not matter
    pareto = gittins_indices(PRIOR[None])[0]
    assert pareto == pytest.approx(PRIOR)  # falling: the hazard itself, 1 / T
    gap = 64.0
    after_a_minute = np.where(EDGES[:-1] < gap, 1e-9, 1e3)
    rising = gittins_indices(after_a_minute[None])[0]
    before = EDGES[:-1] < gap
    assert rising[before] == pytest.approx(
        1.0 / (gap - EDGES[:-1][before]), rel=0.01
    )  # back in gap - T seconds
    assert (np.diff(rising[before]) > 0).all()
    assert (factors(PRIOR[None])[0, middle] == pytest.approx(1.0)) and factors(PRIOR[None]).shape == (
        1,
        returns.COLUMNS,
    )


def test_without_history_the_hazard_is_the_inverse_of_the_age() -> None:
    assert ReturnRates().hazards(0.0) == pytest.approx(np.tile(PRIOR, (CELLS, 1)))


def test_hazards_are_those_of_the_distribution_that_returns_were_drawn_from() -> None:
    """Sessions that never come back count with their time at risk, for as long as what is counted is remembered."""
    rates, now = learn(two_in_five, 30_000)
    hazard = rates.hazards(now)[0]
    inside = (EDGES[:-1] >= 4) & (EDGES[1:] <= 192)
    ages = (EDGES[:-1] + EDGES[1:])[inside] / 2
    still = 0.4 * np.exp(-ages / 60)
    expected = still / 60 / (still + 0.6)
    assert hazard[inside] == pytest.approx(expected, rel=0.2)
    assert np.abs(hazard[inside] / expected - 1).mean() < 0.06


def test_cells_learn_what_is_theirs() -> None:
    shares = {0: 0.9, returns.INPUTS: 0.5, 2 * returns.INPUTS: 0.1, 3 * returns.INPUTS: 0.02}
    rates, now = learn(
        lambda rng, cell: rng.exponential(60.0) if rng.random() < shares[cell] else NEVER, 8000
    )
    at = int(bins_of(np.array([30.0]))[0])
    found = rates.hazards(now)[list(shares), at]
    for share, hazard in list(zip(shares.values(), found.tolist(), strict=True))[:3]:
        there = share * math.exp(-0.5)
        assert hazard == pytest.approx(there / 60 / (there + 1 - share), rel=0.25)
    assert found[3] < found[2] / 2


def test_a_cell_never_seen_is_judged_by_its_context_and_its_input() -> None:
    rates = ReturnRates()
    short, long, small, large = 3 * returns.INPUTS, 7 * returns.INPUTS, 1, 5
    for number in range(3000):
        now = float(number)
        rates.on_idle(("short, small", number), short + small, now)
        rates.on_idle(("short, large", number), short + large, now)
        rates.on_idle(("long, small", number), long + small, now)
        rates.on_return(("short, small", number - 20), now)
        if number % 3 == 0:
            rates.on_return(("long, small", number - 20), now)
    at = int(bins_of(np.array([20.0]))[0])
    hazards = rates.hazards(3000.0)[:, at]
    assert hazards[long + large] < hazards[long + small] / 5, "large inputs do not come back"
    assert hazards[long + small + 1] < hazards[short + small + 1] / 1.5, "long contexts come back less often"


SHORT, LONG, SMALL, LARGE = 3 * returns.INPUTS, 7 * returns.INPUTS, 1, 5
"""Rows and columns of cells."""


def observed(*periods: tuple[int, float | None]) -> Callable[[int, float], float]:
    """The hazard by (cell, age) after 1,000 s, of periods that all began at 0: (cell, when it ended)."""
    rates = ReturnRates()
    for number, (cell, _) in enumerate(periods):
        rates.on_idle(number, cell, 0.0)
    for number, (_, gap) in enumerate(periods):
        if gap is not None:
            rates.on_return(number, gap)
    hazards = rates.hazards(1000.0)
    return lambda cell, age: float(hazards[cell, int(bins_of(np.array([age]))[0])])


def test_an_input_is_not_held_against_the_contexts_it_comes_with() -> None:
    """Sessions come back after small inputs and not after large ones; all long contexts end in a large one."""
    small = [(SHORT + SMALL, 20.0)] * 200
    large = [(LONG + LARGE, None)] * 200 + [(SHORT + LARGE, None)] * 200
    hazard = observed(*small, *large)
    assert hazard(LONG + SMALL, 20.0) > 0.15 * hazard(SHORT + SMALL, 20.0)
    assert hazard(LONG + LARGE, 20.0) < 0.1 * hazard(SHORT + SMALL, 20.0)


def test_what_comes_back_late_is_known_by_its_context() -> None:
    """Short contexts come back after 20 s and long ones after 10 minutes, also in a cell that was never seen."""
    inputs = [0, 2, 3, 4, 6]
    early = [(SHORT + new, 20.0 if number % 2 else None) for new in inputs for number in range(60)]
    late = [(LONG + new, 600.0 if number % 2 else None) for new in inputs for number in range(60)]
    hazard = observed(*early, *late)
    assert hazard(SHORT + LARGE, 20.0) > 2 * hazard(LONG + LARGE, 20.0)
    assert hazard(LONG + LARGE, 600.0) > 2 * hazard(SHORT + LARGE, 600.0)


def test_cells_that_are_not_the_product_of_context_and_input() -> None:
    gaps = [float(gap) for gap in np.geomspace(3, 600, 24)]
    back = [(cell, gap) for cell in (SHORT + SMALL, LONG + LARGE) for gap in gaps]
    gone: list[tuple[int, float | None]] = [
        (cell, None) for cell in (SHORT + LARGE, LONG + SMALL) for _ in gaps
    ]
    hazard = observed(*back, *gone)
    assert hazard(SHORT + SMALL, 40.0) > 8 * hazard(SHORT + LARGE, 40.0)
    assert hazard(LONG + LARGE, 40.0) > 8 * hazard(LONG + SMALL, 40.0)


def test_cells_whose_ages_are_not_that_product_either() -> None:
    early = [
        (cell, gap) for cell in (SHORT + SMALL, LONG + LARGE) for gap in (20.0, None) for _ in range(100)
    ]
    late = [
        (cell, gap) for cell in (SHORT + LARGE, LONG + SMALL) for gap in (600.0, None) for _ in range(100)
    ]
    hazard = observed(*early, *late)
    assert hazard(SHORT + SMALL, 20.0) > 4 * hazard(SHORT + LARGE, 20.0)
    assert hazard(LONG + SMALL, 600.0) > 4 * hazard(LONG + LARGE, 600.0)


def test_some_old_periods_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that comes back after minutes has to be seen, though 300 others leave in a quarter of a minute."""
    monkeypatch.setattr(returns, "MOST_OPEN", 300)
    rates, now = learn(lambda rng, cell: NEVER, 20_000)
    ages = now - rates._idle._since[rates._idle._open]
    assert len(ages) <= 300
    octaves = np.histogram(ages, 2.0 ** np.arange(2, 10))[0]
    assert (octaves > 15).all(), "as many of minutes as of seconds"


def test_closing_periods_early_loses_precision_only(monkeypatch: pytest.MonkeyPatch) -> None:
    all_kept, now = learn(two_in_five, 20_000)
    monkeypatch.setattr(returns, "MOST_OPEN", 3000)
    thinned, _ = learn(two_in_five, 20_000)
    assert len(thinned._idle._rows) <= 3000 < len(all_kept._idle._rows)
    inside = (EDGES[:-1] >= 4) & (EDGES[1:] <= 192)
    ratio = thinned.hazards(now)[0, inside] / all_kept.hazards(now)[0, inside]
    assert abs(ratio.mean() - 1) < 0.05 and np.abs(ratio - 1).max() < 0.25


def test_what_has_not_come_back_yet_counts() -> None:
    rates = ReturnRates()
    for number in range(500):
        rates.on_idle(number, 0, 0.0)
    at = int(bins_of(np.array([20.0]))[0])
    assert rates.hazards(1000.0)[0, at] < PRIOR[at] / 20
    assert rates.hazards(1000.0)[0, at] < rates.hazards(21.0)[0, at] < PRIOR[at]


def test_a_suspension_leaves_no_trace() -> None:
    rates = ReturnRates()
    rates.on_idle("a", 3, 5.0)
    rates.on_return("a", 5.0)
    assert not rates._returns.any() and not rates._at_risk.any() and not rates._idle._rows
    rates.on_return("nobody", 6.0)
    rates.on_idle("a", 3, 5.0)
    rates.on_idle("a", 4, 7.0)  # as after an error: the period before never ended
    assert len(rates._idle._rows) == 1 and len(rates._idle._free) == returns.MOST_OPEN - 1


def test_old_habits_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "HALF_LIFE", 2000)
    rates = ReturnRates()
    numbers = itertools.count()
    now = 0.0

    def serve(sessions: int, gap: float) -> None:
        nonlocal now
        for _ in range(sessions):
            number = next(numbers)
            rates.on_idle(number, 0, now)
            rates.on_return(number, now + gap)
            now += 1.0

    serve(10_000, 100.0)
    quick = int(bins_of(np.array([10.0]))[0])
    before = rates.hazards(now)[0, quick]
    serve(20_000, 10.0)
    assert rates.hazards(now)[0, quick] > 100 * before


@given(st.lists(st.tuples(st.floats(0, 1e7), st.floats(0.01, 100.0)), min_size=1, max_size=40))
def test_before_it_has_learned_it_is_the_papers_policy(rows: list[tuple[float, float]]) -> None:
    idle, cost = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    idle = np.clip(idle, 2e-3, 1e6)
    ours, theirs = Gittins(), Retention()
    kinds = np.array([ours.on_turn_end(number, 10 * number, 50 * number, 0.0) for number in range(len(rows))])
    candidates = np.ones(len(rows))
    assert ours.values(cost, candidates, idle, kinds) == pytest.approx(
        theirs.values(cost, candidates, idle, kinds)
    )
    assert ours.values(cost, candidates, idle, np.full(len(rows), UNKNOWN)) == pytest.approx(cost / idle)


def taught() -> tuple[Gittins, float]:
    """Small inputs come back after half a minute; large ones do not."""
    rule, now = Gittins(), 0.0
    for number in range(2000):
        now += 0.25
        rule.on_turn_end(f"chat{number}", 20, 2000, now)
        rule.on_turn_end(f"document{number}", 3000, 3500, now)
        rule.on_return(f"chat{number - 120}", now)
    return rule, now


def test_it_keeps_what_comes_back() -> None:
    rule, now = taught()
    chat, document = rule.on_turn_end("a", 20, 2000, now), rule.on_turn_end("b", 3000, 3500, now)
    kinds = np.array([chat, document, chat])
    values = rule.values(np.ones(3), np.ones(3), np.array([20.0, 1.0, 500.0]), kinds)
    assert values[0] > 5 * values[1], "idle for longer, but about to come back"
    assert values[2] < values[0] / 5, "it should have been back long ago"
    waits = rule.values(np.ones(2), np.ones(2), np.array([1.0, 25.0]), np.array([chat, chat]))
    assert waits[1] > 1.5 * waits[0], "the closer the return, the more it is worth to hold on"


def test_the_same_history_gives_the_same_values() -> None:
    kinds = [rule.on_turn_end("x", 20, 2000, now) for rule, now in (taught(), taught())]
    assert kinds[0] == kinds[1]
    assert (taught()[0]._factors == taught()[0]._factors).all()


def test_no_input_makes_numpy_complain() -> None:
    with np.errstate(all="raise"):
        rule, now = taught()
        kinds = np.array(
            [rule.on_turn_end("c", 0, 0, now), UNKNOWN, rule.on_turn_end("d", 10**9, 10**9, now), UNKNOWN]
        )
        idle = np.array([-5.0, 0.0, 1e12, 3.0])
        values = rule.values(np.array([1.0, 1.0, 1.0, np.inf]), np.ones(4), idle, kinds)
    assert np.isfinite(values[:3]).all() and (values[:3] > 0).all() and values[3] == np.inf


def test_lessons_come_often_at_first_and_rarely_later(monkeypatch: pytest.MonkeyPatch) -> None:
    lessons: list[int] = []
    rule = Gittins()
    monkeypatch.setattr(policies, "factors", lambda hazards: lessons.append(rule._rates.periods) or 1.0)
    for number in range(20_000):
        rule.on_turn_end(number, 1, 1, float(number))
    gaps = np.diff([0, *lessons])
    assert gaps[0] == 64 and gaps.max() == 1024 and len(lessons) < 60
