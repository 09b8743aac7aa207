"""The watchdog: what a step may take follows from what steps took; a stopped process needs no estimate."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.core import Sampling, SessionKey
from pensieve.engine.messages import Stats
from pensieve.errors import Unavailable
from pensieve.server.links import base
from pensieve.server.links.base import HUNG_FLOOR_S, STALLED_FLOOR_S, StepTimes, Watchdog
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.operations import health
from support.engine.fake_engine import BUILDER, Script, options
from support.service.listener import Listened


class Watched:
    """A watchdog of an engine whose steps the test makes."""

    def __init__(self, limit_s: float = 60.0) -> None:
        self.dog = Watchdog(limit_s)
        self.steps = 0

    def step(self, tokens: int, seconds: float) -> None:
        """A step that is announced, takes its time and ends."""
        self.dog.on_step_begin(tokens)
        self.wait(seconds)
        self.steps += 1
        self.dog.on_report(
            Stats(steps_total=self.steps, running=1, last_batch_tokens=tokens, last_step_seconds=seconds)
        )

    def wait(self, seconds: float, *, work_waits: bool = True, frozen: bool = False) -> None:
        for _ in range(round(seconds / self.dog.tick_s)):
            self.dog.tick(self.dog.tick_s, work_waits=work_waits, frozen=frozen)

    def patience(self) -> tuple[float, float]:
        """Seconds of silence until it is stalled, and until it is hung."""
        stalled = waited = 0.0
        while not self.dog.hung:
            self.wait(self.dog.tick_s)
            waited += self.dog.tick_s
            stalled = stalled if self.dog.stalled else waited
        return stalled, waited


def test_a_hang_among_short_steps_is_seen_within_five_seconds() -> None:
    watched = Watched()
    for _ in range(20):
        watched.step(8, 0.02)
    stalled, hung = watched.patience()
    assert stalled == pytest.approx(STALLED_FLOOR_S, abs=0.5) and hung == pytest.approx(HUNG_FLOOR_S, abs=0.5)
    assert STALLED_FLOOR_S + 2 * watched.dog.tick_s + health.CHECK_INTERVAL_S < 5


def test_a_prefill_thirty_times_as_long_is_no_stall() -> None:
    """What is announced as thirty times as many tokens may take thirty times as long, and more."""
    watched = Watched()
    watched.step(4000, 6.0)  # the first of its size: nothing is foreseen
    for _ in range(20):
        watched.step(130, 0.2)
    for seconds in (6.0, 12.0, 30.0):
        watched.dog.on_step_begin(3900)
        watched.wait(seconds)
        assert not watched.dog.stalled, seconds
        watched.step(3900, 0.0)
    watched.dog.on_step_begin(3900)
    stalled, hung = watched.patience()
    assert 40 < stalled < hung


def test_a_hang_is_seen_soon_also_after_long_steps() -> None:
    """The limit is that of the step under way, not of the longest one ever."""
    watched = Watched()
    watched.step(4000, 6.0)
    for _ in range(5):
        watched.step(4, 0.02)
    watched.dog.on_step_begin(4)
    assert watched.patience()[0] < 4


def test_a_first_step_may_compile() -> None:
    watched = Watched()
    watched.dog.on_step_begin(16)
    watched.wait(55.0)
    assert not watched.dog.stalled
    watched.wait(10.0)
    assert watched.dog.stalled and watched.dog.hung
    larger = Watched()
    larger.step(16, 0.1)
    larger.dog.on_step_begin(1000)
    larger.wait(50.0)
    assert not larger.dog.stalled


def test_a_stopped_process_is_seen_whatever_it_was_doing() -> None:
    watched = Watched()
    watched.dog.on_step_begin(16)  # nothing is foreseen of it
    watched.wait(STALLED_FLOOR_S + 0.5, frozen=True)
    assert watched.dog.stalled and watched.dog.frozen and not watched.dog.hung
    watched.wait(0.5)
    assert not watched.dog.stalled, "it goes on"
    watched.wait(HUNG_FLOOR_S + 0.5, frozen=True)
    assert watched.dog.hung


def test_a_step_whose_requests_were_all_cancelled_is_still_a_step() -> None:
    watched = Watched()
    watched.dog.on_step_begin(16)
    watched.wait(30.0, work_waits=False)
    assert not watched.dog.stalled


def test_heartbeats_are_no_steps() -> None:
    watched = Watched(limit_s=10.0)
    for step in range(100):
        watched.dog.tick(0.25, work_waits=True)
        watched.dog.on_report(Stats(steps_total=step))
    assert not watched.dog.stalled
    for _ in range(44):
        watched.dog.tick(0.25, work_waits=True)
        watched.dog.on_report(Stats(steps_total=99))
    assert watched.dog.stalled


def test_an_idle_engine_has_to_beat() -> None:
    watched = Watched()
    watched.dog.on_report(Stats())
    watched.wait(STALLED_FLOOR_S - 0.5, work_waits=False)
    assert not watched.dog.stalled
    watched.wait(1.0, work_waits=False)
    assert watched.dog.stalled
    watched.dog.on_report(Stats())
    assert not watched.dog.stalled


def test_a_frozen_front_end_does_not_blame_the_engine() -> None:
    watchdog = Watchdog(10.0)
    watchdog.tick(3600.0, work_waits=True)
    assert not watchdog.stalled


def test_estimates() -> None:
    times = StepTimes()
    assert times.expected(1) is None
    times.observe(0, 99.0)
    assert times.expected(1) is None
    times.observe(64, 0.1)
    assert times.expected(1) == times.expected(64) == 0.1
    assert times.expected(128) is None, "larger than any before"
    times.observe(1000, 3.0)
    assert times.expected(600) == pytest.approx(0.1 * 600 / 64)
    for _ in range(16):
        times.observe(64, 0.01)
    assert times.expected(64) == 0.01, "what was slow once is forgotten"


@pytest.mark.fault(28)
async def test_an_engine_process_is_judged_by_what_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    script = options(Script(step_s=0, token_s=0.0001, poison=7, poison_does="hang"))
    link = ProcessLink(script, builder=BUILDER, stall_limit_s=1000.0)
    await link.start()

    def prompt(length: int, token: int = 0) -> Listened:
        tokens = np.full(length, token, dtype=np.int32)
        return Listened(link, SessionKey("t/s"), tokens, Sampling(max_output_tokens=2))

    try:
        times = link._watchdog._times
        assert times.expected(100) is None
        assert [event async for event in prompt(100)]
        short = times.expected(101)
        assert short is not None and short >= 0.01 and times.expected(3001) is None
        assert [event async for event in prompt(3000)]
        long = times.expected(3001)
        assert long is not None and long >= 0.3
        assert link._watchdog._tokens == 1, "the last step that was announced made one token"
        monkeypatch.setattr(base, "HUNG_FLOOR_S", 0.5)
        with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
            async for _ in prompt(
                100, token=7
            ):  # far sooner than the limit of steps of which nothing is known
                pass
    finally:
        await link.stop()
