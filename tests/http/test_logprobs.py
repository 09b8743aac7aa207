"""Log-probabilities in all of the door's protocols, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.client import TokenLogprob
from pensieve.http.common.answers import token_scores
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door, opened
from support.service.real_engine import TinyModel, really_serving
from support.service.service_rig import encode, eos, says

SMILE = "a\U0001f600b"
HI: Any = [{"role": "user", "content": "hi"}]
INCLUDE: Any = ["message.output_text.logprobs"]


async def chat(rig: HttpRig, **options: Any) -> Any:
    return await rig.client.chat.completions.create(model="tiny", messages=HI, **options)


async def respond(rig: HttpRig, **options: Any) -> Any:
    return await rig.client.responses.create(model="tiny", input="hi", **options)


def check_smile(scores: list[Any]) -> None:
    assert b"".join(bytes(one.bytes) for one in scores).decode() == SMILE
    assert scores[0].token == "a" and scores[1].token.startswith("\\xf0")
    assert (scores[-1].token, scores[-1].bytes) == ("<|im_end|>", [])
    assert len(scores) == len(says(SMILE))


async def test_chat_has_one_entry_for_each_token() -> None:
    async with door(answer=SMILE) as rig:
        (whole,) = (await chat(rig, logprobs=True, top_logprobs=1)).choices
        check_smile(whole.logprobs.content)
        assert all(
            one.logprob == -1.0 and one.top_logprobs[0].token == one.token for one in whole.logprobs.content
        )
        stream = await chat(rig, logprobs=True, top_logprobs=1, stream=True)
        chunks = [chunk async for chunk in stream]
        parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
        assert [one for part in parts for one in part.content] == whole.logprobs.content
        plain = await chat(rig)
        assert plain.choices[0].logprobs is None
        drawn = await chat(rig, logprobs=True, n=2, temperature=1.0)
        assert [{one.logprob for one in choice.logprobs.content} for choice in drawn.choices] == [
            {-1.0},
            {-0.5},
        ]


async def test_the_first_chunk_of_an_answer_has_its_role_and_no_scores() -> None:
    """OpenAI's client for Node takes it as the beginning of its own answer, and adds its scores to themselves."""
    asked = {"model": "tiny", "messages": HI, "n": 2, "logprobs": True, "top_logprobs": 1, "stream": True}
    node = {"user-agent": "OpenAI/JS 6.0.0", "x-stainless-lang": "js", "x-stainless-retry-count": "0"}
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, headers=node, timeout=60) as http:
        told = (await http.post("/v1/chat/completions", json=asked)).text
        lines = [line.removeprefix("data: ") for line in told.splitlines() if line]
        assert lines.pop() == "[DONE]"
        for answer in range(2):
            choices = [one for line in lines for one in json.loads(line)["choices"] if one["index"] == answer]
            assert choices[0]["delta"] == {"role": "assistant", "content": ""}
            assert choices[0]["logprobs"] is None and choices[1]["logprobs"] is not None
            assert not any("role" in one["delta"] for one in choices[1:])


async def test_a_token_without_text_is_an_entry_too() -> None:
    async with door(answer=None) as rig:
        asked: Any = {"logprobs": True, "stream": True}
        for streamed in (chat(rig, **asked), respond(rig, include=INCLUDE, stream=True)):
            waiting = asyncio.create_task(streamed)
            generation = await rig.service.link.next_generation()
            generation.admit()
            generation.emit(*encode("a"))
            stream = (await waiting).__aiter__()
            seen = ""
            while '"a"' not in seen:
                seen += (await anext(stream)).model_dump_json()
            generation.emit(eos())
            async with asyncio.timeout(20):
                while "<|im_end|>" not in seen:
                    seen += (await anext(stream)).model_dump_json()
            generation.finish()
            async for _ in stream:
                pass


async def test_a_replayed_chat_has_none() -> None:
    async with door() as rig:
        headers = {"Idempotency-Key": "one"}
        first, again = [await chat(rig, logprobs=True, extra_headers=headers) for _ in range(2)]
        assert first.choices[0].logprobs.content and again.choices[0].logprobs is None
        assert again.choices[0].message.content == first.choices[0].message.content


