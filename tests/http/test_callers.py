"""The connections of the door to the service: how many there are for one credential."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncStream

from pensieve.http.common import callers
from support.http import http_rig
from support.http.http_rig import HttpRig, door

BEARER = http_rig.BearerTenant


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Connections from which the service was called."""
    seen: set[str] = set()

    class Noting(BEARER):
        def check(self, method: str, metadata: Any, peer: Any = "") -> Any:
            seen.add(peer._context.peer())  # with the port, which it tells nobody
            return super().check(method, metadata, peer)

    monkeypatch.setattr(http_rig, "BearerTenant", Noting)
    monkeypatch.setattr(callers, "REQUESTS_EACH", 2)
    return seen


async def hold(rig: HttpRig, count: int) -> list[AsyncStream[Any]]:
    """So many answers under way, of which the engine says nothing yet."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    create: Any = rig.client.chat.completions.create
    return list(await asyncio.wait_for(asyncio.gather(*(create(**asked) for _ in range(count))), 20))


async def test_a_caller_with_many_requests_gets_more_connections(peers: set[str]) -> None:
    """A server takes so many calls on one connection; what is beyond would wait for the end of another's answer."""
    async with door(answer=None) as rig:
        streams = await hold(rig, 5)
        assert len(peers) == 3, peers
        for stream in streams:
            await stream.close()
        while rig.service.conversations.turns.running:
            await asyncio.sleep(0.01)
        for stream in await hold(rig, 5):
            await stream.close()
        assert len(peers) == 3, "connections that are free are used again"


async def test_connections_beyond_the_limit_are_closed_when_nobody_uses_them(peers: set[str]) -> None:
    async with door(answer=None, max_callers=1) as rig:
        for _ in range(2):
            for stream in await hold(rig, 5):
                await stream.close()
            while rig.service.conversations.turns.running:
                await asyncio.sleep(0.01)
        assert len(peers) > 3


async def test_requests_on_one_connection_leave_room_for_their_other_calls() -> None:
    """Of the calls that a server takes on one connection (256) a request may make two at a time."""
    assert 2 * callers.REQUESTS_EACH <= 256
