"""Compaction through OpenAI's own client: ``/v1/responses/compact`` and ``context_management``."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, ConflictError

from pensieve.http.responses.ids import ResponseId
from pensieve.v1 import pensieve_pb2 as pb
from support.engine.checkpoints import tiny_checkpoint
from support.http.http_rig import HttpRig, door, opened
from support.http.tool_rig import context_of, tool_door
from support.service.real_engine import TinyModel, really_serving
from support.service.service_rig import Rig
from support.tool_templates import STYLES, write_model

LONG = "Tell me of Troy. " * 60
ALWAYS: Any = [{"type": "compaction", "compact_threshold": 1}]
BEFORE = "Summary of the conversation so far:\n"


async def ask(rig: HttpRig, **asked: Any) -> Any:
    return await rig.client.responses.create(**{"model": "tiny", **asked})


async def sessions(rig: HttpRig) -> list[str]:
    listed = await rig.service.api.ListSessions(pb.ListSessionsRequest())
    return sorted(one.name for one in listed.sessions)


async def test_a_conversation_goes_on_from_its_compaction_item() -> None:
    async with tool_door("Troy fell.", "They fought.", "Why not.") as rig:
        first = await ask(
            rig, input=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": LONG}]
        )
        compacted = await rig.client.responses.compact(model="tiny", previous_response_id=first.id)
        (item,) = compacted.output
        assert compacted.object == "response.compaction" and item.type == "compaction"
        assert compacted.usage.output_tokens > 0
        given: list[Any] = [item.to_dict(), {"role": "user", "content": "Why?"}]
        second = await ask(rig, input=given)
        expected = context_of(rig)
        assert "Be brief.\n\n" + BEFORE + "They fought." in expected and LONG not in expected
        system: Any = {"role": "system", "content": "Be rude."}
        third = await ask(rig, input=[system, {"role": "user", "content": LONG}, *given])
        assert f"Be rude.\n\n{BEFORE}They fought." in context_of(rig), (
            "a system message of the client's comes first"
        )
        assert "Be brief." not in context_of(rig) and LONG not in context_of(rig)
        await ask(rig, input="And?", previous_response_id=third.id, instructions="Be long.")
        assert f"Be long.\n\nBe rude.\n\n{BEFORE}They fought." in context_of(rig), (
            "new instructions keep the rest"
        )
        before = await sessions(rig)
        again = [*given, *(one.to_dict() for one in second.output), {"role": "user", "content": "So?"}]
        await ask(rig, input=again)
        assert await sessions(rig) == before, "the resent conversation is found"
        await ask(rig, input="And then?", previous_response_id=first.id)
        assert LONG.strip() in context_of(rig), "earlier responses stay as they were"


async def test_a_resent_conversation_is_compacted_on_its_session() -> None:
    async with tool_door("Troy fell.", "They fought.", "Why not.") as rig:
        talk: list[Any] = [{"role": "user", "content": LONG}]
        first = await ask(rig, input=talk, instructions="Be brief.")
        talk += [one.to_dict() for one in first.output]
        before = await sessions(rig)
        compacted = await rig.client.responses.compact(model="tiny", input=talk, instructions="Be brief.")
        assert "Be brief." in context_of(rig) and LONG.strip() in context_of(rig)
        assert len(await sessions(rig)) == len(before) + 1, "the compacted context, for the next response"
        await ask(
            rig, input=[*compacted.output, {"role": "user", "content": "Why?"}], instructions="Be rude."
        )
        assert f"Be rude.\n\n{BEFORE}They fought." in context_of(rig), "instructions are not carried over"
        conversation = await rig.client.conversations.create(items=[compacted.output[0].to_dict()])  # type: ignore[list-item]
        await ask(rig, input="Why?", conversation=conversation.id)
        assert f"{BEFORE}They fought." in context_of(rig)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stored", [True, False])
async def test_a_long_context_is_compacted_before_the_response(stored: bool, stream: bool) -> None:
    async with tool_door("Troy fell.", "A wall.", "They fought.", "Why not.") as rig:
        first = await ask(rig, input=LONG, instructions="Be brief.", context_management=ALWAYS)
        assert [one.type for one in first.output] == ["message"], "there was nothing to compact"
        asked: dict[str, Any] = {"instructions": "Be brief.", "store": stored}
        talk: list[Any] = [{"role": "user", "content": LONG}, *(one.to_dict() for one in first.output)]
        new: Any = {"role": "user", "content": "Why?"}
        if stored:
            asked |= {"input": "Why?", "previous_response_id": first.id}
        else:
            asked["input"] = [*talk, new]
        rarely: Any = [{"type": "compaction", "compact_threshold": 3000}, {"type": "compaction"}]
        below = await ask(rig, **asked, context_management=rarely)
        assert [one.type for one in below.output] == ["message"]
        if stream:
            events = [
                event async for event in await ask(rig, **asked, context_management=ALWAYS, stream=True)
            ]
            response = events[-1].response
            done = [one for one in events if one.type == "response.output_item.done"]
            assert [one.output_index for one in done] == [0, 1]
            assert [one.item for one in done] == response.output
            deltas = [one for one in events if one.type == "response.output_text.delta"]
            assert {one.output_index for one in deltas} == {1}
            assert [one.sequence_number for one in events] == list(range(len(events)))
        else:
            response = await ask(rig, **asked, context_management=ALWAYS)
        assert [one.type for one in response.output] == ["compaction", "message"]
        assert response.output_text == "Why not."
        expected = context_of(rig)
        assert f"Be brief.\n\n{BEFORE}They fought." in expected and LONG not in expected
        if stored:
            same = await rig.client.responses.retrieve(response.id)
            assert same.output == response.output
            talk = []
        before = await sessions(rig)
        rest = [*talk, new, *(one.to_dict() for one in response.output), {"role": "user", "content": "So?"}]
        await ask(rig, input=rest, instructions="Be brief.")
        assert context_of(rig).startswith(expected), "the same context in either place"
        assert (await sessions(rig) == before) is stored


async def test_a_conversation_is_compacted_in_place() -> None:
    async with tool_door("Troy fell.", "They fought.", "Why not.") as rig:
        conversation = await rig.client.conversations.create(
            items=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
        )
        await ask(rig, input=LONG, conversation=conversation.id)
        response = await ask(rig, input="Why?", conversation=conversation.id, context_management=ALWAYS)
        assert [one.type for one in response.output] == ["compaction", "message"]
        assert f"Be brief.\n\n{BEFORE}They fought." in context_of(rig)
        items = await rig.client.conversations.items.list(conversation.id, order="asc")
        assert len(items.data) == 3, "summary, question and answer"


async def test_sessions_made_on_the_way_expire_from_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A door that is killed at any moment leaves none that stays for ever."""
    async with tool_door("Troy fell.", "They fought.", "Why not.") as rig:
        first = await ask(rig, input=LONG)
        made: list[float] = []
        own = rig.service.conversations.sessions
        fork = own.fork

        async def seen(*given: Any, **named: Any) -> Any:
            row = await fork(*given, **named)
            made.append(row.config.ttl_s)
            return row

        monkeypatch.setattr(own, "fork", seen)
        await rig.client.responses.compact(model="tiny", previous_response_id=first.id)
        assert len(made) == 2, "one to compact, and its branch"
        asked: Any = {"input": "Why?", "previous_response_id": first.id}
        await ask(rig, **asked, context_management=ALWAYS)
        await ask(rig, **asked, store=False)
        await ask(rig, **asked, extra_body={"prompt_cache_options": {"prewarm": True}})
        await rig.client.responses.input_tokens.count(**{"model": "tiny", "instructions": "No.", **asked})
        assert len(made) == 7
        assert set(made) == {600.0}


