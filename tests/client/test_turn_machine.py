"""The turn machine alone: every border, every attempt change, every verdict. No I/O, a clock of our own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.client._retry import Backoff, RetryPolicy
from pensieve.client._turn_machine import TurnMachine
from pensieve.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PensieveError,
    ResourceExhausted,
    RevisionMismatch,
    TurnFenced,
    TurnInProgress,
    Unavailable,
)
from pensieve.rpc_status import TRANSPORT, TRANSPORT_FINAL
from pensieve.v1 import pensieve_pb2 as pb

BROKEN = Unavailable("socket closed", reason=TRANSPORT)
POLICY = RetryPolicy(max_attempts=4, initial_s=0.1, max_s=1.0, max_wait_s=10.0)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def machine(
    *,
    timeout: float | None = None,
    wait_if_busy: bool = False,
    abandoned: tuple[str, ...] = (),
    clock: Callable[[], float] | None = None,
) -> TurnMachine:
    request = pb.StreamTurnRequest(session="sessions/s", turn=pb.TurnSpec(request_id="r"))
    clock = clock or Clock()
    return TurnMachine(
        request,
        timeout=timeout,
        wait_if_busy=wait_if_busy,
        abandoned=abandoned,
        clock=clock,
        backoff=Backoff(POLICY, uniform=lambda low, high: high, clock=clock),
    )


def accepted(attempt: str = "a", heartbeat_s: float = 0.0) -> pb.StreamTurnResponse:
    message = pb.TurnAccepted(attempt=attempt, seed=5)
    if heartbeat_s:
        message.heartbeat_interval.FromNanoseconds(round(heartbeat_s * 1e9))
    return pb.StreamTurnResponse(accepted=message)


def delta(text: str, offset: int, count: int | None = None) -> pb.StreamTurnResponse:
    count = len(text) if count is None else count
    ids = pb.TokenIds(ids=range(offset, offset + count))
    return pb.StreamTurnResponse(
        delta=pb.TurnDelta(token_offset=offset, token_count=count, text=text, tokens=ids)
    )


def completed(text: str, reason: pb.FinishReason = pb.FINISH_REASON_EOS) -> pb.StreamTurnResponse:
    turn = pb.Turn(state=pb.Turn.STATE_COMMITTED, output=pb.Item(text=text), finish_reason=reason)
    return pb.StreamTurnResponse(completed=turn)


def joined(turn: TurnMachine) -> str:
    """What a caller who obeys ``restarted`` has on the screen."""
    text = ""
    while turn.pending:
        piece = turn.pending.popleft()
        text = "" if piece.restarted else text + piece.text
    return text


def test_first_request_names_no_attempt_and_later_ones_say_what_is_held() -> None:
    turn = machine()
    assert (turn.next_request().resume_attempt, turn.next_request().resume_token_offset) == ("", 0)
    turn.on_message(accepted("a"))
    turn.on_message(delta("abc", 0))
    turn.on_error(BROKEN)
    again = turn.next_request()
    assert (again.resume_attempt, again.resume_token_offset) == ("a", 3)
    assert again.turn.request_id == "r"


def test_same_attempt_continues() -> None:
    turn = machine()
    for message in (accepted("a"), delta("abc", 0)):
        turn.on_message(message)
    turn.on_error(BROKEN)
    turn.next_request()
    for message in (accepted("a"), delta("def", 3), completed("abcdef")):
        turn.on_message(message)
    assert not any(piece.restarted for piece in turn.pending)
    assert joined(turn) == "abcdef"
    assert turn.done
    assert turn.resumes == 1


def test_other_attempt_restarts() -> None:
    turn = machine()
    for message in (accepted("a"), delta("abc", 0)):
        turn.on_message(message)
    turn.on_error(BROKEN)
    turn.next_request()
    turn.on_message(accepted("b"))
    assert [piece.restarted for piece in turn.pending] == [False, True]
    assert turn.token_count == 0
    turn.on_message(delta("xyz", 0))
    turn.on_message(completed("xyz"))
    assert joined(turn) == turn.text == "xyz"


def test_other_attempt_before_any_text_needs_no_marker() -> None:
    turn = machine()
    turn.on_message(accepted("a"))
    turn.on_error(BROKEN)
    turn.on_message(accepted("b"))
    assert not turn.pending


@given(
    text=st.text(min_size=1, max_size=12),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(0, 12)), max_size=8),
)
def test_overlapping_repeats_never_double_or_lose_text(text: str, cuts: list[tuple[int, int, int]]) -> None:
    """Every try starts at some border it was given before, with another chunk size, and breaks somewhere."""
    turn = machine()
    for back, size, messages in [*cuts, (0, 3, 100)]:
        request = turn.next_request()
        at = request.resume_token_offset
        at = at - min(back, at) if size == 1 else at
        turn.on_message(accepted("a"))
        for _ in range(messages):
            if at >= len(text):
                break
            try:
                turn.on_message(delta(text[at : at + size], at))
            except Internal as error:
                turn._backoff.reset()
                turn.on_error(error)
                break
            at += size
        else:
            turn._backoff.reset()
            turn.on_error(BROKEN)
    turn.next_request()
    turn.on_message(completed(text))
    assert joined(turn) == text


def test_a_partial_overlap_gives_only_what_is_new() -> None:
    turn = machine()
    turn.on_message(delta("ab", 0))
    turn.on_message(delta("cd", 2))
    turn.on_message(delta("cdef", 2))
    assert [piece.text for piece in turn.pending] == ["ab", "cd", "ef"]
    assert turn.pending[-1].token_ids == (4, 5)
    assert turn.pending[-1].token_offset == 4
    assert turn.token_count == 6


def test_text_held_back_at_the_end_of_a_stream_is_not_doubled_by_a_resume() -> None:
    turn = machine()
    turn.on_message(accepted())
    turn.on_message(delta("ab", 0))
    turn.on_message(delta("", 2, count=1))
    turn.on_message(delta("STO", 3, count=0))  # What looked like a stop string was none.
    turn.on_error(BROKEN)
    assert turn.next_request().resume_token_offset == 3
    turn.on_message(accepted())
    turn.on_message(delta("STO", 3, count=0))
    turn.on_message(completed("abSTO"))
    assert [piece.text for piece in turn.pending] == ["ab", "", "STO"]


def test_tokens_without_text_are_pieces_too() -> None:
    turn = machine()
    turn.on_message(delta("", 0, count=1))
    turn.on_message(delta("é", 1, count=1))
    assert [piece.token_count for piece in turn.pending] == [1, 1]


@pytest.mark.parametrize("bad", [delta("xyz", 5), delta("XY", 0)], ids=["gap", "other text"])
def test_a_stream_that_contradicts_itself_starts_over(bad: pb.StreamTurnResponse) -> None:
    turn = machine()
    turn.on_message(accepted())
    turn.on_message(delta("abc", 0))
    with pytest.raises(Internal) as caught:
        turn.on_message(bad)
    turn.on_error(caught.value)
    request = turn.next_request()
    assert (request.resume_attempt, request.resume_token_offset) == ("", 0)
    for message in (accepted(), delta("abcdef", 0), completed("abcdef")):
        turn.on_message(message)
    assert joined(turn) == "abcdef"


def test_text_that_was_committed_but_never_streamed_is_delivered() -> None:
    turn = machine()
    turn.on_message(delta("ab", 0))
    turn.on_message(completed("abcd"))
    assert joined(turn) == "abcd"


def test_text_that_another_attempt_committed_replaces_what_was_streamed() -> None:
    turn = machine()
    turn.on_message(delta("ab", 0))
    turn.on_message(completed("xy"))
    assert joined(turn) == "xy"


def test_a_cancelled_turn_may_keep_less_than_was_streamed() -> None:
    turn = machine()
    turn.on_message(delta("abcd", 0))
    turn.on_message(completed("ab", pb.FINISH_REASON_CANCELLED))
    assert joined(turn) == "abcd"
    assert turn.text == "ab"


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("x", reason="DRAINING"),
        Unavailable("x", reason="TURN_RUNNING_ELSEWHERE"),
        Unavailable("x", reason="STORE_FULL"),
        Unavailable("x", reason=TRANSPORT),
        Internal("RST_STREAM", reason=TRANSPORT, metadata={"grpc_code": "INTERNAL"}),
        PensieveError("END_STREAM", reason=TRANSPORT, metadata={"grpc_code": "UNKNOWN"}),
        PensieveError("cut", reason=TRANSPORT, metadata={"grpc_code": "CANCELLED"}),
        TurnFenced("x"),
        ResourceExhausted("x", reason="SERVER_OVERLOADED"),
        Internal("x", reason="ENGINE_FAILED"),
    ],
    ids=lambda error: f"{error.code}-{error.reason}",
)
def test_sent_again(error: PensieveError) -> None:
    assert machine().on_error(error) > 0


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("x"),
        RevisionMismatch("x"),
        TurnInProgress("x", retry_after_s=1.0),
        ResourceExhausted("x", reason="QUOTA_EXCEEDED", retry_after_s=1.0),
        ResourceExhausted("message too large", reason=TRANSPORT),
        Internal("x", reason="BUG"),
        Unavailable("x", reason=TRANSPORT_FINAL),
        DeadlineExceeded("x"),
    ],
    ids=lambda error: f"{error.code}-{error.reason}",
)
def test_raised(error: PensieveError) -> None:
    with pytest.raises(type(error)) as caught:
        machine().on_error(error)
    assert caught.value.metadata["request_id"] == "r"


def test_a_failed_engine_gets_one_more_chance() -> None:
    turn = machine()
    turn.on_error(Internal("x", reason="ENGINE_FAILED"))
    turn.on_message(delta("abc", 0))
    with pytest.raises(Internal):
        turn.on_error(Internal("x", reason="ENGINE_FAILED"))


def test_waits_double_and_end_and_new_text_starts_them_again() -> None:
    turn = machine()
    assert [turn.on_error(BROKEN) for _ in range(3)] == [0.1, 0.2, 0.4]
    turn.on_message(accepted())
    turn.on_message(delta("a", 0))
    assert [turn.on_error(BROKEN) for _ in range(3)] == [0.1, 0.2, 0.4]
    with pytest.raises(Unavailable):
        turn.on_error(BROKEN)


def test_accepted_alone_is_no_progress() -> None:
    turn = machine()
    for _ in range(3):
        turn.on_message(accepted())
        turn.on_error(BROKEN)
    with pytest.raises(Unavailable):
        turn.on_error(BROKEN)


def test_retry_info_is_the_least_wait_and_counts_against_the_budget() -> None:
    overloaded = ResourceExhausted("x", retry_after_s=4.0)
    turn = machine()
    assert turn.on_error(overloaded) == pytest.approx(4.1)
    assert turn.on_error(overloaded) == pytest.approx(4.2)
    with pytest.raises(ResourceExhausted):
        turn.on_error(overloaded)


def test_busy_because_of_our_own_abandoned_turn_is_waited_for() -> None:
    busy = TurnInProgress("x", metadata={"active_request_id": "old"}, retry_after_s=30.0)
    assert machine(abandoned=("old",)).on_error(busy) < 1.0
    with pytest.raises(TurnInProgress):
        machine(abandoned=("other",)).on_error(busy)


def test_wait_if_busy_waits_within_the_budget() -> None:
    turn = machine(wait_if_busy=True)
    waits = []
    with pytest.raises(TurnInProgress):
        while True:
            waits.append(turn.on_error(TurnInProgress("x", retry_after_s=30.0)))
    assert sum(waits) == POLICY.max_wait_s


def test_three_heartbeats_of_silence() -> None:
    turn = machine()
    assert turn.silence_limit_s == 30.0
    turn.on_message(accepted(heartbeat_s=2.0))
    assert turn.silence_limit_s == 6.0


def test_the_deadline_covers_all_tries() -> None:
    clock = Clock()
    turn = machine(timeout=5.0, clock=clock)
    assert turn.remaining_s() == 5.0
    clock.now += 4.95
    with pytest.raises(Unavailable):
        turn.on_error(BROKEN)  # The wait would outlast the deadline.
    clock.now += 0.05
    with pytest.raises(DeadlineExceeded) as caught:
        turn.remaining_s()
    assert caught.value.reason == "TIMEOUT"


def test_unknown_events_of_a_newer_server_are_ignored() -> None:
    turn = machine()
    turn.on_message(pb.StreamTurnResponse())
    assert not turn.pending
