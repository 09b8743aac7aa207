"""Conversations through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from support.http.http_rig import door
from support.service.service_rig import ANSWER


async def test_the_life_of_a_conversation() -> None:
    async with door() as rig:
        conversations = rig.client.conversations
        made = await conversations.create(
            items=[{"role": "user", "content": "before"}, {"role": "assistant", "content": "said"}],
            metadata={"topic": "foxes"},
        )
        assert (made.object, made.metadata) == ("conversation", {"topic": "foxes"})
        answer = await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        assert answer.output_text == ANSWER
        assert answer.conversation is not None and answer.conversation.id == made.id
        page = await conversations.items.list(made.id, order="asc")
        texts = [item.content[0].text for item in page.data]  # type: ignore[union-attr]
        assert texts == ["before", "said", "hi", ANSWER]
        newest = await conversations.items.list(made.id, limit=1)
        assert newest.has_more and newest.data[0].content[0].text == ANSWER  # type: ignore[union-attr]
        rest = await conversations.items.list(made.id, after=newest.last_id)
        assert len(rest.data) == 3
        one = await conversations.items.retrieve(str(newest.data[0].id), conversation_id=made.id)
        assert one == newest.data[0]
        changed = await conversations.update(made.id, metadata={"topic": "hares"})
        assert (await conversations.retrieve(made.id)).metadata == changed.metadata == {"topic": "hares"}
        assert (await rig.client.responses.retrieve(answer.id)).output_text == ANSWER
        gone = await conversations.delete(made.id)
        assert gone.deleted and gone.object == "conversation.deleted"
        with pytest.raises(NotFoundError):
            await conversations.retrieve(made.id)


async def test_instructions_change_and_responses_stay() -> None:
    async with door() as rig:
        made = await rig.client.conversations.create()
        first = await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        await rig.client.responses.create(
            model="tiny", input="more", conversation=made.id, instructions="Be brief."
        )
        assert (await rig.client.responses.retrieve(first.id)).output_text == ANSWER


async def test_a_conversation_outlives_its_responses() -> None:
    async with door() as rig:
        made = await rig.client.conversations.create()
        only = await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        await rig.client.responses.delete(only.id)
        assert (await rig.client.conversations.items.list(made.id)).data == []
        again = await rig.client.responses.create(model="tiny", input="again", conversation=made.id)
        assert again.output_text == ANSWER


async def test_items_are_added_behind_the_others() -> None:
    async with door() as rig:
        conversations = rig.client.conversations
        made = await conversations.create(items=[{"role": "user", "content": "before"}])
        headers = {"Idempotency-Key": "one"}
        for _ in range(2):
            added = await conversations.items.create(
                made.id,
                items=[{"role": "assistant", "content": "said"}, {"role": "developer", "content": "now"}],
                extra_headers=headers,
            )
            assert [item.content[0].text for item in added.data] == ["said", "now"]  # type: ignore[union-attr]
        answer = await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        page = await conversations.items.list(made.id, order="asc")
        texts = [item.content[0].text for item in page.data]  # type: ignore[union-attr]
        assert texts == ["before", "said", "now", "hi", ANSWER]
        assert [item.id for item in page.data[1:3]] == [item.id for item in added.data]
        imported = await conversations.create(
            items=[
                {"role": "user", "content": "before"},
                {"role": "assistant", "content": "said"},
                {"role": "developer", "content": "now"},
            ]
        )
        await rig.client.responses.create(model="tiny", input="hi", conversation=imported.id)
        one, other = rig.service.link.generations
        assert one.tokens == other.tokens, "added items are not what imported ones are"
        by_message = await conversations.items.retrieve(answer.output[0].id or "", conversation_id=made.id)
        assert by_message == page.data[-1]


async def test_pages_of_items() -> None:
    async with door() as rig:
        items = rig.client.conversations.items
        said: Any = [{"role": "user", "content": str(number)} for number in range(6)]
        made = await rig.client.conversations.create(items=said)
        everything = [item.id async for item in items.list(made.id, limit=2)]
        ids = [item.id for item in (await items.list(made.id, order="asc")).data]
        assert everything == ids[::-1] and len(ids) == 6
        for query, expected in (
            ({"before": ids[3]}, ids[:3:-1]),
            ({"before": ids[3], "order": "asc"}, ids[:3]),
            ({"before": ids[4], "after": ids[1], "order": "asc", "limit": 1}, ids[2:3]),
        ):
            page = await items.list(made.id, extra_query=query)
            assert [item.id for item in page.data] == expected, query
        bad: list[dict[str, object]] = [{"order": "up"}, {"limit": 0}, {"after": "x"}, {"before": "x"}]
        for wrong in bad:
            with pytest.raises(BadRequestError) as caught:
                await items.list(made.id, extra_query=wrong)
            assert caught.value.param == next(iter(wrong))


async def test_the_newest_item_is_taken_out() -> None:
    async with door() as rig:
        conversations = rig.client.conversations
        made = await conversations.create()
        await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        newest, oldest = (await conversations.items.list(made.id)).data
        with pytest.raises(BadRequestError) as caught:
            await conversations.items.delete(str(oldest.id), conversation_id=made.id)
        assert caught.value.code == "unsupported_operation"
        for one in (newest, oldest):
            assert (await conversations.items.delete(str(one.id), conversation_id=made.id)).id == made.id
            with pytest.raises(NotFoundError):
                await conversations.items.retrieve(str(one.id), conversation_id=made.id)
        assert (await conversations.items.list(made.id)).data == []


async def test_what_a_history_cannot_honour_is_refused() -> None:
    async with door() as rig:
        conversations = rig.client.conversations
        made = await conversations.create()
        for count in (0, 21):
            with pytest.raises(BadRequestError):
                await conversations.items.create(made.id, items=[{"role": "user", "content": "hi"}] * count)
        with pytest.raises(NotFoundError):
            await conversations.items.delete("msg_x", conversation_id=made.id)
        with pytest.raises(BadRequestError):
            await conversations.create(items=[{"role": "user", "content": "hi"}] * 21)
        for unknown in ("conv_x", f"conv_{'0' * 32}"):
            with pytest.raises(NotFoundError):
                await conversations.items.list(unknown)
        other = rig.client.with_options(api_key="other")
        with pytest.raises(NotFoundError):
            await other.conversations.retrieve(made.id)


async def test_an_early_response_is_found_without_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with door() as rig:
        made = await rig.client.conversations.create()
        first = await rig.client.responses.create(model="tiny", input="hi", conversation=made.id)
        for _ in range(3):
            await rig.client.responses.create(model="tiny", input="on", conversation=made.id)
        sessions = rig.service.conversations.sessions
        listed, pages = sessions.items, list[int]()

        async def counting(*given: Any, **fields: Any) -> Any:
            page = await listed(*given, **fields)
            pages.append(len(page.items))
            return page

        monkeypatch.setattr(sessions, "items", counting)
        assert (await rig.client.responses.retrieve(first.id)).output_text == ANSWER
        assert sum(pages) == 1, "its own answer is the one item that is looked at"
