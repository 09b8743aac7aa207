"""Stop strings at the door: behind thoughts, and what the next call builds on."""

from __future__ import annotations

from typing import Any

import pytest

from support.http.tool_rig import context_of, tool_door

THINKS = "<think>\nthe fox, perhaps\n</think>\n\nA quick fox jumps."


async def chat(rig: Any, messages: list[Any], **options: Any) -> Any:
    return await rig.client.chat.completions.create(model="tiny", messages=messages, **options)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_is_whole_whatever_the_stop_strings(stream: bool) -> None:
    async with tool_door(THINKS, style="thinking") as rig:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        answer = await chat(rig, asked, stop=["fox", "\n"], stream=stream)
        parts = [one.choices[0] async for one in answer if one.choices] if stream else [answer.choices[0]]
        said = [part.delta if stream else part.message for part in parts]
        assert "".join(getattr(one, "reasoning_content", None) or "" for one in said) == "the fox, perhaps"
        assert "".join(one.content or "" for one in said) == "A quick "
        assert parts[-1].finish_reason == "stop"


async def test_the_next_call_builds_on_what_the_client_was_given() -> None:
    async with tool_door("hello world, the quick fox", style="qwen") as rig:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        first = (await chat(rig, asked, stop="ck f", logprobs=True, top_logprobs=1)).choices[0]
        assert first.message.content == "hello world, the qui"
        scored = [one.token for one in first.logprobs.content]
        assert "".join(scored) == first.message.content
        again = [
            *asked,
            {"role": "assistant", "content": first.message.content},
            {"role": "user", "content": "and?"},
        ]
        await chat(rig, again)
        assert len({turn.session for turn in rig.service.link.generations}) == 1
        assert "the qui<|im_end|>" in context_of(rig) and "fox" not in context_of(rig)


async def test_a_control_token_ends_the_answer_by_its_name() -> None:
    async with tool_door("hello <|eot_id|>world", style="qwen") as rig:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        choice = (await chat(rig, asked, stop=["<|eot_id|>", "</s>"])).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("hello ", "stop")
