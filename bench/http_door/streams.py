"""Callers that hold streams open: the same turns by gRPC, as chat completions, and as responses.

They do as little as they can with what comes: pieces are counted, and the first is noted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import aiohttp
import grpc.aio
import msgspec

from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

Way = Literal["grpc", "chat", "responses"]
STREAMS_EACH = 100
"""On one gRPC connection; a server takes 256."""
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)
_TEXT = "the name of the garden is what you told me about the fox and the neighbour " * 2
_PIECE = {"chat": b'"delta":{', "responses": b"event: response.output_text.delta"}
"""What a piece of an answer has once."""


class Broken(Exception):
    """A turn did not come to its end."""


@dataclass(frozen=True, slots=True)
class Load:
    """``streams`` conversations of ``turns`` turns, each answered with ``output`` tokens, begun over ``ramp_s``."""

    way: Way
    grpc: str
    http: str
    streams: int
    turns: int
    output: int
    ramp_s: float = 1.0


@dataclass(slots=True)
class Came:
    """What came of a load. Seconds."""

    tokens: int = 0
    pieces: int = 0
    first_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    client_cpu_s: float = 0.0


class Conversation(Protocol):
    async def turn(self, output: int) -> tuple[float, int]:
        """One turn: seconds to the first piece, and pieces. Raises Broken."""
        ...


@dataclass(slots=True)
class GrpcConversation:
    """On bare stubs, so that an SDK's own cost is not the client's here and the door's there."""

    stub: Any
    session: str

    async def turn(self, output: int) -> tuple[float, int]:
        spec = pb.TurnSpec(
            request_id=str(uuid.uuid4()),
            input=[pb.InputItem(role=pb.ROLE_USER, text=_TEXT)],
            sampling=pb.SamplingParams(max_output_tokens=output, ignore_eos=True),
        )
        began, first, pieces, done = time.perf_counter(), 0.0, 0, False
        async for event in self.stub.StreamTurn(pb.StreamTurnRequest(session=self.session, turn=spec)):
            if event.HasField("delta"):
                first, pieces = first or time.perf_counter(), pieces + 1
            done = done or event.HasField("completed")
        if not done:
            raise Broken("the stream ended before the turn")
        return first - began, pieces


@dataclass(slots=True)
class HttpConversation:
    """Chat completions, which resend the history, or responses, which name the one before."""

    http: aiohttp.ClientSession
    way: Way
    messages: list[dict[str, str]] = field(default_factory=list)
    previous: str | None = None

    async def turn(self, output: int) -> tuple[float, int]:
        chat = self.way == "chat"
        body: dict[str, Any] = {"stream": True, "ignore_eos": True}
        if chat:
            self.messages.append({"role": "user", "content": _TEXT})
            body |= {"messages": self.messages, "max_completion_tokens": output}
        else:
            body |= {"input": _TEXT, "max_output_tokens": output, "previous_response_id": self.previous}
        began, first, parts = time.perf_counter(), 0.0, []
        mark = _PIECE[self.way]
        path = "/v1/chat/completions" if chat else "/v1/responses"
        async with self.http.post(path, json=body) as response:
            if not response.ok:
                raise Broken(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                if not first and mark in data:
                    first = time.perf_counter()
                parts.append(data)
        whole = b"".join(parts)
        if not whole.endswith(b"data: [DONE]\n\n"):
            raise Broken(f"the stream ended with {whole[-200:]!r}")
        self._remember(whole)
        return first - began, whole.count(mark)

    def _remember(self, whole: bytes) -> None:
        """Of a chat the answer, which is sent again; of a response its id."""
        events = (line[6:] for line in whole.split(b"\n") if line.startswith(b"data: {"))
        if self.way == "chat":
            texts = [
                choice["delta"].get("content") or ""
                for one in map(msgspec.json.decode, events)
                for choice in one["choices"]
            ]
            self.messages.append({"role": "assistant", "content": "".join(texts)})
        else:
            self.previous = str(msgspec.json.decode(next(events))["response"]["id"])


@asynccontextmanager
async def conversations(load: Load) -> AsyncIterator[list[Conversation]]:
    """Connected; by gRPC the sessions are made."""
    async with AsyncExitStack() as held:
        if load.way != "grpc":
            http = await held.enter_async_context(
                aiohttp.ClientSession(
                    load.http, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None),
                    json_serialize=lambda value: msgspec.json.encode(value).decode(),
                )
            )  # fmt: skip
            yield [HttpConversation(http, load.way) for _ in range(load.streams)]
            return
        found: list[Conversation] = []
        for start in range(0, load.streams, STREAMS_EACH):
            channel = await held.enter_async_context(grpc.aio.insecure_channel(load.grpc, options=_OPTIONS))
            stub: Any = rpc.ConversationServiceStub(channel)
            for _ in range(start, min(load.streams, start + STREAMS_EACH)):
                made = await stub.CreateSession(pb.CreateSessionRequest(request_id=str(uuid.uuid4())))
                found.append(GrpcConversation(stub, made.session.name))
        yield found


def offer(load: Load) -> Came:
    """Run a load, in a process of its own."""
    return asyncio.run(_offer(load))


async def _offer(load: Load) -> Came:
    came = Came()
    async with conversations(load) as talks:
        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(_hold(load, talk, number, came) for number, talk in enumerate(talks)))
        came.wall_s, came.client_cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return came


async def _hold(load: Load, talk: Conversation, number: int, came: Came) -> None:
    await asyncio.sleep(load.ramp_s * number / load.streams)
    for _ in range(load.turns):
        try:
            first, pieces = await talk.turn(load.output)
        except (Broken, grpc.aio.AioRpcError, aiohttp.ClientError) as failure:
            came.failures.append(f"{type(failure).__name__}: {str(failure)[:300]}")
            return
        came.first_s.append(first)
        came.pieces += pieces
        came.tokens += load.output
