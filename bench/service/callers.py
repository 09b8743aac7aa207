"""Callers of a server that is offered too much: turns at random times or one after another, and other calls.

They use the bare stubs: a client that tries again by itself would hide what is measured here.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from pensieve import rpc_status
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc

SESSIONS = 300
WORKERS = 32
"""Calls at once of a tenant that floods with other calls than turns."""
CONNECTIONS = 16
"""That one of them opens at once."""
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The preface of HTTP/2, and settings without any."""
WORDS = "the fox was in the garden and the neighbour told me what the name of the dog is "
INPUT_CHARS = 200


@dataclass(frozen=True, slots=True)
class Call:
    """What became of one call. Seconds; ``at`` since the load began."""

    at: float
    reason: str
    """"": it was served."""
    first_token_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Turns of one tenant: ``rate`` a second at random times for ``seconds``; each answer has ``output`` tokens."""

    address: str
    key: str
    rate: float
    seconds: float
    output: int = 20
    seed: int = 0


def offer(load: Load) -> list[Call]:
    """Run a load, in a process of its own."""
    return asyncio.run(_offer(load))


def flood(load: Load, kind: str) -> int:
    """Flood with other calls (``listings``, ``counts``, ``bodies``) or ``connections``, 16 a call, for as long; returns
    how many were made."""
    return asyncio.run(_flood(load, kind))


async def _offer(load: Load) -> list[Call]:
    rng = random.Random(load.seed)
    loop = asyncio.get_running_loop()
    async with _channel(load.address) as channel:
        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        free = deque(await _sessions(api, load, SESSIONS))
        calls: list[Call] = []
        tasks: set[asyncio.Task[None]] = set()
        begin = at = loop.time()
        while (at := at + rng.expovariate(load.rate)) < begin + load.seconds:
            await asyncio.sleep(max(at - loop.time(), 0))
            if not free:
                free.extend(await _sessions(api, load, 50))
            task = asyncio.create_task(_turn(api, load, free, at - begin, at, calls))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)
        return calls


async def _turn(api: Any, load: Load, free: deque[str], at: float, due: float, calls: list[Call]) -> None:
    """One turn, whose times count from when it was due: a caller that is late itself would flatter the server."""
    loop = asyncio.get_running_loop()
    session, first, reason = free.popleft(), 0.0, ""
    spec = pb.TurnSpec(
        request_id=str(uuid.uuid4()),
        input=[pb.InputItem(role=pb.ROLE_USER, text=(WORDS * 9)[:INPUT_CHARS])],
        sampling=pb.SamplingParams(max_output_tokens=load.output, ignore_eos=True),
    )
    call = api.StreamTurn(
        pb.StreamTurnRequest(session=session, turn=spec), metadata=_bearer(load.key), timeout=120.0
    )
    try:
        async for event in call:
            if event.HasField("delta") and not first:
                first = loop.time() - due
    except grpc.RpcError as error:
        found = rpc_status.from_rpc_error(error)
        reason = found.reason if found.reason != rpc_status.TRANSPORT else f"{found.code}: {found.message}"
    finally:
        call.cancel()
    calls.append(Call(at, reason, first, loop.time() - due))
    free.append(session)


async def _sessions(api: Any, load: Load, count: int) -> Sequence[str]:
    async def create() -> str:
        while True:
            try:
                answer = await api.CreateSession(pb.CreateSessionRequest(), metadata=_bearer(load.key))
            except grpc.RpcError:  # of a server that is flooded with streams, gRPC refuses some by itself
                await asyncio.sleep(0.1)
            else:
                return str(answer.session.name)

    names: list[str] = []
    while len(names) < count:
        names += await asyncio.gather(*(create() for _ in range(min(25, count - len(names)))))
    return names


async def _flood(load: Load, kind: str) -> int:
    until, made = time.monotonic() + load.seconds, 0
    async with _channel(load.address) as channel:
        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        await _sessions(api, load, SESSIONS)
        text = (WORDS * 2000)[:100_000]
        labels = {f"k{number}": "x" * 200 for number in range(60)}
        requests: dict[str, Callable[[], Awaitable[Any]]] = {
            "listings": lambda: api.ListSessions(
                pb.ListSessionsRequest(page_size=1000, label_selector="a=b"), metadata=_bearer(load.key)
            ),
            "counts": lambda: api.CountTokens(
                pb.CountTokensRequest(input=[pb.InputItem(role=pb.ROLE_USER, text=text)]),
                metadata=_bearer(load.key),
            ),
            "connections": lambda: _connections(load.address),
            "bodies": lambda: api.CreateSession(
                pb.CreateSessionRequest(labels=labels, config=pb.SessionConfig(system_prompt=text * 20)),
                metadata=_bearer(load.key),
            ),
        }

        async def work() -> None:
            nonlocal made
            while time.monotonic() < until:
                try:
                    await requests[kind]()
                except (grpc.RpcError, OSError):
                    await asyncio.sleep(0.001)
                made += 1

        await asyncio.gather(*(work() for _ in range(WORKERS)))
    return made


async def _connections(address: str) -> None:
    """Open some, say hello as HTTP/2 does, wait for the answer, and leave."""
    host, _, port = address.rpartition(":")
    opened = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS)))
    try:
        for reader, writer in opened:
            writer.write(HELLO)
            async with asyncio.timeout(5):
                await reader.read(9)
    finally:
        for _, writer in opened:
            writer.close()


def _channel(address: str) -> Any:
    return aio.insecure_channel(address)


def _bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()
