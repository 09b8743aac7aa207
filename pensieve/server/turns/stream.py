"""One attached stream: from a turn's buffer to the events that a client sees, at the client's speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from pensieve.errors import InvalidArgument
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.pace import Pace
from pensieve.server.values import OutputChoice, StreamEvent


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How one client wants its stream."""

    output: OutputChoice
    heartbeat_s: float
    resume_attempt: str = ""
    resume_offset: int = 0
    joined: bool = False
    """The turn had been started before this call."""


async def events(
    buffer: TurnBuffer, options: StreamOptions, pace: Pace | None = None
) -> AsyncGenerator[StreamEvent, None]:
    """``Accepted``, then progress and deltas, then the turn. Raises the error the turn ends with.

    Whatever is ready when the reader comes back for more is one delta, so a slow reader gets few and large ones; with
    many streams ``pace`` does the same. Never silent for longer than ``heartbeat_s`` after that first event, as long as
    the reader keeps reading.
    """
    while buffer.accepted is None:
        if buffer.ended:
            buffer.result()  # raises: nothing ends well before it is accepted
        await buffer.changed(options.heartbeat_s)
    accepted = buffer.accepted
    sent = _first_token(buffer, options)
    yield replace(accepted, replayed=accepted.replayed or options.joined)
    pace, now = pace or Pace(), asyncio.get_running_loop().time
    seen, next_at, talking = 0, 0.0, False
    try:
        while True:
            if buffer.ready > sent:
                if not talking:
                    talking = True
                    pace.join()
                if options.output.max_chunk_delay_s > 0:
                    await _gather(buffer, sent, options)
                    if buffer.ready <= sent:
                        continue  # taken back meanwhile
                delta = buffer.delta(sent, options.output.max_chunk_tokens)
                sent += len(delta.tokens)
                if buffer.ready == sent:  # else the client wants smaller pieces: they follow at once
                    next_at = pace.next_at(now())
                yield delta
                if next_at > now():
                    # Asleep until then, whatever tokens come: to be woken by the first and then wait would cost as much
                    # again as the message.
                    await buffer.ends_within(next_at - now())
            elif buffer.ended:
                yield buffer.result()
                return
            elif buffer.progress_count != seen:
                seen = buffer.progress_count
                yield buffer.progress
            elif not await buffer.changed(options.heartbeat_s):
                yield buffer.progress
    finally:
        if talking:
            pace.leave()


def _first_token(buffer: TurnBuffer, options: StreamOptions) -> int:
    """Index of the first token to send. Raises InvalidArgument when the client claims tokens that never existed."""
    assert buffer.accepted is not None and buffer.output is not None
    if options.resume_attempt and options.resume_attempt != buffer.accepted.attempt:
        return 0
    if options.resume_offset > len(buffer.output.tokens):
        if buffer.output.cut_short:
            return len(buffer.output.tokens)
        raise InvalidArgument.field(
            "resume_token_offset", "is larger than the number of tokens of this attempt"
        )
    return options.resume_offset


async def _gather(buffer: TurnBuffer, sent: int, options: StreamOptions) -> None:
    """Wait for more tokens: until a chunk is full, the delay or a heartbeat's time is over, or the turn ends."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(options.output.max_chunk_delay_s, options.heartbeat_s)
    wanted = options.output.max_chunk_tokens
    while not buffer.ended and (wanted is None or buffer.ready - sent < wanted):
        left = until - loop.time()
        if left <= 0 or not await buffer.changed(left):
            return
