"""A request that ends engines is found, refused and told; whoever was there by chance goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from pensieve.core import Sampling, SessionKey
from pensieve.errors import Internal, PensieveError, Unavailable
from pensieve.server.links import quarantine
from pensieve.server.links.base import BaseLink
from pensieve.server.links.engine_link import LinkState
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.links.quarantine import Blocklist, Quarantine
from support.engine.fake_engine import BUILDER, FakeEngine, Script, options
from support.service.inprocess_link import InProcessLink
from support.service.listener import Listener, submission

POISON = 500
QUARANTINED = "REQUEST_QUARANTINED"


async def tried(
    link: BaseLink, name: str, tokens: Sequence[int], *, output: int = 4, tries: int = 12, session: str = ""
) -> str:
    """Send a request again as clients do, until it is answered or refused for good. How it ended."""
    for _ in range(tries):
        async with asyncio.timeout(30):
            while link.state is not LinkState.SERVING:
                await asyncio.sleep(0.002)
        listener, sampling = Listener(), Sampling(max_output_tokens=output)
        try:
            array = np.asarray(tokens, dtype=np.int32)
            key = SessionKey(session or name)
            link.submit(submission(key, array, sampling, num_new=len(tokens), origin=name), listener)
            async with asyncio.timeout(30):
                async for _ in listener:
                    pass
        except Unavailable:
            continue
        except PensieveError as error:
            return error.reason
        return f"{len(listener.token_ids)} tokens"
    return "never"


@asynccontextmanager
async def threaded(script: Script) -> AsyncIterator[InProcessLink]:
    link = InProcessLink(lambda: FakeEngine(script), restart_delay_s=0.001)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


@pytest.mark.fault(29)
async def test_a_session_whose_client_never_gives_up_ends_three_engines_and_no_more() -> None:
    async with threaded(Script(poison=POISON)) as link:
        over = asyncio.Event()

        async def talk(name: str) -> int:
            turns = 0
            while not over.is_set():
                assert await tried(link, f"{name}/{turns}", [1, 2], session=name) == "4 tokens"
                turns += 1
            return turns

        others = [asyncio.create_task(talk(name)) for name in ("a", "b")]
        reasons = [await tried(link, f"bad/{n}", [POISON, n], session="bad") for n in range(8)]
        over.set()
        assert min(await asyncio.gather(*others)) > 0
        assert reasons == [QUARANTINED] * 2 + ["SESSION_QUARANTINED"] * 6
        assert link.restarts_total == 3
        assert (link.condemned_turns_total, link.condemned_sessions_total) == (2, 1)


async def test_a_condemned_context_is_refused_in_each_session_of_its_tenant() -> None:
    async with threaded(Script(poison=POISON)) as link:
        for n in range(4):
            assert await tried(link, f"new{n}/{n}", [POISON, 7]) == QUARANTINED
        assert link.restarts_total == 2
        assert await tried(link, "new9/9", [8, 7]) == "4 tokens"


def test_a_session_is_refused_after_two_condemned_turns_and_for_a_while() -> None:
    now = 0.0
    condemned = Blocklist(lambda: now)
    bad, other = SessionKey("bad"), SessionKey("other")
    assert not condemned.add(bad, "t", b"1")
    assert condemned.on_probation(bad) and not condemned.refuses(bad)
    condemned.check(bad, "t", b"2")
    condemned.check(other, "u", b"1")  # another tenant's
    with pytest.raises(Internal, match=QUARANTINED):
        condemned.check(other, "t", b"1")
    now = 100.0
    assert condemned.add(bad, "t", b"2")
    with pytest.raises(Internal, match="SESSION_QUARANTINED") as refused:
        condemned.check(bad, "t", b"3")
    assert refused.value.retry_after_s == 600.0
    condemned.check(other, "t", b"3")
    now = 701.0
    condemned.check(bad, "t", b"2")
    assert condemned.on_probation(bad) and condemned.add(bad, "t", b"4"), "the next one is enough"
    now = 3000.0
    assert not condemned.add(bad, "t", b"5"), "all is forgotten"


@pytest.mark.fault(29)
async def test_a_poisonous_request_ends_two_engines_and_nobody_else() -> None:
    async with threaded(Script(poison=POISON, step_s=0.001)) as link:
        assert await tried(link, "bad", [1, POISON]) == QUARANTINED
        assert link.restarts_total in (1, 2)
        deaths = link.restarts_total
        assert await tried(link, "bad", [1, POISON]) == QUARANTINED, "refused at once"
        assert await tried(link, "good", [1, 2]) == "4 tokens"
        assert link.restarts_total - deaths <= 1, "the second one may still have been on its way up"


async def test_innocents_of_the_same_batch_go_on() -> None:
    async with threaded(Script(poison=POISON, step_s=0.001)) as link:
        good = [tried(link, f"good{n}", [1, 2, n], output=20) for n in range(12)]
        bad = tried(link, "bad", [1, POISON], output=20)
        *ends, end = await asyncio.gather(*good, bad)
        assert end == QUARANTINED and set(ends) == {"20 tokens"}
        assert link.restarts_total == 2


async def test_one_that_ends_engines_late_is_found_among_many() -> None:
    """It dies at its thirtieth token, long after it has begun: the others must not be blamed."""
    async with threaded(Script(poison=POISON, poison_at=30, step_s=0.001)) as link:
        good = [tried(link, f"good{n}", [1, 2, n], output=60) for n in range(6)]
        bad = tried(link, "bad", [1, POISON], output=60)
        *ends, end = await asyncio.gather(*good, bad)
        assert end == QUARANTINED and set(ends) == {"60 tokens"}


async def test_two_poisonous_requests_are_both_found() -> None:
    async with threaded(Script(poison=POISON, step_s=0.001)) as link:
        good = [tried(link, f"good{n}", [1, 2, n], output=20) for n in range(6)]
        bad = [tried(link, f"bad{n}", [n, POISON]) for n in range(2)]
        ends = list(await asyncio.gather(*good, *bad))
        assert ends == ["20 tokens"] * 6 + [QUARANTINED] * 2


async def test_one_that_hangs_real_engine_processes() -> None:
    script = options(Script(poison=POISON, poison_does="hang"))
    link = ProcessLink(script, builder=BUILDER, stall_limit_s=2.0)
    await link.start()
    try:
        bad, good = tried(link, "bad", [1, POISON]), tried(link, "good", [1, 2], output=8)
        assert list(await asyncio.gather(bad, good)) == [QUARANTINED, "8 tokens"]
    finally:
        await link.stop()


@pytest.mark.fault(30)
async def test_one_that_the_memory_does_not_suffice_for() -> None:
    async with threaded(Script(poison=POISON, poison_does="exhaust memory", step_s=0.001)) as link:
        bad, good = tried(link, "bad", [1, POISON]), tried(link, "good", [1, 2], output=20)
        assert list(await asyncio.gather(bad, good)) == [QUARANTINED, "20 tokens"]


@pytest.mark.fault(27)
async def test_kills_from_outside_are_blamed_on_no_session() -> None:
    """An operator's kill, or two, says nothing of the requests that were running."""
    link = ProcessLink(options(Script(step_s=0.01)), builder=BUILDER)
    await link.start()
    try:
        turn = asyncio.create_task(tried(link, "long", [1, 2], output=100))
        for kills in (1, 2):
            async with asyncio.timeout(30):
                while link.state is not LinkState.SERVING or not link.stats.running:
                    await asyncio.sleep(0.005)
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                while link.restarts_total < kills:
                    await asyncio.sleep(0.005)
        assert await turn == "100 tokens"
    finally:
        await link.stop()


