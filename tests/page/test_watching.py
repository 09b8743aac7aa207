"""Strips and notes as they are gathered: from an engine in its own process, from one that is slow, from the store."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pensieve.config import EngineOptions
from pensieve.core import Sampling, SessionKey
from pensieve.engine.messages import SessionStrip
from pensieve.errors import NotFound
from pensieve.server.links.process_link import ProcessLink
from pensieve.server.page import state
from pensieve.server.page.state import SessionNotes, StripPoller
from pensieve.store import Key
from pensieve.store.records import SessionRow
from support.engine.hash_engine import BUILDER
from support.service.listener import Listened


async def test_an_engine_in_its_own_process_tells_of_all_its_sessions() -> None:
    link = ProcessLink(
        EngineOptions(model="", device_cache="4096tokens", host_cache="64tokens", chunk_tokens=8),
        builder=BUILDER,
    )
    await link.start()
    try:
        assert await link.read_strips() == []
        for number in range(30):
            session = SessionKey(f"t/s{number}")
            async for _ in Listened(
                link, session, np.arange(3, 60, dtype=np.int32), Sampling(max_output_tokens=2)
            ):
                pass
        found = await link.read_strips()
        assert {one.session for one in found} == {f"t/s{number}" for number in range(30)}
        assert {one.strip for one in found if not one.running} == {"d8"}
    finally:
        await link.stop()


class SlowLink:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.looks = 0

    async def read_strips(self) -> list[SessionStrip]:
        self.looks += 1
        number = self.looks
        await self.may_answer.wait()
        return [SessionStrip(f"t/{number}", 8, "d1", 1.0, False, False, False)]


async def test_an_engine_in_a_long_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "PATIENCE_S", 0.01)
    link, now = SlowLink(), 0.0
    watch = StripPoller(link, clock=lambda: now)  # type: ignore[arg-type]
    assert await watch.strips() is None and await watch.strips() is None
    assert link.looks == 1, "one look at a time"
    link.may_answer.set()
    while (first := await watch.strips()) is None:
        await asyncio.sleep(0)
    assert [one.session for one in first.sessions] == ["t/1"]
    link.may_answer.clear()
    now = 10.0
    assert await watch.strips() is first, "what there was is shown, with its age"
    await watch.close()


class CountingStore:
    def __init__(self) -> None:
        self.read: list[str] = []

    async def load(self, key: Key) -> SessionRow:
        self.read.append(key.session_id)
        if key.session_id == "gone":
            raise NotFound("no such session")
        labels = {"title": key.session_id.upper()}
        return SessionRow(tenant=key.tenant, session_id=key.session_id, item_count=4, labels=labels)


async def test_notes_are_read_a_few_at_a_time_and_again_after_a_turn() -> None:
    store, now = CountingStore(), 1000.0
    kept = SessionNotes(store, clock=lambda: now)  # type: ignore[arg-type]
    wanted = [(Key("t", "gone"), 8), *((Key("t", f"s{number}"), 8) for number in range(30))]
    first = await kept.read(wanted)
    assert len(store.read) == state.MOST_READ and len(first) == state.MOST_READ - 1
    assert first[Key("t", "s0")].labels == {"title": "S0"} and first[Key("t", "s0")].items == 4
    assert len(await kept.read(wanted)) == 30 and len(store.read) == 31
    await kept.read(wanted)
    assert len(store.read) == 31, "what is known is not read again"
    grown = [(key, 16 if key.session_id == "s7" else tokens) for key, tokens in wanted]
    await kept.read(grown)
    assert len(store.read) == 31, "not at once"
    now += state.CHANGED_S + 1.0
    await kept.read(grown)
    assert store.read[31:] == ["s7"]
    now += state.NOTE_FRESH_S + 1.0
    await kept.read(grown)
    assert len(store.read) == 32 + state.MOST_READ
