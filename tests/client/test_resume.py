"""Streams that break, over a real connection: the text is that of the uncut run, and the turn happens once."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import pytest

from pensieve.errors import DeadlineExceeded, Internal, ResourceExhausted, TurnInProgress, Unavailable
from pensieve.rpc_status import PUSHBACK_KEY, TRANSPORT_FINAL
from support.faults.fake_faults import Fault, answer_to
from support.service.fake_conversations import FakeConversations

TEXT = "Ada läuft"
MESSAGES = 2 + -(-len(answer_to(TEXT)) // 3)
"""accepted, the deltas, completed."""
BREAKS = [
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
]


def on_screen(stream: Any) -> str:
    text = ""
    for piece in stream:
        text = "" if piece.restarted else text + piece.text
    return text


def check_one_turn(fake: FakeConversations, chat: Any) -> None:
    items = chat.items()
    assert [one.text for one in items] == [TEXT, answer_to(TEXT)]
    assert len({one.turn.request_id for one in fake.stream_requests}) == 1


@pytest.mark.fault(2)
@pytest.mark.parametrize("code", BREAKS, ids=lambda code: code.name)
def test_resume_at_every_border(client: Any, fake: FakeConversations, code: grpc.StatusCode) -> None:
    for after in range(MESSAGES):
        chat = client.create_session()
        fake.stream_requests.clear()
        fake.script.append(Fault(after=after, code=code))
        stream = chat.stream(TEXT)
        assert on_screen(stream) == answer_to(TEXT)
        assert stream.turn.text == answer_to(TEXT)
        check_one_turn(fake, chat)
        received = max(0, after - 1) * 3
        assert fake.stream_requests[-1].resume_token_offset == min(received, len(answer_to(TEXT)))


def test_break_after_every_message(client: Any, fake: FakeConversations) -> None:
    """More failures than tries in a row are allowed: each new message starts the count again."""
    fake.script.extend(Fault(after=2, code=grpc.StatusCode.UNAVAILABLE) for _ in range(MESSAGES - 2))
    chat = client.create_session()
    stream = chat.stream(TEXT)
    assert on_screen(stream) == answer_to(TEXT)
    assert stream.resumes >= MESSAGES - 3
    check_one_turn(fake, chat)


@pytest.mark.parametrize("after", [0, 1, 3, MESSAGES - 1])
def test_a_lost_attempt_restarts(client: Any, fake: FakeConversations, after: int) -> None:
    fake.script.append(Fault(after=after, code=grpc.StatusCode.UNAVAILABLE, lose_attempt=True))
    chat = client.create_session()
    pieces = list(chat.stream(TEXT))
    assert sum(piece.restarted for piece in pieces) == (1 if after > 1 else 0)
    start = next((i for i, piece in enumerate(pieces) if piece.restarted), -1) + 1
    assert "".join(piece.text for piece in pieces[start:]) == answer_to(TEXT)
    check_one_turn(fake, chat)


@pytest.mark.parametrize("after", [0, 1, 2, MESSAGES - 1])
def test_committed_but_the_answer_was_lost(client: Any, fake: FakeConversations, after: int) -> None:
    fake.script.append(Fault(after=after, code=grpc.StatusCode.INTERNAL, commit=True))
    chat = client.create_session()
    assert on_screen(chat.stream(TEXT)) == answer_to(TEXT)
    check_one_turn(fake, chat)
    assert chat.last_turn.revision == 2


def test_a_stream_that_ends_without_completed(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(after=2, end=True))
    chat = client.create_session()
    assert on_screen(chat.stream(TEXT)) == answer_to(TEXT)
    check_one_turn(fake, chat)


def test_a_gap_is_asked_for_again(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(after=2, skip_messages=1))
    chat = client.create_session()
    assert on_screen(chat.stream(TEXT)) == answer_to(TEXT)
    check_one_turn(fake, chat)


@pytest.mark.parametrize("after", [1, 3])
def test_a_silent_stream_is_dead(client: Any, fake: FakeConversations, after: int) -> None:
    fake.heartbeat_s = 0.1
    fake.script.append(Fault(after=after, silent=True))
    chat = client.create_session()
    stream = chat.stream(TEXT)
    assert on_screen(stream) == answer_to(TEXT)
    assert stream.resumes == 1
    check_one_turn(fake, chat)


def test_a_slow_reader_is_not_a_silent_server(client: Any, fake: FakeConversations) -> None:
    fake.heartbeat_s = 0.1
    gate = threading.Event()
    fake.script.append(Fault(after=2, gate=gate))
    chat = client.create_session()
    stream = chat.stream(TEXT)
    text = next(stream).text
    time.sleep(0.5)  # More than three heartbeat intervals in which nobody reads.
    gate.set()
    text += "".join(piece.text for piece in stream)
    assert text == answer_to(TEXT)
    assert stream.resumes == 0


@pytest.mark.fault(14)
def test_errors_that_call_for_the_same_turn_again(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(error=Unavailable("x", reason="ENGINE_RESTARTING")))
    fake.script.append(Fault(error=ResourceExhausted("x", retry_after_s=0.001)))
    fake.script.append(Fault(after=2, error=Internal("x", reason="ENGINE_FAILED"), lose_attempt=True))
    chat = client.create_session()
    assert chat.send(TEXT).text == answer_to(TEXT)
    check_one_turn(fake, chat)


def test_retry_info_is_honoured(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(error=ResourceExhausted("x", retry_after_s=0.3)))
    chat = client.create_session()
    start = time.monotonic()
    chat.send(TEXT)
    assert time.monotonic() - start >= 0.3


def test_pushback_is_honoured(client: Any, fake: FakeConversations) -> None:
    """After the first message the library does not replay: the SDK has to read the trailer itself."""
    fake.script.append(Fault(after=2, code=grpc.StatusCode.UNAVAILABLE, trailers=((PUSHBACK_KEY, "300"),)))
    chat = client.create_session()
    start = time.monotonic()
    assert chat.send(TEXT).text == answer_to(TEXT)
    assert time.monotonic() - start >= 0.3


def test_a_refusal_that_was_torn_on_its_way_is_asked_for_again(client: Any, fake: FakeConversations) -> None:
    """Its trailer came, its details did not: the connection died in between."""
    fake.script.append(Fault(after=2, code=grpc.StatusCode.UNAVAILABLE, trailers=((PUSHBACK_KEY, "-1"),)))
    assert client.create_session().send(TEXT).text == answer_to(TEXT)
    assert len(fake.stream_requests) == 2


def test_pushback_that_forbids_to_try_again(client: Any, fake: FakeConversations) -> None:
    refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
    fake.script.append(Fault(after=2, code=refusal, trailers=((PUSHBACK_KEY, "-1"),)))
    with pytest.raises(ResourceExhausted) as caught:
        client.create_session().send(TEXT)
    assert caught.value.reason == TRANSPORT_FINAL
    assert len(fake.stream_requests) == 1


def test_the_library_does_not_replay_what_carries_minus_one(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(error=TurnInProgress("x", metadata={"active_request_id": "other"})))
    with pytest.raises(TurnInProgress) as caught:
        client.create_session().send(TEXT)
    assert caught.value.metadata["active_request_id"] == "other"
    assert len(fake.stream_requests) == 1


def test_a_server_that_still_holds_the_turn_before_is_waited_for(
    client: Any, fake: FakeConversations
) -> None:
    """Another server told how it ended; this one has not heard."""
    session = client.create_session()
    before = session.send(TEXT)
    fake.script.append(Fault(error=TurnInProgress("x", metadata={"active_request_id": before.request_id})))
    assert session.send(TEXT).text == answer_to(TEXT)
    assert len(fake.stream_requests) == 3


def test_timeout_ends_a_silent_turn(client: Any, fake: FakeConversations) -> None:
    fake.script.append(Fault(after=2, silent=True))
    with pytest.raises(DeadlineExceeded) as caught:
        client.create_session().send(TEXT, timeout=0.3)
    assert caught.value.reason == "TIMEOUT"
    assert caught.value.metadata["request_id"]


def test_the_budget_ends_a_turn_that_gets_nowhere(client: Any, fake: FakeConversations) -> None:
    fake.script.extend(Fault(after=1, code=grpc.StatusCode.UNKNOWN) for _ in range(50))
    chat = client.create_session()
    with pytest.raises(Exception, match="broken on purpose"):
        chat.send(TEXT)
    assert len(fake.stream_requests) == 8
