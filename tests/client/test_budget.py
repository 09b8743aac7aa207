"""How long a client goes on trying: time counts, in which nothing new was heard."""

from __future__ import annotations

import pytest

from pensieve.client._retry import Backoff, RetryPolicy
from pensieve.client._turn_machine import TurnMachine
from pensieve.errors import PensieveError, Unavailable
from pensieve.rpc_status import TRANSPORT
from pensieve.v1 import pensieve_pb2 as pb

BROKEN = Unavailable("socket closed", reason=TRANSPORT)


class HandClock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def machine(clock: HandClock) -> TurnMachine:
    """A turn under the default policy, with the longest waits."""
    request = pb.StreamTurnRequest(session="sessions/s", turn=pb.TurnSpec(request_id="r"))
    backoff = Backoff(RetryPolicy(), uniform=lambda low, high: high, clock=clock)
    return TurnMachine(request, policy=RetryPolicy(), clock=clock, backoff=backoff)


def _delta() -> pb.StreamTurnResponse:
    return pb.StreamTurnResponse(delta=pb.TurnDelta(token_count=1, text="a"))


def _down_for(turn: TurnMachine, clock: HandClock, seconds: float, error: PensieveError) -> int:
    """The server says ``error`` to every try for so long; the number of tries. Raises what the client would see."""
    until, tries = clock.now + seconds, 0
    while clock.now < until:
        turn.next_request()
        clock.now += turn.failed(error)
        tries += 1
    return tries


def test_the_default_budget_is_time() -> None:
    """A server that is killed and started again is away for many tries and not for a minute."""
    for error in (BROKEN, Unavailable("x", reason="STARTING", retry_after_s=1.0)):
        clock = HandClock()
        turn = machine(clock)
        assert _down_for(turn, clock, 55.0, error) > 8
        turn.received(_delta())
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
        turn.received(pb.StreamTurnResponse(progress=pb.TurnProgress()))
    clock.now += turn.failed(BROKEN)
    turn.next_request()
    clock.now += 30.0
    clock.now += turn.failed(turn.silent())
    turn.next_request()
    clock.now += 30.0
    with pytest.raises(Unavailable):
        turn.failed(turn.silent())
