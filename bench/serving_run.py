"""One load on one running server: client processes, metrics of the window, what came of it."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import grpc
import grpc.aio
import serving_client
from serving_client import Job, Progress, Result
from serving_load import Session
from serving_metrics import Window

from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

HEAD_START_S = 4.0
"""For the client processes to import, connect and get ready."""
LATE_S = 60.0
"""After the load: for the clients to end their turns and send what they saw."""


class ClientError(RuntimeError):
    """A client process of the benchmark failed: there is no result."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a load is applied and measured."""

    seconds: float
    window_s: float
    """The last so many seconds are measured."""
    clients: int
    """Processes."""

    @property
    def window_start_s(self) -> float:
        return self.seconds - self.window_s


@dataclass(frozen=True, slots=True)
class Seen:
    """What one load gave."""

    results: tuple[Result, ...]
    """One per client."""
    metrics: dict[str, Any]
    """See ``serving_metrics.Window``; empty without an admin port."""


@dataclass(slots=True)
class _Child:
    process: BaseProcess
    pipe: Connection
    progress: Progress
    result: Result | None = None


def apply_load(
    target: str,
    admin: str,
    sessions: Sequence[Session],
    protocol: Protocol,
    seed: int,
    watch: Callable[[float, Progress], None] = lambda elapsed, progress: None,
) -> Seen:
    """Play ``sessions`` against the server. ``watch`` hears of it twice a second. Raises ClientError."""
    vocab_size = asyncio.run(_vocab_size(target))
    begin = time.monotonic() + HEAD_START_S
    children = [
        _start(Job(target, tuple(sessions[i :: protocol.clients]), begin, protocol.seconds, vocab_size, seed))
        for i in range(protocol.clients)
    ]
    try:
        window = Window(admin, begin + protocol.window_start_s, begin + protocol.seconds) if admin else None
        while any(child.result is None for child in children):
            _listen(children, begin + protocol.seconds + LATE_S)
            watch(time.monotonic() - begin, _sum(children))
        results = tuple(child.result for child in children if child.result is not None)
        return Seen(results, window.finish() if window is not None else {})
    finally:
        for child in children:
            child.process.join(5)
            if child.process.is_alive():
                child.process.kill()


async def evict_all(admin: str) -> int:
    """Empty the server's cache, so that one load does not meet what another left; tokens that were dropped."""
    async with grpc.aio.insecure_channel(admin) as channel:
        stub: Any = rpc.AdminServiceStub(channel)
        answer = await stub.EvictCache(pb.EvictCacheRequest(), timeout=60)
        return int(answer.tokens_evicted)


async def _vocab_size(target: str) -> int:
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = rpc.ConversationServiceStub(channel)
        return int((await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=30)).vocab_size)


def _start(job: Job) -> _Child:
    # Spawned: gRPC does not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=serving_client.main, args=(job, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Child(process, ours, Progress())


def _listen(children: Sequence[_Child], until: float) -> None:
    """Take in what the clients have sent within half a second."""
    if time.monotonic() > until:
        raise ClientError("a client process did not come to its end")
    waiting = {child.pipe: child for child in children if child.result is None}
    for pipe in wait(list(waiting), timeout=0.5):
        child = waiting[pipe]  # type: ignore[index]
        try:
            message = child.pipe.recv()
        except EOFError:
            raise ClientError("a client process died; its traceback is above") from None
        if isinstance(message, Progress):
            child.progress = message
        else:
            child.result = message


def _sum(children: Sequence[_Child]) -> Progress:
    parts = [child.progress for child in children]
    return Progress(
        done=sum(part.done for part in parts),
        failed=sum(part.failed for part in parts),
        running=sum(part.running for part in parts),
        tokens=sum(part.tokens for part in parts),
    )
