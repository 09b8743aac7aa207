"""Merging of output when there are many streams, and the waits that it rests on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pensieve.errors import Cancelled
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.stream import MAX_INTERVAL_S, StreamOptions, StreamPacer, events
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, Delta, OutputOptions, ProgressView, TurnStatus, TurnView
from support.service.service_rig import says, tokenizer

TURN = TurnView("s", "r", TurnStatus.COMMITTED)


def crowd(streams: int) -> StreamPacer:
    """A pace that ``streams`` streams share, with a longest interval between them."""
    pace = StreamPacer(0.001)
    for _ in range(streams):
        pace.join()
    return pace


class Held(StreamPacer):
    """A pace by which a stream that was written to waits for longer than any test, whatever the clock says."""

    def next_at(self, now: float) -> float:
        return now + 60.0


def started() -> TurnBuffer:
    buffer = TurnBuffer()
    buffer.accept(Accepted("r", 0, 1, 0, "attempt", False), OutputText(tokenizer()))
    return buffer


async def read(
    buffer: TurnBuffer, pace: StreamPacer, limit: int | None = None, found: list[Delta] | None = None
) -> list[Delta]:
    """All deltas of a stream; ``found`` has those that have come so far."""
    found = [] if found is None else found
    options = StreamOptions(OutputOptions(max_chunk_tokens=limit), 5.0)
    async with aclosing(events(buffer, options, pace)) as stream:
        async for event in stream:
            if isinstance(event, Delta):
                assert event.tokens
                found.append(event)
    return found


def test_few_streams_are_not_held_up() -> None:
    pace = StreamPacer(1000.0)
    pace.join()
    assert pace.next_at(12.345) == 12.345
    assert StreamPacer().next_at(7.0) == 7.0


def test_many_streams_share_their_times() -> None:
    pace = StreamPacer(1000.0)
    for _ in range(50):
        pace.join()
    times = [pace.next_at(now) for now in (10.001, 10.02, 10.049)]
    assert times == pytest.approx([10.05] * 3)
    assert pace.next_at(10.051) == pytest.approx(10.1)
    for _ in range(24):
        pace.leave()
    assert pace.next_at(10.001) == pytest.approx(10.05), (
        "26 want 26 ms: the next of the nested intervals is 50"
    )
    pace.leave()
    assert pace.next_at(10.001) == pytest.approx(10.025)
    for _ in range(20):
        pace.leave()
    assert pace.next_at(10.001) == 10.001
    assert crowd(5).next_at(10.01) == pytest.approx(10.0 + MAX_INTERVAL_S)


async def test_output_is_merged_and_complete() -> None:
    buffer, tokens = started(), says("hello world, the fox")
    pace = StreamPacer(20.0)  # with this one stream, 50 ms between two messages
    reading = asyncio.create_task(read(buffer, pace))
    for token in tokens:
        buffer.take(0, [token], [])
        for _ in range(20):
            await asyncio.sleep(0)
    buffer.end(TURN)
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == tokens
    assert "".join(delta.text for delta in deltas) == "hello world, the fox"
    assert len(deltas[0].tokens) == 1, "the first output is not held up"
    assert len(deltas) < len(tokens), "nothing was merged"
    assert pace.next_at(10.001) == 10.001, "the stream did not leave"


async def test_the_end_is_not_held_up() -> None:
    """With an interval of 100 ms the end would come late; it comes before any timer of this loop can have fired."""
    buffer = started()
    reading = asyncio.create_task(read(buffer, Held()))
    for token in says("one two"):
        buffer.take(0, [token], [])
        for _ in range(20):
            await asyncio.sleep(0)
    buffer.end(TURN)
    for _ in range(20):
        await asyncio.sleep(0)
    assert reading.done()


async def test_smaller_pieces_follow_each_other_at_once() -> None:
    buffer, tokens = started(), says("hello world, the fox")
    found: list[Delta] = []
    reading = asyncio.create_task(read(buffer, Held(), limit=1, found=found))
    buffer.take(0, tokens, [])
    for _ in range(200):
        await asyncio.sleep(0)
    assert [len(delta.tokens) for delta in found] == [1] * len(tokens)
    buffer.end(TURN)
    await asyncio.wait_for(reading, 5)


async def test_tokens_that_are_taken_back_while_held_are_not_sent() -> None:
    buffer, tokens = started(), says("hello world, the fox")
    reading = asyncio.create_task(read(buffer, Held()))
    buffer.take(0, tokens[:1], [])
    for _ in range(20):
        await asyncio.sleep(0)
    buffer.take(0, tokens[1:], [])
    for _ in range(20):
        await asyncio.sleep(0)
    buffer.outputs[0].finish(keep=1)
    buffer.end(TURN)
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == tokens[:1]


async def test_an_error_reaches_a_stream_that_is_held() -> None:
    buffer = started()
    reading = asyncio.create_task(read(buffer, Held()))
    for token in says("one two"):
        buffer.take(0, [token], [])
        for _ in range(20):
            await asyncio.sleep(0)
    buffer.end(Cancelled("gone"))
    with pytest.raises(Cancelled):
        await asyncio.wait_for(reading, 5)


async def test_each_wait_ends_at_its_own_time() -> None:
    """One alarm serves all waits of a buffer, in whatever order their times come."""
    buffer = TurnBuffer()
    waits = [asyncio.create_task(buffer.wait_for_change(seconds)) for seconds in (0.06, 30.0, 0.02, 0.04)]
    await asyncio.wait_for(asyncio.gather(waits[0], waits[2], waits[3]), 5)
    assert [wait.result() for wait in (waits[0], waits[2], waits[3])] == [False] * 3
    assert not waits[1].done()
    buffer.report(ProgressView())
    assert await asyncio.wait_for(waits[1], 5)
    assert not await asyncio.wait_for(buffer.wait_for_change(0.01), 5), (
        "the next wait has an alarm of its own"
    )


async def test_waiting_for_the_end_is_not_disturbed_by_tokens() -> None:
    buffer = started()
    end = asyncio.create_task(buffer.ends_within(30.0))
    late = asyncio.create_task(buffer.ends_within(0.01))
    for token in says("one two three"):
        buffer.take(0, [token], [])
        await asyncio.sleep(0)
    assert not await asyncio.wait_for(late, 5)
    assert not end.done()
    buffer.end(TURN)
    assert await end and await buffer.ends_within(0.0)


async def test_a_held_stream_sleeps_while_tokens_come() -> None:
    """Between two messages a stream of a crowd waits once, for its time or the end, and not for tokens as well."""
    buffer = started()
    reading = asyncio.create_task(read(buffer, Held()))
    tokens = says("hello world, the fox")
    buffer.take(0, tokens[:1], [])
    for _ in range(20):
        await asyncio.sleep(0)
    for token in tokens[1:]:
        assert not buffer._waiting, "it waits for the next token"
        buffer.take(0, [token], [])
        await asyncio.sleep(0)
    buffer.end(TURN)
    deltas = await asyncio.wait_for(reading, 5)
    assert [token for delta in deltas for token in delta.tokens] == tokens
