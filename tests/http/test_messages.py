"""Anthropic's Messages through Anthropic's own client, every answer checked against its types."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pensieve.client import FinishReason, Piece
from pensieve.core import FinishReason as Finish
from pensieve.errors import Internal
from pensieve.http.messages import BlockAnswer, BlockEvents
from pensieve.http.responses.ids import ResponseId
from pensieve.speech import CallForm, SpeechForm
from pensieve.v1 import pensieve_pb2 as pb
from support.engine.checkpoints import tiny_checkpoint
from support.http.http_rig import HttpRig, door, opened
from support.http.tool_rig import OSLO, ROME, context_of, tool_door
from support.lazily import lazily
from support.service.real_engine import TinyModel, really_serving
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import ANSWER, encode
from support.sources import ROOT
from support.tool_templates import STYLES, WEATHER, write_model

FUNCTION = WEATHER["function"]
TOOL: Any = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
}
HI: Any = [{"role": "user", "content": "hi"}]
RESULT = "blue skies"
anthropic = lazily("anthropic")


@functools.cache
def event_type() -> TypeAdapter[Any]:
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


def client_of(rig: HttpRig, **options: Any) -> Any:
    options = {"api_key": "acme", "max_retries": 0, **options}
    return anthropic.AsyncAnthropic(base_url=rig.url, _strict_response_validation=True, **options)


async def say(rig: HttpRig, messages: Any, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 100, **options}
    async with client_of(rig) as client:
        if not options.pop("streamed", False):
            return await client.messages.create(messages=messages, **options)
        async with client.messages.stream(messages=messages, **options) as stream:
            return await stream.get_final_message()


async def posted(rig: HttpRig, body: dict[str, Any], **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        return await http.post("/v1/messages", json=body, headers=headers)


async def events_of(rig: HttpRig, **options: Any) -> list[dict[str, Any]]:
    """The events of a stream, each checked against the SDK's types."""
    body = {"model": "tiny", "max_tokens": 100, "messages": HI, "stream": True, **options}
    *lines, rest = (await posted(rig, body)).text.split("\n\n")
    assert rest == ""
    found = []
    for line in lines:
        name, _, data = line.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event_type().validate_python(event).type == event["type"]
        found.append(event)
    return found


def results(message: Any, text: str = RESULT) -> dict[str, Any]:
    calls = [one for one in message.content if one.type == "tool_use"]
    blocks = [{"type": "tool_result", "tool_use_id": one.id, "content": text} for one in calls]
    return {"role": "user", "content": blocks}


async def test_a_message_and_a_resent_history() -> None:
    async with door() as rig:
        first = await say(rig, HI, system="Be brief.")
        assert (first.type, first.role, first.model) == ("message", "assistant", "tiny")
        # Vercel's client refuses a text block with `citations: null`.
        assert first.to_dict()["content"] == [{"type": "text", "text": ANSWER}]
        assert (first.stop_reason, first.stop_sequence) == ("end_turn", None)
        assert first._request_id and first.usage.output_tokens > 0
        history = [*HI, first.to_param(), {"role": "user", "content": [{"type": "text", "text": "again"}]}]
        cached: Any = {"type": "ephemeral"}
        await say(rig, history, system=[{"type": "text", "text": "Be brief.", "cache_control": cached}])
        chat = [
            {"role": "system", "content": "Be brief."},
            *HI,
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": "and again"},
        ]
        # The protocols share their conversations.
        await rig.client.chat.completions.create(model="tiny", messages=chat)
        (session,) = {turn.session for turn in rig.service.link.generations}
        assert len(rig.service.link.generations) == 3, session


async def test_the_order_of_events() -> None:
    async with door() as rig:
        found = await events_of(rig)
        kinds = [event["type"] for event in found if event["type"] != "content_block_delta"]
        assert kinds == [
            "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
        ]  # fmt: skip
        start, delta = found[0]["message"], found[-2]
        assert start["stop_reason"] is None and start["content"] == []
        assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        whole = await say(rig, HI)
        assert delta["usage"]["output_tokens"] == whole.usage.output_tokens
        assert sum(delta["usage"][name] for name in INPUTS) == sum(
            getattr(whole.usage, name) for name in INPUTS
        )


TURN = ResponseId(f"chat-{'0' * 32}", "00000000-0000-0000-0000-000000000001", 2)
INPUTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


