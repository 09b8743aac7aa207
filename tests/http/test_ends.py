"""Who resends a conversation is led to its end by any door, with the very tokens, and never to another's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import APIStatusError, AsyncOpenAI

from support.http.http_rig import HttpRig, door, opened
from support.service.service_rig import ANSWER, encode, eos, says

Messages = list[Any]


def talk(*texts: str, system: str = "Be brief.") -> Messages:
    """User and assistant in turns."""
    roles = ("user", "assistant")
    said = [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *said]


def odd(text: str) -> list[int]:
    """Tokens of the text that no tokenizer would make of it."""
    return [token for letter in text for token in encode(letter)]


async def say(client: AsyncOpenAI, messages: Messages, **options: Any) -> Any:
    return await client.chat.completions.create(model="tiny", messages=messages, **options)


@asynccontextmanager
async def elsewhere(rig: HttpRig) -> AsyncIterator[AsyncOpenAI]:
    """A client of a door that has just been opened, and so remembers nothing."""
    async with opened(rig.service.target) as (_, client):
        yield client


async def told(rig: HttpRig, answer: Any) -> list[str]:
    return [item.text for item in await rig.service.items(f"sessions/{answer.session}")]


async def test_another_door_goes_on_where_this_one_was() -> None:
    async with door() as rig:
        first = await say(rig.client, talk("hi"))
        async with elsewhere(rig) as client:
            second = await say(client, talk("hi", ANSWER, "again"))
            assert second.session == first.session
            stream = await say(client, talk("hi", ANSWER, "again", ANSWER, "more"), stream=True)
            async for chunk in stream:
                last = chunk
        assert last.session == first.session
        async with elsewhere(rig) as client:
            # From the middle: what was said since stays, and this is a branch of it.
            branch = await say(client, talk("hi", ANSWER, "or else"))
            assert branch.session != first.session
            assert await told(rig, branch) == ["Be brief.", "hi", ANSWER, "or else", ANSWER]
            response = await client.responses.create(
                model="tiny", input=talk("hi", ANSWER, "or else", ANSWER, "?")
            )
            assert response.usage is not None
            assert (await told(rig, branch))[-2:] == ["?", ANSWER]


async def test_nobody_is_led_to_what_was_not_said() -> None:
    async with door() as rig:
        first = await say(rig.client, talk("hi"))
        await say(rig.client, talk("unstored"), extra_body={"session": "mine"})
        async with elsewhere(rig) as client:
            for messages in (
                talk("hi", ANSWER + "!", "again"),
                talk("ho", ANSWER, "again"),
                talk("hi", ANSWER, "again", system="Be rude."),
                talk("unstored", ANSWER, "again"),
            ):
                other = await say(client, messages)
                assert other.session not in (first.session, "mine")
                assert await told(rig, other) == [one["content"] for one in messages] + [ANSWER]
            stranger = client.with_options(api_key="another")
            theirs = await say(stranger, talk("hi", ANSWER, "again"))
            assert theirs.session != first.session


async def test_the_tokens_are_those_that_were_generated() -> None:
    """The answer's text would make other tokens."""
    async with door() as rig:
        assert odd(ANSWER) != encode(ANSWER)
        rig.service.link.answer = lambda _: [*odd(ANSWER), eos()]
        first = await say(rig.client, talk("hi"))
        assert first.choices[0].message.content == ANSWER
        async with elsewhere(rig) as client:
            await say(client, talk("hi", ANSWER, "again"))
            # Also when the session has gone on, and this is a branch.
            await say(client, talk("hi", ANSWER, "or else"))
        before, *after = rig.service.link.generations
        for one in after:
            history = [*before.tokens, *odd(ANSWER)]
            assert one.tokens[: len(history)] == history


async def test_any_of_several_answers_is_gone_on_with() -> None:
    texts = ["one", "two", "three"]
    async with door(answer=None) as rig:
        link = rig.service.link

        async def several() -> Any:
            call = asyncio.create_task(say(rig.client, talk("hi"), n=3, temperature=1.0))
            while not link.generations:
                await asyncio.sleep(0.005)
            (drawn,) = link.generations
            drawn.admit()
            for candidate, text in enumerate(texts):
                drawn.emit(*odd(text), eos(), candidate=candidate)
                drawn.finish_candidate(candidate)
            drawn.finish()
            return await call

        first = await several()
        assert [one.message.content for one in first.choices] == texts
        link.answer = lambda _: says(ANSWER)
        async with elsewhere(rig) as client:
            second = await say(client, talk("hi", "two", "again"))
        assert second.session == first.session
        assert await told(rig, second) == ["Be brief.", "hi", "two", "again", ANSWER]
        # The others are still there, for branches with the tokens that were drawn.
        for client in (rig.client, None):
            for text in ("one", "three"):
                async with elsewhere(rig) as other:
                    branch = await say(client or other, talk("hi", text, "or else"))
                assert branch.session not in (first.session, second.session)
                assert await told(rig, branch) == ["Be brief.", "hi", text, "or else", ANSWER]
                drawn = [*link.generations[0].tokens, *odd(text)]
                assert link.generations[-1].tokens[: len(drawn)] == drawn


async def test_a_retry_goes_where_its_first_try_went() -> None:
    """Whatever else has come to say the same meanwhile."""
    async with door() as rig:
        first = await say(rig.client, talk("hi"))
        headers = {"Idempotency-Key": "one"}
        second = await say(rig.client, talk("hi", ANSWER, "again"), extra_headers=headers)
        newer = await say(rig.client, talk("hi"))
        assert newer.session != first.session
        imported = talk("never said here", "indeed", "and now?")
        third = await say(rig.client, imported, extra_headers={"Idempotency-Key": "two"})
        for client in (rig.client, None):
            async with elsewhere(rig) as other:
                retry = await say(client or other, talk("hi", ANSWER, "again"), extra_headers=headers)
                assert (retry.id, retry.session) == (second.id, first.session)
                again = await say(client or other, imported, extra_headers={"Idempotency-Key": "two"})
                assert (again.id, again.session) == (third.id, third.session)
                try:
                    changed = [{"role": "system", "content": "Be rude."}, *imported[1:]]
                    await say(other, changed, extra_headers={"Idempotency-Key": "two"})
                except APIStatusError as error:
                    assert error.status_code == 409
                else:
                    raise AssertionError("a key was used twice")
        assert await told(rig, newer) == ["Be brief.", "hi", ANSWER]


async def test_one_that_drops_its_oldest_turns_is_not_for_others() -> None:
    async with door() as rig:
        said: Any = talk("hi")
        await rig.client.responses.create(model="tiny", input=said, truncation="auto")
        async with elsewhere(rig) as client:
            for one in (rig.client, client):
                other = await say(one, talk("hi", ANSWER, "again"))
                assert other.session.startswith("chat-"), "led into the response's session"
            same: Any = talk("hi", ANSWER, "again")
            answer = await client.responses.create(model="tiny", input=same, truncation="auto")
            found = await rig.client.responses.retrieve(answer.id)
            assert found.usage is not None and found.usage.input_tokens_details.cached_tokens > 0
