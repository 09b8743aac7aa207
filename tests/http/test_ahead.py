"""Contexts that are counted or computed ahead of their responses, through OpenAI's own client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from pensieve.v1 import pensieve_pb2 as pb
from support.engine.checkpoints import tiny_checkpoint
from support.http.http_rig import HttpRig, door, opened
from support.http.tool_rig import tool_door
from support.service.real_engine import TinyModel, really_serving
from support.tool_templates import STYLES, WEATHER, write_model

TOOL: Any = {"type": "function", "strict": True, **WEATHER["function"]}
ITEMS: Any = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "Ho."},
    {"role": "user", "content": "hi"},
]


async def sessions(rig: HttpRig) -> int:
    return len((await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions)


async def test_tokens_are_those_of_the_response() -> None:
    async with tool_door("Blue.") as rig:
        conversation = await rig.client.conversations.create(items=[{"role": "user", "content": "hi"}])
        empty = await rig.client.conversations.create()
        first = await rig.client.responses.create(model="tiny", input="How is it?", tools=[TOOL])
        second = await rig.client.responses.create(model="tiny", input="So?", previous_response_id=first.id)
        cases: list[dict[str, Any]] = [
            {"input": "hi"},
            {"input": ITEMS, "instructions": "Be brief.", "tools": [TOOL]},
            {"input": [*ITEMS, *({"role": "user", "content": str(n)} for n in range(70))]},
            {"input": "And?", "previous_response_id": second.id},
            {"input": "And?", "previous_response_id": first.id, "tools": [TOOL]},
            {"input": "And?", "previous_response_id": second.id, "instructions": "Be brief."},
            {"input": "And?", "conversation": conversation.id},
            {"input": "And?", "conversation": conversation.id, "instructions": "Be rude.", "tools": [TOOL]},
            {"input": "And?", "conversation": empty.id, "instructions": "Be rude."},
        ]
        for asked in cases:
            before = await sessions(rig)
            counted = await rig.client.responses.input_tokens.count(model="tiny", **asked)
            assert await sessions(rig) == before, "nothing is left behind"
            response = await rig.client.responses.create(model="tiny", **asked)
            assert response.usage is not None
            assert counted.input_tokens == response.usage.input_tokens, asked
        for bad in ({"input": []}, {"input": "x", "previous_response_id": "resp_x"}):
            with pytest.raises(BadRequestError):
                await rig.client.responses.input_tokens.count(model="tiny", **bad)  # type: ignore[arg-type]
        long = await rig.client.responses.input_tokens.count(model="tiny", input="word " * 5_000)
        assert long.input_tokens > 4096, "also of what does not fit"


PREWARM: Any = {"prewarm": True}


async def test_a_prewarmed_context_is_read_from_the_cache(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama3", tmp_path, vocab_size=480, max_position_embeddings=4096)
    write_model(folder, *STYLES["qwen"])
    model = TinyModel(folder)
    async with (
        really_serving(model, device="4096tokens") as service,
        opened(service.target) as (url, client),
    ):
        rig = HttpRig(service, client, url)

        async def cached(**asked: Any) -> Any:
            response = await client.responses.create(model="tiny", max_output_tokens=4, **asked)
            assert response.usage is not None and response.usage.input_tokens > 100
            return response, response.usage.input_tokens_details.cached_tokens / response.usage.input_tokens

        async def prewarm(**asked: Any) -> Any:
            warmed = await client.responses.create(model="tiny", prompt_cache_options=PREWARM, **asked)
            assert (warmed.status, warmed.output, warmed.store) == ("completed", [], False)  # type: ignore[attr-defined]
            assert warmed.usage is not None and warmed.usage.output_tokens == 0
            return warmed

        await prewarm(input="The first words. " * 10)
        first, share = await cached(input="The first words. " * 10)
        assert share > 0.8, "a new conversation"
        await prewarm(input="Other words follow. " * 10, previous_response_id=first.id)
        second, share = await cached(input="Other words follow. " * 10, previous_response_id=first.id)
        assert share > 0.9, "the next turn"
        before = await sessions(rig)
        warmed = await prewarm(previous_response_id=second.id)
        assert await sessions(rig) == before, "the session itself"
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(warmed.id)
        with pytest.raises(BadRequestError):
            await client.responses.create(model="tiny", input="x", previous_response_id=warmed.id)

        # Agents resend their histories to responses that are not stored.
        said: Any = [{"role": "user", "content": "Words that are not kept. " * 10}]
        unstored, _ = await cached(input=said, store=False)
        said += [*unstored.output, {"role": "user", "content": "And?"}]
        _, share = await cached(input=said, store=False)
        assert share > 0.8, "the beginning of a resent history"


async def test_prewarming_is_refused_where_it_has_no_meaning() -> None:
    async with door() as rig:
        for more in ({"stream": True}, {"background": True}, {"input": []}):
            with pytest.raises(BadRequestError):
                await rig.client.responses.create(
                    **{"model": "tiny", "input": "hi", "prompt_cache_options": PREWARM, **more}  # type: ignore[call-overload]
                )
        with pytest.raises(BadRequestError) as caught:
            await rig.client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                extra_body={"prompt_cache_options": PREWARM},
            )
        assert caught.value.param == "prompt_cache_options.prewarm"
        assert not await sessions(rig) and not rig.service.link.generations
