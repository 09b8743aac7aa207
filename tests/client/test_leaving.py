"""Turns that are cancelled, abandoned or dropped: every call is ended, and the next turn is not held up."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from pensieve.client import AsyncClient, Client, FinishReason, TurnState
from pensieve.errors import Cancelled, NotFound, TurnInProgress
from support.faults.fake_faults import Fault, answer_to
from support.service.both_clients import Blocking
from support.service.fake_conversations import FakeConversations
from support.service.fake_server import FakeServerThread, start_fake

STALL = Fault(after=3, silent=True)
SEEN = answer_to("x")[:6]


def until(client: Any, condition: Callable[[], bool]) -> None:
    """Wait for the other side; fails only when it never happens."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        if isinstance(client, Blocking):
            client.settle()
        else:
            time.sleep(0.01)


def read_two(stream: Any) -> str:
    return str(next(stream).text + next(stream).text)


def test_leaving_the_loop_discards_the_turn(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x")
    for piece in stream:
        assert piece.text == SEEN[:3]
        break
    gc.collect()
    until(client, lambda: fake.open_streams == 0 and "CancelTurn" in fake.calls)
    assert chat.items() == []
    assert not stream.done
    with pytest.raises(Cancelled):
        _ = stream.turn
    assert chat.send("y").text == answer_to("y")


def test_a_discard_that_is_refused_is_sent_again(client: Any, fake: FakeConversations) -> None:
    """As HTTP/2 refuses a call beyond the streams of a connection: the turn would run on, and be kept."""
    chat = client.create_session()
    fake.script.append(STALL)
    fake.unary_script.extend([grpc.StatusCode.UNAVAILABLE] * 3)
    stream = chat.stream("x")
    read_two(stream)
    stream.close()
    until(client, lambda: fake.open_streams == 0 and fake.calls.count("CancelTurn") == 4)
    assert chat.items() == []


def test_a_discard_that_is_said_to_be_of_no_use_is_not_sent_again(
    client: Any, fake: FakeConversations
) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    fake.unary_script.append(NotFound("no such turn", reason="TURN_NOT_FOUND"))
    stream = chat.stream("x")
    read_two(stream)
    stream.close()
    until(client, lambda: fake.open_streams == 0 and "CancelTurn" in fake.calls)
    client.close()
    assert fake.calls.count("CancelTurn") == 1


def test_a_discard_names_the_stream_that_was_left(client: Any, fake: FakeConversations) -> None:
    """All tries of a stream have its id, and another stream has another: the server can tell what is late."""
    chat = client.create_session()
    fake.script.extend([Fault(after=2, end=True), STALL, STALL, STALL])
    stream = chat.stream("x")
    read_two(stream)
    next(stream)
    stream.close()
    until(client, lambda: len(fake.cancel_requests) == 1)
    for through_the_session in (False, True):
        stream = chat.stream("x", request_id=stream.request_id)
        read_two(stream)
        if not through_the_session:
            stream._core.running = None  # as when the handle has another by now
        (chat if through_the_session else stream).cancel(keep="nothing")
        stream.close()
    first, again, second, third = (request.stream_id for request in fake.stream_requests)
    assert first == again and len({first, second, third}) == 3 and all((first, second, third))
    assert list(dict.fromkeys(request.stream_id for request in fake.cancel_requests)) == [
        first,
        second,
        third,
    ]


def test_the_next_turn_waits_for_the_abandoned_one(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x")
    read_two(stream)
    stream.close()
    assert chat.send("y").text == answer_to("y")
    assert [one.text for one in chat.items()] == ["y", answer_to("y")]


def test_a_dropped_stream_is_cancelled(client: Any, fake: FakeConversations) -> None:
    """Since 1.83 grpc never collects a call object that nobody cancelled."""
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x")
    read_two(stream)
    assert fake.open_streams == 1
    del stream
    gc.collect()
    until(client, lambda: fake.open_streams == 0 and "CancelTurn" in fake.calls)


def test_finish_on_disconnect_is_not_cancelled(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x", on_disconnect="finish")
    read_two(stream)
    stream.close()
    until(client, lambda: fake.open_streams == 0)
    assert "CancelTurn" not in fake.calls
    assert chat.attach(stream.request_id).finish().text == answer_to("x")


def test_cancel_keeps_what_was_seen(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x")
    assert read_two(stream) == SEEN == stream.text
    turn = stream.cancel(keep_output_tokens=stream.token_count)
    assert (turn.text, turn.finish_reason) == (SEEN, FinishReason.CANCELLED)
    assert list(stream) == []
    assert stream.turn == chat.last_turn == turn
    assert [one.text for one in chat.items()] == ["x", SEEN]
    until(client, lambda: fake.open_streams == 0)
    assert fake.calls.count("CancelTurn") == 1


def test_cancel_through_the_session(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    fake.script.append(STALL)
    stream = chat.stream("x")
    read_two(stream)
    assert chat.cancel(keep="nothing").state is TurnState.DISCARDED
    assert chat.items() == []
    stream.close()


def test_cancel_finds_a_turn_of_another_client(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    with pytest.raises(NotFound):
        chat.cancel()
    fake.script.append(STALL)
    stream = chat.stream("x")
    read_two(stream)
    other = client.session(chat.name)
    with pytest.raises(TurnInProgress):
        other.send("y")
    assert other.cancel().text == answer_to("x")
    stream.close()


def test_cancel_from_another_thread() -> None:
    with FakeServerThread() as server, Client(server.target) as client:
        chat = client.create_session()
        server.fake.script.append(STALL)
        stream = chat.stream("x")
        text = read_two(stream)
        thread = threading.Thread(target=lambda: stream.cancel(keep_output_tokens=len(text)))
        thread.start()
        assert stream.finish().text == text  # Blocks in a read until the other thread ends it.
        thread.join()


@pytest.mark.parametrize("at", ["before the call is made", "before it is read"])
def test_close_from_another_thread_while_the_stream_is_opened(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever closes it knows nothing of the call, which must not begin the turn for good."""
    with FakeServerThread() as server, Client(server.target) as client:
        fake = server.fake
        chat = client.create_session()
        chat.send("y")
        fake.script.append(STALL)
        stream = chat.stream("x")
        make = client._link.stub.StreamTurn

        def elsewhere() -> None:
            thread = threading.Thread(target=stream.close)
            thread.start()
            thread.join()

        def made(*args: Any, **kwargs: Any) -> Any:
            elsewhere()
            until(client, lambda: fake.calls.count("CancelTurn") == 1)
            call = make(*args, **kwargs)
            until(client, lambda: fake.open_streams == 1)
            return call

        if at == "before the call is made":
            monkeypatch.setattr(client._link.stub, "StreamTurn", made)
        else:
            monkeypatch.setattr(
                type(stream._machine), "silence_limit_s", property(lambda machine: elsewhere() or 30.0)
            )
        with pytest.raises(Cancelled):
            stream.finish()
        until(client, lambda: fake.open_streams == 0)
        tries = 2 if at == "before the call is made" else 1
        until(client, lambda: fake.calls.count("CancelTurn") == tries)
        assert stream.request_id not in fake.sessions[chat.name].turns


async def test_cancel_from_another_task() -> None:
    fake = FakeConversations()
    server, target = await start_fake(fake)
    async with AsyncClient(target) as client:
        chat = await client.create_session()
        fake.script.append(STALL)
        stream = chat.stream("x")
        text = (await anext(stream)).text + (await anext(stream)).text
        finish = asyncio.create_task(stream.finish())
        await asyncio.sleep(0)
        await stream.cancel(keep_output_tokens=len(text))
        assert (await finish).text == text
    await server.stop(grace=None)


async def test_a_cancelled_task_leaves_nothing_behind() -> None:
    fake = FakeConversations()
    server, target = await start_fake(fake)
    async with AsyncClient(target) as client:
        chat = await client.create_session()
        fake.script.append(STALL)
        task = asyncio.create_task(chat.send("x"))
        while fake.open_streams == 0:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await chat.send("y")).text == answer_to("y")
    assert fake.open_streams == 0
    await server.stop(grace=None)
    await asyncio.sleep(0.05)
    assert [one for one in asyncio.all_tasks() if one is not asyncio.current_task()] == []


def test_no_read_is_under_observation_while_nobody_reads() -> None:
    """Else a slow consumer would be taken for a silent server."""
    with FakeServerThread() as server, Client(server.target) as client:
        stream = client.create_session().stream("x")
        next(stream)
        assert stream._watch.call is not None
        assert stream._watch.deadline is None


def test_a_closed_client_ends_its_streams() -> None:
    with FakeServerThread() as server:
        client = Client(server.target)
        chat = client.create_session()
        server.fake.script.append(STALL)
        stream = chat.stream("x")
        read_two(stream)
        threads = [one for one in threading.enumerate() if one.name == "pensieve-client"]
        assert len(threads) == 1
        client.close()
        client.close()
        with pytest.raises(Cancelled) as caught:
            next(stream)
        assert caught.value.reason == "CLIENT_CLOSED"
        with pytest.raises(Cancelled):
            chat.items()
        assert not threads[0].is_alive()


def test_a_session_keeps_the_connection_alive_without_its_client() -> None:
    with FakeServerThread() as server:
        chat = Client(server.target).create_session()
        gc.collect()
        assert chat.send("x").text == answer_to("x")
        link = chat._link
        assert link.opened.channel is not None


def living_calls() -> list[str]:
    gc.collect()
    names = ("_MultiThreadedRendezvous", "UnaryStreamCall", "UnaryUnaryCall")
    return [type(one).__name__ for one in gc.get_objects() if type(one).__name__ in names]


def test_no_call_object_outlives_its_use(client: Any, fake: FakeConversations) -> None:
    chat = client.create_session()
    for fault in (None, Fault(after=2, end=True), STALL, STALL):
        if fault is not None:
            fake.script.append(fault)
        stream = chat.stream("x")
        if fault is STALL:
            read_two(stream)
            stream.close()
        else:
            stream.finish()
    fake.script.append(Fault(error=NotFound("x")))
    with pytest.raises(NotFound):
        chat.send("x")
    del stream
    until(client, lambda: fake.open_streams == 0 and living_calls() == [])


async def test_a_close_that_is_awaited_has_told_the_server() -> None:
    fake = FakeConversations()
    server, target = await start_fake(fake)
    async with AsyncClient(target) as client:
        chat = await client.create_session()
        for awaited in (True, False):
            fake.script.append(STALL)
            stream = chat.stream("x")
            await anext(stream)
            closing = stream.close()
            assert "CancelTurn" not in fake.calls, (
                "the server runs in this loop, which has not been left since"
            )
            if awaited:
                await closing
                assert fake.calls.pop() == "CancelTurn"
                await closing
                await stream.close()
                assert "CancelTurn" not in fake.calls, "once is enough"
    assert fake.calls[-1] == "CancelTurn", "a client that is closed waits for what it has begun"
    await server.stop(grace=None)
