"""The session that a client names in a chat completion. A name whose session never had a turn is free."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.client import AsyncSession
from pensieve.errors import Internal, ResourceExhausted
from pensieve.http import chat as door_chat
from pensieve.store import HistoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER, says
from support.store.redis_server import RedisServer, redis_server_fixture
from support.store.store_bench import opened_redis, opened_sqlite

own_redis = redis_server_fixture("module")

PATH = "/v1/chat/completions"
LONG = "word " * 2000
Body = dict[str, Any]
Opened = Callable[[], AbstractAsyncContextManager[HistoryStore | None]]


def talk(*texts: str) -> list[Body]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


def many(count: int) -> list[Body]:
    """``count`` messages of history, then a question."""
    return talk(*("a" if number % 2 == 0 else "b" for number in range(count)), "?")


class Caller:
    """Asks for chat completions of the session "mine"."""

    def __init__(self, rig: HttpRig) -> None:
        self.rig = rig

    async def ask(self, *texts: str, key: str = "", status: int = 200, **more: Any) -> Body:
        body = {"messages": talk(*texts), "session": "mine", **more}
        headers = {"Idempotency-Key": key} if key else {}
        async with httpx.AsyncClient(base_url=self.rig.url, timeout=60) as http:
            answer = await http.post(PATH, json=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json() if not body.get("stream") else {"text": answer.text}

    async def sessions(self) -> list[str]:
        listed = await self.rig.service.api.ListSessions(pb.ListSessionsRequest())
        return [one.name for one in listed.sessions]

    async def said(self) -> list[str]:
        return [item.text for item in await self.rig.service.items("sessions/mine")]


@asynccontextmanager
async def asking(store: HistoryStore | None = None, **options: Any) -> AsyncIterator[Caller]:
    # The door tries no longer than this what an overloaded server refuses.
    async with door(service_options={"store": store, **options}, patience_s=0.1) as rig:
        yield Caller(rig)


@contextmanager
def overloaded(caller: Caller) -> Iterator[None]:
    """The gate lets no turn in."""
    gate = caller.rig.service.conversations.gate
    refusal = gate.refusal
    gate.refusal = lambda *_: ResourceExhausted("too much")  # type: ignore[method-assign]
    try:
        yield
    finally:
        gate.refusal = refusal  # type: ignore[method-assign]


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    """Opens the store, for one server after the other."""
    if request.param == "sqlite":
        yield lambda: opened_sqlite(tmp_path / "history.sqlite3")
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("own_redis")
        with contextlib.closing(server.client()) as client:
            client.flushall()
        yield lambda: opened_redis(server.url)
    else:
        yield lambda: contextlib.nullcontext(None)


@pytest.mark.parametrize(
    ("key", "again"), [("", "same"), ("key", "same"), ("key", "other key"), ("key", "other messages")]
)
async def test_a_first_call_that_an_overloaded_server_refuses_leaves_the_name_free(
    opened: Opened, key: str, again: str
) -> None:
    async with opened() as store, asking(store) as caller:
        with overloaded(caller):
            for _ in range(2):
                await caller.ask("x", "y", "a", key=key, status=429)
                assert await caller.sessions() == []
        texts = ("u", "v", "w", "z", "b") if again == "other messages" else ("x", "y", "a")
        key = "other" if again == "other key" else key
        answer = await caller.ask(*texts, key=key)
        assert await caller.said() == [*texts, ANSWER]
        assert await caller.sessions() == ["sessions/mine"]
        await caller.ask("on")
        if key:
            assert (await caller.ask(*texts, key=key))["id"] == answer["id"]
        assert await caller.said() == [*texts, ANSWER, "on", ANSWER]


@pytest.mark.parametrize("key", ["", "key"])
async def test_the_name_is_free_for_the_next_server(opened: Opened, key: str) -> None:
    async with opened() as store, asking(store) as caller:
        with overloaded(caller):
            await caller.ask("x", "y", "a", key=key, status=429)
    async with opened() as store, asking(store) as caller:
        answer = await caller.ask("x", "y", "a", key=key)
        assert await caller.said() == ["x", "y", "a", ANSWER]
    async with opened() as store, asking(store) as caller:
        if store is not None and key:
            assert (await caller.ask("x", "y", "a", key=key))["id"] == answer["id"]
            assert await caller.said() == ["x", "y", "a", ANSWER]


@pytest.mark.parametrize("key", ["", "key"])
async def test_a_context_that_is_too_long_leaves_the_name_free(opened: Opened, key: str) -> None:
    async with opened() as store, asking(store) as caller:
        for texts in (("x", "y", LONG), (LONG, "y", "a")):
            await caller.ask(*texts, key=key, status=400)
            assert await caller.sessions() == []
        await caller.ask("x", "y", "a", key=key)
        assert await caller.said() == ["x", "y", "a", ANSWER]


@pytest.mark.parametrize("at", [1027, -1])
async def test_a_long_history_is_taken_back_wherever_it_is_refused(at: int) -> None:
    """It comes in two calls: the second is refused, or the turn behind them."""
    async with asking(context_limit=20_000) as caller:
        messages = many(1030)
        bad = [*messages]
        bad[at] = {**bad[at], "content": "word " * 40_000}
        await caller.ask(messages=bad, status=400)
        assert await caller.sessions() == []
        await caller.ask(messages=messages)
        assert (await caller.rig.service.session("sessions/mine")).item_count == 1032


@pytest.mark.parametrize(("key", "stream"), [("", True), ("key", False)])
async def test_a_turn_that_waited_too_long_leaves_the_name_free(key: str, stream: bool) -> None:
    """It was accepted, and is refused while it waits for its place."""
    async with asking() as caller:
        service = caller.rig.service
        service.link.answer = None
        status = 200 if stream else 429
        call = asyncio.create_task(caller.ask("x", "y", "a", key=key, status=status, stream=stream))
        async with asyncio.timeout(60):
            while not service.link.generations:
                await asyncio.sleep(0.005)
        turns, gate = service.conversations.turns, service.conversations.gate
        gate.overdue = lambda _: ResourceExhausted("it waited too long")  # type: ignore[method-assign]
        (run,) = turns._runs.values()
        turns._refuse_if_overdue(run)
        answer = await call
        assert not stream or "server_overloaded" in answer["text"]
        assert await caller.sessions() == []
        service.link.answer = lambda _: says(ANSWER)
        await caller.ask("u", "v", "b", key=key)
        assert await caller.said() == ["u", "v", "b", ANSWER]


async def test_a_turn_of_another_caller_in_the_gap_survives(opened: Opened, monkeypatch: Any) -> None:
    """Between the refusal and the removal of the session that was made for it."""
    async with opened() as store, asking(store) as caller:
        take_back = door_chat._Made.take_back
        waiting = [caller.ask("other", key="other")]

        async def later(made: Any) -> None:
            for one in waiting:
                gate.refusal = refusal  # type: ignore[method-assign]
                await one
            await take_back(made)

        monkeypatch.setattr(door_chat._Made, "take_back", later)
        gate = caller.rig.service.conversations.gate
        refusal = gate.refusal
        with overloaded(caller):
            await caller.ask("x", "y", "a", status=429)
        assert await caller.said() == ["x", "y", "other", ANSWER]
        waiting.clear()
        await caller.ask("on")
        assert await caller.said() == ["x", "y", "other", ANSWER, "on", ANSWER]


async def test_a_running_turn_of_another_caller_survives(monkeypatch: Any) -> None:
    async with asking() as caller:
        service, take_back = caller.rig.service, door_chat._Made.take_back
        gate = service.conversations.gate
        refusal = gate.refusal
        others: list[asyncio.Task[Body]] = []

        async def later(made: Any) -> None:
            gate.refusal = refusal  # type: ignore[method-assign]
            service.link.answer = None
            others.append(asyncio.create_task(caller.ask("other")))
            generation = await service.link.next_generation()
            await take_back(made)
            generation.admit()
            generation.emit(*says(ANSWER))
            generation.finish(output=len(says(ANSWER)))

        monkeypatch.setattr(door_chat._Made, "take_back", later)
        with overloaded(caller):
            await caller.ask("x", "y", "a", status=429)
        async with asyncio.timeout(60):
            await others[0]
        assert await caller.said() == ["x", "y", "other", ANSWER]


async def test_a_session_that_another_call_takes_back_is_made_again(monkeypatch: Any) -> None:
    """Two calls make the same session. The one that is refused takes it back before the other has begun its turn."""
    async with asking() as caller:
        real = door_chat.append_items
        gone: list[bool] = []

        async def taken(session: AsyncSession, *args: Any, **options: Any) -> AsyncSession:
            if not gone:
                gone.append(True)
                await caller.rig.service.api.DeleteSession(
                    pb.DeleteSessionRequest(name="sessions/mine", unused_only=True)
                )
            return await real(session, *args, **options)

        monkeypatch.setattr(door_chat, "append_items", taken)
        await caller.ask("x", "y", "a")
        assert gone and await caller.said() == ["x", "y", "a", ANSWER]


@pytest.mark.parametrize("key", ["", "key"])
async def test_a_session_that_was_there_stays_when_a_call_is_refused(key: str) -> None:
    async with asking() as caller:
        await caller.rig.service.create("Be brief.", session_id="mine")
        with overloaded(caller):
            await caller.ask("a", key=key, status=429)
        assert await caller.said() == ["Be brief."]


@pytest.mark.parametrize("used", [False, True])
async def test_a_deletion_on_request_keeps_the_name(opened: Opened, used: bool) -> None:
    async with opened() as store, asking(store) as caller:
        if used:
            await caller.ask("a")
        else:
            await caller.rig.service.create(session_id="mine")
        await caller.rig.service.api.DeleteSession(pb.DeleteSessionRequest(name="sessions/mine"))
        refused = (await caller.ask("a", status=404))["error"]
        assert refused["code"] == "session_deleted"


@pytest.mark.parametrize("key", ["", "key"])
async def test_an_answer_that_fails_leaves_the_session_to_be_gone_on_with(key: str) -> None:
    """The engine failed, which refuses nothing: the same call goes on in the session that was made for it."""
    async with asking() as caller:
        service = caller.rig.service
        service.link.answer = None
        call = asyncio.create_task(caller.ask("x", "y", "a", key=key, status=500))
        (await service.link.next_generation()).fail(Internal("gone", reason="BUG"))
        await call
        assert await caller.said() == ["x", "y"]
        service.link.answer = lambda _: says(ANSWER)
        await caller.ask("x", "y", "a", key=key)
        assert await caller.said() == ["x", "y", "a", ANSWER]
