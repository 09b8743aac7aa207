"""The engine's part of a turn: submit, copy tokens into the buffer, stop at the turn's limits."""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from pensieve.core import FinishReason, HintReceipt, Hints, Usage
from pensieve.debug import failpoint
from pensieve.engine.messages import (
    CandidateFinished,
    EngineReady,
    Finished,
    Output,
    RequestProgress,
    Started,
    Submit,
)
from pensieve.server.admission import AdmissionTicket
from pensieve.server.links.engine_link import EngineLink, Generation
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.values import ProgressView, TurnHints

MAX_NEXT_TURN_S: Final = 7 * 24 * 3600.0
"""Longer estimates are clipped to this: the engine could not tell them apart."""
MIN_IMPORTANCE: Final = 1 / 16
MAX_IMPORTANCE: Final = 16.0
"""Within these bounds no importance acts as a pin, or as an eviction."""


class TurnGeneration:
    """The generation of one turn, and its ``GenerationSink``, which writes the turn's buffer.

    It ends by itself, at a stop string (with several candidates: only that candidate), at its time limit, or
    by ``interrupt``.
    """

    def __init__(self, buffer: TurnBuffer) -> None:
        self._buffer = buffer
        self._generation: Generation | None = None
        self._ticket: AdmissionTicket | None = None
        self._done: asyncio.Future[None] | None = None
        """``run`` waits for it. No token resolves it, so a turn's task sleeps from its submission to its end."""
        self._started: Started | None = None
        self._finished: Finished | None = None
        self._drafts = 0, 0
        """How many drafts the first candidate has had so far, and how many of them were accepted."""
        self._reasons: dict[int, FinishReason] = {}
        """Finish reasons of candidates that ended before the generation: from the engine, or a stop string here."""
        self._interrupted = False
        self._started_at = 0.0
        self.submitted_at: float | None = None
        self.ended_at: float | None = None
        self.first_token_at: float | None = None
        """On the event loop's clock, like the two before it."""
        self.timed_out = False
        self.generated_tokens = 0
        """Tokens of all candidates or beams, whether they are kept or not. None of a cut search."""
        self._beams = 1

    def interrupt(self) -> None:
        """Stop within one engine step, or never start. Later events of the engine are ignored."""
        self._interrupted = True
        self._end()

    async def run(
        self,
        link: EngineLink,
        command: Submit,
        *,
        limit_s: float | None = None,
        ticket: AdmissionTicket | None = None,
    ) -> None:
        """Generate until the last token, or for ``limit_s``. Raises the errors of ``EngineLink.submit`` and
        ``failed``."""
        if self._interrupted:
            return
        loop = asyncio.get_running_loop()
        self._ticket, self._beams = ticket, command.sampling.beam_width
        self.submitted_at = loop.time()
        self._done = loop.create_future()
        self._generation = link.submit(command, self)
        timer = loop.call_later(limit_s, self._time_is_over) if limit_s is not None else None
        try:
            await self._done
        finally:
            self.ended_at = loop.time()
            self._generation.cancel()
            # Breaks a reference cycle between link and turn, which would leave the turn's buffer to the
            # garbage collector.
            self._generation = None
            if timer is not None:
                timer.cancel()

    @property
    def is_cut_search(self) -> bool:
        """Whether it was a beam search that ended without an answer. Its tokens were never shown here."""
        return self._started is not None and self._beams > 1 and not self.generated_tokens

    # ---- called by the link

    def started(self, event: Started) -> None:
        self._started, self._started_at = event, asyncio.get_running_loop().time()
        if self._ticket is not None:
            usage = event.usage
            self._ticket.on_started(usage.recomputed_tokens, usage.context_tokens - usage.new_tokens)

    def progress(self, event: RequestProgress) -> None:
        self._buffer.report(
            ProgressView(event.phase, event.queue_position, event.tokens_done, event.tokens_total)
        )

    def tokens(self, event: Output) -> None:
        failpoint("mid_decode")
        if self.first_token_at is None:
            self.first_token_at = asyncio.get_running_loop().time()
        self.generated_tokens += len(event.token_ids) * self._beams
        if event.candidate == 0:
            self._drafts = event.drafted, event.accepted
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
        """Why a candidate ended, unless the generation was interrupted."""
        if candidate in self._reasons:
            return self._reasons[candidate]
        if self.timed_out or self._finished is None:
            return FinishReason.TIME_LIMIT
        return self._finished.reason

    def usage(self, output_tokens: int) -> Usage:
        """The receipt; ``output_tokens``: number of tokens that are kept."""
        now = asyncio.get_running_loop().time()
        source = self._finished or self._started
        started = self._started_at or now
        first = self.first_token_at or now
        return final_usage(
            source.usage if source is not None else None,
            output_tokens=output_tokens,
            drafts=self._drafts,
            queue_s=started - (self.submitted_at or now),
            prefill_s=first - started,
            decode_s=now - first,
        )

    def _stop(self, candidate: int) -> None:
        """A stop string was found in this candidate. May be called again, when the engine had sent more of it."""
        if candidate in self._reasons:
            return
        self._reasons[candidate] = FinishReason.STOP_SEQUENCE
        if all(output.stop is not None for output in self._buffer.outputs):
            self._end()
        elif self._generation is not None:
            self._generation.cancel_candidate(candidate)

    def _time_is_over(self) -> None:
        if self._done is not None and not self._done.done():
            self.timed_out = True
            self.interrupt()

    def _end(self, error: Exception | None = None) -> None:
        """Let ``run`` return, or raise ``error``, and stop the engine. The first call decides."""
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
        # The turn's task would do this later: tokens that arrive until then would be shown.
        if self._generation is not None:
            self._generation.cancel()


