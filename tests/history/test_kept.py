"""What a client writes on a turn is kept with it, is never the model's, and leads back to the turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve.client import AsyncClient, Client
from pensieve.errors import PensieveError
from pensieve.store import HistoryStore, Key, MarkedTurn, open_store
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import ANSWER, Rig, Streamed, refusal, serving, spec, uid, user
from support.store.redis_server import redis_server_fixture

redis_server = redis_server_fixture("module")
NOTES = {"app": '{"temperature":0.5}', "naïve".encode().hex(): "\N{ELEPHANT}"}


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryStore]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path / 'history.db'}"}[request.param]
    made = open_store(url)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def find(rig: Rig, mark: str, answer: str | None = ANSWER, **fields: str) -> pb.FindTurnResponse:
    return await rig.api.FindTurn(pb.FindTurnRequest(mark=mark, answer=answer, **fields))


async def test_annotations_come_back_with_their_turn(store: HistoryStore) -> None:
    turn = spec("hi", annotations=NOTES)
    plain = spec("hi")
    async with serving(store=store) as rig:
        name, other = await rig.create(), await rig.create()
        done = (await rig.stream(name, turn)).completed
        await rig.stream(other, plain)
        assert dict(done.annotations) == NOTES
        first, second = rig.link.generations
        assert first.tokens == second.tokens, "the model saw them"
        # They are no part of what the turn is: a retry without them is the same turn.
        del turn.annotations["app"]
        again = (await rig.stream(name, turn)).completed
        assert dict(again.annotations) == NOTES and again.revision == done.revision
    async with serving(store=store) as rig:
        assert dict((await rig.get_turn(name, turn.request_id)).annotations) == NOTES
        assert not (await rig.get_turn(other, plain.request_id)).annotations


async def test_a_running_turn_has_them_already() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi", annotations=NOTES)
        call = asyncio.create_task(rig.stream(name, turn))
        while not rig.link.generations:
            await asyncio.sleep(0.005)
        running = await rig.get_turn(name, turn.request_id)
        assert (running.state, dict(running.annotations)) == (pb.Turn.STATE_RUNNING, NOTES)
        await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (await refusal_of(call)).reason == "TURN_CANCELLED"


async def refusal_of(call: asyncio.Task[Streamed]) -> PensieveError:
    return await refusal(call)


async def test_a_turn_is_found_by_its_mark(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create()
        turn = spec("hi", mark="m")
        await rig.stream(name, turn)
        await rig.stream(name, "more")
    async with serving(store=store) as rig:
        found = await find(rig, "m")
        assert (found.turn.session, found.turn.request_id) == (name, turn.request_id)
        assert (found.candidate, found.turn.output.text) == (0, ANSWER)
        assert await find(rig, "m", None) == found
        for mark, answer in (("m", "other"), ("n", None), ("n", ANSWER)):
            assert (await refusal(find(rig, mark, answer))).reason == "TURN_NOT_FOUND"
        theirs = rig.api.FindTurn(
            pb.FindTurnRequest(mark="m", answer=ANSWER), metadata=(("tenant", "other"),)
        )
        assert (await refusal(theirs)).reason == "TURN_NOT_FOUND"
        # Of several the newest, or the one where a first try went.
        newer, later = await rig.create(), spec("hi", mark="m")
        await rig.stream(newer, later)
        assert (await find(rig, "m")).turn.session == newer
        assert (await find(rig, "m", request_id=turn.request_id)).turn.session == name
        assert (await find(rig, "m", None)).turn.session == newer
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=newer))
        assert (await find(rig, "m")).turn.session == name


async def test_an_index_that_is_wrong_leads_nowhere() -> None:
    """What it names is read before it is believed."""
    async with serving() as rig:
        name = await rig.create()
        await rig.stream(name, spec("hi", mark="m"))
        marks = rig.store._marks
        where, same = marks.values()  # by mark and answer, and by the mark alone
        assert where == same
        other = await rig.create()
        await rig.stream(other, "another turn with the same answer")
        here, there = where[0].session_id, other.removeprefix("sessions/")
        for session, revision in ((there, 2), (here, 1), (here, 9), ("nowhere", 2)):
            for at in marks:
                marks[at] = [*where, MarkedTurn(session, revision)]
            assert (await find(rig, "m")).turn.session == name, (session, revision)
        row = await rig.store.load(Key("acme", name.removeprefix("sessions/")))
        assert row.state.value == "active"


async def test_both_clients() -> None:
    async with serving() as rig:
        async with AsyncClient(rig.target) as client:
            session = await client.create_session()
            turn = await session.send("hi", annotations=NOTES, mark="m")
            assert turn.annotations == NOTES
            assert (await session.get_turn(turn.request_id)).annotations == NOTES
            found = await client.find_turn("m", ANSWER, request_id=turn.request_id)
            assert found is not None and (found.turn, found.candidate) == (
                await session.get_turn(turn.request_id),
                0,
            )
            assert await client.find_turn("m", "other") is None
            (added,) = await session.append([("user", "more")])
            assert (added.text, (await session.items())[-1].item) == ("more", added.item)
            limits = (await client.server_info()).limits
            assert (limits.max_annotations, limits.max_annotation_bytes) == (16, 1 << 20)

        def blocking() -> str:
            with Client(rig.target) as other:
                found = other.find_turn("m", ANSWER)
                assert found is not None
                other.session(found.turn.session).append([("user", "last")])
                return found.turn.session

        assert await asyncio.to_thread(blocking) == session.name


async def test_items_are_appended_without_a_turn(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create("Be brief.")
        await rig.stream(name, "hi")
        before = await rig.session(name)
        request = pb.AppendItemsRequest(
            name=name,
            request_id=uid(),
            items=[user("more"), pb.InputItem(role=pb.ROLE_ASSISTANT, text="said"), user("last")],
            expected_revision=before.revision,
        )
        first, again = [await rig.api.AppendItems(request) for _ in range(2)]
        assert first == again and first.session.revision == before.revision + 1
        assert [item.text for item in first.items] == ["more", "said", "last"]
        items = await rig.items(name, tokens=True)
        assert [item.text for item in items[1:]] == ["hi", ANSWER, "more", "said", "last"]
        request.request_id = uid()
        assert (await refusal(rig.api.AppendItems(request))).reason == "REVISION_MISMATCH"
        request.ClearField("expected_revision")
        request.items[0].text = "word " * 190
        assert (await refusal(rig.api.AppendItems(request))).reason == "CONTEXT_LIMIT_EXCEEDED"
        await rig.stream(name, "and now")
        tokens = [token for item in items for token in item.tokens.ids]
        assert rig.link.generations[-1].tokens[: len(tokens)] == tokens


async def test_nothing_is_appended_under_a_running_turn() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call = asyncio.create_task(rig.stream(name, turn))
        while not rig.link.generations:
            await asyncio.sleep(0.005)
        error = await refusal(rig.api.AppendItems(pb.AppendItemsRequest(name=name, items=[user("x")])))
        assert error.reason == "TURN_IN_PROGRESS"
        await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert (await refusal_of(call)).reason == "TURN_CANCELLED"
