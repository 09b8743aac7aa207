"""Merging for slow readers, dealing to the right reader, observers."""

from __future__ import annotations

import asyncio

import pytest

from pensieve.core import FinishReason, Phase, RequestKey, TokenLogprob, Usage
from pensieve.engine.messages import (
    Evicted,
    Failed,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
)
from pensieve.errors import ContextLimitExceeded, Internal, PensieveError, ResourceExhausted, Unavailable
from pensieve.server.links.base import Watchdog, restarting
from pensieve.server.links.generations import BufferedGeneration, Generations


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def first_token(self, seconds: float, usage: Usage) -> None:
        self.calls.append(("first", seconds, usage.gpu_cached_tokens))

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.calls.append(("next", seconds, tokens))

    def ended(self, outcome: str) -> None:
        self.calls.append(("ended", outcome))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def read(generation: BufferedGeneration) -> list[object]:
    return [event async for event in generation]


async def test_a_reader_that_never_read_gets_everything_in_four_events() -> None:
    generations = Generations()
    generation = generations.open(lambda request: None)
    number = generation.request
    generations.deal([Started(number, Usage(context_tokens=7)), RequestProgress(number, Phase.PREFILL)])
    for token in range(5000):
        generations.deal(
            [
                Output(number, (token,), (TokenLogprob(token, -1.0),)),
                RequestProgress(number, Phase.DECODE, tokens_done=token),
            ]
        )
    generations.deal([Finished(number, FinishReason.EOS, Usage(context_tokens=7))])
    events = await read(generation)
    assert [type(event) for event in events] == [Started, RequestProgress, Output, Finished]
    assert isinstance(events[1], RequestProgress) and events[1].tokens_done == 4999
    assert isinstance(events[2], Output)
    assert events[2].token_ids == tuple(range(5000)) and len(events[2].logprobs) == 5000
    assert len(generations) == 0


async def test_undelivered_events_do_not_pile_up() -> None:
    generations = Generations()
    generation = generations.open(lambda request: None)
    for number in range(1000):
        generations.deal([RequestProgress(generation.request, Phase.QUEUED, queue_position=number)])
    first = await anext(generation)
    assert isinstance(first, RequestProgress) and first.queue_position == 999
    waiting = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    assert not waiting.done()
    generations.deal([Output(generation.request, (1,))])
    assert await waiting == Output(generation.request, (1,))


async def test_events_reach_their_own_reader_only() -> None:
    generations = Generations()
    one, two = generations.open(lambda request: None), generations.open(lambda request: None)
    assert one.request != two.request
    generations.deal([Output(two.request, (2,)), Output(one.request, (1,)), Output(999, (9,))])
    assert await anext(one) == Output(one.request, (1,))
    assert await anext(two) == Output(two.request, (2,))


async def test_a_cancelled_reader_stops_at_once_and_the_engine_is_told_once() -> None:
    told: list[RequestKey] = []
    recorder = Recorder()
    generations = Generations(recorder)
    generation = generations.open(told.append)
    generations.deal([Output(generation.request, (1, 2))])
    waiting = asyncio.ensure_future(read(generation))
    await asyncio.sleep(0)
    generation.cancel()
    generation.cancel()
    generations.deal([Output(generation.request, (3,))])
    assert [event for event in await waiting if isinstance(event, Output) and 3 in event.token_ids] == []
    assert told == [generation.request]
    assert recorder.calls[-1] == ("ended", "cancelled")
    assert len(generations) == 0


async def test_cancel_after_the_end_says_nothing_to_the_engine() -> None:
    told: list[RequestKey] = []
    generations = Generations()
    generation = generations.open(told.append)
    generations.deal([Finished(generation.request, FinishReason.EOS, Usage())])
    generation.cancel()
    assert told == []


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CONTEXT_LIMIT_EXCEEDED", ContextLimitExceeded),
        ("SERVER_OVERLOADED", ResourceExhausted),
        ("ENGINE_FAILED", Internal),
    ],
)
async def test_failures_keep_reason_and_come_after_the_output(reason: str, kind: type[PensieveError]) -> None:
    generations = Generations()
    generation = generations.open(lambda request: None)
    generations.deal([Output(generation.request, (1,)), Failed(generation.request, reason, "why")])
    assert await anext(generation) == Output(generation.request, (1,))
    with pytest.raises(kind) as caught:
        await anext(generation)
    assert caught.value.reason == reason and caught.value.message == "why"
    assert (caught.value.retry_after_s is not None) == (reason == "SERVER_OVERLOADED")
    assert await read(generation) == []


async def test_when_the_engine_is_lost_everyone_gets_an_error_of_its_own() -> None:
    generations = Generations()
    one, two = generations.open(lambda request: None), generations.open(lambda request: None)
    _, call = generations.open_call()
    generations.fail_all(restarting)
    errors = []
    for generation in (one, two):
        with pytest.raises(Unavailable) as caught:
            await anext(generation)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    with pytest.raises(Unavailable):
        await call
    await asyncio.sleep(0)
    assert len(generations) == 0 and not generations.has_calls


async def test_calls_are_matched_and_forgotten() -> None:
    generations = Generations()
    one, first = generations.open_call()
    two, second = generations.open_call()
    generations.deal([Evicted(two, 5), ResidentTokens(one, 1, 2), Evicted(77, 1)])
    assert (await first, await second) == (ResidentTokens(one, 1, 2), Evicted(two, 5))
    await asyncio.sleep(0)
    assert not generations.has_calls


async def test_an_abandoned_call_is_forgotten() -> None:
    generations = Generations()
    number, call = generations.open_call()
    call.cancel()
    await asyncio.sleep(0)
    assert not generations.has_calls
    generations.deal([Evicted(number, 5)])


async def test_observers_hear_of_arrival_not_of_reading() -> None:
    recorder, clock = Recorder(), Clock()
    generations = Generations(recorder, clock)
    generation = generations.open(lambda request: None)
    clock.now = 102.0
    generations.deal(
        [Started(generation.request, Usage(gpu_cached_tokens=64)), Output(generation.request, (1,))]
    )
    clock.now = 103.0
    generations.deal([Output(generation.request, (2, 3))])
    generations.deal([Finished(generation.request, FinishReason.STOP_TOKEN, Usage())])
    assert recorder.calls == [("first", 2.0, 64), ("next", 1.0, 2), ("ended", "stop_token")]


def test_the_watchdog_counts_steps_not_heartbeats() -> None:
    watchdog = Watchdog(10.0)
    for step in range(100):
        watchdog.tick(1.0, work_waits=True)
        watchdog.reported(Stats(steps_total=step))
    assert not watchdog.stalled
    for _ in range(11):
        watchdog.tick(1.0, work_waits=True)
        watchdog.reported(Stats(steps_total=99))
    assert watchdog.stalled


def test_the_watchdog_wants_heartbeats_of_an_idle_engine() -> None:
    watchdog = Watchdog(10.0)
    for _ in range(11):
        assert not watchdog.stalled
        watchdog.tick(1.0, work_waits=False)
    assert watchdog.stalled


def test_a_frozen_front_end_does_not_blame_the_engine() -> None:
    watchdog = Watchdog(10.0)
    watchdog.tick(3600.0, work_waits=True)
    assert not watchdog.stalled
