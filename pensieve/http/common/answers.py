"""What a running turn says, for protocols that cannot take back what was sent."""

from __future__ import annotations

from collections import defaultdict

from pensieve.client import FinishReason, Piece, Turn, Usage
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
            raise Internal(
                "the answer was lost while it was streamed, and the new one differs; send the request again",
                reason="STREAM_INCONSISTENT",
            )
        if len(again) < len(sent):
            self._again[piece.candidate] = again
            return None
        del self._again[piece.candidate]
        self._sent[piece.candidate] = again
        return again[len(sent) :] or None


def was_cut(reason: FinishReason | int | None) -> bool:
    """Whether an answer ended before the model ended it."""
    return reason in (FinishReason.LENGTH, FinishReason.CONTEXT_FULL, FinishReason.TIME_LIMIT)


def cached_tokens(usage: Usage) -> int:
    """Tokens of the context that were not computed for this turn."""
    return usage.gpu_cached_tokens + usage.swapped_in_tokens


def output_tokens(turn: Turn) -> int:
    """Of all candidates together."""
    if turn.candidates:
        return sum(candidate.output_tokens for candidate in turn.candidates)
    return turn.usage.output_tokens
