"""Several answers to one input, with both clients: pieces, resuming, choosing, what the parameters become."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from pensieve.client import AsyncClient, RetryPolicy, Turn, decode
from pensieve.client._retry import Backoff
from pensieve.client._turn_machine import TurnMachine
from pensieve.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fake_faults import FakeTurn, Fault, drawn_answer
from support.service.drawn_turns import BEST, TOKENS
from support.service.drawn_turns import expected as scripted
from support.service.fake_conversations import FakeConversations
from support.service.service_rig import serving

TEXT = "Ada läuft"
ANSWERS = [drawn_answer(TEXT, candidate) for candidate in range(3)]
DELTAS = [
    (message.delta.candidate, message.delta.token_count)
    for message in FakeTurn(pb.TurnSpec(), "a", ANSWERS[0], ANSWERS[1:]).deltas([0], 3)
]
MESSAGES = 2 + len(DELTAS)
"""accepted, the deltas, completed."""


def on_screen(stream: Any) -> list[str]:
    texts = [""] * 3
    for piece in stream:
        if piece.restarted:
            texts = [""] * 3
        texts[piece.candidate] += piece.text
    return texts


def test_pieces_say_whose_they_are(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    stream = chat.stream(TEXT, candidates=3)
    seen: dict[int, int] = {}
    texts = dict.fromkeys(range(3), "")
    for piece in stream:
        assert piece.token_offset == seen.get(piece.candidate, 0)
        seen[piece.candidate] = piece.token_offset + piece.token_count
        texts[piece.candidate] += piece.text
    assert list(texts.values()) == ANSWERS
    turn = stream.turn
    assert [one.text for one in turn.candidates] == ANSWERS
    assert [one.candidate for one in turn.candidates] == [0, 1, 2]
    assert (turn.chosen, turn.text, stream.text) == (0, ANSWERS[0], ANSWERS[0])
    assert fake.stream_requests[-1].turn.sampling.candidates == 3


def test_resume_at_every_border(client: Any, fake: FakeConversations) -> None:
    for after in range(MESSAGES):
        chat = client.create_session()
        fake.stream_requests.clear()
        fake.script.append(Fault(after=after, code=grpc.StatusCode.UNAVAILABLE))
        stream = chat.stream(TEXT, candidates=3)
        assert on_screen(stream) == ANSWERS
        again = fake.stream_requests[-1]
        got = [0, 0, 0]
        for candidate, tokens in DELTAS[: max(0, after - 1)]:
            got[candidate] += tokens
        had = [again.resume_token_offset, *again.resume_candidate_offsets]
        assert had == got[: len(had)] and not any(got[len(had) :])
        assert len({one.turn.request_id for one in fake.stream_requests}) == 1


@pytest.mark.parametrize("after", [2, 5, MESSAGES - 1])
def test_a_lost_attempt_restarts_all(client: Any, fake: FakeConversations, after: int) -> None:
    fake.script.append(Fault(after=after, code=grpc.StatusCode.UNAVAILABLE, lose_attempt=True))
    pieces = list(client.create_session().stream(TEXT, candidates=3))
    assert sum(piece.restarted for piece in pieces) == 1
    assert on_screen(pieces) == ANSWERS


def test_a_gap_in_one_candidate_is_asked_for_again(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(after=4, skip_messages=1))
    assert on_screen(client.create_session().stream(TEXT, candidates=3)) == ANSWERS


def test_committed_but_the_answers_were_lost(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(after=3, code=grpc.StatusCode.INTERNAL, commit=True))
    assert on_screen(client.create_session().stream(TEXT, candidates=3)) == ANSWERS


def machine(*messages: Message) -> TurnMachine:
    """What the SDK makes of these, without a server."""
    request = pb.StreamTurnRequest(session="sessions/s", turn=pb.TurnSpec(request_id="r"))
    turn = TurnMachine(request, backoff=Backoff(RetryPolicy()))
    feed(turn, pb.TurnAccepted(attempt="a"), *messages)
    return turn


def feed(turn: TurnMachine, *messages: Message) -> None:
    names = {pb.TurnAccepted: "accepted", pb.TurnDelta: "delta", pb.Turn: "completed"}
    for message in messages:
        turn.on_message(pb.StreamTurnResponse(**{names[type(message)]: message}))


def delta(candidate: int, text: str, offset: int, count: int) -> pb.TurnDelta:
    return pb.TurnDelta(candidate=candidate, text=text, token_offset=offset, token_count=count)


def committed(*texts: str, **fields: Any) -> pb.Turn:
    drawn = [pb.Candidate(candidate=i, text=text, output_tokens=len(text)) for i, text in enumerate(texts)]
    several = drawn if len(drawn) > 1 else []
    return pb.Turn(output=pb.Item(text=texts[0]), candidates=several, **fields)


def test_text_held_back_of_one_candidate_is_not_doubled_by_a_resume() -> None:
    turn = machine(delta(0, "ab", 0, 2), delta(1, "xy", 0, 2), delta(1, "STO", 2, 0))
    turn.on_error(Unavailable("x", reason="STORE_UNAVAILABLE"))
    again = turn.next_request()
    assert (again.resume_token_offset, list(again.resume_candidate_offsets)) == (2, [2])
    feed(turn, pb.TurnAccepted(attempt="a"), delta(1, "STO", 2, 0), committed("ab", "xySTO"))
    assert [(piece.candidate, piece.text) for piece in turn.pending] == [(0, "ab"), (1, "xy"), (1, "STO")]


def test_what_was_not_streamed_of_each_comes_with_the_end() -> None:
    turn = machine(delta(0, "a", 0, 1), committed("ab", "xy", chosen_candidate=0))
    assert on_screen(turn.pending) == ["ab", "xy", ""]


def test_one_candidate_that_another_attempt_said_otherwise_restarts_all() -> None:
    turn = machine(delta(0, "ab", 0, 2), delta(1, "xy", 0, 2), committed("ab", "xz"))
    assert [piece.restarted for piece in turn.pending] == [False, False, True, False, False]
    assert on_screen(turn.pending) == ["ab", "xz", ""]


def test_a_cancel_keeps_the_first_and_takes_nothing_back_on_the_screen() -> None:
    kept = committed("a", finish_reason=pb.FINISH_REASON_CANCELLED)
    turn = machine(delta(0, "ab", 0, 2), delta(1, "xy", 0, 2), kept)
    assert not any(piece.restarted for piece in turn.pending)
    assert (turn.text, turn.result().candidates) == ("a", ())


def test_choose_by_turn_or_by_its_request_id(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    turn = chat.send(TEXT, candidates=3)
    chosen = chat.choose(turn, 2)
    assert (chosen.chosen, chosen.text, chosen.revision) == (2, ANSWERS[2], turn.revision + 1)
    assert (chat.last_turn, chat.revision) == (chosen, chosen.revision)
    assert chat.choose(turn.request_id, 2) == chosen
    assert chat.choose(turn.request_id, 1).text == ANSWERS[1] == chat.items()[-1].text
    with pytest.raises(NotFound, match="CANDIDATE_NOT_FOUND"):
        chat.choose(turn, 3)
    calls = len(fake.calls)
    for wrong in (-1, 1 << 32):
        with pytest.raises(InvalidArgument, match="candidate"):
            chat.choose(turn, wrong)
    assert len(fake.calls) == calls


def test_a_choice_whose_answer_was_lost_is_sent_again(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    turn = chat.send(TEXT, candidates=2)
    fake.unary_script.append(Unavailable("x", reason="STORE_UNAVAILABLE"))
    assert chat.choose(turn, 1, expected_revision=turn.revision).chosen == 1
    assert fake.calls.count("ChooseCandidate") == 2


def test_parameters(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session(candidates=2, candidate_choice="best_logprob")
    assert chat.info.default_sampling == {"candidates": 2, "candidate_choice": "best_logprob"}
    chat.send(TEXT, beam_width=4, length_penalty=0.5, early_stopping=True)
    asked = fake.stream_requests[-1].turn.sampling
    assert asked == pb.SamplingParams(beam_width=4, length_penalty=0.5, early_stopping=True)
    chat.send(TEXT, candidate_choice="best_logprob", candidates=2)
    assert fake.stream_requests[-1].turn.sampling.candidate_choice == BEST
    with pytest.raises(InvalidArgument, match="candidate_choice"):
        chat.send(TEXT, candidate_choice="worst")
    with pytest.raises(InvalidArgument, match="candidates"):
        chat.send(TEXT, candidates=-1)


def test_a_choice_of_a_newer_server_stays_a_number() -> None:
    assert decode.sampling(pb.SamplingParams(candidate_choice=9)) == {"candidate_choice": 9}  # type: ignore[arg-type]


async def test_against_the_service() -> None:
    """The same names, with the server that they are meant for."""
    async with serving() as rig, AsyncClient(rig.target) as client:
        limits = (await client.server_info()).limits
        assert (limits.max_candidates, limits.max_beam_width) == (16, 16)
        chat = await client.create_session()
        texts = ["", "", ""]
        stream = chat.stream("hi", candidates=3, candidate_choice="best_logprob")
        async for piece in stream:
            texts[piece.candidate] += piece.text
        turn: Turn = stream.turn
        assert texts == [one.text for one in turn.candidates] == [scripted(i) for i in range(3)]
        assert (turn.chosen, turn.text) == (2, scripted(2))
        assert turn.candidates[2].token_ids == tuple(TOKENS[2:])
        assert turn.candidates[1].mean_logprob == pytest.approx(-0.5)
        chosen = await chat.choose(turn, 1)
        assert chosen.text == scripted(1) == (await chat.items())[-1].text
        assert await chat.get_turn(turn.request_id) == await chat.choose(turn, 1)
        await chat.send("next", expected_revision=chosen.revision)
        with pytest.raises(FailedPrecondition, match="TURN_NOT_LATEST"):
            await chat.choose(turn, 0)
        with pytest.raises(InvalidArgument, match="temperature"):
            await chat.send("hi", beam_width=2, temperature=0.5)
