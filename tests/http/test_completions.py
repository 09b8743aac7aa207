"""Completions through OpenAI's own client, in front of the service with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2 as httpx
import pytest
from openai import BadRequestError
from openai.types import Completion

from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER, encode, says


async def complete(rig: HttpRig, prompt: Any, **options: Any) -> Any:
    return await rig.client.completions.create(model="tiny", prompt=prompt, **options)


async def chunks_of(rig: HttpRig, prompt: Any, **options: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, each held against OpenAI's type.

    In OpenAI's own streams finish_reason is null until the end, which its type does not know.
    """
    async with httpx.AsyncClient() as http:
        body = {"model": "tiny", "prompt": prompt, "stream": True, **options}
        answer = await http.post(f"{rig.url}/v1/completions", json=body)
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), answer.text
    chunks: list[dict[str, Any]] = [json.loads(one.removeprefix("data: ")) for one in events]
    for chunk in chunks:
        ended = [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]]
        Completion.model_validate({**chunk, "choices": ended}, strict=True)
    return chunks


async def test_a_prompt_goes_to_the_model_as_it_is() -> None:
    async with door() as rig:
        answer = await complete(rig, "the fox<|im_end|>")
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason, choice.index) == (ANSWER, "stop", 0)
        assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
        asked = rig.service.link.generations[-1]
        assert asked.tokens == says("the fox") and asked.sampling.max_output_tokens == 16
        assert answer.usage.prompt_tokens == len(asked.tokens)
        assert answer.usage.completion_tokens == len(says(ANSWER))
        await complete(rig, encode("quick brown"), max_tokens=3, seed=-1)
        asked = rig.service.link.generations[-1]
        assert asked.tokens == encode("quick brown") and asked.sampling.max_output_tokens == 3