async def test_a_retry_is_told_of_the_first_compaction() -> None:
    async with tool_door("Troy fell.", "They fought.", "Why not.", "They talked.") as rig:
        first = await ask(rig, input=LONG)
        asked: Any = {"input": "Why?", "previous_response_id": first.id, "context_management": ALWAYS}
        headers = {"Idempotency-Key": "once"}
        told = await ask(rig, **asked, extra_headers=headers)
        again = await ask(rig, **asked, extra_headers=headers)
        assert (again.id, again.output) == (told.id, told.output)
        stream = await ask(rig, **asked, extra_headers=headers, stream=True)
        assert [event async for event in stream][-1].response.output == told.output


async def test_what_cannot_be_compacted() -> None:
    async with door() as rig:
        compact = rig.client.responses.compact
        other = base64.b64encode(b'{"summary": 1}').decode()
        deep = base64.b64encode(
            b'{"summary": "hm", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
        ).decode()
        for content in ("", "gAAAAAB", "pensieve1.", f"pensieve1.{other}", f"pensieve1.{deep}"):
            item: Any = {"type": "compaction", "encrypted_content": content}
            with pytest.raises(BadRequestError) as refused:
                await ask(rig, input=[item, {"role": "user", "content": "hi"}])
            assert refused.value.param == "input[0].encrypted_content"
        whole = "pensieve1." + base64.b64encode(b'{"summary": "hm"}').decode()
        item = {"type": "compaction", "encrypted_content": whole}
        first = await ask(rig, input="hi")
        cases: list[dict[str, Any]] = [
            {"input": [item]},
            {"input": [item, {"role": "user", "content": "hi"}], "previous_response_id": first.id},
            {"input": "hi", "context_management": [{"type": "other"}]},
            {"input": "hi", "context_management": [{"type": "compaction", "compact_threshold": 0}]},
            {"input": [{"type": "compaction_trigger"}]},
        ]
        for asked in cases:
            with pytest.raises(BadRequestError):
                await ask(rig, **asked)
        before = await sessions(rig)
        for bad in ({}, {"input": []}, {"input": "hi", "previous_response_id": "resp_x"}):
            with pytest.raises(BadRequestError):
                await compact(model="tiny", **bad)
        for asked in ({"input": [{"role": "system", "content": "Be brief."}]}, {"input": [item]}):
            with pytest.raises(ConflictError) as nothing:
                await compact(model="tiny", **asked)
            assert nothing.value.code == "nothing_to_compact"
        assert await sessions(rig) == before, "nothing is left behind"


