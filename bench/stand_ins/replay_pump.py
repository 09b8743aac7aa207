"""Servers that cost next to nothing, to see what the replay client carries: one token per step for each stream.

    python bench/stand_ins/replay_pump.py openai|pensieve STEP_MS

Prints ``listening URL``. Answers are as long as asked for; prompts are not looked at. An event of the OpenAI protocol
is as long as vLLM's and goes out in a chunk of its own, which is what makes a client work.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import msgspec

from pensieve.v1 import pensieve_pb2 as pb

CONTEXT_LIMIT = 1 << 20
VOCABULARY = 32000
_TOKEN = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None, "stop_reason": None,
          "prompt_token_ids": None, "prompt_logprobs": None, "token_ids": [4321]}  # fmt: skip
_EVENT = {"id": "cmpl-8f14e45fceea467f8f14e45fceea467f", "object": "text_completion", "created": 1700000000,
          "model": "pump", "choices": [_TOKEN], "system_fingerprint": None}  # fmt: skip


class Steps:
    """Calls every subscriber once per step; a step that is late is not made up for."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.subscribers: set[Callable[[], None]] = set()

    async def run(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for subscriber in tuple(self.subscribers):
                subscriber()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_PIECE = _chunk(b"data: " + msgspec.json.encode(_EVENT) + b"\n\n")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection: requests one after the other."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""
        self._left = 0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._steps.subscribers.discard(self._send_piece)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        if len(rest) < length:
            return
        self._received = rest[length:]
        if head.startswith(b"GET "):
            return self._answer(
                {"data": [{"id": "pump", "owned_by": "pump", "max_model_len": CONTEXT_LIMIT}]}
            )
        body = msgspec.json.decode(rest[:length]) if length else {}
        if not head.startswith(b"POST /v1/completions "):
            return self._answer({})
        self._left, self._asked, self._prompt = body["max_tokens"], body["max_tokens"], len(body["prompt"])
        self._transport.write(_HEAD)
        self._steps.subscribers.add(self._send_piece)

    def _answer(self, value: Any) -> None:
        data = msgspec.json.encode(value)
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data))

    def _send_piece(self) -> None:
        self._transport.write(_PIECE)
        self._left -= 1
        if self._left:
            return
        self._steps.subscribers.discard(self._send_piece)
        counts = {"prompt_tokens": self._prompt, "completion_tokens": self._asked}
        usage = counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        last = _EVENT | {"choices": [], "usage": usage}
        self._transport.write(_chunk(b"data: " + msgspec.json.encode(last) + b"\n\n"))
        self._transport.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def run_openai(steps: Steps) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: HttpConnection(steps), "127.0.0.1", 0)
    async with server:
        print(f"listening http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await steps.run()


class GrpcPump:
    """The methods that the replay client calls, on serialised messages."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._contexts: dict[str, int] = {}
        self._piece = pb.StreamTurnResponse(
            delta=pb.TurnDelta(text=" token", token_count=1)
        ).SerializeToString()

    def handlers(self) -> grpc.GenericRpcHandler:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            "pensieve.v1.ConversationService",
            {
                "GetServerInfo": unary(self.info, response_serializer=_serialised),
                "CreateSession": unary(self.create, response_serializer=_serialised),
                "DeleteSession": unary(self.delete, response_serializer=_serialised),
                "StreamTurn": stream(self.turn, request_deserializer=pb.StreamTurnRequest.FromString),
            },
        )

    async def info(self, request: bytes, context: Any) -> Any:
        return pb.GetServerInfoResponse(
            version="0", model="pump", vocab_size=VOCABULARY, context_limit=CONTEXT_LIMIT
        )

    async def create(self, request: bytes, context: Any) -> Any:
        name = f"sessions/{len(self._contexts)}"
        self._contexts[name] = 0
        return pb.CreateSessionResponse(session=pb.Session(name=name))

    async def delete(self, request: bytes, context: Any) -> Any:
        return pb.DeleteSessionResponse()

    async def turn(self, request: Any, context: Any) -> AsyncIterator[bytes]:
        new, wanted = len(request.turn.input[0].tokens.ids), request.turn.sampling.max_output_tokens
        before = self._contexts[request.session]
        due = asyncio.Event()
        self._steps.subscribers.add(due.set)
        try:
            for _ in range(wanted):
                await due.wait()
                due.clear()
                yield self._piece
        finally:
            self._steps.subscribers.discard(due.set)
        self._contexts[request.session] = before + new + wanted
        usage = pb.Usage(
            context_tokens=before + new, gpu_cached_tokens=before, new_tokens=new, output_tokens=wanted
        )
        completed = pb.Turn(state=pb.Turn.STATE_COMMITTED, usage=usage)
        yield pb.StreamTurnResponse(completed=completed).SerializeToString()


def _serialised(message: Any) -> bytes:
    return bytes(message.SerializeToString())


async def run_pensieve(steps: Steps) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((GrpcPump(steps).handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"listening pensieve://127.0.0.1:{port}", flush=True)
    await steps.run()


def main(protocol: str, step_ms: float) -> None:
    run = {"openai": run_openai, "pensieve": run_pensieve}[protocol]
    asyncio.run(run(Steps(step_ms / 1e3)))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
