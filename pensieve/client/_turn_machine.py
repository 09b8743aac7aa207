"""One turn as seen by the client, without any I/O: what to send, what a message means, what a failure calls for.

The shells (``_sync_link``, ``_aio_link``) do only this, in a loop: open a call with ``next_request``, hand each message
to ``received``, each failure to ``failed`` and sleep as told, hand ``pending`` pieces to the caller, end when ``done``.

**Resuming.** All tries carry the same request id, so the server appends the turn at most once. A try names the attempt
it has seen and how many output tokens it holds. The same attempt continues there. Another attempt starts at token 0:
the caller gets a piece with ``restarted`` set and drops its partial text. Text is joined by position and never by
order of arrival, so a server that repeats tokens does not double them, and one that skips some is asked again. All this
holds for each candidate by itself.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import replace

from pensieve.client import decode
from pensieve.client._retry import STREAM_INCONSISTENT, Backoff, RetryPolicy, Verdict, verdict
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
    """State of one turn. ``clock`` is monotonic seconds; ``abandoned``: turns the user walked away from."""

    def __init__(
        self,
        request: pb.StreamTurnRequest,
        *,
        policy: RetryPolicy,
        timeout: float | None = None,
        wait_if_busy: bool = False,
        abandoned: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
        backoff: Backoff | None = None,
    ) -> None:
        self.request_id = request.turn.request_id
        self.session = request.session
        self.stream_id = uuid.uuid4().hex
        """The same in all tries: to leave is to leave those that are still on their way, too."""
        self.pending: deque[Piece] = deque()
        self.progress: Progress | None = None
        self.turn: Turn | None = None
        self.seed: int | None = None
        self.base_revision: int | None = None
        self.attempt = ""
        self.resumes = 0
        """How often the turn was sent again."""
        self._request = request
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._backoff = backoff or Backoff(policy, clock=clock)
        self.discard_on_close = request.on_disconnect != pb.DISCONNECT_POLICY_FINISH
        """Whether the turn is discarded when the client walks away from it."""
        self._wait_if_busy = wait_if_busy
        self._abandoned = abandoned
        self._heartbeat_s = DEFAULT_HEARTBEAT_S
        self._engine_failed = False
        self._texts: defaultdict[int, _CandidateText] = defaultdict(_CandidateText)
        """By candidate."""

    # -- what the caller sees

    @property
    def done(self) -> bool:
        return self.turn is not None

    @property
    def text(self) -> str:
        """The answer so far, candidate 0 of several; of a complete turn, as it stands in history."""
        return self.turn.text if self.turn is not None else self._texts[0].value

    @property
    def token_count(self) -> int:
        """Output tokens received so far; of several candidates those of candidate 0."""
        return self._texts[0].tokens

    # -- what the shell needs to know

    @property
    def silence_s(self) -> float:
        """A stream that says nothing for this long is dead."""
        return SILENT_INTERVALS * self._heartbeat_s

    def remaining_s(self) -> float | None:
        """Seconds until the turn's deadline, None without one. Raises DeadlineExceeded when it has passed."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise self._timed_out()
        return min(MAX_TIMEOUT_S, left)

    def next_request(self) -> pb.StreamTurnRequest:
        """A request for the same turn, from where we are."""
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

    # -- what happened

    def on_message(self, message: pb.StreamTurnResponse) -> None:
        """Take one message. Raises Internal (STREAM_INCONSISTENT): hand it to ``failed`` after closing the call."""
        self._backoff.mark_activity()
        match message.WhichOneof("event"):
            case "accepted":
                self._accepted(message.accepted)
            case "progress":
                self.progress = decode.progress(message.progress)
            case "delta":
                piece = self._texts[message.delta.candidate].add(decode.piece(message.delta))
                if piece is not None:
                    self._backoff.reset()
                    self.pending.append(piece)
            case "completed":
                self._completed(message.completed)
            case _:
                return  # An event of a newer server.

    def on_error(self, error: PensieveError) -> float:
        """Seconds to wait before the next try. Raises the error when there shall be none."""
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
        """The failure of a stream that closed in good order but before the turn was complete."""
        return Unavailable("the stream ended before the turn was complete", reason=TRANSPORT)

    def silence_error(self) -> PensieveError:
        """The failure of a stream that said nothing for ``silence_s``."""
        return Unavailable(f"no message for {self.silence_s:g} s", reason=TRANSPORT)

    def on_cancelled(self, turn: Turn) -> None:
        """CancelTurn was answered: this is how the turn ended."""
        self.turn = turn

    def result(self) -> Turn:
        """The finished turn. Raises Cancelled when it was given up before it was complete."""
        if self.turn is None:
            raise Cancelled("the turn is not complete", metadata={"request_id": self.request_id})
        return self.turn

    def _timed_out(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            "the turn's timeout has passed", reason="TIMEOUT", metadata={"request_id": self.request_id}
        )

    def _accepted(self, accepted: pb.TurnAccepted) -> None:
        self.seed = accepted.seed
        self.base_revision = accepted.base_revision
        if accepted.HasField("heartbeat_interval"):
            self._heartbeat_s = decode.seconds(accepted.heartbeat_interval) or DEFAULT_HEARTBEAT_S
        if accepted.attempt and self.attempt and accepted.attempt != self.attempt:
            self._restart()
        self.attempt = accepted.attempt or self.attempt

    def _completed(self, message: pb.Turn) -> None:
        turn = decode.turn(message)
        cut_short = turn.finish_reason == FinishReason.CANCELLED
        answers = [(one.text, one.output_tokens) for one in turn.candidates]
        answers = answers or [(turn.text, turn.usage.output_tokens)]
        contradicted = any(
            not text.startswith(have := self._texts[candidate].value)
            and not (cut_short and have.startswith(text))
            for candidate, (text, _) in enumerate(answers)
        )
        if contradicted:
            # What was streamed is not what was committed (another attempt won): show the truth.
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
        """The turn with what was streamed of its log-probabilities, where that is all of an answer."""
        candidates = tuple(
            replace(one, logprobs=self._texts[one.candidate].scores(one.output_tokens))
            for one in turn.candidates
        )
        answer = turn.chosen if candidates else 0
        logprobs = self._texts[answer].scores(turn.usage.output_tokens)
        return replace(turn, candidates=candidates, logprobs=logprobs)

    def _restart(self) -> None:
        if not all(text.empty for text in self._texts.values()):
            self.pending.append(Piece(restarted=True))
        self._texts.clear()

    def _wait_after(self, error: PensieveError) -> float:
        if error.reason == "TURN_IN_PROGRESS":
            return self._wait_for_other(error)
        what = verdict(error)
        if error.reason == "TURN_NOT_FOUND" and self._request.attach_only and self.resumes:
            # Its server went away while it ran. It is there again as soon as the one who began it has come back, too.
            what = Verdict.RESEND
        if what is Verdict.RAISE or (what is Verdict.RESEND_ONCE and self._engine_failed):
            raise error
        self._engine_failed |= what is Verdict.RESEND_ONCE
        return self._backoff.wait_after(error, what, self.remaining_s())

    def _wait_for_other(self, error: PensieveError) -> float:
        """Our own abandoned turn is being cancelled right now; RetryInfo, the rest of its lease, is far too long."""
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
    """A candidate's answer so far, and where each token border lies in it."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0
        self._borders = {0: 0}
        """Token count -> text length when that many tokens had been received, the first time."""
        self.tokens = 0
        self._logprobs: list[TokenLogprob] = []
        self._token_at = 0
        """Position of the stream: equal to ``tokens`` except while the server repeats itself."""
        self._text_at = 0

    @property
    def empty(self) -> bool:
        return self.tokens == 0 and self._length == 0

    @property
    def value(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def scores(self, tokens: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the first ``tokens`` tokens; empty unless all are known."""
        known = len(self._logprobs) == self.tokens >= tokens
        return tuple(self._logprobs[:tokens]) if known else ()

    def rewind_to_tokens(self) -> None:
        """A new stream starts at the last token border. Text held back there (a possible stop string) comes again."""
        self._token_at = self.tokens
        self._text_at = self._borders[self.tokens]

    def add(self, piece: Piece) -> Piece | None:
        """The part of ``piece`` that is new, if any. Raises Internal when it does not continue what we hold."""
        if piece.token_offset != self._token_at:
            if piece.token_offset not in self._borders:
                raise _inconsistent(f"token {piece.token_offset} after {self.tokens} tokens")
            # The server repeats itself from a token border that we have seen: compare from there.
            self._token_at, self._text_at = piece.token_offset, self._borders[piece.token_offset]
        known = self.value[self._text_at :] if self._text_at < self._length else ""
        overlap = min(len(known), len(piece.text))
        if known[:overlap] != piece.text[:overlap]:
            raise _inconsistent(f"other text at token {piece.token_offset}")
        skip = self.tokens - self._token_at
        self._token_at += piece.token_count
        self._text_at += len(piece.text)
        # Text and tokens may overlap by different amounts: text that could begin a stop string is held back by the
        # server, so it can come later than the token that it belongs to.
        fresh_text = piece.text[overlap:]
        fresh_tokens = max(0, piece.token_count - skip)
        if not fresh_text and not fresh_tokens:
            return None
        offset = self.tokens
        self._parts.append(fresh_text)
        self._logprobs += piece.logprobs[skip:]
        self._length += len(fresh_text)
        self.tokens += fresh_tokens
        self._borders.setdefault(self.tokens, self._text_at)
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


def _inconsistent(what: str) -> Internal:
    return Internal(f"the stream does not continue the answer: {what}", reason=STREAM_INCONSISTENT)
