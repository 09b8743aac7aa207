"""The service over real gRPC in a thread of its own, for calls with any bytes."""

from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import Any, Self

import grpc

from pensieve import rpc_status
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, serving

LIMIT_S = 20.0
STREAMS = frozenset({"StreamTurn"})
OURS_TO_BLAME = frozenset({"BUG", "INTERNAL", "UNKNOWN", rpc_status.TRANSPORT, rpc_status.TRANSPORT_FINAL})


class FuzzedServer:
    """A rig with one session, ``sessions/fuzzed``, which is made again when a request has deleted it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._ending, self._over, self._fresh = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._rig: Rig | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        ready = threading.Event()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(ready), self._loop)
        assert ready.wait(LIMIT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._loop.call_soon_threadsafe(self._over.set)
        self._serving.result(LIMIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        """One server after another: a name whose session was deleted is not free again while its store lives."""
        while not self._ending.is_set():
            async with serving(max_in_flight=64) as rig:
                await rig.create("be brief", session_id="fuzzed")
                self._rig = rig
                self._fresh.set()
                ready.set()
                await self._over.wait()
                self._over.clear()
                self._fresh.clear()

    def send(self, method: str, data: bytes) -> str:
        """How it was answered: OK, or a reason. Raises AssertionError when that puts the blame on us."""
        return asyncio.run_coroutine_threadsafe(self._send(method, data), self._loop).result(LIMIT_S)

    async def _send(self, method: str, data: bytes) -> str:
        await self._there()
        assert self._rig is not None
        channel: Any = self._rig.channel
        path = f"/pensieve.v1.ConversationService/{method}"
        try:
            if method in STREAMS:
                async for _ in channel.unary_stream(path)(data, timeout=LIMIT_S):
                    pass
            else:
                await channel.unary_unary(path)(data, timeout=LIMIT_S)
        except grpc.RpcError as error:
            problem = rpc_status.from_rpc_error(error)
            assert problem.reason not in OURS_TO_BLAME, (
                f"{method} {data.hex()}: {problem.code} {problem.reason}"
            )
            return problem.reason
        return "OK"

    async def _there(self) -> None:
        """The session is there."""
        await self._fresh.wait()
        assert self._rig is not None
        try:
            await self._rig.api.GetSession(pb.GetSessionRequest(name="sessions/fuzzed"))
        except grpc.RpcError:
            self._fresh.clear()
            self._over.set()
            await self._fresh.wait()
