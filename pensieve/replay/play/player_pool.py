"""Plays one run with several client processes: each conversation in one of them, all from the same instant."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from pensieve.debug import child_environment
from pensieve.replay.load.schedule import Script
from pensieve.replay.play import player_process as wire
from pensieve.replay.play.runner import OnSend, OnTurn
from pensieve.replay.records import Outcome, PlayResult, RunOptions, TurnRecord, merge_results
from pensieve.replay.targets.base import RemoteTarget, TargetInfo, TurnFailed

_HEAD_START_S = 0.05
"""Time between ``Go`` and the start that it announces, so that it reaches every process before then."""
_TAIL_BYTES = 4000
T = TypeVar("T")


class ClientFailed(RuntimeError):
    """A client process ended before its work did; the measurement is lost."""


def deal(scripts: Sequence[Script], options: RunOptions) -> list[tuple[tuple[Script, ...], RunOptions]]:
    """Distribute scripts round-robin over the processes, with the options of each.

    A limit on concurrent conversations, at least the number of processes, is split too, and conversations in
    proportion.
    """
    processes, limit = options.processes, options.concurrency
    rounds = limit or processes
    assert rounds >= processes
    return [
        (
            tuple(script for place, script in enumerate(scripts) if place % rounds % processes == number),
            replace(options, concurrency=limit and len(range(number, limit, processes))),
        )
        for number in range(processes)
    ]


async def replay(
    target: RemoteTarget,
    info: TargetInfo,
    scripts: Sequence[Script],
    options: RunOptions,
    on_turn: OnTurn = lambda record: None,
    on_send: OnSend = lambda: None,
) -> Outcome:
    """Like ``runner.replay``, from several processes to the target's address. No process outlives this call.

    Raises TurnFailed when a process cannot connect, ClientFailed when one dies.
    """
    records: list[TurnRecord] = []

    def on_end(record: TurnRecord) -> None:
        records.append(record)
        on_turn(record)

    async with AsyncExitStack() as stack:
        players: list[_PlayerProcess] = []
        for number, (share, limits) in enumerate(deal(scripts, options)):
            players.append(await stack.enter_async_context(_start_process(number)))
            players[-1].channel.send(wire.Job(target.address(), info, share, limits))
        await _all(player.ready(on_end, on_send) for player in players)
        start = time.perf_counter() + _HEAD_START_S
        for player in players:
            player.channel.send(wire.Go(start))
        played = await _all(player.follow(on_end, on_send) for player in players)
        # Sessions are deleted only after all processes have finished their measurement.
        leftovers = await _all(player.delete_sessions() for player in players)
    return merge_results(target.name, info, records, played, next(filter(None, leftovers), ""))


class _PlayerProcess:
    def __init__(self, number: int, process: asyncio.subprocess.Process, channel: wire.PoolChannel) -> None:
        self._number, self._process, self.channel = number, process, channel
        assert process.stderr is not None
        self._stderr_tail = asyncio.create_task(_tail(process.stderr))

    async def ready(self, on_turn: OnTurn, on_send: OnSend) -> None:
        message = await self._next(wire.PlayerReady | wire.Refused, on_turn, on_send)
        if isinstance(message, wire.Refused):
            raise TurnFailed(message.code, message.message)

    async def follow(self, on_turn: OnTurn, on_send: OnSend) -> PlayResult:
        finished = await self._next(wire.PlayerFinished, on_turn, on_send)
        return cast(PlayResult, finished.played)

    async def _next(self, wanted: Any, on_turn: OnTurn, on_send: OnSend) -> Any:
        while True:
            match await self._receive(wire.TurnSent | wire.TurnEnded | wanted):
                case wire.TurnSent():
                    on_send()
                case wire.TurnEnded(record):
                    on_turn(record)
                case message:
                    return message

    async def delete_sessions(self) -> str:
        self.channel.send(wire.DeleteSessions())
        message = await self._receive(wire.SessionsDeleted)
        return str(message.leftover)

    async def kill(self) -> None:
        """Kill the process: its remaining work is of no use."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._stderr_tail
        await self.channel.close()

    async def _receive(self, kind: Any) -> Any:
        try:
            return await self.channel.receive(kind)
        except EOFError:
            status, tail = await self._process.wait(), await self._stderr_tail
            raise ClientFailed(
                f"client process {self._number} ended with status {status}; last output:\n{tail}"
            ) from None


@asynccontextmanager
async def _start_process(number: int) -> AsyncIterator[_PlayerProcess]:
    ours, theirs = socket.socketpair()
    channel = await wire.PoolChannel.from_socket(ours, wire.PlayerMessage)  # closing it ends the process, too
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", wire.__name__, str(theirs.fileno())),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env=child_environment(failpoints=False),
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which ends its processes
        )
    player = _PlayerProcess(number, process, channel)
    try:
        yield player
    finally:
        await player.kill()


async def _tail(stream: asyncio.StreamReader) -> str:
    last = b""
    while data := await stream.read(_TAIL_BYTES):
        last = (last + data)[-_TAIL_BYTES:]
    return last.decode("utf-8", "replace").strip()


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order; the first failure cancels the rest and is raised unwrapped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