def made_by_hand(new: list[Any], summary: str = "They met.") -> Any:
    content = base64.urlsafe_b64encode(json.dumps({"summary": summary, "new": new}).encode()).decode()
    return {"type": "compaction", "encrypted_content": f"pensieve1.{content}"}


USER: Any = {"role": "user", "content": "hi"}
CALL: Any = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}


CARRIED: list[tuple[list[Any], str]] = [
    ([USER, {"role": "tool", "content": "x"}], "[1].role"),
    ([{"role": "bard", "content": "x"}], "[0].role"),
    ([{"content": "x"}], "[0].role"),
    ([{"role": "user"}], "[0].content"),
    ([{"role": "user", "content": None}], "[0].content"),
    ([{"role": "user", "content": [{"type": "input_image"}]}], "[0].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "[0].content[0].text"),
    ([CALL | {"arguments": "["}], "[0].arguments"),
    ([CALL | {"name": ""}], "[0].name"),
    ([{"type": "function_call_output", "call_id": "c"}], "[0].output"),
    ([{"type": "computer_call"}], "[0]"),
]


async def test_what_a_compaction_item_carries_is_checked_as_any_input() -> None:
    async with door() as rig:
        await ask(rig, input=[made_by_hand([USER]), USER])
        before = await sessions(rig)
        for new, where in CARRIED:
            for given, field in (([made_by_hand(new), USER], "input[0].encrypted_content"), (new, "input")):
                with pytest.raises(BadRequestError) as refused:
                    await ask(rig, input=given)
                assert refused.value.param == f"{field}{where}"
        assert await sessions(rig) == before


async def test_a_compaction_item_holds_a_summary_and_no_other() -> None:
    reference: Any = {"type": "item_reference", "id": "msg_1"}
    cases = [
        (made_by_hand([made_by_hand([])]), ""),
        (made_by_hand([reference]), "[0]"),
        (made_by_hand([{"role": "user", "text": "x"}]), "[0].content"),
        (made_by_hand([USER] * 16385), ""),
        (made_by_hand([], ""), ""),
        (made_by_hand([], " "), ""),
    ]
    async with door() as rig:
        for item, where in cases:
            with pytest.raises(BadRequestError) as refused:
                await ask(rig, input=[item, USER])
            assert refused.value.param == f"input[0].encrypted_content{where}"
            with pytest.raises(BadRequestError) as refused:
                await rig.client.conversations.create(items=[item, USER])
            assert refused.value.param == f"items[0].encrypted_content{where}"
            with pytest.raises(BadRequestError):
                await rig.client.responses.compact(model="tiny", input=[item, USER])


async def test_a_compaction_item_carries_calls_and_their_results() -> None:
    async with tool_door("Troy fell.", "They fought.", "Why not.") as rig:
        first = await ask(rig, input=LONG)
        result: Any = {"type": "function_call_output", "call_id": "c", "output": "Rome"}
        new = [USER, {"role": "developer", "content": "Go on."}, CALL, result]
        asked: dict[str, Any] = {"input": new, "previous_response_id": first.id}
        response = await ask(rig, **asked, context_management=ALWAYS)
        expected = context_of(rig)
        assert "Rome" in expected
        given = [*new, *(one.to_dict() for one in response.output), {"role": "user", "content": "So?"}]
        await ask(rig, input=given)
        assert context_of(rig).startswith(expected), "the same context in either place"


async def test_a_compacted_context_is_read_from_the_cache(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama3", tmp_path, vocab_size=480, max_position_embeddings=4096)
    write_model(folder, *STYLES["qwen"])
    async with (
        really_serving(TinyModel(folder), device="4096tokens") as service,
        opened(service.target) as (url, client),
    ):
        rig = HttpRig(service, client, url)
        first = await ask(rig, input=LONG, max_output_tokens=8)
        compacted = await client.responses.compact(model="tiny", previous_response_id=first.id)
        used = compacted.usage
        assert used.input_tokens_details.cached_tokens > 0.7 * used.input_tokens, (
            "summarised where it is cached"
        )
        # It is computed after the answer, and only until the next turn comes.
        await until_computed(service, compacted.id)
        given: Any = [*compacted.output, {"role": "user", "content": "hi"}]
        response = await ask(rig, input=given, max_output_tokens=4)
        used = response.usage
        assert used.input_tokens_details.cached_tokens > 0.7 * used.input_tokens, "computed ahead"


async def until_computed(service: Rig, response: str) -> None:
    """Wait until most of the context of a response's session is on the device."""
    head = ResponseId.parse(response)
    assert head is not None
    request = pb.GetSessionRequest(name=f"sessions/{head.session_id}", view=pb.SESSION_VIEW_FULL)
    async with asyncio.timeout(60):
        while True:
            session = (await service.api.GetSession(request)).session
            if session.residency.gpu_tokens > 0.8 * session.context_tokens > 0:
                return
            await asyncio.sleep(0.02)
