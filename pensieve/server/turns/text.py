"""The text of a growing answer: which text belongs to which token, and how much may be shown.

Every token has a piece of text, a pure function of the token prefix. A position is *clean* when the text
before it is final: no code point is incomplete, and nothing before it may still become part of a stop string.
Streams stop at clean positions only; that makes ``resume_token_offset`` exact.

A stop string is not part of the answer. Its tokens are removed, and a token in whose middle it begins is
replaced by tokens for the text before it. So the tokens match the text, and the next turn builds on what the
client got.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from pensieve.core import TokenLogprob
from pensieve.speech import FirstCall, ThoughtEnd
from pensieve.tokenizer import ChatTokenizer, StopMatcher


class OutputText:
    """One candidate's output as it grows: its tokens, their text, and how much of it may be shown."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        thinks: bool = False,
        opening: str = "",
        first_call: FirstCall | None = None,
    ) -> None:
        """Stop strings count from the ``min_tokens``-th token on, and not in a thought, with which the answer
        may begin if it ``thinks``. The name of a control token is also a stop token, even in a thought.
        ``opening``: given beginning of the answer after its thought, in which no stop string counts either.
        ``first_call``: end after the call that it finds."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)
        named = ((tokenizer.control_token(stop), stop) for stop in stops)
        self._stop_tokens = {token: stop for token, stop in named if token is not None}
        self._thought = ThoughtEnd(tokenizer.speech) if stops and thinks else None
        """Looks for the end of the thought; None when it was found, or is not needed."""
        self._unmatched = ""
        """Text that may still turn out to begin a thought."""
        self._min_tokens = min_tokens
        self._opening_chars = len(opening)
        """Characters of the opening that are still to come."""
        self._first_call = first_call
        self._chars = 0
        self._final_chars = 0
        self._undecided: list[tuple[int, int]] = []
        self._first: int | None = None
        """Index of the first token that adds text."""
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.clean: list[bool] = [True]
        """Whether a stream may stop before token ``i``; one entry more than tokens."""
        self.ready = 0
        """Number of tokens that may be shown: the largest clean position."""
        self.stop: str | None = None
        """The stop string that was found, or "" for the end of the only call. Later tokens are ignored."""
        self.cut_short = False
        """The turn was cancelled, and tokens that streams may have shown were removed."""

    def push(self, token: int, score: TokenLogprob | None = None) -> None:
        """Append a token, with its log-probabilities if the turn has them. Ignored after a stop string."""
        if self.stop is not None:
            return
        counts = len(self.tokens) + 1 >= self._min_tokens
        if counts and token in self._stop_tokens:
            self.stop, self._final_chars = self._stop_tokens[token], self._chars
            return
        piece = self._stream.push((token,))
        if self._first is None and self._tokenizer.token_text(token).piece:
            self._first = len(self.tokens)
        self.tokens.append(token)
        self.pieces.append(piece)
        if score is not None:
            self.logprobs.append(score)
        self._chars += len(piece)
        self._match_stops(piece, counts=counts)
        self._end_with_call(piece)
        self.clean.append(False)
        if not self._stream.pending:
            self._undecided.append((len(self.tokens), self._chars))
        self._settle()

    def finish(self, keep: int | None = None) -> str:
        """End the output, keeping the first ``keep`` tokens; returns the text. Incomplete code points become
        U+FFFD."""
        if keep is not None and keep < len(self.tokens):
            self._truncate(keep)
        tail = self._stream.finish()
        if tail and self.pieces:
            self.pieces[-1] += tail
            self._chars += len(tail)
        self.clip(self._chars)
        return "".join(self.pieces)

    def clip(self, chars: int) -> None:
        """Cut the text to ``chars`` characters and make all of it final."""
        left = chars
        for index, piece in enumerate(self.pieces):
            self.pieces[index] = piece[:left]
            left -= len(self.pieces[index])
        self.clean[-1] = True
        self.ready = len(self.tokens)
        self._undecided.clear()

    def slice(self, start: int, limit: int | None) -> int:
        """Where a delta from ``start`` ends: the last clean position within ``limit`` tokens, else the next one."""
        if limit is None or self.ready - start <= limit:
            return self.ready
        end = next((i for i in range(start + limit, start, -1) if self.clean[i]), None)
        if end is None:
            end = next(i for i in range(start + limit + 1, self.ready + 1) if self.clean[i])
        return end

    def scores(self, start: int, end: int) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of tokens ``[start, end)``, with the text of each token; empty when there are none."""
        return tuple(self._with_text(at, one) for at, one in enumerate(self.logprobs[start:end], start))

    def _with_text(self, at: int, one: TokenLogprob) -> TokenLogprob:
        first = self._first is None or at <= self._first
        return msgspec.structs.replace(
            one,
            token=self._tokenizer.token_text(one.token_id, first=first),
            top_tokens=tuple(self._tokenizer.token_text(token, first=first) for token, _ in one.top),
        )

    def _match_stops(self, piece: str, *, counts: bool) -> None:
        """Search the text of the newest token for stop strings. ``counts``: a stop string may end in it."""
        if self._thought is not None:
            self._unmatched += piece
            begins = self._thought.push(piece)
            if begins is None and counts and not self._thought.inside:
                return  # undecided: neither show nor search it
            piece, self._unmatched = self._unmatched, ""
            if begins is None:
                self._final_chars += len(piece)
                return
            self._thought = None
            before = max(0, begins - (self._chars - len(piece)))
            self._final_chars += before
            piece = piece[before:]
        given = min(len(piece), self._opening_chars)
        self._opening_chars -= given
        self._final_chars += given
        piece = piece[given:]
        if not counts:
            self._final_chars += len(piece)
            return
        result = self._matcher.push(piece)
        self._final_chars += len(result.text)
        self.stop = result.stop

    def _end_before_stop(self) -> None:
        kept, rest = self.ready, self._final_chars - sum(map(len, self.pieces[: self.ready]))
        text, cut = "".join(self.pieces[kept:])[:rest], list[TokenLogprob]()
        for score, piece in zip(self.logprobs[kept:], self.pieces[kept:], strict=False):
            if rest > 0:
                cut.append(score)
                rest -= len(piece)
        del self.tokens[kept:], self.pieces[kept:], self.logprobs[kept:], self.clean[kept + 1 :]
        self._undecided.clear()
        self._stream = self._tokenizer.detokenizer()
        self._stream.push(self.tokens)
        # Without a spelling the answer ends with its last whole token: no text is shown that the history
        # lacks.
        spelled = (self._tokenizer.spell(text, self.tokens) or ()) if text else ()
        for token in spelled:
            self.tokens.append(token)
            self.pieces.append(self._stream.push((token,)))
            self.clean.append(not self._stream.pending)
        self.logprobs += _spread_logprobs(cut, spelled)
        self._chars = self._final_chars = sum(map(len, self.pieces))
        self.ready = len(self.tokens)

    def _end_with_call(self, piece: str) -> None:
        """End the text at the end of its first call, if that comes before a stop string."""
        end = self._first_call.push(piece) if self._first_call is not None else None
        if end is None or (self.stop is not None and end > self._final_chars):
            return
        self.stop, self._final_chars = "", end

    def _settle(self) -> None:
        """Mark positions whose text has become final as clean. After a stop string no others remain."""
        settled = 0
        for position, chars in self._undecided:
            if chars > self._final_chars:
                break
            self.clean[position] = True
            self.ready = position
            settled += 1
        del self._undecided[:settled]
        if self.stop is not None:
            self._end_before_stop()

    def _truncate(self, keep: int) -> None:
        self.cut_short = True
        del self.tokens[keep:], self.pieces[keep:], self.logprobs[keep:], self.clean[keep + 1 :]
        self.stop = None
        self._stream = self._tokenizer.detokenizer()
        self._stream.push(self.tokens)
        self._chars = sum(map(len, self.pieces))


def _spread_logprobs(drawn: list[TokenLogprob], spelled: tuple[int, ...]) -> list[TokenLogprob]:
    """Log-probabilities for tokens that replace the beginning of ``drawn``: the first gets the sum, the others 0."""
    if not drawn:
        return []
    found = [TokenLogprob(token, 0.0, ((token, 0.0),) if drawn[0].top else ()) for token in spelled]
    if found:
        total = sum(score.logprob for score in drawn)
        found[0] = msgspec.structs.replace(found[0], logprob=total, top=drawn[0].top)
    return found


def replayed_text(tokenizer: ChatTokenizer, tokens: Iterable[int], text: str) -> OutputText:
    """The output of a committed answer, from its stored tokens and text."""
    output = OutputText(tokenizer)
    for token in tokens:
        output.push(token)
    output.finish()
    output.clip(len(text))
    if output.tokens and "".join(output.pieces) != text:
        # Another tokenizer made these tokens: show the stored text, with the last of them.
        last = len(output.tokens) - 1
        output.pieces = [""] * last + [text]
        output.clean = [True, *[False] * last, True]
    return output
