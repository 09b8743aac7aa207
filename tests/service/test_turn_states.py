"""The state machine of a turn: every event in every state, by the methods that callers use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from pensieve.errors import Cancelled, PensieveError, TurnFenced
from pensieve.server.rpc.convert import turn_spec
from pensieve.server.turns.run import TRANSITIONS, Event, Order, RunState, TurnRun
from pensieve.server.values import OnDisconnect, TurnStatus, TurnView
from pensieve.store import Key
from support.service.service_rig import spec

E, S = Event, RunState
VIEW: Final = TurnView("s", "r", TurnStatus.COMMITTED)
ENDS: Final = {S.COMMITTED, S.REPLAYED, S.DISCARDED, S.UNCERTAIN, S.REFUSED}

LED_TO: Final[dict[RunState, tuple[Event, ...]]] = {
    S.BEGINNING: (),
    S.FOLLOWING: (E.ELSEWHERE,),
    S.KEEP_PENDING: (E.KEEP,),
    S.DISCARD_PENDING: (E.DISCARD,),
    S.REPLAYING: (E.IN_HISTORY,),
    S.GENERATING: (E.BEGUN,),
    S.TRUNCATING: (E.BEGUN, E.KEEP),
    S.DISCARDING: (E.BEGUN, E.DISCARD),
    S.COMMITTING: (E.BEGUN, E.COMMIT),
    S.COMMITTED: (E.BEGUN, E.COMMIT, E.SUCCEEDED),
    S.REPLAYED: (E.IN_HISTORY, E.SUCCEEDED),
    S.DISCARDED: (E.BEGUN, E.FAILED),
    S.UNCERTAIN: (E.BEGUN, E.COMMIT, E.FAILED),
    S.REFUSED: (E.FAILED,),
}
"""The events that bring a new run into a state."""

EXPECTED: Final[dict[RunState, dict[Event, RunState]]] = {
    S.BEGINNING: {
        E.BEGUN: S.GENERATING,
        E.ELSEWHERE: S.FOLLOWING,
        E.IN_HISTORY: S.REPLAYING,
        E.KEEP: S.KEEP_PENDING,
        E.DISCARD: S.DISCARD_PENDING,
        E.FAILED: S.REFUSED,
    },
    S.FOLLOWING: {
        E.BEGUN: S.GENERATING,
        E.IN_HISTORY: S.REPLAYING,
        E.KEEP: S.KEEP_PENDING,
        E.DISCARD: S.DISCARD_PENDING,
        E.FAILED: S.REFUSED,
    },
    S.KEEP_PENDING: {
        E.BEGUN: S.TRUNCATING,
        E.ELSEWHERE: S.KEEP_PENDING,
        E.IN_HISTORY: S.REPLAYING,
        E.KEEP: S.KEEP_PENDING,
        E.DISCARD: S.KEEP_PENDING,
        E.FAILED: S.REFUSED,
    },
    S.DISCARD_PENDING: {
        E.BEGUN: S.DISCARDING,
        E.ELSEWHERE: S.DISCARD_PENDING,
        E.IN_HISTORY: S.REPLAYING,
        E.KEEP: S.DISCARD_PENDING,
        E.DISCARD: S.DISCARD_PENDING,
        E.FAILED: S.REFUSED,
    },
    S.REPLAYING: {E.SUCCEEDED: S.REPLAYED, E.FAILED: S.REFUSED},
    S.GENERATING: {
        E.KEEP: S.TRUNCATING,
        E.DISCARD: S.DISCARDING,
        E.COMMIT: S.COMMITTING,
        E.FAILED: S.DISCARDED,
    },
    S.TRUNCATING: {
        E.KEEP: S.TRUNCATING,
        E.DISCARD: S.TRUNCATING,
        E.COMMIT: S.COMMITTING,
        E.FAILED: S.DISCARDED,
    },
    S.DISCARDING: {E.KEEP: S.DISCARDING, E.DISCARD: S.DISCARDING, E.FAILED: S.DISCARDED},
    S.COMMITTING: {E.SUCCEEDED: S.COMMITTED, E.FAILED: S.UNCERTAIN},
    **{end: {} for end in ENDS},
}
"""The state after each event that is taken; all others are refused."""


def new_run() -> TurnRun:
    return TurnRun(Key("acme", "s"), turn_spec(spec("hi")), "")


def error() -> PensieveError:
    return Cancelled("the turn was cancelled and discarded")


SENDS: Final[dict[Event, Callable[[TurnRun], object]]] = {
    E.BEGUN: TurnRun.on_begun,
    E.ELSEWHERE: TurnRun.on_elsewhere,
    E.IN_HISTORY: TurnRun.on_in_history,
    E.KEEP: lambda run: run.end_early(Order(by_caller=True)),
    E.DISCARD: lambda run: run.end_early(Order(error=error(), by_caller=True)),
    E.COMMIT: TurnRun.begin_commit,
    E.SUCCEEDED: lambda run: run.end(VIEW),
    E.FAILED: lambda run: run.end(error()),
}


def run_in(state: RunState) -> TurnRun:
    run = new_run()
    for event in LED_TO[state]:
        SENDS[event](run)
    assert run.state is state
    return run


def test_the_table_has_every_cell() -> None:
    assert set(TRANSITIONS) == {(state, event) for state in S for event in E}
    assert set(EXPECTED) == set(S) == set(LED_TO)


@pytest.mark.parametrize("event", E, ids=lambda one: one.name)
@pytest.mark.parametrize("state", S, ids=lambda one: one.name)
async def test_transition(state: RunState, event: Event) -> None:
    run = run_in(state)
    orders, outcome = run.orders, run.buffer._outcome
    after = EXPECTED[state].get(event)
    if after is not None:
        assert SENDS[event](run) is not False
        assert run.state is after
        assert run.buffer.ended == (after in ENDS)
        return
    # An order may come at any time, so it is answered; every other event has one sender, which knows the state.
    may_be_late = event in (E.KEEP, E.DISCARD)
    try:
        taken = SENDS[event](run)
    except (AssertionError, Cancelled):
        assert not may_be_late
    else:
        assert may_be_late and taken is False
    assert (run.state, run.orders, run.buffer._outcome) == (state, orders, outcome)


async def test_a_commit_of_a_discarded_turn_raises_the_first_order_s_error() -> None:
    run = run_in(S.GENERATING)
    run.end_early(Order(error=TurnFenced("the turn lost its lease")))
    run.end_early(Order(error=error(), by_caller=True))
    run.end_early(Order(keep_tokens=3, by_caller=True))
    with pytest.raises(TurnFenced):
        run.begin_commit()


async def test_the_first_order_counts() -> None:
    run = run_in(S.GENERATING)
    assert run.end_early(Order(keep_tokens=3, by_caller=True)) and run.end_early(
        Order(error=error(), by_caller=True)
    )
    assert run.begin_commit() == Order(keep_tokens=3, by_caller=True)


def reachable(*states: RunState) -> set[RunState]:
    found = set(states)
    while True:
        more = {
            after
            for (state, _), after in TRANSITIONS.items()
            if state in found and after is not None and after not in found
        }
        if not more:
            return found
        found |= more


def before(state: RunState) -> set[RunState]:
    """The states that lead to this one in one step."""
    return {one for (one, _), after in TRANSITIONS.items() if after is state and one is not state}


def test_exactly_once() -> None:
    """The promises of the module's docstring, for the table as it is."""
    assert before(S.COMMITTED) == {S.COMMITTING}
    assert {event for (_, event), after in TRANSITIONS.items() if after is S.COMMITTING} == {E.COMMIT}
    assert all(state.had_lease for state in before(S.COMMITTING)), "only a run with the lease commits"
    assert reachable(S.COMMITTING) == {S.COMMITTING, S.COMMITTED, S.UNCERTAIN}, "it commits once"
    told = {S.DISCARD_PENDING, S.DISCARDING, S.DISCARDED, S.REFUSED}
    assert S.COMMITTING not in reachable(*told), "what was discarded is not committed"
    for end in ENDS:
        assert reachable(end) == {end}
    for state in set(S) - ENDS:
        assert TRANSITIONS[state, E.FAILED] in ENDS, "whatever happens, the run can end"


