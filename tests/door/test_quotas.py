"""What a tenant may keep: sessions and bytes. Others are not concerned, and what is there stays within reach."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pensieve.errors import PensieveError
from pensieve.server.keys import TenantLimits, TenantTable
from pensieve.server.sessions import quotas
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import TOKENS, begun, drawing, rest
from support.service.service_rig import Rig, refusal, serving, spec, uid

OTHER = (("tenant", "other"),)


def table(**limits: Any) -> TenantTable:
    return TenantTable({"acme": TenantLimits(**limits)})


def assert_quota(error: PensieveError, limit: str) -> None:
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
    assert error.metadata == {"subject": "acme", "limit": limit}
    assert error.retry_after_s


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store is asked every time, unless a test says otherwise."""
    monkeypatch.setattr(quotas, "USAGE_MAX_AGE_S", 0.0)


async def test_sessions_are_counted_and_room_comes_back() -> None:
    async with serving(tenants=table(max_sessions=3)) as rig:
        names = [await rig.create() for _ in range(3)]
        assert_quota(await refusal(rig.create()), "max_sessions")
        fork = pb.ForkSessionRequest(name=names[0], request_id=uid())
        assert_quota(await refusal(rig.api.ForkSession(fork)), "max_sessions")
        for _ in range(5):
            await rig.api.CreateSession(pb.CreateSessionRequest(), metadata=OTHER)
        assert (await rig.run(names[0], "hi")).output.text
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=names[1]))
        assert await rig.session(await rig.create())


@pytest.mark.parametrize("unused_only", [False, True])
async def test_room_is_there_as_soon_as_a_session_is_removed(
    unused_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quotas, "USAGE_MAX_AGE_S", 3600.0)
    async with serving(tenants=table(max_sessions=1)) as rig:
        for _ in range(3):
            name = await rig.create()
            assert_quota(await refusal(rig.create()), "max_sessions")
            await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name, unused_only=unused_only))


async def test_a_session_that_exists_is_found_again_without_room() -> None:
    async with serving(tenants=table(max_sessions=1)) as rig:
        request = pb.CreateSessionRequest(request_id=uid())
        first = await rig.api.CreateSession(request)
        again = await rig.api.CreateSession(request)
        assert again.session.name == first.session.name
        taken = first.session.name.removeprefix("sessions/")
        error = await refusal(rig.create("Another.", session_id=taken))
        assert error.code == "ALREADY_EXISTS"


async def test_of_many_at_once_no_more_get_through_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quotas, "USAGE_MAX_AGE_S", 3600.0)
    async with serving(tenants=table(max_sessions=5)) as rig:
        plain = rig.store.create

        async def slow(*args: Any) -> Any:
            await asyncio.sleep(0.02)
            return await plain(*args)

        rig.store.create = slow
        made = await asyncio.gather(*(rig.create() for _ in range(30)), return_exceptions=True)
        assert sum(isinstance(one, str) for one in made) == 5
        assert (await rig.store.usage("acme")).sessions == 5


async def test_answers_of_the_store_that_overlap_miss_no_session() -> None:
    """A session is completed between two of them; a third caller has the older answer."""
    async with serving(tenants=table(max_sessions=1)) as rig:
        create, usage = rig.store.create, rig.store.usage
        asked, made = asyncio.Event(), asyncio.Event()

        async def slow_create(*args: Any) -> Any:
            await asked.wait()
            return await create(*args)

        async def slow_usage(tenant: str) -> Any:
            found = await usage(tenant)
            asked.set()
            await made.wait()
            return found

        rig.store.create = slow_create
        first = asyncio.create_task(rig.create())
        async with asyncio.timeout(30):
            while not rig.conversations.quotas._being_made["acme"]:
                await asyncio.sleep(0.01)
            rig.store.usage = slow_usage
            others = [asyncio.create_task(rig.create())]
            await first
            others.append(asyncio.create_task(rig.create()))
            await asyncio.sleep(0.1)
            made.set()
            for error in await asyncio.gather(*others, return_exceptions=True):
                assert isinstance(error, Exception)
        rig.store.usage = usage
        assert (await rig.store.usage("acme")).sessions == 1


async def fill(rig: Rig, name: str) -> pb.TurnSpec:
    """Turns until one is refused; the last that was not."""
    done = spec("x" * 40)
    await rig.run(name, done)
    async with asyncio.timeout(60):
        while True:
            turn = spec("x" * 40)
            try:
                await rig.run(name, turn)
            except Exception:
                assert_quota(await refusal(rig.call(name, turn)), "max_stored_bytes")
                return done
            done = turn


async def test_beyond_its_tokens_a_minute_a_tenant_warms_nothing() -> None:
    async with serving(tenants=table(tokens_per_minute=1)) as rig:
        name = await rig.create()
        warm = pb.WarmSessionRequest(session=name)
        assert (await rig.run(name, "hi")).output.text
        assert (await rig.api.WarmSession(warm)).refused == "busy"
        assert_quota(await refusal(rig.run(name, "more")), "tokens_per_minute")


async def charged(rig: Rig, name: str) -> float:
    """Tokens that a tenant with a limit of one has used: it is told when they are paid off."""
    error = await refusal(rig.run(name, "more"))
    assert_quota(error, "tokens_per_minute")
    assert error.retry_after_s
    return error.retry_after_s / 60


