"""The thread link behaves as the process link does, as far as a thread can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pensieve.core import Hints, Sampling, SessionKey, pack_tokens
from pensieve.engine.messages import CandidateFinished, Choose, Finished, Output
from pensieve.errors import Internal, Unavailable
from pensieve.server.links.engine_link import LinkState
from support.engine.fake_engine import FakeEngine, Script, build, options
from support.service.inprocess_link import InProcessLink
from support.service.listener import Listened, Listener, submission

SESSION = SessionKey("default/abc")
TOKENS = np.arange(8, dtype=np.int32)


async def test_generations_calls_and_stop() -> None:
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine(Script()))
        return engines[-1]

    link = InProcessLink(make)
    with pytest.raises(Unavailable, match="STARTING"):
        Listened(link, SESSION, TOKENS, Sampling())
    await link.start()
    assert link.state is LinkState.SERVING and link.info.vocab_size == 512
    events = [event async for event in Listened(link, SESSION, TOKENS, Sampling(max_output_tokens=9))]
    assert sum(len(event.token_ids) for event in events if isinstance(event, Output)) == 9
    assert isinstance(events[-1], Finished)
    assert await link.evict() == 77
    running = Listened(link, SESSION, TOKENS, Sampling(max_output_tokens=10**6))
    await anext(running)
    await link.stop()
    with pytest.raises(Unavailable, match="DRAINING"):
        async for _ in running:
            pass
    assert [engine.closed for engine in engines] == [True]


async def test_the_wanted_memory_outlives_its_engine(caplog: pytest.LogCaptureFixture) -> None:
    """A new engine begins with its ceiling. It gets the last size that an engine has accepted."""
    mib, engines = 1 << 20, []

    def make() -> FakeEngine:
        script = Script() if engines else Script(raise_at_step=1)
        engines.append(FakeEngine(script, floor=4 * mib, ceiling=16 * mib))
        return engines[-1]

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.01)

    link = InProcessLink(make)
    await link.start()
    assert (await link.memory()).wanted == 16 * mib
    assert (await link.memory(6 * mib)).wanted == 6 * mib
    refused = await link.memory(2 * mib)
    assert refused.refused and refused.wanted == 6 * mib
    with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
        async for _ in Listened(link, SESSION, TOKENS, Sampling()):
            pass
    with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
        await link.memory(7 * mib)
    await until(lambda: link.state is LinkState.SERVING)
    assert (await link.memory()).wanted == 6 * mib, "it hears that before any other question"
    assert len(engines) == 2
    await until(lambda: link.stats.device_held == 6 * mib)
    stats = link.stats
    assert (stats.device_wanted, stats.device_floor, stats.device_ceiling) == (6 * mib, 4 * mib, 16 * mib)
    assert "does not resize" not in caplog.text
    await link.stop()


async def test_a_size_that_a_new_engine_refuses_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The next engine has another range, as on a device that has less memory by then."""
    mib, floors = 1 << 20, [4, 8]

    def make() -> FakeEngine:
        return FakeEngine(Script(raise_at_step=1), floor=floors.pop(0) * mib, ceiling=16 * mib)

    link = InProcessLink(make)
    await link.start()
    await link.memory(6 * mib)
    with pytest.raises(Unavailable):
        async for _ in Listened(link, SESSION, TOKENS, Sampling()):
            pass
    while "does not resize its device tier to 6291456 bytes" not in caplog.text:
        await asyncio.sleep(0.01)
    assert (await link.memory()).wanted == 16 * mib
    await link.stop()


async def test_one_size_says_why_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    link = InProcessLink(lambda: FakeEngine(Script(elastic_refusal="this driver cannot map memory")))
    await link.start()
    said = [record.getMessage() for record in caplog.records if "driver" in record.getMessage()]
    assert said == ["the device cache does not grow or shrink: this driver cannot map memory"]
    await link.stop()


async def test_candidates_and_the_choice_among_them() -> None:
    engine = FakeEngine(Script())
    link = InProcessLink(lambda: engine)
    link.choose(SESSION, 1)  # before there is an engine: nobody is told, and nothing is raised
    await link.start()
    drawn = Listened(link, SESSION, TOKENS, Sampling(candidates=3, max_output_tokens=50))
    await drawn.first_output()
    drawn.generation.cancel_candidate(1)
    heard = [event async for event in drawn]
    made = {i: sum(e.candidate == i for e in drawn.events if isinstance(e, Output)) for i in range(3)}
    assert made[0] == made[2] == 50 > made[1] > 0
    assert [event.candidate for event in heard if isinstance(event, CandidateFinished)] == [0, 2]
    assert isinstance(heard[-1], Finished)
    link.choose(SESSION, 2)
    assert await link.evict() == 77  # commands are taken in their order
    assert engine.chosen == [Choose(SESSION, 2)]
    await link.stop()
    link.choose(SESSION, 1)


async def test_a_submission_reaches_the_engine_whole() -> None:
    engine = FakeEngine(Script())
    link = InProcessLink(lambda: engine)
    await link.start()
    hints, listener = Hints(next_turn_s=2.0), Listener()
    running = Sampling(max_output_tokens=10**6)
    command = submission(SESSION, TOKENS, running, scope="tenants/t", hints=hints)
    generation = link.submit(command, listener)
    await listener.first_output()
    submit = engine.requests[generation.request].submit
    assert (submit.session, submit.tokens, submit.num_new) == (SESSION, pack_tokens(TOKENS), 3)
    assert (submit.scope, submit.hints) == ("tenants/t", hints)
    await link.stop()


async def test_a_failed_engine_is_replaced(tmp_path: Path) -> None:
    script = options(Script(raise_at_step=2, only_in_life=str(tmp_path / "life")))
    link = InProcessLink(lambda: build(script), restart_delay_s=0.01)
    await link.start()
    with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
        async for _ in Listened(link, SESSION, TOKENS, Sampling()):
            pass
    async with asyncio.timeout(10):
        while link.state is not LinkState.SERVING:
            await asyncio.sleep(0.005)
    assert link.restarts_total == 1
    assert [event async for event in Listened(link, SESSION, TOKENS, Sampling())]
    await link.stop()


async def test_a_failed_start_is_told_in_the_engines_words() -> None:
    link = InProcessLink(lambda: build(options(Script(fail_to_start="no such folder"))))
    with pytest.raises(Internal, match="no such folder"):
        await link.start()
    await link.stop()


async def test_a_stall_is_reported() -> None:
    link = InProcessLink(lambda: FakeEngine(Script(never_steps=True)), stall_limit_s=0.2)
    await link.start()
    generation = Listened(link, SESSION, TOKENS, Sampling())
    async with asyncio.timeout(10):
        while not link.stalled:
            await asyncio.sleep(0.01)
    generation.cancel()
    async with asyncio.timeout(10):
        while link.stalled:
            await asyncio.sleep(0.01)
    await link.stop()
