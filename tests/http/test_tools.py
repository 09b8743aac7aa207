"""Functions and thoughts through OpenAI's own client: calls, results, streams, chains, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError
from transformers import PreTrainedTokenizerFast

from support.http.http_rig import HttpRig
from support.http.tool_rig import OSLO, ROME, context_of, tool_door
from support.tool_templates import STYLES, WEATHER, write_model

FUNCTION = WEATHER["function"]
TOOL: Any = {"type": "function", "strict": True, **FUNCTION}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
RESULT = "blue skies"


async def respond(rig: HttpRig, said: Any, **options: Any) -> Any:
    options = {"tools": [TOOL], **options}
    return await rig.client.responses.create(model="tiny", input=said, **options)


async def say(rig: HttpRig, messages: list[Any], **options: Any) -> Any:
    options = {"tools": [CHAT_TOOL], **options}
    return await rig.client.chat.completions.create(model="tiny", messages=messages, **options)


def result(call: Any, text: str = RESULT) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call.call_id, "output": text}


def types(response: Any) -> list[str]:
    return [item.type for item in response.output]


@pytest.mark.parametrize(
    ("style", "answer"),
    [("qwen", ROME), ("llama", '{"name": "weather", "parameters": {"town": "Rome"}}'),
     ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "Rome"}}]')],
)  # fmt: skip
async def test_a_call_its_result_and_the_answer(style: str, answer: str) -> None:
    async with tool_door(answer, "Blue.", style=style) as rig:
        first = await respond(rig, "How is it in Rome?")
        assert (types(first), first.status) == (["function_call"], "completed")
        call = first.output[0]
        assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Rome"})
        assert first.tools[0].name == "weather" and first.tools[0].strict is True
        assert "Tells the weather" in context_of(rig)
        second = await respond(rig, [result(call)], previous_response_id=first.id)
        assert (second.output_text, types(second)) == ("Blue.", ["message"])
        # The same session, and the call as the model wrote it: nothing is rendered again.
        first_turn, second_turn = rig.service.link.generations
        assert second_turn.session == first_turn.session
        assert second_turn.tokens[: len(first_turn.tokens)] == first_turn.tokens
        assert answer in context_of(rig) and RESULT in context_of(rig)
        assert context_of(rig).count("Tells the weather") == 1
        again = await rig.client.responses.retrieve(first.id)
        assert again.output == first.output
        listed = await rig.client.responses.input_items.list(second.id)
        assert [(one.type, one.call_id, one.output) for one in listed.data] == [  # type: ignore[union-attr]
            ("function_call_output", call.call_id, RESULT)
        ]


async def test_parallel_calls_between_words() -> None:
    async with tool_door(f"Let me see.\n{ROME}\n{OSLO}", "Blue and grey.") as rig:
        first = await respond(rig, "How is it in Rome and Oslo?")
        assert types(first) == ["message", "function_call", "function_call"]
        assert first.output_text == "Let me see."
        calls = first.output[1:]
        assert [json.loads(call.arguments)["town"] for call in calls] == ["Rome", "Oslo"]
        assert len({call.call_id for call in calls} | {item.id for item in first.output}) == 5
        results = [result(call, text) for call, text in zip(calls, ("blue", "grey"), strict=True)]
        second = await respond(rig, results, previous_response_id=first.id)
        assert second.output_text == "Blue and grey."
        assert "<tool_response>\nblue\n</tool_response>\n<tool_response>\ngrey" in context_of(rig)


async def stream_of(rig: HttpRig, said: Any, **options: Any) -> list[Any]:
    return [event async for event in await respond(rig, said, stream=True, **options)]


async def test_the_events_of_a_call() -> None:
    async with tool_door(f"Let me see.\n{ROME}") as rig:
        events = await stream_of(rig, "How is it in Rome?")
        assert [event.sequence_number for event in events] == list(range(len(events)))
        names = [event.type.removeprefix("response.") for event in events]
        told = [name for name in names if name != "output_text.delta"]
        assert told == [
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
            "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.delta",
            "function_call_arguments.done", "output_item.done", "completed",
        ]  # fmt: skip
        final = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert done == final.output
        call = final.output[1]
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(event.delta for event in deltas) == call.arguments == '{"town": "Rome"}'
        assert {(event.item_id, event.output_index) for event in deltas} == {(call.id, 1)}
        words = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert words == final.output_text == "Let me see."


NONSENSE = ["<tool_call>{nonsense</tool_call>", "<tool_call>", '<tool_call>["weather"]</tool_call>',
            '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>']  # fmt: skip


@pytest.mark.parametrize("text", NONSENSE)
async def test_what_is_no_call_is_words(text: str) -> None:
    async with tool_door(text) as rig:
        assert (await respond(rig, "hi")).output_text == text
        events = await stream_of(rig, "hi")
        assert events[-1].type == "response.completed" and events[-1].response.output_text == text
        completion = await say(rig, [{"role": "user", "content": "hi"}])
        assert completion.choices[0].message.content == text
        assert completion.choices[0].finish_reason == "stop"


async def test_calls_in_a_conversation() -> None:
    async with tool_door(ROME, "Blue.", "Bye.") as rig:
        conversation = await rig.client.conversations.create()
        first = await respond(rig, "How is it in Rome?", conversation=conversation.id)
        second = await respond(rig, [result(first.output[0])], conversation=conversation.id)
        assert second.output_text == "Blue."
        # Tools hold for one response, as instructions do.
        third = await respond(rig, "Thanks", conversation=conversation.id, tools=[])
        assert third.output_text == "Bye."
        assert len({turn.session for turn in rig.service.link.generations}) == 1
        items = await rig.client.conversations.items.list(conversation.id, order="asc")
        assert [item.type for item in items.data] == [
            "message", "function_call", "function_call_output", "message", "message", "message",
        ]  # fmt: skip
        assert items.data[1].arguments == '{"town": "Rome"}'  # type: ignore[union-attr]
        session = await rig.service.session(f"sessions/{conversation.id.replace('_', '-')}")
        assert (session.revision, session.config.tools_json) == (1 + 3, ""), "made, and three turns"


async def test_added_calls_are_listed_with_the_ids_of_their_results() -> None:
    """As sessions of the Agents SDK add them: it drops calls without a result."""
    town = {"type": "function_call", "name": "weather", "arguments": '{"town": "Rome"}'}
    async with tool_door("Blue.") as rig:
        items: Any = [
            {"role": "user", "content": "How is it?"},
            *({**town, "call_id": name} for name in ("b", "a")),
            *({"type": "function_call_output", "call_id": name, "output": name} for name in ("b", "a")),
            {"role": "user", "content": "And now?"},
            {**town, "call_id": "c"},
        ]
        conversation = await rig.client.conversations.create(items=items)
        listed = (await rig.client.conversations.items.list(conversation.id, order="asc")).data
        names = [getattr(item, "call_id", "") for item in listed]
        assert names[:6] == ["", "b", "a", "b", "a", ""] and names[6].startswith("call_")


async def test_a_result_that_was_removed_is_gone_for_the_model() -> None:
    call = {"type": "function_call", "name": "weather", "arguments": '{"town": "Rome"}'}
    async with tool_door("Blue.") as rig:
        items: Any = [
            {"role": "user", "content": "How is it?"},
            *({**call, "call_id": name} for name in "ab"),
            *(
                {"type": "function_call_output", "call_id": name, "output": f'{{"sky": "{name}"}}'}
                for name in "ab"
            ),
        ]
        conversation = await rig.client.conversations.create(items=items)
        newest = (await rig.client.conversations.items.list(conversation.id)).data[0]
        await rig.client.conversations.items.delete(str(newest.id), conversation_id=conversation.id)
        await respond(rig, "And now?", conversation=conversation.id)
        assert context_of(rig).endswith(
            '<tool_response>\n{"sky": "a"}\n</tool_response><|im_end|>\n'
            "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
        )


async def test_other_tools_are_another_session() -> None:
    async with tool_door("Hello.") as rig:
        first = await respond(rig, "hi")
        same = await respond(rig, "and?", previous_response_id=first.id)
        other = {**TOOL, "name": "traffic"}
        changed = await respond(rig, "so?", previous_response_id=same.id, tools=[other])
        without = await respond(rig, "well?", previous_response_id=changed.id, tools=[])
        sessions = Counter(turn.session for turn in rig.service.link.generations)
        assert sorted(sessions.values()) == [1, 1, 2]
        assert "traffic" in context_of(rig, 2) and '"weather"' not in context_of(rig, 2)
        assert "# Tools" not in context_of(rig) and context_of(rig).count("Hello.") == 3
        assert without.output_text == "Hello."


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_resends_its_calls(stream: bool) -> None:
    """A history with calls and results is found again, and goes on with the tokens as they were."""
    async with tool_door(f"Let me see.\n{ROME}\n{OSLO}", "Blue and grey.", "Bye.") as rig:
        history: list[Any] = [{"role": "user", "content": "How is it in Rome and Oslo?"}]
        for step in range(3):
            message = await chat(rig, history, stream)
            history.append(message)
            for call in message.get("tool_calls") or ():
                # As frameworks do that parse arguments and write them again.
                call["function"]["arguments"] = json.dumps(
                    json.loads(call["function"]["arguments"]), indent=1
                )
                history.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
            if step:
                history.append({"role": "user", "content": "Thanks"})
        assert [one.get("content") for one in history if one["role"] == "assistant"] == [
            "Let me see.", "Blue and grey.", "Bye.",
        ]  # fmt: skip
        turns = rig.service.link.generations
        assert len({turn.session for turn in turns}) == 1
        for before, after in itertools.pairwise(turns):
            assert after.tokens[: len(before.tokens)] == before.tokens
        # The same talk without tools, or with others, is another one.
        await say(rig, history, tools=[])
        assert rig.service.link.generations[-1].session != turns[0].session


async def test_what_was_called_is_part_of_what_was_said() -> None:
    async with tool_door(ROME, "Blue.") as rig:
        history: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
        history.append(await chat(rig, history, False))
        call = history[1]["tool_calls"][0]
        history.append({"role": "tool", "tool_call_id": call["id"], "content": RESULT})
        call["function"]["arguments"] = '{"town": "Oslo"}'
        await say(rig, history)
        assert len({turn.session for turn in rig.service.link.generations}) == 2
        assert "Oslo" in context_of(rig)


async def test_results_belong_to_their_calls() -> None:
    """Two conversations that differ only in which call a result belongs to are not taken for each other."""
    rome, oslo = (
        f'{{"name": "weather", "arguments": {{"town": "{town}"}}, "id": "{town.lower()}00001"}}'
        for town in ("Rome", "Oslo")
    )
    async with tool_door(f"[TOOL_CALLS][{rome}, {oslo}]", "Well.", style="mistral") as rig:
        asked: list[Any] = [{"role": "user", "content": "How is it?"}]
        asked.append(await chat(rig, asked, False))
        talks, contexts = [], []
        for names in (("rome00001", "oslo00001"), ("oslo00001", "rome00001")):
            results = [
                {"role": "tool", "tool_call_id": name, "content": text}
                for name, text in zip(names, ("20", "5"), strict=True)
            ]
            talks.append([*asked, *results])
            talks[-1].append(await chat(rig, talks[-1], False))
            contexts.append(context_of(rig))
        assert contexts[0] != contexts[1]
        for talk, context in zip(talks, contexts, strict=True):
            await say(rig, [*talk, {"role": "user", "content": "Thanks"}])
            assert context_of(rig).startswith(context)


async def test_an_answer_whose_white_space_was_changed_is_another() -> None:
    async with tool_door("Hello. ") as rig:
        history: list[Any] = [{"role": "user", "content": "hi"}]
        history.append(await chat(rig, history, False))
        history.append({"role": "user", "content": "Thanks"})
        await say(rig, history)
        assert "Hello. <|im_end|>" in context_of(rig)
        history[1]["content"] = "Hello."
        await say(rig, history)
        assert "Hello.<|im_end|>" in context_of(rig)


async def chat(rig: HttpRig, history: list[Any], stream: bool) -> dict[str, Any]:
    """The next message of a chat, as a client would send it again."""
    if not stream:
        choice = (await say(rig, history)).choices[0]
        assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        return choice.message.model_dump(exclude_none=True)  # type: ignore[no-any-return]
    async with rig.client.chat.completions.stream(
        model="tiny", messages=history, tools=[CHAT_TOOL]
    ) as events:
        async for _ in events:
            pass
        completion = await events.get_final_completion()
    choice = completion.choices[0]
    assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
    message: dict[str, Any] = {"role": "assistant", "content": choice.message.content}
    if choice.message.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in choice.message.tool_calls
        ]
    return message


async def test_a_history_from_elsewhere() -> None:
    """Calls that this service never generated are rendered as the template writes them."""
    async with tool_door("Blue.") as rig:
        call = {"name": "weather", "arguments": '{"town": "Rome"}'}
        await say(rig, [
            {"role": "user", "content": "How is it in Rome?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c1", "content": RESULT},
        ])  # fmt: skip
        assert f"<|im_start|>assistant\n{ROME}<|im_end|>" in context_of(rig)
        await respond(rig, [
            {"role": "user", "content": "How is it in Rome?"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "function_call", "call_id": "c1", **call},
            {"type": "function_call_output", "call_id": "c1", "output": RESULT},
        ])  # fmt: skip
        assert rig.service.link.generations[0].tokens == rig.service.link.generations[1].tokens


async def test_responses_resend_their_calls() -> None:
    async with tool_door(ROME, "Blue.") as rig:
        asked: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
        first = await respond(rig, asked)
        told = [item.model_dump(exclude_none=True) for item in first.output]
        second = await respond(rig, [*asked, *told, result(first.output[0])])
        assert second.output_text == "Blue."
        assert len({turn.session for turn in rig.service.link.generations}) == 1


async def test_thoughts() -> None:
    async with tool_door(f"<think>\nHm, Rome.\n</think>\n\n{ROME}", "Blue.", style="thinking") as rig:
        events = await stream_of(rig, "How is it in Rome?")
        final = events[-1].response
        assert types(final) == ["reasoning", "function_call"]
        assert final.output[0].content[0].text == "Hm, Rome."
        thought = [event for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(event.delta for event in thought) == "Hm, Rome."
        assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
        told = [item.model_dump(exclude_none=True) for item in final.output]
        asked = {"role": "user", "content": "How is it in Rome?"}
        second = await respond(rig, [asked, *told, result(final.output[1])])
        assert second.output_text == "Blue."
        # Kept as generated, thoughts and all.
        assert f"<think>\nHm, Rome.\n</think>\n\n{ROME}" in context_of(rig)
    async with tool_door("<think>\nHm.\n</think>\n\nYes.", style="thinking") as rig:
        choice = (await say(rig, [{"role": "user", "content": "hi"}], tools=[])).choices[0]
        assert (choice.message.content, choice.message.reasoning_content) == ("Yes.", "Hm.")
        chunks = [
            one async for one in await say(rig, [{"role": "user", "content": "hi"}], stream=True, tools=[])
        ]
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."


async def test_a_response_in_the_background_is_read_again() -> None:
    async with tool_door(f"Well. {ROME}") as rig:
        whole = await stream_of(rig, "hi", background=True)
        response = whole[-1].response
        rest = await rig.client.responses.retrieve(response.id, stream=True, starting_after=4)
        again = [event async for event in rest]
        assert again[:-1] == whole[5:-1]
        assert again[-1].response.output == response.output


async def test_no_calls_wanted() -> None:
    async with tool_door(ROME) as rig:
        response = await respond(rig, "hi", tool_choice="none")
        assert (response.output_text, types(response), response.tool_choice) == (ROME, ["message"], "none")
        assert (await rig.client.responses.retrieve(response.id)).output_text == ROME


OTHER: Any = {**TOOL, "name": "traffic"}
ALLOWED: Any = {
    "type": "allowed_tools",
    "mode": "required",
    "tools": [{"type": "function", "name": "weather"}],
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "forced without tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "named and not there": ({"tool_choice": {"type": "function", "name": "traffic"}}, "tool_choice"),
    "no choice": ({"tool_choice": "weather"}, "tool_choice"),
    "another kind of choice": ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    "allowed, not there": ({"tool_choice": {**ALLOWED, "tools": [{"type": "function", "name": "x"}]}}, "tool_choice"),
    "nothing allowed": ({"tool_choice": {**ALLOWED, "tools": []}}, "tool_choice"),
    "no function": ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    "no name": ({"tools": [{"type": "function"}]}, "tools[0].name"),
    "bad name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools"),
    "twice": ({"tools": [TOOL, TOOL]}, "tools"),
    "marks": ({"tools": [{**TOOL, "description": "<|im_end|>"}]}, "tools"),
    "dropping": ({"truncation": "auto"}, "truncation"),
    "no output": ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    "bad arguments": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}, "input[0].arguments"
    ),
}  # fmt: skip


async def test_bad_input_is_refused_by_name() -> None:
    async with tool_door("Hello.") as rig:
        for name, (fields, param) in REFUSED.items():
            with pytest.raises(BadRequestError) as caught:
                await respond(rig, "hi", extra_body=fields)
            assert caught.value.param == param, (name, caught.value.body)
        deep: Any = {}
        for _ in range(300):
            deep = {"x": deep}
        with pytest.raises(BadRequestError, match="nested deeper"):
            await respond(rig, "hi", tools=[{**TOOL, "parameters": deep}])
        too_deep = b'{"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {"x": '
        with pytest.raises(BadRequestError, match="too deep"):
            await rig.client.post(
                "/responses",
                cast_to=object,
                content=too_deep + b"[" * 50_000 + b"]" * 50_000 + b"}}]}",
                options={"headers": {"content-type": "application/json"}},
            )
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        with pytest.raises(BadRequestError) as caught:
            await say(rig, [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "?"}])
        assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
        assert not rig.service.link.generations


THOUGHT = "<think>\nHm.\n</think>\n\n"


async def test_a_resent_history_is_what_the_template_writes_of_the_whole_conversation(tmp_path: Path) -> None:
    """Whatever the door knows nothing of is imported; thoughts of earlier answers are not in it, and none is added."""
    folder = write_model(tmp_path, *STYLES["last thinks"])
    oracle = PreTrainedTokenizerFast.from_pretrained(str(folder))
    said: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": f"{THOUGHT}Hi."},
        {"role": "user", "content": "And now?"},
        {"role": "assistant", "content": "Now."},
        {"role": "user", "content": "the end"},
    ]
    whole = oracle.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert "<think>" not in whole and "Hm." not in whole
    async with tool_door("Bye.", style="last thinks") as rig:
        await say(rig, said, tools=[])
        assert context_of(rig) == whole
        await respond(rig, said, tools=[])
        assert context_of(rig) == whole
        await say(rig, said, tools=[], extra_body={"session": "my-own"})
        assert context_of(rig) == whole


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize(("style", "kept"), [("thinking", True), ("qwen", False)])
async def test_a_thought_that_is_resent_beside_the_answer_is_read_by_a_model_that_thinks(
    field: str, style: str, kept: bool
) -> None:
    answer = {"role": "assistant", "content": "Hi.", field: "Hm."}
    said: list[Any] = [{"role": "user", "content": "hello"}, answer, {"role": "user", "content": "the end"}]
    async with tool_door("Bye.", "Bye again.", style=style) as rig:
        await say(rig, said, tools=[])
        assert (f"{THOUGHT}Hi." in context_of(rig)) is kept
        assert ("Hm." in context_of(rig)) is kept
        # The history is found by its words, with its thoughts or without.
        answer.pop(field)
        said += [{"role": "assistant", "content": "Bye."}, {"role": "user", "content": "and now"}]
        await say(rig, said, tools=[])
        assert len(rig.service.link.generations) == 2
        before, after = (context_of(rig, turn) for turn in (0, 1))
        assert after.startswith(before)


async def test_what_was_generated_stays_as_it_was_generated() -> None:
    async with tool_door(f"{THOUGHT}Hi.", "Bye.", style="last thinks") as rig:
        first = await respond(rig, "hello", tools=[])
        await respond(rig, "and now?", tools=[], previous_response_id=first.id)
        before, after = (context_of(rig, turn) for turn in (0, 1))
        assert after.startswith(f"{before}{THOUGHT}Hi.<|im_end|>\n<|im_start|>user\nand now?")
