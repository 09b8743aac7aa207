"""DELETE at the door erases: the text is gone, and a repetition of the call that made it says so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import APIStatusError, NotFoundError

from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER

Begin = Callable[[HttpRig], Awaitable[dict[str, Any]]]


async def in_a_conversation(rig: HttpRig) -> dict[str, Any]:
    return {"conversation": (await rig.client.conversations.create()).id}


async def in_a_full_conversation(rig: HttpRig) -> dict[str, Any]:
    said: Any = [{"role": "user", "content": "before"}]
    return {"conversation": (await rig.client.conversations.create(items=said)).id}


async def behind_another(rig: HttpRig) -> dict[str, Any]:
    return {"previous_response_id": (await rig.client.responses.create(model="tiny", input="before")).id}


async def first(rig: HttpRig) -> dict[str, Any]:
    return {}


def logs(rig: HttpRig) -> str:
    return repr([session.log for session in rig.service.store._sessions.values()])  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begin", [in_a_conversation, in_a_full_conversation, behind_another, first])
async def test_a_response_that_was_erased_is_not_told_again(begin: Begin, stream: bool) -> None:
    async with door("the answer is a canary") as rig:
        where = await begin(rig)
        ask: dict[str, Any] = {"model": "tiny", "input": "my canary", "metadata": {"k": "canary"}, **where}
        ask["extra_headers"] = {"Idempotency-Key": "one"}
        made = await rig.client.responses.create(**ask)
        assert "canary" in logs(rig)
        await rig.client.responses.delete(made.id)
        if "previous_response_id" not in where:  # there it was said before
            assert "canary" not in logs(rig)
        assert "my canary" not in logs(rig)
        turns = len(rig.service.link.generations)
        with pytest.raises(APIStatusError) as caught:
            await rig.client.responses.create(**ask, stream=stream)
        assert caught.value.status_code == 404
        assert caught.value.code == ("session_deleted" if begin is first else "content_erased")
        for call in (rig.client.responses.retrieve, rig.client.responses.delete):
            with pytest.raises(NotFoundError):
                await call(made.id)
        with pytest.raises(APIStatusError) as caught:
            await rig.client.responses.create(model="tiny", input="on", previous_response_id=made.id)
        assert caught.value.code == "previous_response_not_found"
        assert len(rig.service.link.generations) == turns, "nothing is made anew"
        again = await rig.client.responses.create(**{**ask, "extra_headers": {"Idempotency-Key": "two"}})
        assert again.output_text == "the answer is a canary"


async def test_an_item_that_was_taken_out_is_erased() -> None:
    async with door() as rig:
        conversations = rig.client.conversations
        made = await conversations.create()
        headers = {"Idempotency-Key": "note"}
        note: Any = [{"role": "user", "content": "a canary"}]
        (added,) = (await conversations.items.create(made.id, items=note, extra_headers=headers)).data
        answer = await rig.client.responses.create(
            model="tiny", input="hi", conversation=made.id, extra_headers={"Idempotency-Key": "turn"}
        )
        newest, asked, _ = (await conversations.items.list(made.id)).data
        await conversations.items.delete(str(newest.id), conversation_id=made.id)
        assert ANSWER not in logs(rig) and "a canary" in logs(rig)
        with pytest.raises(NotFoundError):
            await rig.client.responses.retrieve(answer.id)
        for one in (asked, added):
            await conversations.items.delete(str(one.id), conversation_id=made.id)
        assert "a canary" not in logs(rig)
        with pytest.raises(NotFoundError) as caught:
            await conversations.items.create(made.id, items=note, extra_headers=headers)
        assert caught.value.code == "content_erased"
        assert (await conversations.items.list(made.id)).data == []
