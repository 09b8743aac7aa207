"""The engine's part of a turn: submit, take tokens into the buffer, stop where the turn says so."""

from __future__ import annotations

import asyncio

from pensieve.core import FinishReason, Sampling, SessionKey, Usage
from pensieve.debug import async_failpoint
from pensieve.engine.messages import Finished, Output, RequestProgress, Started
from pensieve.errors import Internal
from pensieve.server.history.rendering import Prepared
from pensieve.server.links.engine_link import EngineLink, Generation
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import ProgressView


class TurnGeneration:
    """One generation of one turn. Ends by itself, at a stop string, when its time is over, or by ``interrupt``."""

    def __init__(self, buffer: TurnBuffer) -> None:
        self._buffer = buffer
        self._generation: Generation | None = None
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._interrupted = False
        self._muted = False
        self._submitted_at = self._started_at = 0.0
        self.first_token_at: float | None = None
        """On the event loop's clock."""
        self.out_of_time = False
        """Ended because ``max_duration`` was over."""

    def interrupt(self, *, mute: bool) -> None:
        """Stop within one engine step, or never start. Muted: what is still under way is not shown to anybody."""
        self._interrupted = True
        self._muted = self._muted or mute
        if self._generation is not None:
            self._generation.cancel()

    async def run(
        self,
        link: EngineLink,
        session: SessionKey,
        prepared: Prepared,
        sampling: Sampling,
        limit_s: float | None,
    ) -> None:
        """Returns when the turn has its last token. Raises what ``Generation`` does."""
        if self._interrupted:
            return
        loop = asyncio.get_running_loop()
        self._submitted_at = loop.time()
        generation = link.submit(session, prepared.context, prepared.num_new, sampling)
        self._generation = generation
        timer = loop.call_later(limit_s, self._time_is_over) if limit_s is not None else None
        try:
            async for event in generation:
                match event:
                    case Output():
                        await async_failpoint("mid_decode")
                        self._take(event)
                    case Started():
                        self._started, self._started_at = event, loop.time()
                    case RequestProgress():
                        self._buffer.report(
                            ProgressView(
                                event.phase, event.queue_position, event.tokens_done, event.tokens_total
                            )
                        )
                    case Finished():
                        self._finished = event
        finally:
            generation.cancel()
            if timer is not None:
                timer.cancel()
        if self._finished is None and not self._interrupted and self._stop is None:
            raise Internal("the engine ended the turn without a result", reason="ENGINE_FAILED")

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
        self.out_of_time = True
        self.interrupt(mute=False)

    def _take(self, event: Output) -> None:
        assert self._generation is not None
        if self._muted:
            return
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
        self._buffer.take(event.token_ids, event.logprobs)
        if self._stop is not None:
            self._generation.cancel()