def clip_hints(given: TurnHints, engine: EngineReady) -> tuple[Hints | None, HintReceipt | None]:
    """Hints for the engine (None: send none), and the receipt (None: the turn gave none). Values are clipped."""
    names = _given_names(given)
    if not names:
        return None, None
    if not engine.uses_hints:
        return None, HintReceipt(ignored=names)
    # A finished session has no next turn.
    contradicted = given.finished and given.next_turn_s is not None
    next_turn_s = None
    if given.next_turn_s is not None and not contradicted:
        next_turn_s = min(given.next_turn_s, MAX_NEXT_TURN_S)
    importance = given.importance
    if importance is not None:
        importance = min(max(importance, MIN_IMPORTANCE), MAX_IMPORTANCE)
    receipt = HintReceipt(
        next_turn_s=next_turn_s,
        importance=importance,
        finished=given.finished,
        ignored=("next_turn_in",) if contradicted else (),
    )
    worth = 1.0 if importance is None else importance
    return Hints(next_turn_s=next_turn_s, importance=worth, finished=given.finished), receipt


def _given_names(given: TurnHints) -> tuple[str, ...]:
    given_by_name = {
        "next_turn_in": given.next_turn_s is not None,
        "importance": given.importance is not None,
        "session_finished": given.finished,
    }
    return tuple(name for name, is_given in given_by_name.items() if is_given)


def final_usage(
    usage: Usage | None,
    *,
    output_tokens: int,
    drafts: tuple[int, int],
    queue_s: float,
    prefill_s: float,
    decode_s: float,
) -> Usage:
    """The engine's receipt with the number of kept tokens; empty for a turn that was never admitted. ``drafts``, those
    accepted among them, and the times (seconds, this process's clock) fill in for an engine that was stopped before it
    reported its own."""
    if usage is None:
        return Usage(queue_s=queue_s)
    drafted, accepted = drafts
    usage = msgspec.structs.replace(
        usage,
        output_tokens=output_tokens,
        drafted_tokens=drafted,
        accepted_tokens=min(accepted, output_tokens),
    )
    if usage.decode_s or usage.prefill_s:
        return usage
    return msgspec.structs.replace(
        usage, queue_s=usage.queue_s or queue_s, prefill_s=prefill_s, decode_s=decode_s
    )