async def test_the_events_of_thoughts_and_calls() -> None:
    answer = f"<think>\nHm.\n</think>\n\nLet me see.\n{ROME}\n{OSLO}"
    async with tool_door(answer, style="thinking") as rig:
        found = await events_of(rig, tools=[TOOL])
        told = [
            (event["index"], event.get("content_block", event.get("delta", {})).get("type"))
            for event in found
            if "index" in event
        ]
        assert list(dict.fromkeys(told)) == [
            (0, "thinking"), (0, "thinking_delta"), (0, "signature_delta"), (0, None),
            (1, "text"), (1, "text_delta"), (1, None),
            (2, "tool_use"), (2, "input_json_delta"), (2, None),
            (3, "tool_use"), (3, "input_json_delta"), (3, None),
        ]  # fmt: skip
        assert found[-2]["delta"]["stop_reason"] == "tool_use"


PIECES = ["<think>", "</think>", "Hm", "\n\n", " ", ROME, OSLO, "<tool_call>", "{nonsense", "so", "é"]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(PIECES), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_message(text: str, cuts: list[int], thinks: bool, shown: bool) -> None:
    ends = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    answer = BlockAnswer(TURN, "tiny", SpeechForm(CallForm.HERMES, thinks=thinks), shown)
    turn: Any = SimpleNamespace(
        text=text,
        usage=SimpleNamespace(
            context_tokens=9, gpu_cached_tokens=4, swapped_in_tokens=1, recomputed_tokens=2, output_tokens=3
        ),
        finish_reason=FinishReason.EOS,
        stop_sequence="",
    )

    class Stream:
        def __init__(self) -> None:
            self.turn = turn

        async def __aiter__(self) -> Any:
            for begin, end in itertools.pairwise(ends):
                yield Piece(text=text[begin:end])

    async def streamed() -> Any:
        snapshot: Any = None
        buffers: dict[int, bytes] = {}
        accumulate = anthropic.lib.streaming._messages.accumulate_event
        stream: Any = Stream()
        async for data in BlockEvents(answer).stream_events(stream):
            event = event_type().validate_json(data.partition(b"data: ")[2])
            snapshot = accumulate(event=event, current_snapshot=snapshot, json_bufs=buffers)
        return snapshot

    whole = anthropic.types.Message.model_validate_json(msgspec.json.encode(answer.whole(turn)))
    told = asyncio.run(streamed())
    assert [one.to_dict() for one in told.content] == [one.to_dict() for one in whole.content]
    assert (told.stop_reason, told.usage.to_dict()) == (whole.stop_reason, whole.usage.to_dict())


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_loop_stays_in_one_session(streamed: bool) -> None:
    """The history is found again, and goes on with the tokens as they were generated."""
    answers = (f"Let me see.\n{ROME}\n{OSLO}", OSLO, "Blue and grey.", "Bye.")
    async with tool_door(*answers) as rig:
        history: list[Any] = [{"role": "user", "content": "How is it?"}]
        reasons = []
        for _ in answers:
            message = await say(rig, history, tools=[TOOL], streamed=streamed)
            reasons.append(message.stop_reason)
            history.append({"role": "assistant", "content": [one.to_dict() for one in message.content]})
            history.append(
                results(message) if reasons[-1] == "tool_use" else {"role": "user", "content": "Thanks"}
            )
        assert reasons == ["tool_use", "tool_use", "end_turn", "end_turn"]
        first = history[1]["content"]
        assert [one["type"] for one in first] == ["text", "tool_use", "tool_use"]
        assert first[1]["input"] == {"town": "Rome"} and first[1]["id"] != first[2]["id"]
        turns = rig.service.link.generations
        assert len({turn.session for turn in turns}) == 1
        for before, after in itertools.pairwise(turns):
            assert after.tokens[: len(before.tokens)] == before.tokens
        assert f"<tool_response>\n{RESULT}\n</tool_response>\n<tool_response>" in context_of(rig)
        # Another answer is another conversation.
        history[1]["content"][1]["input"]["town"] = "Paris"
        await say(rig, history, tools=[TOOL])
        assert len({turn.session for turn in turns}) == 2 and "Paris" in context_of(rig)


