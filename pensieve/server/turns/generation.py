"""The engine's part of a turn: submit, take tokens into the buffer, stop where the turn says so."""

from __future__ import annotations

import asyncio

from pensieve.core import ALONE, FinishReason, Hints, Sampling, SessionKey, Standing, Usage
from pensieve.debug import failpoint
from pensieve.engine.messages import CandidateFinished, Finished, Output, RequestProgress, Started
from pensieve.server.admission import Ticket
from pensieve.server.history.rendering import PreparedTurn
from pensieve.server.links.engine_link import EngineLink, Generation
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import ProgressView


class TurnGeneration:
    """The generation of one turn, and the ``GenerationSink`` that takes it into the turn's buffer.

    It ends by itself, at a stop string, when its time is over, or by ``interrupt``. With several candidates a stop
    string ends the one that it was found in.
    """

    def __init__(self, buffer: TurnBuffer) -> None:
        self._buffer = buffer
        self._generation: Generation | None = None
        self._ticket: Ticket | None = None
        self._over: asyncio.Future[None] | None = None
        """What ``run`` waits for. No token resolves it, so a turn's task sleeps from its submission to its end."""
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._reasons: dict[int, FinishReason] = {}
        """Of the candidates that have ended while others go on: by the engine, or here by a stop string."""
        self._interrupted = False
        self._started_at = 0.0
        self.submitted_at: float | None = None
        self.ended_at: float | None = None
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
        *,
        scope: str = "",
        hints: Hints | None = None,
        origin: str = "",
        standing: Standing = ALONE,
        ticket: Ticket | None = None,
    ) -> None:
        """Returns when the turn has its last token. Raises what ``EngineLink.submit`` and ``failed`` tell."""
        if self._interrupted:
            return
        loop = asyncio.get_running_loop()
        self._ticket = ticket
        self.submitted_at = loop.time()
        self._over = loop.create_future()
        self._generation = link.submit(
            session,
            prepared.context,
            prepared.num_fresh,
            sampling,
            self,
            scope=scope,
            hints=hints,
            origin=origin,
            standing=standing,
        )
        timer = loop.call_later(limit_s, self._time_is_over) if limit_s is not None else None
        try:
            await self._over
        finally:
            self.ended_at = loop.time()
            self._generation.cancel()
            # Link and turn know each other through it: without this the turn's buffer would wait for the collector.
            self._generation = None
            if timer is not None:
                timer.cancel()

    # ---- the link calls

    def started(self, event: Started) -> None:
        self._started, self._started_at = event, asyncio.get_running_loop().time()
        if self._ticket is not None:
            usage = event.usage
            self._ticket.started(usage.recomputed_tokens, usage.context_tokens - usage.new_tokens)

    def progress(self, event: RequestProgress) -> None:
        self._buffer.report(
            ProgressView(event.phase, event.queue_position, event.tokens_done, event.tokens_total)
        )

    def tokens(self, event: Output) -> None:
        failpoint("mid_decode")
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
        output = self._buffer.take(event.candidate, event.token_ids, event.logprobs)
        if output.stop is not None:
            self._stop(event.candidate)

    def candidate_finished(self, event: CandidateFinished) -> None:
        self._reasons.setdefault(event.candidate, event.reason)

    def finished(self, event: Finished) -> None:
        self._finished = event
        self._end()

    def failed(self, error: Exception) -> None:
        self._end(error)

    # ---- the receipt

    def finish_reason(self, candidate: int = 0) -> FinishReason:
        """Why a candidate ended, if nobody interrupted the generation."""
        if candidate in self._reasons:
            return self._reasons[candidate]
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
            queue_s=started - (self.submitted_at or now),
            prefill_s=first - started,
            decode_s=now - first,
        )

    def _stop(self, candidate: int) -> None:
        """A stop string was found in this candidate, maybe before: the engine may have sent more of it by now."""
        if candidate in self._reasons:
            return
        self._reasons[candidate] = FinishReason.STOP_SEQUENCE
        if all(output.stop is not None for output in self._buffer.outputs):
            self._end()
        elif self._generation is not None:
            self._generation.cancel_candidate(candidate)

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
