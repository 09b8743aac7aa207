"""A client process: one ``Player`` with its own connections, controlled by the ``player_pool`` that started it.

    pool  → process   Job              what to play, where
    pool  ← process   TurnSent, TurnEnded … of the histories; then PlayerReady; or Refused, and the process ends
    pool  → process   Go               when time 0 is
    pool  ← process   TurnSent, TurnEnded …, then PlayerFinished
    pool  → process   DeleteSessions   all processes have finished
    pool  ← process   SessionsDeleted  the last message

Messages are frames as between front end and engine (``pensieve.frames``) on a socket whose descriptor is the
argument. If the socket closes early the pool is gone, and the process ends.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from pensieve.frames import HEADER, decode, decoder_for, encode_frame, frame_length
from pensieve.replay.load.schedule import Script
from pensieve.replay.play.runner import Player
from pensieve.replay.records import PlayResult, RunOptions, TurnRecord
from pensieve.replay.targets.base import Address, TargetInfo, TurnFailed
from pensieve.replay.targets.options import parse_target

T = TypeVar("T")
W = TypeVar("W")


class Job(msgspec.Struct, frozen=True, tag=True, array_like=True):
    address: Address
    info: TargetInfo
    scripts: tuple[Script, ...]
    options: RunOptions


class Go(msgspec.Struct, frozen=True, tag=True, array_like=True):
    start: float
    """On the clock of ``time.perf_counter``, which all processes of a machine share."""


class DeleteSessions(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All processes have finished: delete the sessions and end."""


class PlayerReady(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The histories have been played."""


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The server could not be reached; the process ends."""

    code: str
    message: str


class TurnSent(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A turn is sent."""


class TurnEnded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A turn has completed or failed."""

    record: TurnRecord


class PlayerFinished(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """All turns have ended, or the replay was stopped."""

    played: PlayResult


class SessionsDeleted(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The sessions are deleted, and the process ends."""

    leftover: str
    """Why a session could not be deleted; empty if all were."""


PoolMessage = Job | Go | DeleteSessions
PlayerMessage = PlayerReady | Refused | TurnSent | TurnEnded | PlayerFinished | SessionsDeleted


class PoolChannel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, messages: Any) -> None:
        self._reader, self._writer = reader, writer
        self._decoder: msgspec.msgpack.Decoder[Any] = decoder_for(messages)

    @classmethod
    async def from_socket(cls, sock: socket.socket, messages: Any) -> PoolChannel:
        return cls(*await asyncio.open_connection(sock=sock), messages)

    def send(self, message: PoolMessage | PlayerMessage) -> None:
        """Send without waiting for the other end to read: a measurement must not wait."""
        self._writer.write(encode_frame(message))

    async def receive(self, kind: type[T]) -> T:
        """Return the next message, which must have this type. Raises EOFError when the other end is gone."""
        try:
            length = frame_length(await self._reader.readexactly(HEADER.size))
            message = decode(await self._reader.readexactly(length), self._decoder)
        except ConnectionError as error:
            raise EOFError from error
        assert isinstance(message, kind), f"{message!r} was not expected"
        return message

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the other end closed first


async def run(channel: PoolChannel) -> None:
    job = await channel.receive(Job)
    target = parse_target(job.address.url, job.address.api_key)
    try:
        await target.open()
        await _play(channel, job, Player(target, job.info, job.options, lambda r: channel.send(TurnEnded(r)),
                                         lambda: channel.send(TurnSent())))  # fmt: skip
    except TurnFailed as failure:
        channel.send(Refused(failure.code, failure.message))
    finally:
        await target.close()


async def _play(channel: PoolChannel, job: Job, player: Player) -> None:
    go = await _do_and_report(channel, player.prepare(job.scripts), lambda _: PlayerReady(), Go)
    gc.freeze()  # existing objects stay: collections need not scan them while turns are timed
    await _do_and_report(channel, player.play(job.scripts, go.start), PlayerFinished, DeleteSessions)
    channel.send(SessionsDeleted(await player.end_sessions()))


async def _do_and_report(
    channel: PoolChannel, work: Coroutine[Any, Any, W], report: Callable[[W], PlayerMessage], order: type[T]
) -> T:
    """Do the work, report its result, and wait for the next order; a closed socket cancels the work."""
    ordered, working = asyncio.create_task(channel.receive(order)), asyncio.create_task(work)
    try:
        await asyncio.wait({ordered, working}, return_when=asyncio.FIRST_COMPLETED)
        if not ordered.done():
            channel.send(report(working.result()))
        return await ordered
    finally:
        working.cancel()
        ordered.cancel()


async def main(descriptor: int) -> None:
    channel = await PoolChannel.from_socket(socket.socket(fileno=descriptor), PoolMessage)
    try:
        await run(channel)
    except EOFError:
        return
    finally:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