async def test_a_history_from_elsewhere() -> None:
    async with tool_door("Blue.", "Blue.", style="thinking") as rig:
        history: Any = [
            {"role": "user", "content": "How is it in Rome?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Rome"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": RESULT}]},
                    {"type": "text", "text": "And "},
                    {"type": "text", "text": "now?"},
                ],
            },
        ]  # fmt: skip
        await say(rig, history, tools=[TOOL])
        context = context_of(rig)
        assert "<|im_start|>assistant\n<think>\nHm.\n</think>" in context and f"{ROME}<|im_end|>" in context
        assert f"{RESULT}\n</tool_response><|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>" in context


async def test_thoughts() -> None:
    async with tool_door("<think>\nHm.\n</think>\n\nYes.", style="thinking") as rig:
        thought, words = (await say(rig, HI, thinking={"type": "adaptive"})).content
        assert (thought.thinking, words.text) == ("Hm.", "Yes.") and thought.signature
        for streamed in (False, True):
            hidden = await say(
                rig, HI, thinking={"type": "adaptive", "display": "omitted"}, streamed=streamed
            )
            assert [one.type for one in hidden.content] == ["thinking", "text"]
            assert hidden.content[0].thinking == "" and hidden.content[0].signature
        # Words find the conversation, with their thoughts or without.
        again = [*HI, hidden.to_param(), {"role": "user", "content": "Sure?"}]
        await say(rig, again)
        assert rig.service.link.generations[-1].session == rig.service.link.generations[-2].session
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type"):
            await say(rig, HI, thinking={"type": "disabled"})
    async with door() as rig:
        assert (await say(rig, HI, thinking={"type": "disabled"})).content


async def test_choices() -> None:
    async with tool_door(ROME) as rig:
        other = {**TOOL, "name": "traffic", "strict": True}
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "weather"},
        ):
            message = await say(rig, HI, tools=[TOOL, other], tool_choice=choice)
            assert message.stop_reason == "tool_use"
        message = await say(rig, HI, tools=[TOOL], tool_choice={"type": "none"})
        assert [one.type for one in message.content] == ["text"] and message.stop_reason == "end_turn"


def ends(text: str, reason: Finish, **fields: Any) -> Any:
    def play(generation: ScriptedGeneration) -> None:
        generation.admit()
        for token in encode(text):
            generation.emit(token)
        generation.finish(reason, len(encode(text)), **fields)

    return play


async def test_stop_reasons() -> None:
    async with door(answer=None) as rig:
        for reason, expected in (
            (Finish.LENGTH, "max_tokens"),
            (Finish.CONTEXT_FULL, "model_context_window_exceeded"),
            (Finish.TIME_LIMIT, "max_tokens"),
            (Finish.STOP_TOKEN, "end_turn"),
        ):
            asking = asyncio.create_task(say(rig, [{"role": "user", "content": reason.name}]))
            generations = rig.service.link.generations
            count = len(generations)
            async with asyncio.timeout(30):
                while len(generations) == count:
                    await asyncio.sleep(0.005)
            ends("the fox", reason)(generations[-1])
            assert (await asking).stop_reason == expected
    async with door("the quick fox") as rig:
        for streamed in (False, True):
            stopped = await say(rig, HI, stop_sequences=["xyz", " fox"], streamed=streamed)
            assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " fox")
            assert stopped.content[0].text == "the quick"


