"""A call that is repeated with its ``Idempotency-Key`` finds the session of its first try; another call is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.client import AsyncClient
from pensieve.errors import NotFound, ResourceExhausted
from pensieve.http import chat as door_chat
from pensieve.http.responses.ids import ResponseId
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import BearerTenant, HttpRig, door, opened
from support.service.service_rig import ANSWER, says, serving

RESPONSES, CHAT, TEXT, CONVERSATIONS = (
    "/v1/responses",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/conversations",
)
Body = dict[str, Any]


@asynccontextmanager
async def asking(rig: HttpRig) -> AsyncIterator[Callable[..., Awaitable[httpx.Response]]]:
    """Posts a body, with a key if one is given, and expects a status."""
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:

        async def ask(path: str, body: Body, key: str = "", status: int = 200) -> httpx.Response:
            headers = {"Idempotency-Key": key} if key else {}
            answer = await http.post(path, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            return answer

        yield ask


async def sessions(rig: HttpRig) -> list[pb.Session]:
    return list((await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions)


def talk(*texts: str) -> list[Body]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]


async def held(rig: HttpRig, ask: Any, **body: Any) -> asyncio.Task[Any]:
    """A response that runs until the test plays its answer."""
    before = len(rig.service.link.generations)
    rig.service.link.answer = None
    call = asyncio.create_task(ask(RESPONSES, {"input": "other", **body}))
    async with asyncio.timeout(60):
        while len(rig.service.link.generations) == before:
            await asyncio.sleep(0.005)
    rig.service.link.answer = lambda _: says(ANSWER)
    return call


@pytest.mark.parametrize("kind", ["response", "chat"])
async def test_a_branch_stays_where_it_was_made_though_the_session_is_free_again(kind: str) -> None:
    async with door(service_options={"disconnect_grace_s": 0.0}) as rig, asking(rig) as ask:
        if kind == "response":
            first = (await ask(RESPONSES, {"input": "hi"})).json()
            path, body = RESPONSES, {"input": "again", "previous_response_id": first["id"]}
            other = await held(rig, ask, previous_response_id=first["id"])
        else:
            await ask(CHAT, {"messages": talk("hi")})
            path, body = CHAT, {"messages": talk("hi", ANSWER, "again")}
            rig.service.link.answer = None
            other = asyncio.create_task(ask(CHAT, {"messages": talk("hi", ANSWER, "other")}))
            async with asyncio.timeout(60):
                while len(rig.service.link.generations) < 2:
                    await asyncio.sleep(0.005)
            rig.service.link.answer = lambda _: says(ANSWER)
        made = (await ask(path, body, "key")).json()
        other.cancel()
        async with asyncio.timeout(60):
            while rig.service.conversations.turns.running:
                await asyncio.sleep(0.005)
        there = len(await sessions(rig))
        async with (
            opened(rig.service.target) as (url, _),
            asking(HttpRig(rig.service, rig.client, url)) as elsewhere,
        ):
            for again in (ask, elsewhere):
                retry = (await again(path, body, "key")).json()
                assert retry["id"] == made["id"]
        assert len(await sessions(rig)) == there


async def test_one_key_is_one_call_whatever_it_is_led_to() -> None:
    async with door() as rig, asking(rig) as ask:
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        conversation = (await ask(CONVERSATIONS, {})).json()["id"]
        calls: list[tuple[str, Body]] = [
            (RESPONSES, {"input": "a"}),
            (RESPONSES, {"input": "a", "previous_response_id": first}),
            (RESPONSES, {"input": "a", "conversation": conversation}),
            (RESPONSES, {"input": "a", "instructions": "Be brief."}),
            (RESPONSES, {"input": "a", "conversation": conversation, "instructions": "Be brief."}),
            (RESPONSES, {"input": "a", "temperature": 0.5}),
            (RESPONSES, {"input": "a", "metadata": {"a": "b"}}),
            (CHAT, {"messages": talk("a")}),
            (CHAT, {"messages": talk("a"), "session": "mine"}),
            (CHAT, {"messages": talk("hi", ANSWER, "a")}),
            (TEXT, {"prompt": "a"}),
            (TEXT, {"prompt": ["a", "b"]}),
            (CONVERSATIONS, {"items": talk("a")}),
            (f"{CONVERSATIONS}/{conversation}/items", {"items": talk("a")}),
        ]
        answers = [
            (await ask(path, body, f"key {number}")).json() for number, (path, body) in enumerate(calls)
        ]
        before = [(one.name, one.revision) for one in await sessions(rig)]
        for number, answer in enumerate(answers):
            for other in (number, (number + 1) % len(calls), (number + 5) % len(calls)):
                path, body = calls[other]
                if number == other:
                    again = (await ask(path, body, f"key {number}")).json()
                    same = "choices" if path == TEXT else "data" if "items" in path else "id"
                    assert again[same] == answer[same]
                else:
                    refused = (await ask(path, body, f"key {number}", status=409)).json()["error"]
                    assert refused["code"] == "request_id_reused" and refused["param"] == "Idempotency-Key"
        assert [(one.name, one.revision) for one in await sessions(rig)] == before


@pytest.mark.parametrize("kind", ["new", "after", "conversation", "chat"])
async def test_tries_at_once_are_one_turn(kind: str) -> None:
    async with door() as rig, asking(rig) as ask:
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        conversation = (await ask(CONVERSATIONS, {})).json()["id"]
        path, body = {
            "new": (RESPONSES, {"input": "a"}),
            "after": (RESPONSES, {"input": "a", "previous_response_id": first}),
            "conversation": (RESPONSES, {"input": "a", "conversation": conversation}),
            "chat": (CHAT, {"messages": talk("hi", ANSWER, "a")}),
        }[kind]
        before = {one.name: one.item_count for one in await sessions(rig)}
        answers = await asyncio.gather(*(ask(path, body, "key") for _ in range(6)))
        assert len({answer.json()["id"] for answer in answers}) == 1
        after = {one.name: one.item_count for one in await sessions(rig)}
        assert sum(after.values()) == sum(before.values()) + 2, "one question, one answer"


async def test_a_retry_finds_its_answer_after_the_session_went_on_and_was_cut() -> None:
    async with door() as rig, asking(rig) as ask:
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        body = {"input": "again", "previous_response_id": first}
        second = (await ask(RESPONSES, body, "key")).json()["id"]
        third = (await ask(RESPONSES, {"input": "more", "previous_response_id": second})).json()["id"]
        assert (await ask(RESPONSES, body, "key")).json()["id"] == second
        await rig.client.responses.delete(third)
        assert (await ask(RESPONSES, body, "key")).json()["id"] == second
        assert len(await sessions(rig)) == 1


async def test_a_conversation_keeps_its_own_instructions_and_tools() -> None:
    async with door() as rig, asking(rig) as ask:
        system = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]
        conversation = (await ask(CONVERSATIONS, {"items": system})).json()["id"]
        name = f"sessions/{conversation.replace('_', '-')}"
        body = {"input": "a", "conversation": conversation, "instructions": "Be rude."}
        first = (await ask(RESPONSES, body, "key")).json()
        numbers = [item.item for item in await rig.service.items(name)]
        await ask(RESPONSES, {"input": "b", "conversation": conversation})
        revision = (await rig.service.session(name)).revision
        assert (await ask(RESPONSES, body, "key")).json() == first
        await ask(RESPONSES, {**body, "instructions": "Be brief."}, "key", status=409)
        await ask(RESPONSES, {**body, "instructions": "Be brief.", "temperature": -1}, status=400)
        session = await rig.service.session(name)
        assert (session.config.system_prompt, session.revision) == ("Be kind.", revision)
        items = await rig.service.items(name)
        assert [item.item for item in items][: len(numbers)] == numbers
        assert [item.text for item in items] == ["Be kind.", "hi", "a", ANSWER, "b", ANSWER]
        # The one turn is as in a session with its instructions, the next as in a conversation that never had any.
        asked, plain = rig.service.link.generations
        rude = [{"role": "system", "content": "Be rude.\n\nBe kind."}, *talk("hi"), *talk("a")]
        await ask(CHAT, {"messages": rude})
        assert rig.service.link.generations[-1].tokens == asked.tokens
        other = (await ask(CONVERSATIONS, {"items": system})).json()["id"]
        for text in ("a", "b"):
            await ask(RESPONSES, {"input": text, "conversation": other})
        assert rig.service.link.generations[-1].tokens == plain.tokens


REFUSED = {"temperature": -1.0}
LONG = "word " * 2000
KINDS = ("response", "branch", "chat", "named", "text", "texts", "long", "unstored", "conversation", "items")


@pytest.mark.parametrize("key", ["", "key"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_refused_leaves_nothing_and_may_be_put_right(kind: str, key: str) -> None:
    async with door() as rig, asking(rig) as ask:
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        await ask(RESPONSES, {"input": "on", "previous_response_id": first})
        conversation = (await ask(CONVERSATIONS, {})).json()["id"]
        before = [(one.name, one.revision) for one in await sessions(rig)]
        good: Body
        path, good = {
            "response": (RESPONSES, {"input": "a"}),
            "branch": (RESPONSES, {"input": "a", "previous_response_id": first}),
            "chat": (CHAT, {"messages": talk("a")}),
            "named": (CHAT, {"messages": talk("a"), "session": "mine"}),
            "text": (TEXT, {"prompt": "a"}),
            "texts": (TEXT, {"prompt": ["a", "b"]}),
            "long": (RESPONSES, {"input": "a"}),
            "unstored": (RESPONSES, {"input": "a", "store": False}),
            "conversation": (CONVERSATIONS, {"items": talk("a")}),
            "items": (f"{CONVERSATIONS}/{conversation}/items", {"items": talk("a")}),
        }[kind]
        too_long = {"items": talk(LONG)} if "items" in good else {"input": LONG}
        bad = {**good, **(too_long if kind in ("long", "conversation", "items") else REFUSED)}
        for _ in range(2):
            await ask(path, bad, key, status=400)
            assert [(one.name, one.revision) for one in await sessions(rig)] == before
        # The same key is free for the call as it should have been, and so is a name that the client chose.
        answer = (await ask(path, good, key)).json()
        if key and kind != "unstored":
            same = "id" if "id" in answer else "data"
            assert (await ask(path, good, key)).json()[same] == answer[same]


@pytest.mark.parametrize("key", ["", "key"])
@pytest.mark.parametrize("there", [True, False], ids=["there", "new"])
async def test_a_named_session_keeps_nothing_of_what_is_refused(there: bool, key: str) -> None:
    """More messages than one turn takes are added before it, and go with it."""
    async with door(service_options={"context_limit": 2000}) as rig, asking(rig) as ask:
        if there:
            await ask(CHAT, {"messages": talk("hi"), "session": "mine"})
        crowd = [{"role": "user", "content": str(number)} for number in range(70)]
        body = {"messages": crowd, "session": "mine"}
        await ask(CHAT, {**body, "messages": [*crowd, *talk(LONG)]}, key, status=400)
        if not there:
            assert await sessions(rig) == []
            await ask(CHAT, body, key)  # key and name are free
            return
        await ask(CHAT, {**body, **REFUSED}, key, status=400)
        assert [item.text for item in await rig.service.items("sessions/mine")] == ["hi", ANSWER]
        answer = (await ask(CHAT, body, key)).json()
        if key:
            assert (await ask(CHAT, body, key)).json()["id"] == answer["id"]
        assert len(await rig.service.items("sessions/mine")) == 73


async def test_an_overloaded_server_is_asked_again_with_the_same_key() -> None:
    async with door() as rig, asking(rig) as ask:
        gate = rig.service.conversations.gate
        refusal = gate.refusal
        gate.refusal = lambda *_: ResourceExhausted("no more", reason="QUOTA_EXCEEDED")  # type: ignore[method-assign]
        await ask(RESPONSES, {"input": "a"}, "key", status=429)
        assert await sessions(rig) == []
        gate.refusal = refusal  # type: ignore[method-assign]
        first = (await ask(RESPONSES, {"input": "a"}, "key")).json()["id"]
        assert (await ask(RESPONSES, {"input": "a"}, "key")).json()["id"] == first


async def test_a_server_that_is_started_again_knows_the_claims() -> None:
    async with door() as rig, asking(rig) as ask:
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        body = {"input": "again", "previous_response_id": first}
        made = (await ask(RESPONSES, body, "key")).json()["id"]
        async with (
            serving(answer=ANSWER, store=rig.service.store, authorizer=BearerTenant()) as service,
            opened(service.target) as (url, client),
            asking(HttpRig(service, client, url)) as ask_again,
        ):
            assert (await ask_again(RESPONSES, body, "key")).json()["id"] == made
            await ask_again(RESPONSES, {**body, "input": "or else"}, "key", status=409)
            assert not service.link.generations


def many(count: int) -> list[Body]:
    """Turns of one letter, then a question."""
    return [*talk(*("a" if number % 2 == 0 else "b" for number in range(2 * (count // 2)))), *talk("?")]


@pytest.mark.parametrize("purged", [False, True])
@pytest.mark.parametrize(("at", "key"), [("load", "k"), ("begin", ""), ("begin", "k")])
async def test_a_session_that_expires_on_the_way_to_its_turn_is_made_again(
    at: str, purged: bool, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1_000_000]
    store = MemoryStore(clock=lambda: now[0])
    meant = getattr(store, at)

    async def expiring(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(store, at, meant)
        now[0] += 48 * 3600 * 1000
        if purged:
            await store.purge_expired()
        return await meant(*args, **named)

    async with door(service_options={"store": store}) as rig, asking(rig) as ask:
        await ask(CHAT, {"messages": talk("hello")})
        monkeypatch.setattr(store, at, expiring)
        body = {"messages": talk("hello", ANSWER, "again")}
        answer = await ask(CHAT, body, key)
        assert getattr(store, at) == meant, "it has expired"
        if key:
            assert (await ask(CHAT, body, key)).json()["id"] == answer.json()["id"]
        (session,) = await sessions(rig)
        assert session.item_count == 4


async def test_a_named_session_that_has_expired_is_made_again() -> None:
    now = [1_000_000]
    async with door(service_options={"store": MemoryStore(clock=lambda: now[0])}) as rig, asking(rig) as ask:
        config = pb.SessionConfig(ttl={"seconds": 5})
        await rig.service.api.CreateSession(pb.CreateSessionRequest(session_id="mine", config=config))
        now[0] += 6000  # the store has not removed it yet
        await ask(CHAT, {"session": "mine", "messages": talk("hello", ANSWER, "again")})
        assert (await sessions(rig))[0].item_count == 4


async def test_long_histories_and_many_new_messages_are_brought_in() -> None:
    options = {"context_limit": 200_000}
    async with door(service_options=options) as rig, asking(rig) as ask:
        conversation = (await ask(CONVERSATIONS, {"items": talk("hi")})).json()["id"]
        first = (await ask(RESPONSES, {"input": "hi"})).json()["id"]
        crowd = [{"role": "user", "content": str(number)} for number in range(70)]
        cases: list[tuple[str, Body, int]] = [
            (CHAT, {"messages": many(1300)}, 1301),
            (RESPONSES, {"input": many(1300)}, 1301),
            (CHAT, {"messages": crowd}, 70),
            (CHAT, {"messages": [*talk("hi", ANSWER), *crowd]}, 72),
            (CHAT, {"messages": [*talk("hi", ANSWER), *crowd], "session": "mine"}, 72),
            (CHAT, {"messages": [*talk("hi", ANSWER), *crowd], "session": "mine"}, 72 + 1 + 70),
            (RESPONSES, {"input": crowd, "previous_response_id": first}, 72),
            (RESPONSES, {"input": crowd, "conversation": conversation}, 71),
        ]
        for number, (path, body, items) in enumerate(cases):
            answer = (await ask(path, body, f"key {number}")).json()
            assert (await ask(path, body, f"key {number}")).json()["id"] == answer["id"]
            found = ResponseId.parse(answer["id"]) if path == RESPONSES else None
            name = f"sessions/{answer['session'] if found is None else found.session_id}"
            assert (await rig.service.session(name)).item_count == items + 1, (path, number)
            listed = await rig.service.api.ListItems(pb.ListItemsRequest(name=name, after_item=items - 1))
            assert [item.text for item in listed.items] == [
                (body.get("input") or body["messages"])[-1]["content"],
                ANSWER,
            ]
        # What was taken out since is not added again by a retry.
        response = (await ask(*cases[-1][:2], f"key {len(cases) - 1}")).json()["id"]
        await rig.client.responses.delete(response)
        newest = (await rig.client.conversations.items.list(conversation, limit=1)).data[0]
        assert newest.id is not None
        await rig.client.conversations.items.delete(newest.id, conversation_id=conversation)
        left = (await rig.service.session(f"sessions/{conversation.replace('_', '-')}")).item_count
        await ask(*cases[-1][:2], f"key {len(cases) - 1}", status=404)
        assert (await rig.service.session(f"sessions/{conversation.replace('_', '-')}")).item_count == left
        # A conversation that refuses the turn has none of the items.
        name = f"sessions/{conversation.replace('_', '-')}"
        before = [item.item for item in await rig.service.items(name)]
        refused = {"input": crowd, "conversation": conversation, "temperature": -1}
        await ask(RESPONSES, refused, "again", status=400)
        assert [item.item for item in await rig.service.items(name)] == before
        del refused["temperature"]
        await ask(RESPONSES, refused, "again")
        assert (await rig.service.session(name)).item_count == len(before) + 71


async def test_system_messages_alone_are_answered() -> None:
    async with door() as rig, asking(rig) as ask:
        alone = [{"role": "system", "content": "Say hi."}]
        await ask(CHAT, {"messages": alone})
        await ask(RESPONSES, {"input": alone})
        first, second = rig.service.link.generations
        assert first.tokens == second.tokens


@pytest.mark.parametrize("refused", [False, True], ids=["answered", "refused"])
async def test_a_turn_of_another_call_in_a_named_session_is_never_taken_back(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two first calls name one session. The other one is answered while this one makes the session, or begins in it."""
    async with door() as rig, asking(rig) as ask:
        waiting = [ask(CHAT, {"messages": talk("other"), "session": "mine"})]
        module, name = (door_chat, "begin_turn") if refused else (AsyncClient, "create_session")
        real = getattr(module, name)

        async def beside(*args: Any, **options: Any) -> Any:
            if waiting and (refused or options.get("session_id") == "mine"):
                if refused:
                    await args[0].refresh()  # it is made
                await waiting.pop()
            return await real(*args, **options)

        if refused:
            # The first look finds no session; what is patched is called a second time, in the one that was made.
            found = [NotFound("no such session")]

            async def second(*args: Any, **options: Any) -> Any:
                if found:
                    raise found.pop()
                return await beside(*args, **options)

            monkeypatch.setattr(module, name, second)
        else:
            monkeypatch.setattr(module, name, beside)
        body = {"messages": talk("a") if refused else talk("x", "y", "a"), "session": "mine"}
        await ask(CHAT, {**body, **REFUSED} if refused else body, status=400 if refused else 200)
        assert not waiting
        said = [item.text for item in await rig.service.items("sessions/mine")]
        assert said == ["other", ANSWER] + ([] if refused else ["a", ANSWER])
