"""Sessions of a chat template that writes the date: it is that of their creation, whatever happens later."""

from __future__ import annotations

import datetime as dt

import pytest

from pensieve.store.memory_store import MemoryStore
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2 as pb
from support import tokenizers_ as tiny
from support.service.service_rig import Rig, serving, user

BORN = dt.datetime(2025, 3, 9, 23, 59, 58)
LATER = dt.datetime(2025, 3, 11, 8, 0, 0)


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tiny.write_folder(
        tmp_path_factory.mktemp("dated"), tiny.byte_level(), tiny.DATED, bos=None, eos="<|im_end|>"
    )
    return ChatTokenizer.from_folder(folder)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[dt.datetime]:
    """What the server takes the time to be: its one element."""
    now = [BORN]
    monkeypatch.setattr("pensieve.server.sessions.records.now_ms", lambda: int(now[0].timestamp() * 1000))
    return now


async def context(rig: Rig, dated: ChatTokenizer, name: str) -> str:
    items = (await rig.api.ListItems(pb.ListItemsRequest(name=name, include_tokens=True))).items
    return dated.decode([token for item in items for token in item.tokens.ids])


@pytest.mark.parametrize("begins", ["empty", "system", "transcript"])
async def test_a_session_keeps_the_date_of_its_creation(
    dated: ChatTokenizer, clock: list[dt.datetime], begins: str
) -> None:
    store = MemoryStore()
    system = "Be brief." if begins == "system" else ""
    said = (
        [user("hello"), pb.InputItem(role=pb.ROLE_ASSISTANT, text="the fox")]
        if begins == "transcript"
        else []
    )
    async with serving(store=store, speaks=dated) as rig:
        name = await rig.create(system, initial_items=said)
    clock[0] = LATER
    async with serving(store=store, speaks=dated) as rig:
        await rig.run(name, "and now?")
        text = await context(rig, dated, name)
        assert text.count("Today is 09 March 2025") == 1
        copy = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name))).session.name
        assert await context(rig, dated, copy) == text
        for one in (name, copy):
            changed = pb.Session(config=pb.SessionConfig(system_prompt="Be long."))
            await rig.api.UpdateSession(pb.UpdateSessionRequest(name=one, session=changed))
            after = await context(rig, dated, one)
            assert after.count("Today is 09 March 2025") == 1 and after.count("Be long.") == 1
            await rig.run(one, "go on")
            assert dated.decode(rig.link.generations[-1].tokens).count("Today is") == 1
        fresh = await rig.create()
        await rig.run(fresh, "hi")
        assert "Today is 11 March 2025" in await context(rig, dated, fresh)
