"""Sessions with tools through the SDK: calls, results, changes of the definitions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pensieve import core
from pensieve.client import AsyncClient, AsyncSession, CallingMessage, FunctionCall, Role, ToolResult
from pensieve.errors import FailedPrecondition, InvalidArgument
from pensieve.server.values import InputEntry, NewTurn
from pensieve.speech import CallForm, read
from pensieve.store import HistoryStore
from pensieve.store.sqlite_store import SqliteStore
from support.http.tool_rig import ROME, speaker, spoken
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import Rig, serving
from support.tool_templates import WEATHER, tokenizer_json

TRAFFIC = {"type": "function", "function": {"name": "traffic", "parameters": {"type": "object"}}}
ASKED = "How is it in Rome?"


@asynccontextmanager
async def opened(
    *answers: str, style: str = "qwen", store: HistoryStore | None = None
) -> AsyncIterator[tuple[Rig, AsyncClient]]:
    """``answers``: what the model says, one turn after the other; the last again and again."""
    left = list(answers)

    def script(_: ScriptedGeneration) -> Sequence[int]:
        return spoken(left.pop(0) if len(left) > 1 else left[0], style)

    speaks = speaker(style)
    options: dict[str, Any] = {"speaks": speaks, "vocab_size": speaks.vocab_size, "context_limit": 2048}
    async with serving(answer="", store=store, **options) as rig:
        rig.link.answer = script
        async with AsyncClient(rig.target) as client:
            yield rig, client


def context_of(rig: Rig, turn: int = -1) -> str:
    backend = Tokenizer.from_str(tokenizer_json())
    return backend.decode(rig.link.generations[turn].tokens, skip_special_tokens=False)


async def test_a_call_and_its_result() -> None:
    async with opened(ROME, "Blue.") as (rig, client):
        session = await client.create_session(tools=[WEATHER])
        turn = await session.send(ASKED)
        info = await client.server_info()
        assert info.speech.calls is CallForm.HERMES and not info.speech.thinks
        (call,) = read(turn.text, info.speech).calls
        assert (call.name, json.loads(call.arguments)) == ("weather", {"town": "Rome"})
        turn = await session.send(items=[ToolResult("blue skies", "c1")])
        assert turn.text == "Blue."
        first, second = (generation.tokens for generation in rig.link.generations)
        assert second[: len(first)] == first
        item = (await session.items())[2]
        assert (item.role, item.text, item.call_id) == (Role.TOOL, "blue skies", "c1")
        assert json.loads((await session.refresh()).tools)[0] == WEATHER
        fork = await session.fork(item=2)
        assert (await fork.refresh()).tools == session.info.tools  # type: ignore[union-attr]


async def test_a_call_outlives_its_server(tmp_path: Path) -> None:
    contexts = []
    for answers in ((ROME,), ("Blue.",), ("Bye.",)):
        store = SqliteStore(tmp_path / "history.db")
        await store.open()
        async with opened(*answers, store=store) as (rig, client):
            session = client.session("trip")
            if answers == (ROME,):
                session = await client.create_session(session_id="trip", tools=[WEATHER])
                await session.send(ASKED)
            elif answers == ("Blue.",):
                await session.send(items=[ToolResult("blue skies", "c1")])
            else:
                assert [item.call_id for item in await session.items()] == ["", "", "c1", ""]
                await session.update(tools=[TRAFFIC])
                await session.send("Thanks")
            contexts.append(context_of(rig))
        await store.close()
    assert contexts[1].startswith(contexts[0]) and contexts[0].count('"weather"') == 1
    assert contexts[2].count('"traffic"') == 1 and contexts[2].count("Tells the weather") == 0


async def test_what_is_imported_is_read_as_calls() -> None:
    async with opened("Blue.") as (rig, client):
        called = FunctionCall("weather", '{"town": "Rome"}', "c1")
        session = await client.create_session(
            tools=[WEATHER],
            initial_items=[
                ("user", ASKED),
                CallingMessage((called,), "Let me see."),
                ToolResult("blue", "c1"),
            ],
        )
        await session.send("Well?")
        assert f"Let me see.\n{ROME}<|im_end|>" in context_of(rig)
        said = read((await session.items())[1].text, (await client.server_info()).speech)
        assert (said.words, said.calls) == ("Let me see.", (FunctionCall("weather", '{"town": "Rome"}'),))


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("style", ["qwen", "llama", "mistral"])
async def test_other_tools_are_what_a_new_session_would_show(style: str, system: str | None) -> None:
    # A template without a generation prompt leaves the space before the answer to the model.
    async with opened(" Hello." if style == "mistral" else "Hello.", style=style) as (rig, client):
        session = await client.create_session(tools=[WEATHER], system_prompt=system)
        await session.send("hi")
        for tools in ([TRAFFIC], [], [WEATHER]):
            await session.update(tools=tools)
            await session.send("and?", replace_after_item=(await session.items())[-1].item)
            fresh = await client.create_session(
                tools=tools, system_prompt=system, initial_items=[("user", "hi"), ("assistant", "Hello.")]
            )
            await fresh.send("and?")
            assert context_of(rig, -2) == context_of(rig, -1)
            assert ("traffic" in context_of(rig)) is (tools == [TRAFFIC])
            await session.rewind(to_item=(await session.items())[2 if system else 1].item)


BEGINNINGS: dict[str, list[Any]] = {
    "a system message": [("system", "Be kind."), ("user", "hi")],
    "a call": [
        CallingMessage((FunctionCall("weather", '{"town": "Rome"}', "rome00001"),)),
        ToolResult("1", "rome00001"), ("user", "hi"),
    ],
    "a result": [ToolResult("1", "rome00001"), ("user", "hi")],
}  # fmt: skip


@pytest.mark.parametrize("beginning", BEGINNINGS)
@pytest.mark.parametrize("style", ["qwen", "llama", "mistral"])
async def test_a_history_that_does_not_begin_with_a_question_gets_another_beginning(
    style: str, beginning: str
) -> None:
    if beginning in {"llama": ["a result"], "mistral": ["a system message", "a call"]}.get(style, []):
        pytest.skip("the template does not take it")
    past = [*BEGINNINGS[beginning], ("assistant", "Hello.")]
    async with opened("Hello.", style=style) as (rig, client):
        session = await client.create_session(tools=[WEATHER], initial_items=past)
        for system, tools in (("Be brief.", [TRAFFIC]), ("", [WEATHER]), ("Be rude.", [])):
            fresh = await client.create_session(tools=tools, system_prompt=system, initial_items=past)
            await fresh.send("and?")
            await session.send(
                "and?", turn_system_prompt=system, turn_tools=tools, replace_after_item=await last(session)
            )
            await session.update(system_prompt=system, tools=tools)
            await session.send("and?", replace_after_item=await last(session))
            assert context_of(rig, -3) == context_of(rig, -2) == context_of(rig, -1)


async def last(session: AsyncSession) -> int:
    """The number of the last item of the past that all sessions share."""
    return next(item.item for item in await session.items() if item.text == "Hello.")


async def test_tools_that_could_not_be_shown() -> None:
    async with opened("Hello.") as (rig, client):
        session = await client.create_session(initial_items=[("user", [5, 6, 7])])
        with pytest.raises(FailedPrecondition) as caught:
            await session.update(tools=[WEATHER])
        assert caught.value.reason == "TOOLS_NOT_CHANGEABLE"
        assert (await session.refresh()).revision == 1
        for wrong in ({"overflow": "drop_oldest_turns"}, {"tools": "[1]"}, {"tools": "{"}):
            with pytest.raises(InvalidArgument):
                await client.create_session(**{"tools": [WEATHER], **wrong})  # type: ignore[arg-type]
        with_tools = await client.create_session(tools=[WEATHER])
        with pytest.raises(InvalidArgument, match="overflow_policy"):
            await with_tools.update(overflow="drop_oldest_turns")
        assert not rig.link.generations


WRONG: list[tuple[Any, str]] = [
    (CallingMessage((FunctionCall("a b", "{}"),)), "function_calls[0].name"),
    (CallingMessage((FunctionCall("f", "[]"),)), "function_calls[0].arguments_json"),
    (CallingMessage((FunctionCall("f", "{}"),) * 200), "function_calls"),
    (ToolResult("x", "c" * 300), "call_id"),
]


@pytest.mark.parametrize(("item", "field"), WRONG)
async def test_items_that_are_refused(item: Any, field: str) -> None:
    async with opened("Hello.") as (_, client):
        session = await client.create_session(tools=[WEATHER])
        with pytest.raises(InvalidArgument) as caught:
            await session.send(items=[item])
        assert caught.value.violations[0][0] == f"turn.input[0].{field}"


def test_turns_without_tools_are_the_turns_that_they_were() -> None:
    """A turn that is sent again after an update of the server is the same turn."""
    turn = NewTurn("r", (InputEntry(core.Role.USER, "hi"),))
    assert turn.fingerprint() == FINGERPRINT


FINGERPRINT = "0f5a551e4b546ea10253be1ab28c5976"
