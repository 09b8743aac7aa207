"""Pensieve servers as targets: no turn waits in the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from pensieve.replay.targets import grpc_target
from pensieve.replay.targets.base import TurnRequest
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc
from support.service.paced_server import PacedConversations

ROOM = 2
"""Calls at once that the server takes on one connection."""


class Together(PacedConversations):
    """Answers no turn before so many are there."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self._there = asyncio.Barrier(turns)

    async def StreamTurn(self, request: Any, context: Any) -> AsyncIterator[pb.StreamTurnResponse]:
        await self._there.wait()
        async for response in super().StreamTurn(request, context):
            yield response


async def test_a_server_gets_all_turns_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few calls it takes on one connection; and connections that are free again are used again."""
    monkeypatch.setattr(grpc_target, "_MAX_CALLS", ROOM)
    turns = 2 * ROOM + 1
    server = grpc.aio.server(options=[("grpc.max_concurrent_streams", ROOM)])
    rpc.add_ConversationServiceServicer_to_server(Together(turns), server)
    target = PensieveTarget(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    spec = TurnRequest(np.arange(4, dtype=np.int32), 3, True)
    try:
        await target.open()
        sessions = [await target.start_session() for _ in range(turns)]
        came: list[int] = []
        for times in (1, 2):
            async with asyncio.timeout(30):
                await asyncio.gather(
                    *(target.turn(name, spec, lambda count, at: came.append(count)) for name in sessions)
                )
            assert sum(came) == 3 * turns * times
        assert len(target._connections) == 3
    finally:
        await target.close()
        await server.stop(None)