def test_the_lease_is_never_got_twice_nor_lost_on_the_way() -> None:
    for (state, event), after in TRANSITIONS.items():
        if after is not None:
            assert (after.had_lease and not state.had_lease) == (event is E.BEGUN)
            assert after.had_lease or not state.had_lease


async def test_callers_hear_the_outcome_at_the_end_and_only_there() -> None:
    for state in S:
        assert run_in(state).buffer.ended == (state in ENDS)


async def test_a_run_that_nobody_listens_to_is_abandoned() -> None:
    run = run_in(S.GENERATING)
    run.join(OnDisconnect.CANCEL)
    run.join(OnDisconnect.CANCEL)
    run.leave(0.0)
    assert not run.orders
    run.leave(0.0)
    assert run.state is S.DISCARDING and run.abandoned and not run.cancelled_by_caller


async def test_a_run_that_is_to_finish_alone_is_not_abandoned() -> None:
    run = run_in(S.GENERATING)
    run.join(OnDisconnect.FINISH)
    run.leave(0.0)
    assert run.state is S.GENERATING


async def test_a_run_that_keeps_its_answer_is_not_abandoned() -> None:
    """It is committed, so that a caller who comes now joins it."""
    run = run_in(S.TRUNCATING)
    run.join(OnDisconnect.CANCEL)
    run.leave(0.0)
    assert run.state is S.TRUNCATING and not run.abandoned and not run.cancelled_by_caller


async def test_an_abandoned_run_is_not_for_new_callers_whatever_else_discards_it() -> None:
    run = run_in(S.GENERATING)
    run.end_early(Order(error=TurnFenced("the turn lost its lease")))
    assert not run.abandoned
    run.join(OnDisconnect.CANCEL)
    run.leave(0.0)
    assert run.abandoned
