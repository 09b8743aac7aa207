"""What a running turn says, for protocols that cannot take back what was sent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from pensieve.client import FinishReason, Piece, TokenLogprob, Turn, Usage
from pensieve.errors import Internal


class SentText:
    """Texts of a turn's candidates as the client has them.

    When an attempt is lost the answer begins anew. It is the same answer nearly always; then what was sent stays, and
    the stream goes on behind it.
    """

    def __init__(self) -> None:
        self._sent: defaultdict[int, str] = defaultdict(str)
        self._again: dict[int, str] = {}
        """Candidates whose answer began anew and is not yet as long as what was sent."""

    def new_text(self, piece: Piece) -> str | None:
        """What of this piece has not been sent; None when all was. Raises Internal (STREAM_INCONSISTENT) for another
        answer."""
        if piece.restarted:
            self._again = dict.fromkeys(self._sent, "")
            return None
        again = self._again.get(piece.candidate)
        sent = self._sent[piece.candidate]
        if again is None:
            self._sent[piece.candidate] = sent + piece.text
            return piece.text
        again += piece.text
        if not (sent.startswith(again) or again.startswith(sent)):
            raise _another_answer()
        if len(again) < len(sent):
            self._again[piece.candidate] = again
            return None
        del self._again[piece.candidate]
        self._sent[piece.candidate] = again
        return again[len(sent) :] or None


class SentTokens:
    """Tokens of a turn's candidates as the client has them, for protocols that show them: see ``SentText``."""

    def __init__(self, wanted: bool) -> None:
        """``wanted``: else there are never any."""
        self._wanted = wanted
        self._sent: defaultdict[int, list[int]] = defaultdict(list)

    def new_tokens(self, piece: Piece) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The ids of this piece that have not been sent, and their log-probabilities if there are any.

        Raises Internal (STREAM_INCONSISTENT) for other tokens than were sent.
        """
        if not self._wanted:
            return (), ()
        sent, begin = self._sent[piece.candidate], piece.token_offset
        again = sent[begin : begin + len(piece.token_ids)]
        if tuple(again) != piece.token_ids[: len(again)]:
            raise _another_answer()
        fresh = piece.token_ids[len(again) :]
        sent += fresh
        return fresh, piece.logprobs[len(again) :]


def _another_answer() -> Internal:
    return Internal(
        "the answer was lost while it was streamed, and the new one differs; send the request again",
        reason="STREAM_INCONSISTENT",
    )


def was_cut(reason: FinishReason | int | None) -> bool:
    """Whether an answer ended before the model ended it."""
    return reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT)


def finish_reason(reason: FinishReason | int | None) -> str:
    """The word of both kinds of completions."""
    return "length" if was_cut(reason) else "stop"


def cached_tokens(usage: Usage) -> int:
    """Tokens of the context that were not computed for this turn."""
    return usage.gpu_cached_tokens + usage.swapped_in_tokens


def output_tokens(turn: Turn) -> int:
    """Of all candidates together."""
    if turn.candidates:
        return sum(candidate.output_tokens for candidate in turn.candidates)
    return turn.usage.output_tokens


def usage_of(*turns: Turn) -> dict[str, Any]:
    """Token counts, all turns together. ``cached_tokens``: of the contexts, what was not computed for these turns."""
    prompt = sum(turn.usage.context_tokens for turn in turns)
    answer = sum(map(output_tokens, turns))
    cached = sum(cached_tokens(turn.usage) for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
