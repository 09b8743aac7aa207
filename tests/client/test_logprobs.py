"""What the SDK puts together of log-probabilities when streams break, repeat themselves and begin anew."""

from __future__ import annotations

from pensieve.client import Piece, TokenText
from pensieve.client._retry import Backoff, RetryPolicy
from pensieve.client._turn_machine import TurnMachine
from pensieve.errors import Unavailable
from pensieve.rpc_status import TRANSPORT
from pensieve.v1 import pensieve_pb2 as pb

BROKEN = Unavailable("socket closed", reason=TRANSPORT)


def machine(attempt: str = "a") -> TurnMachine:
    request = pb.StreamTurnRequest(session="sessions/s", turn=pb.TurnSpec(request_id="r"))
    made = TurnMachine(request, backoff=Backoff(RetryPolicy(max_attempts=4, initial_s=0.001)))
    begin(made, attempt)
    return made


def begin(turn: TurnMachine, attempt: str) -> None:
    turn.next_request()
    turn.on_message(pb.StreamTurnResponse(accepted=pb.TurnAccepted(attempt=attempt)))


def say(turn: TurnMachine, text: str, offset: int, *, base: float = 0.0, candidate: int = 0) -> None:
    """One token for each character; the log-probability of token i is ``base - i``."""
    scores = [
        pb.TokenLogprob(
            token_id=ord(char),
            logprob=base - at,
            piece=char.encode(),
            top=[pb.TopToken(token_id=1, logprob=-1.0, name="<s>")],
        )
        for at, char in enumerate(text, offset)
    ]
    delta = pb.TurnDelta(
        token_offset=offset, token_count=len(text), text=text, logprobs=scores, candidate=candidate
    )
    turn.on_message(pb.StreamTurnResponse(delta=delta))


def end(turn: TurnMachine, text: str, *others: str, reason: pb.FinishReason = pb.FINISH_REASON_EOS) -> None:
    message = pb.Turn(output=pb.Item(text=text), finish_reason=reason)
    message.usage.output_tokens = len(text)
    if others:
        for number, one in enumerate((text, *others)):
            message.candidates.add(candidate=number, text=one, output_tokens=len(one))
    turn.on_message(pb.StreamTurnResponse(completed=message))


def values(turn: TurnMachine) -> list[float]:
    return [one.logprob for one in turn.result().logprobs]


def test_a_stream_that_repeats_itself_counts_each_token_once() -> None:
    turn = machine()
    say(turn, "ab", 0)
    turn.on_error(BROKEN)
    begin(turn, "a")
    say(turn, "cde", 2)
    turn.on_error(BROKEN)
    begin(turn, "a")
    say(turn, "cdefg", 2)
    shown = [one.logprob for piece in turn.pending for one in piece.logprobs]
    end(turn, "abcdefg")
    assert values(turn) == shown == [-0.0, -1, -2, -3, -4, -5, -6]
    assert turn.result().logprobs[0].token == TokenText(b"a")
    assert turn.result().logprobs[0].top_tokens[0].text == "<s>"


def test_another_attempt_brings_its_own() -> None:
    turn = machine()
    say(turn, "abc", 0)
    turn.on_error(BROKEN)
    begin(turn, "b")
    say(turn, "ab", 0, base=-10.0)
    end(turn, "ab")
    assert values(turn) == [-10, -11]


def test_what_was_not_seen_whole_is_not_said() -> None:
    turn = machine()
    say(turn, "ab", 0)
    turn.on_message(pb.StreamTurnResponse(delta=pb.TurnDelta(token_offset=2, token_count=1, text="c")))
    end(turn, "abc")
    assert turn.result().logprobs == (), "the third token was replayed from history"
    replaced = machine()
    say(replaced, "ab", 0)
    end(replaced, "xy")
    assert replaced.result().logprobs == () and Piece(restarted=True) in replaced.pending


def test_a_cancelled_turn_keeps_those_of_what_it_kept() -> None:
    turn = machine()
    say(turn, "abcd", 0)
    end(turn, "ab", reason=pb.FINISH_REASON_CANCELLED)
    assert values(turn) == [0, -1]


def test_each_candidate_has_its_own() -> None:
    turn = machine()
    say(turn, "ab", 0)
    say(turn, "xyz", 0, base=-5.0, candidate=1)
    end(turn, "ab", "xyz")
    assert [[one.logprob for one in drawn.logprobs] for drawn in turn.result().candidates] == [
        [0, -1],
        [-5, -6, -7],
    ]
    assert values(turn) == [0, -1]