@pytest.mark.parametrize("kind", ["candidates", "kept", "beams", "cut beams"])
async def test_tokens_that_are_not_kept_count(kind: str) -> None:
    """Tokens of further candidates and beams count, and those behind the end that a cancel keeps."""
    turn = drawing(4) if kind == "candidates" else spec("hi")
    if "beams" in kind:
        turn.sampling.beam_width = 4
    async with serving(answer=None, tenants=table(tokens_per_minute=1)) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, turn)
        for candidate in range(4 if kind == "candidates" else 1):
            if kind != "cut beams":
                generation.emit(*TOKENS, candidate=candidate)
        if kind in ("kept", "cut beams"):
            view = await rig.cancel(name, turn.request_id, keep_output_tokens=0)
        else:
            generation.finish(output=len(TOKENS))
            view = (await rest(call)).completed
        made = (await charged(rig, name)) - view.usage.new_tokens - view.usage.recomputed_tokens
        usage = (await rig.api.GetUsage(pb.GetUsageRequest())).usage
        if kind == "cut beams":  # estimated: they were not shown
            assert made > 4 * 100
        else:
            expected = len(TOKENS) * (1 if kind == "kept" else 4)
            assert made == pytest.approx(expected, abs=0.5) and usage.output_tokens == expected


async def test_stored_bytes() -> None:
    async with serving(tenants=table(max_stored_bytes=1200), context_limit=4096) as rig:
        name = await rig.create()
        last = await fill(rig, name)
        assert (await rig.store.usage("acme")).bytes >= 1200
        assert_quota(await refusal(rig.create()), "max_stored_bytes")
        update = pb.UpdateSessionRequest(name=name, session=pb.Session(labels={"a": "b"}))
        assert_quota(await refusal(rig.api.UpdateSession(update)), "max_stored_bytes")
        again = await rig.stream(name, last)
        assert again.accepted.replayed, "a turn in history is replayed, however full the store is"
        attached = await rig.stream(name, pb.TurnSpec(request_id=last.request_id), attach_only=True)
        assert attached.completed.revision == again.completed.revision
        assert await rig.items(name)
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))
        assert await rig.session(await rig.create())


async def test_choices_and_empty_rewinds_end_with_the_room() -> None:
    limits = table(max_stored_bytes=100_000)
    async with serving(tenants=limits, context_limit=4096) as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.stream(name, turn)

        def choice(candidate: int) -> pb.ChooseCandidateRequest:
            return pb.ChooseCandidateRequest(session=name, request_id=turn.request_id, candidate=candidate)

        def rewind(item: int, **fields: Any) -> pb.RewindSessionRequest:
            return pb.RewindSessionRequest(name=name, item=item, **{"request_id": uid(), **fields})

        await rig.api.ChooseCandidate(choice(1))
        first = rewind(3)
        await rig.api.RewindSession(first)
        before = (await rig.store.usage("acme")).bytes
        limits.replace({"acme": TenantLimits(max_stored_bytes=1)})
        await rig.api.RewindSession(first)  # a repetition
        again = await rig.run(name, turn)
        assert again.chosen_candidate == 1, "reads go on"
        assert_quota(await refusal(rig.api.RewindSession(rewind(3))), "max_stored_bytes")
        assert_quota(await refusal(rig.api.RewindSession(rewind(3, erase=True))), "max_stored_bytes")
        assert (await rig.store.usage("acme")).bytes == before
        await rig.api.RewindSession(rewind(0, erase=True))
        assert (await rig.store.usage("acme")).bytes < before, "erasing makes room"

        limits.replace({"acme": TenantLimits(max_stored_bytes=100_000)})
        turn = drawing(3)
        await rig.stream(name, turn)
        await rig.api.ChooseCandidate(choice(2))
        before = (await rig.store.usage("acme")).bytes
        limits.replace({"acme": TenantLimits(max_stored_bytes=1)})
        for candidate in (0, 1):
            assert_quota(await refusal(rig.api.ChooseCandidate(choice(candidate))), "max_stored_bytes")
        chosen = (await rig.api.ChooseCandidate(choice(2))).turn
        assert chosen.chosen_candidate == 2, "to choose the chosen one changes nothing"
        assert (await rig.store.usage("acme")).bytes == before


async def test_a_turn_that_runs_is_joined_without_room() -> None:
    limits = table(max_stored_bytes=10_000)
    async with serving(answer=None, tenants=limits) as rig:
        name, turn = await rig.create(), spec("hi")
        first = rig.call(name, turn)
        generation = await rig.link.next_generation()
        limits.replace({"acme": TenantLimits(max_stored_bytes=1)})
        second = rig.call(name, turn)
        assert (await anext(aiter(second))).HasField("accepted")
        generation.finish()
        for call in (first, second):
            assert [event async for event in call][-1].completed.revision == 2
        assert_quota(await refusal(rig.call(name, spec("more"))), "max_stored_bytes")


async def test_the_store_is_not_asked_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "USAGE_MAX_AGE_S", 3600.0)
    async with serving(tenants=table(max_sessions=100)) as rig:
        asked = []
        plain = rig.store.usage

        async def usage(tenant: str) -> Any:
            asked.append(tenant)
            return await plain(tenant)

        rig.store.usage = usage
        for _ in range(10):
            await rig.create()
            await rig.api.CreateSession(pb.CreateSessionRequest(), metadata=OTHER)
        assert asked == ["acme", "acme:claims"], "once for who has limits, never for who has none"