async def test_many_prompts_have_choices_in_their_order() -> None:
    async with door() as rig:
        prompts = ["the fox", "the dog", "my name"]
        answer = await complete(rig, prompts, n=2, temperature=1.0, echo=True)
        assert [one.index for one in answer.choices] == list(range(6))
        assert [one.text.startswith(prompts[one.index // 2]) for one in answer.choices] == [True] * 6
        assert (
            answer.choices[0].text == "the fox" + ANSWER and answer.choices[1].text != answer.choices[0].text
        )
        assert answer.usage.completion_tokens == 3 * (2 * len(says(ANSWER)) - 1)
        seen = sorted(one.tokens for one in rig.service.link.generations)
        assert seen == sorted(map(encode, prompts))
        ids = await complete(rig, [encode("the fox"), encode("the dog")], echo=True)
        assert [one.text for one in ids.choices] == ["the fox" + ANSWER, "the dog" + ANSWER]


async def test_a_stream_says_the_same() -> None:
    async with door() as rig:
        chunks = await chunks_of(
            rig,
            ["the fox", "the dog"],
            n=2,
            temperature=1.0,
            echo=True,
            stream_options={"include_usage": True},
        )
        whole = await complete(rig, ["the fox", "the dog"], n=2, temperature=1.0, echo=True)
        said = ["", "", "", ""]
        reasons: list[list[str]] = [[], [], [], []]
        for chunk in chunks[:-1]:
            assert chunk["usage"] is None and chunk["id"] == chunks[0]["id"]
            (one,) = chunk["choices"]
            said[one["index"]] += one["text"]
            assert not reasons[one["index"]], "something after the end"
            reasons[one["index"]] += [one["finish_reason"]] * bool(one["finish_reason"])
        assert said == [one.text for one in whole.choices]
        assert reasons == [["stop"]] * 4
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole.usage.model_dump(
            exclude_unset=True
        )


async def test_the_best_of_several() -> None:
    async with door() as rig:
        # The scripted engine's later candidates are the likelier ones, and the shorter ones.
        drawn = (await complete(rig, "the fox", n=3, temperature=1.0)).choices
        best = await complete(rig, "the fox", n=2, best_of=3, temperature=1.0)
        assert [one.text for one in best.choices] == [drawn[2].text, drawn[1].text]
        assert best.usage.completion_tokens == 3 * len(says(ANSWER)) - 3


async def test_log_probabilities_lie_in_lists() -> None:
    async with door(answer="a\U0001f600b") as rig:
        whole = (await complete(rig, "the fox", logprobs=1)).choices[0]
        lists = whole.logprobs
        ids = says("a\U0001f600b")
        assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.top_logprobs) == len(ids)
        assert lists.tokens[0] == "a" and lists.tokens[-2:] == ["b", "<|im_end|>"]
        assert lists.tokens[1].startswith("bytes:\\xf0")
        assert lists.text_offset == [0, *[1] * (len(ids) - 3), 2, 3]
        assert lists.token_logprobs == [-1.0] * len(ids)
        assert lists.top_logprobs[0] == {"a": -1.0}
        chunks = await chunks_of(rig, "the fox", logprobs=1)
        parts = [one for chunk in chunks if (one := chunk["choices"][0]["logprobs"])]
        for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [one for part in parts for one in part[name]] == getattr(lists, name), name


async def test_token_ids_on_request() -> None:
    async with door() as rig:
        for prompt in ("the fox", encode("the fox")):
            (whole,) = (await complete(rig, prompt, extra_body={"return_token_ids": True})).choices
            assert whole.prompt_token_ids == encode("the fox")
            assert whole.token_ids == says(ANSWER)
            chunks = await chunks_of(rig, prompt, return_token_ids=True)
            choices = [chunk["choices"][0] for chunk in chunks]
            assert choices[0]["prompt_token_ids"] == encode("the fox")
            assert not any(one["prompt_token_ids"] for one in choices[1:])
            assert [token for one in choices for token in one["token_ids"]] == says(ANSWER)


async def test_a_repeated_key_is_one_turn_each() -> None:
    async with door() as rig:
        headers = {"Idempotency-Key": "one"}
        first, second = [await complete(rig, ["a", "b"], extra_headers=headers) for _ in range(2)]
        assert first.id == second.id and first.choices == second.choices
        assert len(rig.service.link.generations) == 2


async def test_sessions_of_completions_do_not_stay() -> None:
    async with door(completion_ttl_s=300.0) as rig:
        await complete(rig, ["a", "b"])
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert len(sessions) == 2
        for one in sessions:
            assert one.expire_time.seconds - one.update_time.seconds in (299, 300, 301)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"prompt": []}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "no ids": ({"prompt": [[1], []]}, "prompt"),
    "this and that": ({"prompt": ["a", 1]}, "prompt"),
    "half a number": ({"prompt": [1.5]}, "prompt[0]"),
    "an id below 0": ({"prompt": [-1]}, "prompt[0]"),
    "an id that there is not": ({"prompt": [99999]}, "prompt"),
    "very many prompts": ({"prompt": ["a"] * 129}, "prompt"),
    "a suffix": ({"suffix": "end"}, "suffix"),
    "6 likely tokens": ({"logprobs": 6}, "logprobs"),
    "true for a number": ({"logprobs": True}, "logprobs"),
    "those of the prompt": ({"echo": True, "logprobs": 1}, "echo"),
    "fewer than are asked for": ({"n": 3, "best_of": 2}, "best_of"),
    "the best of a stream": ({"best_of": 2, "stream": True}, "best_of"),
    "no room to answer": ({"max_tokens": 0}, "max_tokens"),
    "a hot temperature": ({"temperature": 1e9}, "temperature"),
    "too many answers": ({"n": 1000}, "n"),
    "a word as token": ({"logit_bias": {"word": 1}}, "logit_bias"),
}


async def test_bad_input_is_refused_by_name() -> None:
    async with door() as rig:
        for name, (fields, param) in BAD.items():
            with pytest.raises(BadRequestError) as caught:
                await complete(rig, "the fox", extra_body=fields)
            assert caught.value.param == param, (name, caught.value.body)
            assert param in caught.value.message, (name, caught.value.body)


async def nothing_runs(rig: HttpRig) -> None:
    async with asyncio.timeout(20):
        while rig.service.conversations.turns.running:
            await asyncio.sleep(0.01)


async def test_one_bad_prompt_ends_the_turns_of_the_others() -> None:
    async with door(answer=None) as rig:
        with pytest.raises(BadRequestError) as caught:
            await complete(rig, ["the fox", "the " * 300])
        assert caught.value.code == "context_length_exceeded"
        await nothing_runs(rig)


async def test_who_leaves_discards_all_turns() -> None:
    async with door(answer=None) as rig:
        waiting = asyncio.create_task(complete(rig, ["a", "b"], stream=True))
        while len(rig.service.link.generations) < 2:
            await asyncio.sleep(0.01)
        stream = await asyncio.wait_for(waiting, 5)
        await stream.close()
        await nothing_runs(rig)
