"""The bench's ways to make room in a context: each goes on with the turns that stay and a summary."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pensieve.client import Client
from support.replay.benches import load_bench
from support.service.service_rig import ANSWER, serving


async def test_each_way_makes_room_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load_bench("compaction", monkeypatch)
    monkeypatch.setattr(bench, "STILL_S", 0.1)
    sizes = bench.Sizes(turns=9, words=2, compact_at=250, keep_turns=1, summary=8)

    def talked(target: str) -> list[Any]:
        with Client(target) as client:
            agents = [bench.Agent(way, client, sizes) for way in bench.WAYS]
            bench.converse(agents, sizes.turns)
            for agent in agents:
                items = agent.session.items()
                assert items[0].text.startswith(agent._prompt) and items[0].text.endswith(ANSWER)
                assert items[-2].text.startswith("Result of the tool: ")
            return agents

    async with serving(context_limit=2000) as rig:
        agents = await asyncio.to_thread(talked, rig.target)
    for agent in agents:
        assert agent.row()["turns"] == sizes.turns
        assert 1 <= len(agent.pauses) == len(agent.shrinking) == len(agent.saved) < sizes.turns
        assert agent.context < sizes.compact_at + 100
