"""One client process of the serving benchmark: plays its share of the sessions over gRPC and keeps every time.

Several such processes share one load, because one Python process cannot read 10,000 streamed messages a second and
still be on time. All times are seconds after ``Job.begin``, a reading of the system-wide monotonic clock.
"""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt
from serving_load import Session, Turn

from pensieve.client._decode import usage
from pensieve.core import Usage
from pensieve.rpc_status import from_rpc_error
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

OPEN_AHEAD_S = 1.0
"""A session is created this long before its first turn is due, so that creating it delays no turn."""
REPORT_S = 0.5
STREAMS_PER_CHANNEL = 200
"""A server takes 256 calls on one connection and leaves the rest waiting unseen in the client."""
GIVE_UP_S = 20.0
"""For ending the sessions that were in the middle of a turn."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one client does."""

    target: str
    sessions: tuple[Session, ...]
    begin: float
    """``time.monotonic()`` at which the load begins."""
    seconds: float
    """Length of the load; what is not complete by then is abandoned."""
    vocab_size: int
    seed: int


@dataclass(slots=True)
class TurnTimes:
    """One completed turn."""

    session: int
    turn: int
    due_s: float
    sent_s: float
    first_s: float
    """Arrival of the first output token."""
    done_s: float
    """Arrival of ``completed``: the turn is durable."""
    output_tokens: int
    usage: Usage


@dataclass(slots=True)
class Progress:
    """Counts so far."""

    done: int = 0
    failed: int = 0
    running: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Result:
    """All that one client saw."""

    turns: list[TurnTimes] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """By reason of the error."""
    failure_examples: list[str] = field(default_factory=list)
    unfinished: int = 0
    """Turns under way at the end."""
    arrivals: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    """[messages with tokens, (time, tokens, seconds since the stream's message before; NaN for its first)]"""
    cpu_share: float = 0.0
    """Processor time of this process over the length of the load."""


class _Client:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.result = Result()
        self.progress = Progress()
        self._arrivals: list[tuple[float, int, float]] = []
        self._channels: list[Any] = []
        self._stubs: list[Any] = []
        self._busy: dict[str, Any] = {}

    async def run(self) -> None:
        count = 1 + len(self._job.sessions) // STREAMS_PER_CHANNEL
        # Without a pool of its own a channel shares the connection of the others.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [grpc.aio.insecure_channel(self._job.target, options=options) for _ in range(count)]
        self._stubs = [rpc.ConversationServiceStub(channel) for channel in self._channels]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        tasks = [asyncio.create_task(self._play(session)) for session in self._job.sessions if session.turns]
        gc.collect()
        gc.freeze()
        await self._until(0.0)
        cpu = time.process_time()
        await self._until(self._job.seconds)
        self.result.cpu_share = (time.process_time() - cpu) / self._job.seconds
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome
        self.result.unfinished = len(self._busy)
        self.result.arrivals = np.array(self._arrivals).reshape(-1, 3)
        await self._end_turns()

    async def _play(self, session: Session) -> None:
        stub = self._stubs[session.number % len(self._stubs)]
        await self._until(session.start_s - OPEN_AHEAD_S)
        try:
            request = pb.CreateSessionRequest(request_id=str(uuid.uuid4()))
            name = (await stub.CreateSession(request)).session.name
            due = session.start_s
            for index, turn in enumerate(session.turns):
                await self._until(due)
                done = await self._turn(stub, name, session.number, index, turn, due)
                if done is None or index + 1 == len(session.turns):
                    return
                due = done + session.turns[index + 1].think_s
        except grpc.aio.AioRpcError as error:
            self._failed(from_rpc_error(error).reason, f"{error.code().name}: {error.details()}")

    async def _turn(
        self, stub: Any, name: str, session: int, index: int, turn: Turn, due: float
    ) -> float | None:
        """Send one turn and read it to its end; when that was. None: it came out wrong."""
        request = self._request(name, session, index, turn)
        self.progress.running += 1
        self._busy[name] = stub
        tokens, first, last = 0, 0.0, float("nan")
        completed = None
        sent = self._now()
        try:
            async for event in stub.StreamTurn(request):
                kind = event.WhichOneof("event")
                if kind == "delta" and event.delta.token_count:
                    now, count = self._now(), event.delta.token_count
                    first = first or now
                    tokens += count
                    self.progress.tokens += count
                    self._arrivals.append((now, count, now - last))
                    last = now
                elif kind == "completed":
                    completed = event.completed
        except grpc.aio.AioRpcError:
            self._busy.pop(name)
            raise
        finally:
            self.progress.running -= 1
        done = self._now()
        del self._busy[name]
        if completed is None or completed.state != pb.Turn.STATE_COMMITTED:
            self._failed("NOT_COMMITTED", "the stream ended without a committed turn")
            return None
        if tokens != turn.output_tokens:
            self._failed("WRONG_LENGTH", f"{tokens} tokens came, {turn.output_tokens} were due")
            return None
        self.progress.done += 1
        times = TurnTimes(session, index, due, sent, first, done, tokens, usage(completed.usage))
        self.result.turns.append(times)
        return done

    def _request(self, name: str, session: int, index: int, turn: Turn) -> Any:
        draw = np.random.default_rng([self._job.seed, session, index])
        ids = draw.integers(0, self._job.vocab_size, turn.input_tokens).tolist()
        sampling = pb.SamplingParams(temperature=0.0, max_output_tokens=turn.output_tokens, ignore_eos=True)
        content = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=ids))
        spec = pb.TurnSpec(request_id=str(uuid.uuid4()), input=[content], sampling=sampling)
        return pb.StreamTurnRequest(session=name, turn=spec)

    def _failed(self, reason: str, example: str) -> None:
        self.progress.failed += 1
        self.result.failures[reason] += 1
        if len(self.result.failure_examples) < 5:
            self.result.failure_examples.append(example)

    async def _end_turns(self) -> None:
        """Delete the sessions whose turn was cut off: the server would wait for their callers to come back."""
        calls = [
            stub.DeleteSession(pb.DeleteSessionRequest(name=name, allow_missing=True), timeout=GIVE_UP_S)
            for name, stub in self._busy.items()
        ]
        await asyncio.gather(
            *calls, return_exceptions=True
        )  # the server may be gone, which is told elsewhere
        for channel in self._channels:
            await channel.close()

    def _now(self) -> float:
        return time.monotonic() - self._job.begin

    async def _until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self._now()))


async def _run(job: Job, pipe: Connection) -> Result:
    client = _Client(job)

    async def report() -> None:
        while True:
            pipe.send(client.progress)
            await asyncio.sleep(REPORT_S)

    reporting = asyncio.create_task(report())
    try:
        await client.run()
    finally:
        reporting.cancel()
    return client.result


def main(job: Job, pipe: Connection) -> None:
    """Of the process: sends ``Progress`` now and then, and a ``Result`` at the end."""
    pipe.send(asyncio.run(_run(job, pipe)))
    pipe.close()