async def test_a_turn_that_was_over_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """The engine was idle: the step that it was at last is of a turn that had ended well."""
    link = ProcessLink(options(Script()), builder=BUILDER)
    await link.start()
    try:
        assert await tried(link, "short", [1, 2]) == "4 tokens"
        assert link.pid is not None
        os.kill(link.pid, signal.SIGKILL)
        async with asyncio.timeout(30):
            while not link.restarts_total:
                await asyncio.sleep(0.005)
    finally:
        await link.stop()
    assert "at work on this turn" not in caplog.text


# ---- the rules by themselves


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def found(one: Quarantine, *batches: dict[str, int]) -> str | None:
    guilty = None
    for batch in batches:
        assert guilty is None
        guilty = one.on_engine_lost(batch, killed_externally=False)
    return guilty


def test_one_death_condemns_nobody_and_two_of_one_request_do() -> None:
    one = Quarantine()
    assert found(one, {"a": 0}) is None
    one.check("a")
    assert found(one, {"a": 0}) == "a"
    with pytest.raises(Internal, match=QUARANTINED):
        one.check("a")


def test_fresh_requests_wait_for_each_other_and_old_ones_do_not() -> None:
    one = Quarantine()
    found(one, {"fresh1": 0, "fresh2": 3, "old": 200})
    assert [one.must_run_alone(name) for name in ("fresh1", "fresh2", "old", "new")] == [
        True,
        True,
        False,
        False,
    ]
    assert not one.on_progress("fresh2", 3) and one.must_run_alone("fresh2")
    assert one.on_progress("fresh2", 4) and not one.must_run_alone("fresh2")
    one.on_success("fresh1")
    assert not one.must_run_alone("fresh1")


def test_the_one_that_was_let_in_alone_is_guilty_and_the_others_are_cleared() -> None:
    one = Quarantine()
    assert found(one, {"bad": 0, "held": 0, "old": 200}, {"bad": 0, "old": 180, "new": 1}) == "bad"
    assert not any(one.must_run_alone(name) for name in ("held", "old", "new"))
    assert found(one, {"old": 10, "new": 1}) is None, "what the guilty one has done is not held against them"


def test_when_it_cannot_be_told_nobody_is_condemned_and_all_wait_for_each_other() -> None:
    one = Quarantine()
    assert found(one, {"a": 100, "b": 100, "c": 100}) is None
    for name in "abc":
        assert one.on_progress(name, 101)  # all got further than they were: nobody waits
    assert found(one, {"a": 150, "b": 150, "c": 150}) is None
    assert all(map(one.must_run_alone, "abc"))
    assert found(one, {"b": 150, "new": 0}) == "b"
    assert not one.must_run_alone("a") and not one.must_run_alone("c")


def test_deaths_and_verdicts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    one = Quarantine(clock)
    found(one, {"a": 0})
    clock.now += quarantine.MEMORY_S + 1
    assert found(one, {"a": 0}) is None, "the first is too long ago"
    assert found(one, {"a": 0}) == "a"
    clock.now += quarantine.MEMORY_S + 1
    one.check("a")
    monkeypatch.setattr(quarantine, "MAX_REMEMBERED", 3)
    for number in range(10):
        found(one, {f"x{number}": 0})
    assert len(one._suspects) <= 4


def test_deaths_from_outside_count_for_little() -> None:
    one = Quarantine()
    assert [one.on_engine_lost({"a": 0}, killed_externally=True) for _ in range(7)] == [None] * 7
    assert one.on_engine_lost({"a": 0}, killed_externally=True) == "a", (
        "what always gets the engine killed is guilty in the end"
    )
