"""One attached stream: from a turn's buffer to the events that a client sees, at the client's speed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

from pensieve.errors import InvalidArgument
from pensieve.server.pace import StreamPacer
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import OutputOptions, StreamEvent

UNANNOUNCED_HEARTBEAT_S: Final = 10.0
"""The heartbeat until the first event announces another; clients know it."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How one client wants its stream."""

    output: OutputOptions
    heartbeat_s: float
    resume_attempt: str = ""
    resume_offsets: tuple[int, ...] = ()
    """Tokens that the client has of candidates 0, 1, ...; 0 of those that are not in here."""
    joined: bool = False
    """The turn had been started before this call."""


async def events(
    buffer: TurnBuffer, options: StreamOptions, pace: StreamPacer | None = None
) -> AsyncGenerator[StreamEvent, None]:
    """``Accepted``, then progress and deltas, then the turn; progress alone before, while another server has the turn.
    Raises the error the turn ends with.

    Whatever is ready of a candidate when its turn comes is one delta, so a slow reader gets few and large ones; with
    many streams ``pace`` does the same. Candidates take turns: none waits for another's end. Never silent for longer
    than ``heartbeat_s`` after that first event, as long as the reader keeps reading.
    """
    while buffer.accepted is None:
        if buffer.ended:
            buffer.result()  # raises: nothing ends well before it is accepted
        if not await buffer.wait_for_change(min(options.heartbeat_s, UNANNOUNCED_HEARTBEAT_S)):
            yield buffer.progress
    accepted = buffer.accepted
    sent = _first_tokens(buffer, options)
    yield replace(accepted, replayed=accepted.replayed or options.joined)
    pace, now = pace or StreamPacer(), asyncio.get_running_loop().time
    seen, next_at, talking, last = 0, 0.0, False, len(sent) - 1
    try:
        while True:
            candidate = buffer.next_candidate(sent, last)
            if candidate is not None:
                if not talking:
                    talking = True
                    pace.join(len(sent))
                if options.output.max_chunk_delay_s > 0 and candidate <= last:
                    # Once for each round of the candidates, or their delays would add up.
                    await _gather(buffer, sent, options)
                    if (candidate := buffer.next_candidate(sent, last)) is None:
                        continue  # taken back meanwhile
                delta = buffer.delta(
                    candidate,
                    sent[candidate],
                    options.output.max_chunk_tokens,
                    scores=options.output.top_logprobs is not None,
                )
                sent[candidate] += len(delta.tokens)
                last = candidate
                if buffer.next_candidate(sent, last) is None:  # else more is there, and follows at once
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
            elif not await buffer.wait_for_change(options.heartbeat_s):
                yield buffer.progress
    finally:
        if talking:
            pace.leave(len(sent))


def _first_tokens(buffer: TurnBuffer, options: StreamOptions) -> list[int]:
    """Index of the first token to send of each candidate.

    Raises InvalidArgument when the client claims tokens that never existed. Those of a turn that was cut short may have
    been taken back, and with them the candidates that it did not keep.
    """
    assert buffer.accepted is not None and buffer.outputs
    first = [0] * len(buffer.outputs)
    if options.resume_attempt and options.resume_attempt != buffer.accepted.attempt:
        return first
    cut_short = buffer.outputs[0].cut_short
    if any(options.resume_offsets[len(first) :]) and not cut_short:
        raise InvalidArgument.field("resume_candidate_offsets", "has more elements than there are candidates")
    for candidate, (asked, output) in enumerate(zip(options.resume_offsets, buffer.outputs, strict=False)):
        if asked > len(output.tokens) and not cut_short:
            field = "resume_candidate_offsets" if candidate else "resume_token_offset"
            raise InvalidArgument.field(field, "is larger than the number of tokens of this attempt")
        first[candidate] = min(asked, len(output.tokens))
    return first


async def _gather(buffer: TurnBuffer, sent: list[int], options: StreamOptions) -> None:
    """Wait for more tokens: until a chunk is full, the delay or a heartbeat's time is over, or the turn ends."""
    loop = asyncio.get_running_loop()
    until = loop.time() + min(options.output.max_chunk_delay_s, options.heartbeat_s)
    wanted = options.output.max_chunk_tokens
    while not buffer.ended and (
        wanted is None
        or all(output.ready - had < wanted for output, had in zip(buffer.outputs, sent, strict=True))
    ):
        left = until - loop.time()
        if left <= 0 or not await buffer.wait_for_change(left):
            return
