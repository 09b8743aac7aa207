"""One attached stream: turns a turn's buffer into the events that a client sees, at the client's speed.

With many streams, a message costs the front end more than the token in it. Most of that is the system's cost (one
``sendmsg`` and two thread switches per message), so faster Python does not help. ``StreamPacer`` never delays a
stream's first output and its end. In between, a stream is written at most once per interval, with everything that has
come since in one message.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Final

from pensieve.errors import InvalidArgument
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import Delta, OutputOptions, StreamEvent

MIN_INTERVAL_S: Final = 0.0125
"""Shorter intervals would merge little: an engine step takes about as long."""
MAX_INTERVAL_S: Final = 0.1
"""Ten writes per second still look like a stream."""


class StreamPacer:
    """Write times for all streams of a front end. Used on one event loop."""

    def __init__(self, messages_per_s: float = float("inf")) -> None:
        """Keep all streams together below this many output messages per second, if ``MAX_INTERVAL_S`` allows."""
        self._messages_per_s = messages_per_s
        self._streams = 0

    def join(self, candidates: int = 1) -> None:
        """Count a stream from its first output on. Each of its candidates counts, since each has its own messages."""
        self._streams += candidates

    def leave(self, candidates: int = 1) -> None:
        self._streams -= candidates

    def next_at(self, now: float) -> float:
        """Return when a stream written now may be written again, on the same clock; ``now`` if there are few streams.

        All streams get the same time and are served together: waking them one by one would cost each the system calls
        and thread switches that a group shares.
        """
        wanted = self._streams / self._messages_per_s
        if wanted < MIN_INTERVAL_S:
            return now
        # Rounded up to a power of two, so that the times of a longer interval are among those of a shorter
        # one. Otherwise each stream that joins or leaves would shift the grid.
        interval = min(
            math.ldexp(MIN_INTERVAL_S, math.ceil(math.log2(wanted / MIN_INTERVAL_S))), MAX_INTERVAL_S
        )
        return (math.floor(now / interval) + 1) * interval


UNANNOUNCED_HEARTBEAT_S: Final = 10.0
"""The heartbeat interval until the first event announces another; clients rely on it."""


@dataclass(frozen=True, slots=True)
class StreamOptions:
    output: OutputOptions
    heartbeat_s: float
    resume_attempt: str = ""
    resume_offsets: tuple[int, ...] = ()
    """Number of tokens that the client has of candidates 0, 1, ...; 0 for candidates beyond the end."""
    joined: bool = False
    """The turn had been started before this call."""


async def events(
    buffer: TurnBuffer, options: StreamOptions, pace: StreamPacer | None = None
) -> AsyncGenerator[StreamEvent, None]:
    """Yield ``Accepted``, progress and deltas, then the turn. While another server runs the turn: progress
    only. Raises the error the turn ends with.

    All ready tokens of a candidate form one delta, so a slow reader gets few and large ones; ``pace`` does
    the same when there are many streams. Candidates alternate. While the reader keeps reading, the stream is
    never silent for longer than ``heartbeat_s``.
    """
    while buffer.accepted is None:
        if buffer.ended:
            buffer.result()  # raises: no turn succeeds before it is accepted
        if not await buffer.wait_for_change(min(options.heartbeat_s, UNANNOUNCED_HEARTBEAT_S)):
            yield buffer.progress
    accepted = buffer.accepted
    sent = _first_tokens(buffer, options)
    yield replace(accepted, replayed=accepted.replayed or options.joined)
    pace, now = pace or StreamPacer(), asyncio.get_running_loop().time
    seen, talking, last = 0, False, len(sent) - 1
    try:
        while True:
            delta = await _next_delta(buffer, options, sent, last)
            if delta is not None:
                if not talking:
                    talking = True
                    pace.join(len(sent))
                last = delta.candidate
                more = buffer.next_candidate(sent, last) is not None
                next_at = 0.0 if more else pace.next_at(now())
                yield delta
                if next_at > now():
                    # Sleep until then, whatever tokens arrive: a wake-up by the first of them, and a second
                    # wait, would cost as much as the message.
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


async def _next_delta(buffer: TurnBuffer, options: StreamOptions, sent: list[int], last: int) -> Delta | None:
    """Return the next delta, of a candidate after ``last`` if there is one, and count its tokens in ``sent``. None:
    nothing is ready."""
    candidate = buffer.next_candidate(sent, last)
    if candidate is not None and candidate <= last and options.output.max_chunk_delay_s > 0:
        # Once per round of the candidates, or their delays would add up.
        await _gather(buffer, sent, options)
        candidate = buffer.next_candidate(sent, last)  # None: the output was truncated meanwhile
    if candidate is None:
        return None
    scores = options.output.top_logprobs is not None
    delta = buffer.delta(candidate, sent[candidate], options.output.max_chunk_tokens, scores=scores)
    sent[candidate] += len(delta.tokens)
    return delta


def _first_tokens(buffer: TurnBuffer, options: StreamOptions) -> list[int]:
    """Index of the first token to send of each candidate. Raises InvalidArgument when the client claims
    tokens that never existed; a turn that was cut short may have removed them, so there the claim is
    clipped."""
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
    """Wait for more tokens: until a chunk is full, the delay or the heartbeat interval is over, or the turn ends."""
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
