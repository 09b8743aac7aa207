"""From the link's events into the turn's buffer: what streams then see, and every way a generation ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import aclosing

import numpy as np
import pytest

from pensieve.core import FinishReason, Phase, Sampling, SessionKey
from pensieve.errors import Unavailable
from pensieve.server.failures import restarting
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.stream import StreamOptions, events
from pensieve.server.turns.text import OutputText
from pensieve.server.values import (
    Accepted,
    Delta,
    OutputOptions,
    ProgressView,
    StreamEvent,
    TurnStatus,
    TurnView,
)
from support.service.listener import submission
from support.service.scripted_link import ScriptedGeneration, ScriptedLink
from support.service.service_rig import encode, says, tokenizer

TOKENS = np.arange(5, dtype=np.int32)


class Turn:
    """A turn as far as the engine's part in it goes, with a scripted engine."""

    def __init__(self, stops: tuple[str, ...] = (), limit_s: float | None = None, **sampling: int) -> None:
        self.link = ScriptedLink(None)
        self.buffer = TurnBuffer()
        self.output = OutputText(tokenizer(), stops)
        self.buffer.accept(Accepted("r", 0, 5, 0, "attempt", False), self.output)
        self.generation = TurnGeneration(self.buffer)
        self.limit_s = limit_s
        self.sampling = Sampling(**sampling)

    def run(self) -> asyncio.Task[None]:
        return asyncio.create_task(
            self.generation.run(
                self.link, submission(SessionKey("t/s"), TOKENS, self.sampling), limit_s=self.limit_s
            )
        )

    async def running(self) -> tuple[asyncio.Task[None], ScriptedGeneration]:
        task = self.run()
        return task, await self.link.next_generation()


async def read(buffer: TurnBuffer) -> list[StreamEvent]:
    async with aclosing(events(buffer, StreamOptions(OutputOptions(top_logprobs=1), 5.0))) as stream:
        return [event async for event in stream]


async def test_a_receipt_has_the_drafts_of_an_answer_that_ends_here() -> None:
    """At a stop string or the time limit no receipt of the engine comes. What it accepted behind the stop string did
    not become output."""
    turn = Turn(("brown",))
    task, engine = await turn.running()
    engine.admit()
    engine.emit(*encode("the quick "), drafts=(4, 3))
    assert turn.generation.usage(10).accepted_tokens == 3
    engine.emit(*encode("brown fox"), drafts=(24, 21))
    await task
    kept = len(turn.output.tokens)
    usage = turn.generation.usage(kept)
    assert kept == len(encode("the quick ")) and engine.cancelled
    assert (usage.output_tokens, usage.drafted_tokens, usage.accepted_tokens) == (kept, 24, kept)


async def test_a_reader_that_never_read_gets_everything_in_one_delta() -> None:
    turn = Turn(top_logprobs=1)
    task, engine = await turn.running()
    engine.admit()
    tokens = encode("the quick brown fox") * 1000
    for number, token in enumerate(tokens):
        engine.emit(token)
        engine.progress(Phase.DECODE, tokens_done=number)
    engine.finish()
    await task
    turn.buffer.end(TurnView("s", "r", TurnStatus.COMMITTED))
    accepted, delta, last = await read(turn.buffer)
    assert isinstance(accepted, Accepted) and isinstance(last, TurnView)
    assert isinstance(delta, Delta)
    assert list(delta.tokens) == tokens and [one.token_id for one in delta.logprobs] == tokens


async def test_of_progress_only_the_latest_is_kept() -> None:
    turn = Turn()
    task, engine = await turn.running()
    for position in range(1000):
        engine.progress(Phase.QUEUED, queue_position=position)
    async with aclosing(events(turn.buffer, StreamOptions(OutputOptions(top_logprobs=1), 5.0))) as stream:
        assert isinstance(await anext(stream), Accepted)
        assert await anext(stream) == ProgressView(Phase.QUEUED, 999)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert not waiting.done()
        engine.emit(*encode("fox"))
        assert isinstance(await waiting, Delta)
    engine.finish()
    await task
    assert turn.generation.finish_reason() is FinishReason.EOS


