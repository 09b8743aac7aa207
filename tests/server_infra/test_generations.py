"""Dealing to the right sink, what ends a generation and what cannot, observers; the watchdog."""

from __future__ import annotations

import asyncio

import pytest

from pensieve.core import FinishReason, Phase, RequestKey, TokenLogprob, Usage
from pensieve.engine.messages import (
    CandidateFinished,
    Event,
    Evicted,
    Failed,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
)
from pensieve.errors import ContextLimitExceeded, Internal, PensieveError, ResourceExhausted, Unavailable
from pensieve.server.failures import restarting
from pensieve.server.links.generations import Generations
from support.service.listener import Listener


class Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def first_token(self, seconds: float, usage: Usage) -> None:
        self.calls.append(("first", seconds, usage.gpu_cached_tokens))

    def next_tokens(self, seconds: float, tokens: int) -> None:
        self.calls.append(("next", seconds, tokens))

    def on_generation_end(self, outcome: str) -> None:
        self.calls.append(("ended", outcome))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(
    observer: Recorder | None = None, clock: Clock | None = None
) -> tuple[Generations, list[RequestKey | tuple[RequestKey, int]]]:
    """Generations of an engine that is told what to cancel, and what it was told."""
    told: list[RequestKey | tuple[RequestKey, int]] = []

    def cancel(request: RequestKey, candidate: int | None) -> None:
        told.append(request if candidate is None else (request, candidate))

    return Generations(cancel, observer, clock or Clock()), told


async def test_every_event_goes_on_at_once_and_in_order() -> None:
    generations, _ = opened()
    heard = Listener()
    number = generations.open(heard).request
    events: list[Event] = [Started(number, Usage(context_tokens=7)), RequestProgress(number, Phase.PREFILL)]
    events += [Output(number, (token,), (TokenLogprob(token, -1.0),)) for token in range(50)]
    events += [
        RequestProgress(number, Phase.DECODE),
        Finished(number, FinishReason.EOS, Usage(context_tokens=7)),
    ]
    for upto, event in enumerate(events, 1):
        generations.dispatch([event])
        assert heard.events == events[:upto]
    assert heard.ends == 1 and heard.error is None
    assert len(generations) == 0


async def test_events_reach_their_own_sink_only() -> None:
    generations, _ = opened()
    one, two = Listener(), Listener()
    first, second = generations.open(one).request, generations.open(two).request
    assert first != second
    generations.dispatch([Output(second, (2,)), Output(first, (1,)), Output(RequestKey(999), (9,))])
    assert one.events == [Output(first, (1,))]
    assert two.events == [Output(second, (2,))]


async def test_a_cancelled_sink_hears_no_more_and_the_engine_is_told_once() -> None:
    recorder, heard = Recorder(), Listener()
    generations, told = opened(recorder)
    generation = generations.open(heard)
    generations.dispatch([Output(generation.request, (1, 2))])
    generation.cancel()
    generation.cancel()
    generations.dispatch(
        [Output(generation.request, (3,)), Finished(generation.request, FinishReason.EOS, Usage())]
    )
    generations.fail_all(restarting)
    assert heard.token_ids == [1, 2] and heard.ends == 0
    assert told == [generation.request]
    assert recorder.calls[-1] == ("ended", "cancelled")
    assert len(generations) == 0


async def test_a_sink_that_cancels_amid_a_report_hears_nothing_more_of_it() -> None:
    """As at a stop string: what the same report still has for this generation is dropped."""

    class Stopping(Listener):
        def tokens(self, event: Output) -> None:
            super().tokens(event)
            generation.cancel()

    recorder, heard, other = Recorder(), Stopping(), Listener()
    generations, told = opened(recorder)
    generation, second = generations.open(heard), generations.open(other).request
    number = generation.request
    generations.dispatch(
        [
            *(Output(number, (1,)), Output(number, (2,)), Output(second, (3,))),
            Finished(number, FinishReason.LENGTH, Usage()),
        ]
    )
    assert heard.token_ids == [1] and heard.ends == 0
    assert other.token_ids == [3]
    assert told == [number] and ("ended", "length") not in recorder.calls


async def test_one_candidate_is_cancelled_by_itself() -> None:
    recorder, heard = Recorder(), Listener()
    generations, told = opened(recorder)
    generation = generations.open(heard)
    number = generation.request
    generation.cancel_candidate(2)
    assert told == [(number, 2)] and len(generations) == 1
    events: list[Event] = [
        *(Output(number, (7,), candidate=1), CandidateFinished(number, 1, FinishReason.EOS)),
        Finished(number, FinishReason.LENGTH, Usage()),
    ]
    generations.dispatch(events)
    assert heard.events == events and recorder.calls == [("ended", "length")]
    generation.cancel_candidate(0)
    assert told == [(number, 2)]


