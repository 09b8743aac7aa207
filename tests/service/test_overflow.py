"""A session that has outgrown the context: refused, or its oldest turns leave the view and stay in the history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pensieve.client import TokenCount
from pensieve.core import Role
from pensieve.server.history import rendering
from pensieve.server.history.rendering import ContextRoom, ItemStamp, Renderer
from pensieve.server.values import InputEntry
from pensieve.store.records import History, Overflow
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, encode, refusal, says, serving, spec, tokenizer, uid
from support.tokenizers_ import LLAMA3, byte_level, write_folder

DROP = pb.SessionConfig(system_prompt="Be brief.", overflow_policy=pb.OVERFLOW_POLICY_DROP_OLDEST_TURNS)
LIMIT = 120


async def until_full(rig: Rig, name: str) -> pb.Session:
    """Turns until the next one would not fit."""
    while (session := await rig.session(name)).context_tokens < LIMIT - 35:
        await rig.run(name, "the quick brown fox")
    return session


async def test_reject_leaves_everything_as_it_is() -> None:
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create("Be brief.")
        await until_full(rig, name)
        before = (await rig.session(name), await rig.items(name))
        submitted = len(rig.link.generations)
        error = await refusal(rig.call(name, spec("the quick brown fox " * 6)))
        assert (error.code, error.reason) == ("OUT_OF_RANGE", "CONTEXT_LIMIT_EXCEEDED")
        assert int(error.metadata["limit"]) == LIMIT <= int(error.metadata["context_tokens"])
        assert (await rig.session(name), await rig.items(name)) == before
        assert len(rig.link.generations) == submitted


@pytest.mark.fault(24)
@pytest.mark.parametrize(("over", "fits"), [(-1, True), (0, False), (1, False)])
async def test_exactly_at_the_limit(over: int, fits: bool) -> None:
    """One output token has to fit, so a context must be shorter than the limit."""
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create()
        item = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=[50] * (LIMIT + over)))
        turn = pb.TurnSpec(request_id=uid(), input=[item])
        if fits:
            assert (await rig.run(name, turn)).usage.context_tokens == LIMIT + over
        else:
            error = await refusal(rig.call(name, turn))
            assert error.reason == "CONTEXT_LIMIT_EXCEEDED"
            assert error.metadata == {"context_tokens": str(LIMIT + over), "limit": str(LIMIT)}
        count = await rig.api.CountTokens(pb.CountTokensRequest(session=await rig.create(), input=[item]))
        assert TokenCount(count.input_tokens, count.context_tokens, count.context_limit).fits == fits


async def test_oldest_turns_leave_the_view_only() -> None:
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create(config=DROP)
        await until_full(rig, name)
        await rig.run(name, "the quick brown fox")
        for number in range(4):
            await rig.run(name, f"more {number}")
        items = await rig.items(name, tokens=True)
        everything = [token for item in items for token in item.tokens.ids]
        seen = rig.link.generations[-1].tokens
        prompt = list(items[0].tokens.ids)
        assert len(seen) < LIMIT < len(everything)
        assert seen[: len(prompt)] == prompt  # the system prompt never goes
        tail = seen[len(prompt) :]
        answer = len(says("hello world, the fox"))
        start = len(everything) - answer - len(tail)
        assert everything[start:-answer] == tail  # a suffix of history, whole turns
        starts = [sum(len(i.tokens.ids) for i in items[:n]) for n in range(1, len(items), 2)]
        assert start in starts
        session = await rig.session(name)
        assert session.item_count == len(items) and session.context_tokens == len(seen) + answer


async def test_a_turn_too_long_for_any_view_is_refused() -> None:
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create(config=DROP)
        await until_full(rig, name)
        error = await refusal(rig.call(name, spec("the quick brown fox " * 30)))
        assert error.reason == "CONTEXT_LIMIT_EXCEEDED"
        assert (await rig.stream(name, "short")).completed.revision


async def test_regenerate_keeps_the_turn_it_answers() -> None:
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create(config=DROP)
        await until_full(rig, name)
        last = await rig.items(name)
        rig.link.answer = lambda _: encode("a new one")
        await rig.run(name, spec(replace_after_item=last[-2].item))
        assert [item.text for item in await rig.items(name)][-2:] == [last[-2].text, "a new one"]


async def test_rewind_brings_hidden_turns_back() -> None:
    async with serving(context_limit=LIMIT) as rig:
        name = await rig.create(config=DROP)
        await until_full(rig, name)
        for number in range(4):
            await rig.run(name, f"more {number}")
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=3))
        items = await rig.items(name, tokens=True)
        assert (await rig.session(name)).context_tokens == sum(len(item.tokens.ids) for item in items)


async def test_the_start_token_stays_when_its_item_is_hidden(tmp_path: Path) -> None:
    """Without a system prompt the first user item owns the beginning-of-sequence token, and it leaves first."""
    folder = write_folder(tmp_path / "m", byte_level(), LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")
    chat = ChatTokenizer.from_folder(folder)
    renderer = Renderer(chat)
    entries = [InputEntry(role, "hello") for role in (Role.USER, Role.ASSISTANT) * 3]
    items, _ = await renderer.items(History(), entries, ItemStamp(1, "", 0))
    whole = History(revision=1, items=items, head_item=6)
    assert renderer.context(whole).tolist().count(chat.bos_token_id or -1) == 1
    view = replace(whole, hidden_before=3)
    assert renderer.context(view)[0] == chat.bos_token_id
    assert renderer.context(view)[1:].tolist() == view.tokens().tolist()
    assert renderer.length(view) == len(renderer.context(view))
    assert renderer.length(whole) == len(renderer.context(whole))


async def test_a_turn_and_a_cut_cost_one_pass_over_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are looked at once; what is rendered are the last few messages."""
    count, looks, shown = 600, 0, 0
    chat = tokenizer()
    renderer = Renderer(chat)
    entries = [InputEntry(role, "hello") for role in (Role.USER, Role.ASSISTANT) * (count // 2)]
    items, _ = await renderer.items(History(), entries, ItemStamp(1, "", 0))
    whole = History(revision=1, items=items, head_item=count)
    length, seen = rendering.packed_length, ChatTokenizer.seen

    def looked(tokens: bytes) -> int:
        nonlocal looks
        looks += 1
        return length(tokens)

    def noted(self: ChatTokenizer, *args: Any, **more: Any) -> Any:
        nonlocal shown
        shown += 1
        return seen(self, *args, **more)

    monkeypatch.setattr(rendering, "packed_length", looked)
    monkeypatch.setattr(ChatTokenizer, "seen", noted)
    tokens = renderer.length(whole)
    for limit in (2 * tokens, tokens // 2):
        looks = shown = 0
        room = ContextRoom(limit, Overflow.DROP_OLDEST_TURNS, None)
        made = await renderer.prepare(whole, [InputEntry(Role.USER, "on")], ItemStamp(count + 1, "", 0), room)
        assert len(made.context) <= limit - limit // 8, "the next turn would have to cut again"
        assert looks <= 6 * count and shown <= 40
    renderer.close()


async def test_a_refusal_says_what_sets_the_limit() -> None:
    async with serving(context_limit=LIMIT) as rig:
        long = spec("the quick brown fox " * 60)
        error = await refusal(rig.call(await rig.create(), long))
        assert error.message.endswith(f"it must stay below {LIMIT}"), "the model's own limit"
        rig.link.info = msgspec.structs.replace(rig.link.info, model_context_limit=8192)
        error = await refusal(rig.call(await rig.create(), long))
        assert f"it must stay below {LIMIT} (the device tier" in error.message
        assert "takes 8192" in error.message and "--device-cache" in error.message
