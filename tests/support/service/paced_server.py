"""A ConversationService that answers in numbers of tokens, at a pace, and notes the order of what happened."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc


class PacedConversations(rpc.ConversationServiceServicer):
    """Takes ``token_s`` seconds for each token. ``log`` has ``sent``, ``done``, ``broken`` and ``deleted``, each with
    the session's name; ``refuse`` makes every turn fail."""

    def __init__(self, token_s: float = 0.0) -> None:
        self.token_s = token_s
        self.refuse = False
        self.sessions: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.log: list[tuple[str, str]] = []
        self.bearers: set[str] = set()
        self.on_turn = threading.Event()

    def count(self, what: str) -> int:
        return sum(kind == what for kind, _ in self.log)

    async def GetServerInfo(self, request: Any, context: Any) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(version="0", model="paced", vocab_size=100, context_limit=512)

    async def CreateSession(self, request: Any, context: Any) -> pb.CreateSessionResponse:
        name = f"sessions/{len(self.sessions)}"
        self.sessions[name] = 0
        return pb.CreateSessionResponse(session=pb.Session(name=name))

    async def DeleteSession(self, request: Any, context: Any) -> pb.DeleteSessionResponse:
        self.log.append(("deleted", request.name))
        return pb.DeleteSessionResponse()

    async def StreamTurn(self, request: Any, context: Any) -> AsyncIterator[pb.StreamTurnResponse]:
        if self.refuse:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        self.bearers |= {value for key, value in context.invocation_metadata() if key == "authorization"}
        self.prompts.append(tuple(request.turn.input[0].tokens.ids))
        self.log.append(("sent", request.session))
        self.on_turn.set()
        try:
            async for response in self._answer(request):
                yield response
        except asyncio.CancelledError:
            self.log.append(("broken", request.session))
            raise
        self.log.append(("done", request.session))

    async def _answer(self, request: Any) -> AsyncIterator[pb.StreamTurnResponse]:
        history, new = self.sessions[request.session], len(request.turn.input[0].tokens.ids)
        wanted = request.turn.sampling.max_output_tokens
        for offset in range(wanted):
            await asyncio.sleep(self.token_s)
            yield pb.StreamTurnResponse(delta=pb.TurnDelta(token_offset=offset, token_count=1))
        self.sessions[request.session] = history + new + wanted
        usage = pb.Usage(
            context_tokens=history + new, new_tokens=new, gpu_cached_tokens=history, output_tokens=wanted
        )
        yield pb.StreamTurnResponse(completed=pb.Turn(state=pb.Turn.STATE_COMMITTED, usage=usage))


@contextmanager
def in_thread(service: rpc.ConversationServiceServicer) -> Iterator[str]:
    """Serves in a thread with a loop of its own, for programs that run their own loop in this one; HOST:PORT."""
    ready, address = threading.Event(), [""]
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = grpc.aio.server()
        rpc.add_ConversationServiceServicer_to_server(service, server)
        address[0] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        ready.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