async def test_the_gap_between_tokens_is_that_of_one_candidate() -> None:
    """Candidates come in the same steps: each would add a gap of nothing."""
    recorder, clock = Recorder(), Clock()
    generations, _ = opened(recorder, clock)
    number = generations.open(Listener()).request
    for step in range(3):
        clock.now += 0.5
        generations.dispatch([Output(number, (step,), candidate=candidate) for candidate in range(4)])
    assert recorder.calls == [("first", 0.5, 0), ("next", 0.5, 1), ("next", 0.5, 1)]


@pytest.mark.parametrize("place", ["started", "progress", "tokens", "finished"])
async def test_a_sink_that_raises_loses_its_own_generation_only(place: str) -> None:
    def broken(event: object) -> None:
        raise KeyError("a bug")

    bad, good = Listener(), Listener()
    setattr(bad, place, broken)
    generations, told = opened()
    first, second = generations.open(bad).request, generations.open(good).request
    for event in (
        *(Started(first, Usage()), Started(second, Usage())),
        *(RequestProgress(first, Phase.DECODE), RequestProgress(second, Phase.DECODE)),
        *(Output(first, (1,)), Output(second, (1,))),
    ):
        generations.dispatch([event])
    generations.dispatch([Finished(number, FinishReason.EOS, Usage()) for number in (first, second)])
    assert isinstance(bad.error, KeyError) and bad.ends == 1
    assert good.error is None and len(good.events) == 4
    assert told == ([] if place == "finished" else [first])
    assert len(generations) == 0


async def test_cancel_after_the_end_says_nothing_to_the_engine() -> None:
    generations, told = opened()
    generation = generations.open(Listener())
    generations.dispatch([Finished(generation.request, FinishReason.EOS, Usage())])
    generation.cancel()
    assert told == []


async def test_a_generation_that_never_reached_the_engine_is_forgotten() -> None:
    recorder, heard = Recorder(), Listener()
    generations, told = opened(recorder)
    generation = generations.open(heard)
    generations.drop(generation)
    generation.cancel()
    generations.fail_all(restarting)
    assert len(generations) == 0 and not told and not recorder.calls and heard.ends == 0


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("CONTEXT_LIMIT_EXCEEDED", ContextLimitExceeded),
        ("SERVER_OVERLOADED", ResourceExhausted),
        ("ENGINE_FAILED", Internal),
    ],
)
async def test_failures_keep_reason_and_come_after_the_output(reason: str, kind: type[PensieveError]) -> None:
    generations, told = opened()
    heard = Listener()
    number = generations.open(heard).request
    generations.dispatch([Output(number, (1,)), Failed(number, reason, "why")])
    assert await anext(heard) == Output(number, (1,))
    with pytest.raises(kind) as caught:
        await anext(heard)
    assert caught.value.reason == reason and caught.value.message == "why"
    assert (caught.value.retry_after_s is not None) == (reason == "SERVER_OVERLOADED")
    generations.dispatch([Output(number, (2,))])
    assert heard.ends == 1 and heard.token_ids == [1] and not told


async def test_when_the_engine_is_lost_everyone_gets_an_error_of_its_own() -> None:
    generations, told = opened()
    one, two = Listener(), Listener()
    generations.open(one)
    generations.open(two)
    _, call = generations.open_call()
    generations.fail_all(restarting)
    assert isinstance(one.error, Unavailable) and isinstance(two.error, Unavailable)
    assert one.error is not two.error and one.ends == two.ends == 1
    with pytest.raises(Unavailable):
        await call
    await asyncio.sleep(0)
    assert len(generations) == 0 and not generations.has_calls and not told


async def test_calls_are_matched_and_forgotten() -> None:
    generations = opened()[0]
    one, first = generations.open_call()
    two, second = generations.open_call()
    generations.dispatch([Evicted(two, 5), ResidentTokens(one, 1, 2), Evicted(77, 1)])
    assert (await first, await second) == (ResidentTokens(one, 1, 2), Evicted(two, 5))
    await asyncio.sleep(0)
    assert not generations.has_calls


async def test_an_abandoned_call_is_forgotten() -> None:
    generations = opened()[0]
    number, call = generations.open_call()
    call.cancel()
    await asyncio.sleep(0)
    assert not generations.has_calls
    generations.dispatch([Evicted(number, 5)])


async def test_observers_hear_of_arrival() -> None:
    recorder, clock = Recorder(), Clock()
    generations, _ = opened(recorder, clock)
    number = generations.open(Listener()).request
    clock.now = 102.0
    generations.dispatch([Started(number, Usage(gpu_cached_tokens=64)), Output(number, (1,))])
    clock.now = 103.0
    generations.dispatch([Output(number, (2, 3))])
    generations.dispatch([Finished(number, FinishReason.STOP_TOKEN, Usage())])
    assert recorder.calls == [("first", 2.0, 64), ("next", 1.0, 2), ("ended", "stop_token")]
