"""The engine's part of a turn: submit, take tokens into the buffer, stop where the turn says so."""

from __future__ import annotations

import asyncio

from pensieve.core import FinishReason, Sampling, SessionKey, Usage
from pensieve.debug import failpoint
from pensieve.engine.messages import Finished, Output, RequestProgress, Started
from pensieve.server.history.rendering import PreparedTurn
from pensieve.server.links.engine_link import EngineLink, Generation
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import ProgressView


class TurnGeneration:
    """The generation of one turn, and the ``GenerationSink`` that takes it into the turn's buffer.

    It ends by itself, at a stop string, when its time is over, or by ``interrupt``.
    """

    def __init__(self, buffer: TurnBuffer) -> None:
        self._buffer = buffer
        self._generation: Generation | None = None
        self._over: asyncio.Future[None] | None = None
        """What ``run`` waits for. No token resolves it, so a turn's task sleeps from its submission to its end."""
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._interrupted = False
        self._submitted_at = self._started_at = 0.0
        self.first_token_at: float | None = None
        """On the event loop's clock."""
        self.out_of_time = False
        """Ended because ``max_duration`` was over."""

    def interrupt(self) -> None:
        """Stop within one engine step, or never start. What the engine still sends goes nowhere."""
        self._interrupted = True
        self._end()

    async def run(
        self,
        link: EngineLink,
        session: SessionKey,
        prepared: PreparedTurn,
        sampling: Sampling,
        limit_s: float | None,
    ) -> None:
        """Returns when the turn has its last token. Raises what ``EngineLink.submit`` and ``failed`` tell."""
        if self._interrupted:
            return
        loop = asyncio.get_running_loop()
        self._submitted_at = loop.time()
        self._over = loop.create_future()
        self._generation = link.submit(session, prepared.context, prepared.num_new, sampling, self)
        timer = loop.call_later(limit_s, self._time_is_over) if limit_s is not None else None
        try:
            await self._over
        finally:
            self._generation.cancel()
            # Link and turn know each other through it: without this the turn's buffer would wait for the collector.
            self._generation = None
            if timer is not None:
                timer.cancel()

    # ---- the link calls

    def started(self, event: Started) -> None:
        self._started, self._started_at = event, asyncio.get_running_loop().time()

    def progress(self, event: RequestProgress) -> None:
        self._buffer.report(
            ProgressView(event.phase, event.queue_position, event.tokens_done, event.tokens_total)
        )

    def tokens(self, event: Output) -> None:
        failpoint("mid_decode")
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
        self._buffer.take(event.token_ids, event.logprobs)
        if self._stop is not None:
            self._end()

    def finished(self, event: Finished) -> None:
        self._finished = event
        self._end()

    def failed(self, error: Exception) -> None:
        self._end(error)

    # ---- the receipt

    @property
    def finish_reason(self) -> FinishReason:
        """Why the generation ended, if nobody interrupted it."""
        if self._stop is not None:
            return FinishReason.STOP_SEQUENCE
        if self.out_of_time or self._finished is None:
            return FinishReason.TIME_LIMIT
        return self._finished.reason

    def usage(self, output_tokens: int) -> Usage:
        """The receipt, with the number of tokens that are kept."""
        now = asyncio.get_running_loop().time()
        source = self._finished or self._started
        started = self._started_at or now
        first = self.first_token_at or now
        return turn_record.final_usage(
            source.usage if source is not None else None,
            output_tokens=output_tokens,
            queue_s=started - (self._submitted_at or now),
            prefill_s=first - started,
            decode_s=now - first,
        )

    @property
    def _stop(self) -> str | None:
        return self._buffer.output.stop if self._buffer.output is not None else None

    def _time_is_over(self) -> None:
        if self._over is not None and not self._over.done():
            self.out_of_time = True
            self.interrupt()

    def _end(self, error: Exception | None = None) -> None:
        """Let ``run`` return, or raise ``error``, and stop the engine if it is still at it. The first call decides."""
        if self._over is not None and not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)
        # The turn's task would do this too, but only later: the tokens until then would be shown.
        if self._generation is not None:
            self._generation.cancel()
