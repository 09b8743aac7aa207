"""How long a client goes on trying: time counts, in which nothing new was heard."""

from __future__ import annotations

import pytest

from pensieve.client import _steps
from pensieve.client._retry import Backoff, RetryPolicy, retry_policy
from pensieve.client._steps import Invoke, call
from pensieve.client._transport import ClientSettings
from pensieve.client._turn_machine import TurnMachine
from pensieve.errors import Internal, InvalidArgument, NotFound, PensieveError, Unavailable
from pensieve.rpc_status import TRANSPORT
from pensieve.v1 import pensieve_pb2 as pb

BROKEN = Unavailable("socket closed", reason=TRANSPORT)


class HandClock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def machine(clock: HandClock, *, attach: bool = False) -> TurnMachine:
    """A turn under the default policy, with the longest waits."""
    spec = pb.TurnSpec(request_id="r")
    request = pb.StreamTurnRequest(session="sessions/s", turn=spec, attach_only=attach)
    backoff = Backoff(RetryPolicy(), uniform=lambda low, high: high, clock=clock)
    return TurnMachine(request, clock=clock, backoff=backoff)


def _delta() -> pb.StreamTurnResponse:
    return pb.StreamTurnResponse(delta=pb.TurnDelta(token_count=1, text="a"))


def _down_for(turn: TurnMachine, clock: HandClock, seconds: float, error: PensieveError) -> int:
    """The server says ``error`` to every try for so long; the number of tries. Raises what the client would see."""
    until, tries = clock.now + seconds, 0
    while clock.now < until:
        turn.next_request()
        clock.now += turn.on_error(error)
        tries += 1
    return tries


def test_the_default_budget_is_time() -> None:
    """A server that is killed and started again is away for many tries and not for a minute."""
    for error in (BROKEN, Unavailable("x", reason="STARTING", retry_after_s=1.0)):
        clock = HandClock()
        turn = machine(clock)
        assert _down_for(turn, clock, 55.0, error) > 8
        turn.on_message(_delta())
        turn.next_request()
        assert _down_for(turn, clock, 55.0, error) > 8, "new output renews the budget"
        with pytest.raises(Unavailable):
            _down_for(turn, clock, 10.0, error)
        assert clock.now - 100.0 == pytest.approx(55.0 + 60.0, abs=5.1), "the last try comes at the very end"


def test_a_silent_server_costs_time_and_a_talking_one_does_not() -> None:
    clock = HandClock()
    turn = machine(clock)
    turn.next_request()
    for _ in range(10):
        clock.now += 30.0
        turn.on_message(pb.StreamTurnResponse(progress=pb.TurnProgress()))
    clock.now += turn.on_error(BROKEN)
    turn.next_request()
    clock.now += 30.0
    clock.now += turn.on_error(turn.silence_error())
    turn.next_request()
    clock.now += 30.0
    with pytest.raises(Unavailable):
        turn.on_error(turn.silence_error())


def test_what_is_raised_at_the_end_says_how_often_and_how_long() -> None:
    clock = HandClock()
    turn = machine(clock)
    with pytest.raises(Unavailable) as caught:
        _down_for(turn, clock, 100.0, Unavailable("socket closed", reason=TRANSPORT))
    tries = caught.value.metadata["tries"]
    assert str(caught.value) == (
        f"socket closed (given up after {tries} tries in 60.0 s) [UNAVAILABLE/TRANSPORT]"
    )
    assert int(tries) > 12 and caught.value.metadata["tried_for_s"] == "60.0"


def test_a_failure_that_is_not_tried_again_stays_as_it_is() -> None:
    turn = machine(HandClock())
    with pytest.raises(NotFound) as caught:
        turn.on_error(NotFound("no such session"))
    assert str(caught.value) == "no such session [NOT_FOUND/SESSION_NOT_FOUND]"


def test_who_attaches_waits_for_the_one_who_began_the_turn() -> None:
    """After a restart a turn is there again when its owner has asked again, and onlookers may be sooner."""
    clock, unknown = HandClock(), NotFound("no such turn", reason="TURN_NOT_FOUND")
    for attach, cut in ((True, False), (False, True)):
        turn = machine(clock, attach=attach)
        if cut:
            turn.on_error(BROKEN)
        with pytest.raises(NotFound, match=r"no such turn \["):
            turn.on_error(unknown)
    turn = machine(clock, attach=True)
    turn.on_error(BROKEN)
    assert _down_for(turn, clock, 30.0, unknown) > 5
    with pytest.raises(NotFound, match="given up after"):
        _down_for(turn, clock, 60.0, unknown)


@pytest.mark.parametrize("reason", ["ENGINE_FAILED", TRANSPORT])
def test_a_call_ends_at_its_deadline_with_all_its_tries(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """The deadline is the call's, not each try's: no wait outlasts it, and an engine that fails is asked once more."""
    clock = HandClock()
    monkeypatch.setattr(_steps.time, "monotonic", clock)
    flow = call(ClientSettings("x", timeout=10.0), "GetSession", pb.GetSessionRequest())
    step, lefts = next(flow), []
    with pytest.raises(Internal) as caught:
        while True:
            if isinstance(step, Invoke):
                lefts.append(step.timeout)
                clock.now += 1.0
                step = flow.throw(Internal("x", reason=reason))
            else:
                clock.now += step.seconds
                step = flow.send(None)
    assert lefts[0] == 10.0 and lefts == sorted(lefts, reverse=True) and lefts[-1] > 0
    assert clock.now - 100.0 < 11.0
    assert len(lefts) == 2 if reason == "ENGINE_FAILED" else len(lefts) > 2 and "tries" in str(caught.value)


def test_retry_for_is_the_time_of_the_policy() -> None:
    assert retry_policy(None, None) == RetryPolicy() and RetryPolicy().max_wait_s == 60.0
    assert retry_policy(RetryPolicy(max_s=1.0), 7.0) == RetryPolicy(max_s=1.0, max_wait_s=7.0)
    assert Backoff(retry_policy(None, 0.0)).delay() is None, "0: never again"
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InvalidArgument, match="retry_for"):
            retry_policy(None, wrong)
