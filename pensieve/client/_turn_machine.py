"""One turn as the client sees it, without any I/O: what to send and how to react to messages and failures.

The shells (``_sync_link``, ``_aio_link``) run one loop: open a call with ``next_request``, pass each message to
``on_message`` and each failure to ``on_error``, sleep for the returned time, hand ``pending`` pieces to the
caller, and stop when ``done``.

**Resuming.** All tries carry the same request id, so the server appends the turn at most once. A try names the
attempt that the client has seen and the number of output tokens it holds. The same attempt continues there.
Another attempt starts at token 0: the caller gets a piece with ``restarted`` set and drops its partial text.
Text is joined by position, never by order of arrival. So tokens that a server repeats are not doubled, and
tokens that it skips are requested again. All this holds for each candidate separately.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import replace

from pensieve.client import decode
from pensieve.client._retry import STREAM_INCONSISTENT, Backoff, Verdict, verdict
from pensieve.client._transport import MAX_TIMEOUT_S
from pensieve.client._values import FinishReason, Piece, Progress, Turn
from pensieve.core import TokenLogprob
from pensieve.errors import Cancelled, DeadlineExceeded, Internal, PensieveError, Unavailable
from pensieve.rpc_status import TRANSPORT
from pensieve.v1 import pensieve_pb2 as pb

DEFAULT_HEARTBEAT_S = 10.0
SILENT_INTERVALS = 3
BUSY_POLL_S = 1.0


class TurnMachine:
    """State of one turn. ``abandoned``: request ids of turns that the caller has left."""

    def __init__(
        self,
        request: pb.StreamTurnRequest,
        *,
        backoff: Backoff,
        timeout: float | None = None,
        wait_if_busy: bool = False,
        abandoned: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request.turn.request_id
        self.session = request.session
        self.stream_id = uuid.uuid4().hex
        """The same in all tries, so that leaving also covers requests that are still in flight."""
        self.pending: deque[Piece] = deque()
        self.progress: Progress | None = None
        self.turn: Turn | None = None
        self.seed: int | None = None
        self.base_revision: int | None = None
        self.attempt = ""
        self.resumes = 0
        self._request = request
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._backoff = backoff
        self.discard_on_close = request.on_disconnect != pb.DISCONNECT_POLICY_FINISH
        """Whether the turn is discarded if the client closes the stream before its end."""
        self._wait_if_busy = wait_if_busy
        self._abandoned = abandoned
        self._heartbeat_s = DEFAULT_HEARTBEAT_S
        self._engine_failed = False
        self._texts: defaultdict[int, _CandidateText] = defaultdict(_CandidateText)
        """By candidate."""

    # -- for the caller

    @property
    def done(self) -> bool:
        return self.turn is not None

    @property
    def text(self) -> str:
        """The answer so far (candidate 0), or the answer in history once the turn is complete."""
        return self.turn.text if self.turn is not None else self._texts[0].value

    @property
    def token_count(self) -> int:
        """Output tokens received so far for candidate 0."""
        return self._texts[0].tokens

    # -- for the shell

    @property
    def silence_limit_s(self) -> float:
        """A stream without a message for this long is dead."""
        return SILENT_INTERVALS * self._heartbeat_s

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, None without one. Raises DeadlineExceeded after it."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise self._timed_out()
        return min(MAX_TIMEOUT_S, left)

    def next_request(self) -> pb.StreamTurnRequest:
        """Build a request that continues the turn from its current position."""
        self._backoff.mark_activity()
        request = pb.StreamTurnRequest()
        request.CopyFrom(self._request)
        request.stream_id = self.stream_id
        request.resume_attempt = self.attempt
        if self.attempt:
            request.resume_token_offset = self._texts[0].tokens
            others = range(1, max(self._texts) + 1)
            request.resume_candidate_offsets.extend(self._texts[candidate].tokens for candidate in others)
        for text in self._texts.values():
            text.rewind_to_tokens()
        return request

    # -- events

    def on_message(self, message: pb.StreamTurnResponse) -> None:
        """Process one message. On Internal (STREAM_INCONSISTENT) close the call, then call ``on_error``."""
        self._backoff.mark_activity()
        match message.WhichOneof("event"):
            case "accepted":
                self._on_accepted(message.accepted)
            case "progress":
                self.progress = decode.progress(message.progress)
            case "delta":
                piece = self._texts[message.delta.candidate].add(decode.piece(message.delta))
                if piece is not None:
                    self._backoff.reset()
                    self.pending.append(piece)
            case "completed":
                self._on_completed(message.completed)
            case _:
                return  # An event that only newer servers know.

    def on_error(self, error: PensieveError) -> float:
        """Return the seconds to wait before the next try. Raises the error if there is none."""
        if isinstance(error, Internal) and error.reason == STREAM_INCONSISTENT:
            self._restart()
            self.attempt = ""
        if error.code == "DEADLINE_EXCEEDED" and error.reason == TRANSPORT:
            raise self._timed_out()
        error.metadata.setdefault("request_id", self.request_id)
        wait = self._wait_after(error)
        self.resumes += 1
        return wait

    def early_end_error(self) -> PensieveError:
        """Return the error for a stream that ended without an error before the turn was complete."""
        return Unavailable("the stream ended before the turn was complete", reason=TRANSPORT)

    def silence_error(self) -> PensieveError:
        """Return the error for a stream without a message for ``silence_limit_s`` seconds."""
        return Unavailable(f"no message for {self.silence_limit_s:g} s", reason=TRANSPORT)

    def on_cancelled(self, turn: Turn) -> None:
        self.turn = turn

    def result(self) -> Turn:
        """Return the finished turn. Raises Cancelled if the stream was closed before it was complete."""
        if self.turn is None:
            raise Cancelled("the turn is not complete", metadata={"request_id": self.request_id})
        return self.turn

    def _timed_out(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "the turn's timeout has passed", reason="TIMEOUT", metadata={"request_id": self.request_id}
        )

    def _on_accepted(self, accepted: pb.TurnAccepted) -> None:
        self.seed = accepted.seed
        self.base_revision = accepted.base_revision
        if accepted.HasField("heartbeat_interval"):
            self._heartbeat_s = decode.seconds(accepted.heartbeat_interval) or DEFAULT_HEARTBEAT_S
        if accepted.attempt and self.attempt and accepted.attempt != self.attempt:
            self._restart()
        self.attempt = accepted.attempt or self.attempt

    def _on_completed(self, message: pb.Turn) -> None:
        turn = decode.turn(message)
        cut_short = turn.finish_reason == FinishReason.CANCELLED
        answers = [(candidate.text, candidate.output_tokens) for candidate in turn.candidates]
        answers = answers or [(turn.text, turn.usage.output_tokens)]
        contradicted = any(
            not text.startswith(have := self._texts[candidate].value)
            and not (cut_short and have.startswith(text))
            for candidate, (text, _) in enumerate(answers)
        )
        if contradicted:
            # The streamed text was not committed because another attempt won: show the committed one.
            self._restart()
        for candidate, (text, tokens) in enumerate(answers):
            had = self._texts[candidate]
            if contradicted:
                self.pending.append(Piece(text=text, token_count=tokens, candidate=candidate))
            elif len(text) > len(had.value):
                rest = text[len(had.value) :]
                self.pending.append(Piece(text=rest, token_offset=had.tokens, candidate=candidate))
        self.turn = self._with_logprobs(turn)

    def _with_logprobs(self, turn: Turn) -> Turn:
        """Add the streamed log-probabilities to each answer for which all were received."""
        candidates = tuple(
            replace(
                candidate, logprobs=self._texts[candidate.candidate].first_logprobs(candidate.output_tokens)
            )
            for candidate in turn.candidates
        )
        answer = turn.chosen if candidates else 0
        logprobs = self._texts[answer].first_logprobs(turn.usage.output_tokens)
        return replace(turn, candidates=candidates, logprobs=logprobs)

    def _restart(self) -> None:
        if not all(text.empty for text in self._texts.values()):
            self.pending.append(Piece(restarted=True))
        self._texts.clear()

    def _wait_after(self, error: PensieveError) -> float:
        if error.reason == "TURN_IN_PROGRESS":
            return self._wait_for_other_turn(error)
        decision = verdict(error)
        if error.reason == "TURN_NOT_FOUND" and self._request.attach_only and self.resumes:
            # Its server died while it ran. The turn exists again as soon as the client that began it has resent it.
            decision = Verdict.RESEND
        if decision is Verdict.RAISE or (decision is Verdict.RESEND_ONCE and self._engine_failed):
            raise error
        self._engine_failed |= decision is Verdict.RESEND_ONCE
        return self._backoff.wait_after(error, decision, self.remaining_s())

    def _wait_for_other_turn(self, error: PensieveError) -> float:
        """Return the wait while another turn runs in the session.

        If that is our own abandoned turn, it is being cancelled right now: RetryInfo, the rest of its lease,
        would be far too long.
        """
        wait = None
        if error.metadata.get("active_request_id") in self._abandoned:
            wait = self._backoff.poll(BUSY_POLL_S / 10)
        elif self._wait_if_busy:
            wait = self._backoff.poll(min(error.retry_after_s or BUSY_POLL_S, BUSY_POLL_S))
        left = self.remaining_s()
        if wait is None or (left is not None and wait >= left):
            raise error
        return wait


class _CandidateText:
    """One candidate's answer so far, and the text position of each token boundary."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._boundaries = {0: 0}
        """Token count → text length when that count was first reached."""
        self.tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._token_at = 0
        """Position in the stream; equals ``tokens`` except while the server repeats itself."""
        self._text_at = 0

    @property
    def empty(self) -> bool:
        return self.tokens == 0 and self._length == 0

    @property
    def value(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def first_logprobs(self, tokens: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the first ``tokens`` tokens; empty unless all are known."""
        known = len(self._logprobs) == self.tokens >= tokens
        return tuple(self._logprobs[:tokens]) if known else ()

    def rewind_to_tokens(self) -> None:
        """Go back to the last token boundary: a new stream sends text held back there (a stop string) again."""
        self._token_at = self.tokens
        self._text_at = self._boundaries[self.tokens]

    def add(self, piece: Piece) -> Piece | None:
        """Return the new part of ``piece``, or None. Raises Internal if it does not continue the text."""
        if piece.token_offset != self._token_at:
            if piece.token_offset not in self._boundaries:
                raise _inconsistent_error(f"token {piece.token_offset} after {self.tokens} tokens")
            # The server repeats itself from a known token boundary: compare from there.
            self._token_at, self._text_at = piece.token_offset, self._boundaries[piece.token_offset]
        known = self.value[self._text_at :] if self._text_at < self._length else ""
        overlap = min(len(known), len(piece.text))
        if known[:overlap] != piece.text[:overlap]:
            raise _inconsistent_error(f"other text at token {piece.token_offset}")
        skip = self.tokens - self._token_at
        self._token_at += piece.token_count
        self._text_at += len(piece.text)
        # Text and tokens may overlap by different amounts: the server holds back text that could begin a stop
        # string, so text can arrive later than its token.
        fresh_text = piece.text[overlap:]
        fresh_tokens = max(0, piece.token_count - skip)
        if not fresh_text and not fresh_tokens:
            return None
        offset = self.tokens
        self._parts.append(fresh_text)
        self._logprobs += piece.logprobs[skip:]
        self._length += len(fresh_text)
        self.tokens += fresh_tokens
        self._boundaries.setdefault(self.tokens, self._text_at)
        if offset == piece.token_offset and not overlap:
            return piece
        return replace(
            piece,
            text=fresh_text,
            token_ids=piece.token_ids[skip:],
            logprobs=piece.logprobs[skip:],
            token_offset=offset,
            token_count=fresh_tokens,
        )


def _inconsistent_error(decision: str) -> Internal:
    return Internal(f"the stream does not continue the answer: {decision}", reason=STREAM_INCONSISTENT)