async def test_responses_have_them_where_they_are_included() -> None:
    async with door(answer=SMILE) as rig:
        whole = await respond(rig, include=INCLUDE, top_logprobs=1)
        assert whole.top_logprobs == 1
        scores = whole.output[0].content[0].logprobs
        check_smile(scores)
        stream = await respond(rig, include=INCLUDE, top_logprobs=1, stream=True)
        events = [event async for event in stream]
        kinds = {event.type: event for event in events}
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        want = [(one.token, one.logprob, one.top_logprobs[0].token) for one in scores]
        for found in (
            [one for event in deltas for one in event.logprobs],
            kinds["response.output_text.done"].logprobs,
            kinds["response.content_part.done"].part.logprobs,
            kinds["response.output_item.done"].item.content[0].logprobs,
            kinds["response.completed"].response.output[0].content[0].logprobs,
        ):
            assert [(one.token, one.logprob, one.top_logprobs[0].token) for one in found] == want
        assert (await respond(rig, top_logprobs=1)).output[0].content[0].logprobs == []
        assert (await rig.client.responses.retrieve(whole.id)).output[0].content[0].logprobs == []  # type: ignore[union-attr]


async def test_what_is_impossible_is_a_number_too() -> None:
    (one,) = token_scores([TokenLogprob(1, float("-inf"))])
    assert one["logprob"] == -9999.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.make(tmp_path_factory.mktemp("models"))


async def test_all_protocols_say_what_transformers_says(model: TinyModel) -> None:
    async with really_serving(model) as service, opened(service.target) as (_, client):
        prompt = "in the beginning was the word and the word was with us, " * 3
        options: Any = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0.9,
            "seed": 4,
            "logprobs": 3,
        }
        extra = {"return_token_ids": True, "ignore_eos": True}
        first, again = [await client.completions.create(**options, extra_body=extra) for _ in range(2)]
        choice: Any = first.choices[0]
        context, tokens = choice.prompt_token_ids, choice.token_ids
        want = model.expected([*context, *tokens])[len(context) - 1 :]
        drawn = [want[at, token].item() for at, token in enumerate(tokens)]
        assert choice.logprobs.token_logprobs == pytest.approx(drawn, abs=1e-4)
        assert again.choices[0].text == choice.text
        assert first.usage is not None and again.usage is not None
        assert first.usage.prompt_tokens_details.cached_tokens == 0  # type: ignore[union-attr]
        assert again.usage.prompt_tokens_details.cached_tokens >= 16  # type: ignore[union-attr, operator]

        asked: Any = {
            "model": "tiny",
            "max_completion_tokens": 8,
            "temperature": 0.9,
            "seed": 4,
            "logprobs": True,
        }
        chosen = await client.chat.completions.create(
            messages=HI, top_logprobs=3, **asked, extra_body={"ignore_eos": True, "session": "mine"}
        )
        response = await client.responses.create(
            model="tiny", input="hi", include=INCLUDE, top_logprobs=3, temperature=0.9, max_output_tokens=8,
            extra_body={"ignore_eos": True, "seed": 4},
        )  # fmt: skip
        items = await service.api.ListItems(pb.ListItemsRequest(name="sessions/mine", include_tokens=True))
        ids = [token for item in items.items for token in item.tokens.ids]
        rows = model.expected(ids)[len(ids) - 9 : -1]
        scores: Any = chosen.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [one.logprob for one in scores] == pytest.approx(
            [row[token].item() for row, token in zip(rows, ids[-8:], strict=True)], abs=1e-4
        )
        for one, row in zip(scores, rows, strict=True):
            best = [top.logprob for top in one.top_logprobs]
            assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        answer: Any = response.output[0]
        others = [one.logprob for one in answer.content[0].logprobs]
        assert others == pytest.approx([one.logprob for one in scores], abs=1e-4)