async def test_the_turn_sleeps_while_tokens_come() -> None:
    """The task of a turn is not woken by what its engine says: that is what one buffer instead of two saves."""
    turn = Turn()
    task, engine = await turn.running()
    engine.admit()
    await asyncio.sleep(0)
    woken: list[object] = []
    assert turn.generation._done is not None
    turn.generation._done.add_done_callback(woken.append)
    for token in says("hello world"):
        engine.emit(token)
        await asyncio.sleep(0)
        assert not woken
    engine.finish()
    await task
    assert woken


@pytest.mark.parametrize("at_once", [True, False], ids=["in one report", "token by token"])
async def test_a_stop_string_ends_the_generation_where_it_is_found(at_once: bool) -> None:
    turn = Turn(stops=("fox",))
    task, engine = await turn.running()
    engine.admit()
    tokens = encode("the fox jumps over")
    if at_once:
        engine.emit(*tokens)
    for token in [] if at_once else tokens:
        engine.emit(token)
    assert engine.cancelled, "the engine is told before anything else runs"
    engine.finish()
    await task
    assert turn.generation.finish_reason() is FinishReason.STOP_SEQUENCE
    assert turn.output.stop == "fox" and turn.output.finish() == "the "


async def test_interrupted_before_it_is_submitted() -> None:
    turn = Turn()
    turn.generation.interrupt()
    await turn.run()
    assert not turn.link.generations


async def test_interrupted_between_submission_and_the_first_event() -> None:
    turn = Turn()
    task, engine = await turn.running()
    turn.generation.interrupt()
    assert engine.cancelled
    engine.admit()
    engine.emit(1)
    await task
    assert not turn.output.tokens and turn.generation.first_token_at is None
    assert turn.generation.usage(0).context_tokens == 0, "nothing was admitted"


async def test_what_came_before_the_engine_died_is_there() -> None:
    turn = Turn()
    task, engine = await turn.running()
    engine.admit()
    engine.emit(*encode("the fox"))
    engine.fail(restarting())
    with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
        await task
    assert turn.output.tokens == encode("the fox") and not engine.cancelled


async def test_a_refused_submission_is_raised() -> None:
    turn = Turn()
    turn.link.refuse = restarting()
    with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
        await turn.run()


async def test_a_bug_while_tokens_are_taken_ends_this_turn_and_stops_the_engine() -> None:
    turn = Turn()
    task, engine = await turn.running()
    turn.buffer.outputs = ()  # taking tokens finds no output to put them into
    engine.emit(1)
    with pytest.raises(IndexError):
        await task
    assert engine.cancelled


async def test_a_turn_that_is_given_up_stops_the_engine() -> None:
    turn = Turn()
    task, engine = await turn.running()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled() and engine.cancelled


async def test_time_that_is_over_ends_it_with_what_there_is() -> None:
    turn = Turn(limit_s=0.02)
    task, engine = await turn.running()
    engine.emit(*encode("the fox"))
    await asyncio.wait_for(task, 5)
    assert turn.generation.finish_reason() is FinishReason.TIME_LIMIT
    assert engine.cancelled and turn.output.finish() == "the fox"


async def test_time_that_is_over_after_the_end_changes_nothing() -> None:
    turn = Turn(limit_s=3600.0)
    task, engine = await turn.running()
    engine.emit(*encode("the fox"))
    engine.finish(FinishReason.LENGTH)
    turn.generation._time_is_over()  # in the same turn of the event loop
    await task
    assert turn.generation.finish_reason() is FinishReason.LENGTH and not turn.generation.timed_out


async def test_nothing_of_an_ended_turn_waits_for_the_garbage_collector() -> None:
    turn = Turn()
    task, engine = await turn.running()
    engine.emit(*encode("the fox"))
    engine.finish()
    await task
    buffer = weakref.ref(turn.buffer)
    turn.link.generations.clear()  # the script's own memory of it
    gc.disable()
    try:
        del turn, task, engine
        assert buffer() is None
    finally:
        gc.enable()