async def test_an_answer_in_a_form() -> None:
    """Structured output reaches the engine."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    async with door() as rig:
        form = {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
        await say(rig, HI, output_config=form)
        assert rig.service.link.generations[-1].sampling.grammar


async def test_counting() -> None:
    async with tool_door(ROME, "Blue.") as rig:
        asked: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "system": "Be brief."}
        history: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
        async with client_of(rig) as client:
            for _ in range(3):
                counted = await client.messages.count_tokens(messages=history, **asked)
                sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
                message = await client.messages.create(messages=history, max_tokens=50, **asked)
                assert len(sessions) <= 1, "counting leaves nothing behind"
                assert counted.input_tokens == sum(getattr(message.usage, name) for name in INPUTS)
                assert counted.input_tokens == len(rig.service.link.generations[-1].tokens)
                history += [message.to_param(), {"role": "user", "content": "And now?"}]
            # From the middle of a conversation, and of a new one.
            branch = [*history[:2], {"role": "user", "content": "Or else?"}]
            strange = [*HI, {"role": "assistant", "content": "Ho."}, *HI]
            for messages in (branch, strange):
                counted = await client.messages.count_tokens(messages=messages, **asked)
                await client.messages.create(messages=messages, max_tokens=50, **asked)
                assert counted.input_tokens == len(rig.service.link.generations[-1].tokens)


async def test_requests_of_claude_code() -> None:
    """Its billing header is not read, and the edits that it asks for leave everything as it is."""
    asked: Any = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    async with door() as rig:
        history: list[Any] = [*HI]
        for number in range(2):
            system: Any = [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={number};"},
                {"type": "text", "text": "Be brief."},
            ]
            message = await say(rig, history, system=system, extra_body=asked)
            history += [message.to_param(), *HI]
        (session,) = {turn.session for turn in rig.service.link.generations}
        items = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        texts = [one.text for one in await rig.service.items(items[0].name)]
        assert texts[0] == "Be brief.", session


async def test_a_repeated_key_is_one_turn() -> None:
    async with door() as rig:
        headers = {"Idempotency-Key": "one"}
        first, second = [await say(rig, HI, extra_headers=headers) for _ in range(2)]
        assert first.id == second.id and len(rig.service.link.generations) == 1
        with pytest.raises(anthropic.ConflictError):
            await say(rig, HI, extra_body={"temperature": 0.5}, extra_headers=headers)


GO_ON = {"type": "continue", "previous_message_id": "msg_x"}
TEXT = {"type": "text", "text": "hi"}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "edits of the context": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        "context_management",
    ),
    "no messages": ({"messages": []}, "messages"),
    "no length": ({"max_tokens": None}, "max_tokens"),
    "no room to answer": ({"max_tokens": 0}, "max_tokens"),
    "nothing to answer": ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    "an empty message": ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content[0].text"),
    "no blocks": ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "an empty block": (
        {"messages": [{"role": "user", "content": [TEXT, {"type": "text", "text": ""}]}]},
        "messages[0].content[1].text",
    ),
    "a role": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
        "messages[0].content[0]",
    ),
    "a call of the user": (
        {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
        "messages[0].content[0]",
    ),
    "a result of the assistant": (
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "x"}]}, *HI]},
        "messages[1].content[0]",
    ),
    "a call without a name": (
        {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "input": {}}]}, *HI]},
        "messages[1].content[0].name",
    ),
    "a result of nothing": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    "a picture in a result": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}],
                }
            ]
        },
        "messages[0].content[0].content[0]",
    ),
    "a picture in the system prompt": ({"system": [{"type": "image"}]}, "system[0]"),
    "a hot temperature": ({"temperature": 1e9}, "temperature"),
    "many stops": ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    "OpenAI's stop": ({"stop": ["x"]}, "stop"),
    "tools of a model without": ({"tools": [TOOL]}, "tools"),
    "a tool of the server": ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    "a tool that waits": ({"tools": [{**TOOL, "defer_loading": True}], "tool_choice": {"type": "none"}},
                          "tools[0].defer_loading"),
    "forced without tools": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "another choice": ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    "a tool that there is not": ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    "no name to choose": ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "thoughts between tools": ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    "a container": ({"container": "x"}, "container"),
    "a form": ({"output_config": {"format": {"type": "yaml", "schema": {}}}}, "output_config.format.type"),
    "a thread with a system prompt": ({"thread": GO_ON, "system": "Be brief."}, "system"),
    "a thread with its history": (
        {"thread": GO_ON, "messages": [*HI, {"role": "assistant", "content": "x"}, *HI]}, "messages"
    ),
    "an unknown field": ({"whatever": 1}, "whatever"),
}  # fmt: skip


async def test_bad_input_is_refused_by_name() -> None:
    async with door() as rig:
        good = {"model": "tiny", "max_tokens": 10, "messages": HI}
        for name, (fields, param) in BAD.items():
            answer = await posted(rig, {**good, **fields})
            body = answer.json()
            assert answer.status_code == 400, (name, body)
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            assert body["error"]["param"] == param and param.partition("[")[0] in body["error"]["message"], (
                name,
                body,
            )
            assert body["request_id"] == answer.headers["request-id"]
        assert not rig.service.link.generations
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions


async def test_errors_are_the_sdks() -> None:
    async with door(max_body_bytes=100_000) as rig, client_of(rig) as client:
        asked: Any = {"model": "tiny", "max_tokens": 10, "messages": HI}
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**asked, "model": "claude"})
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            await client.messages.create(**asked, system="x" * 200_000)
        assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
        with pytest.raises(anthropic.BadRequestError, match="context"):
            await client.messages.create(**asked, system="word " * 2000)
        async with httpx.AsyncClient(base_url=rig.url) as http:
            for path in ("/v1/messages/batches", "/v1/messages"):
                answer = await http.get(path)
                assert answer.status_code in (404, 405)
                assert answer.json()["type"] == "error" and answer.json()["error"]["type"]
            missing = await http.get("/v1/models/claude", headers={"anthropic-version": "2023-06-01"})
            assert missing.json()["error"]["type"] == "not_found_error" and missing.json()["type"] == "error"
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions


async def test_an_error_in_the_middle() -> None:
    async with door(answer=None) as rig, client_of(rig) as client:
        stream = await client.messages.create(model="tiny", max_tokens=10, messages=HI, stream=True)
        generation = rig.service.link.generations[0]
        generation.admit()
        generation.emit(encode("the fox")[0])
        generation.fail(Internal("the engine could not serve this request", reason="REQUEST_QUARANTINED"))
        with pytest.raises(anthropic.APIStatusError, match="could not serve") as caught:
            async for _ in stream:
                pass
        assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions[0].item_count


async def test_models_suit_both_clients() -> None:
    async with door() as rig, client_of(rig) as client:
        (mine,) = [one async for one in client.models.list()]
        (other,) = [one async for one in rig.client.models.list()]
        assert (mine.id, mine.type, mine.lifecycle) == ("tiny", "model", "active") and other.id == "tiny"
        assert (await client.models.retrieve("tiny")).max_input_tokens
        assert (await rig.client.models.retrieve("tiny")).object == "model"


async def test_a_key_comes_in_either_header() -> None:
    async with door() as rig:
        for headers in ({"x-api-key": "another"}, {"authorization": "Bearer another"}):
            answer = await posted(rig, {"model": "tiny", "max_tokens": 10, "messages": HI}, **headers)
            assert answer.status_code == 200
        # Authorization goes first.
        both = {"x-api-key": "acme", "authorization": "Bearer another"}
        history = [*HI, {"role": "assistant", "content": ANSWER}, *HI]
        body = {"model": "tiny", "max_tokens": 10, "messages": history}
        assert (await posted(rig, body, **both)).status_code == 200
        assert (await posted(rig, body, **{"x-api-key": "acme"})).status_code == 200
        sessions = [turn.session for turn in rig.service.link.generations]
        assert sessions[2] in sessions[:2] and sessions[3] not in sessions[:3]


async def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async with tool_door(ROME, "Warm and clear.") as rig:
        monkeypatch.setenv("ANTHROPIC_BASE_URL", rig.url)
        monkeypatch.setenv("ANTHROPIC_API_KEY", "acme")
        await asyncio.to_thread(
            runpy.run_path, str(ROOT / "examples" / "anthropic_tools.py"), run_name="__main__"
        )
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("0 tokens read") and not printed[1].startswith("0 ")
    assert printed[2] == "Warm and clear."


async def test_resent_tokens_are_read_from_the_cache(tmp_path: Path) -> None:
    """A tool loop on a real engine: from the third turn on at least 0.9 of what is resent."""
    folder = tiny_checkpoint("llama3", tmp_path, vocab_size=480, max_position_embeddings=4096)
    write_model(folder, *STYLES["qwen"])
    schema = {"type": "object", "properties": {"town": {"enum": ["Rome", "Oslo"]}}, "required": ["town"]}
    options: Any = {
        "model": "tiny",
        "max_tokens": 300,
        "tools": [{**TOOL, "input_schema": {**schema, "additionalProperties": False}, "strict": True}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    model = TinyModel(folder)
    async with (
        really_serving(model, device="4096tokens") as service,
        opened(service.target) as (url, openai),
    ):
        rig = HttpRig(service, openai, url)
        history: list[Any] = [{"role": "user", "content": "How is it?"}]
        before = 0
        for turn in range(5):
            message = await say(rig, history, **options, streamed=bool(turn % 2))
            assert message.stop_reason == "tool_use"
            assert message.usage.input_tokens == 0
            if turn >= 2:
                assert message.usage.cache_read_input_tokens >= 0.9 * before
            before = sum(getattr(message.usage, name) for name in INPUTS) + message.usage.output_tokens
            history += [message.to_param(), results(message, "Grey, with a little rain at noon.")]
