"""What is sent of an answer that begins anew in the middle of a stream."""

from __future__ import annotations

import pytest

from pensieve.client import Piece, TokenLogprob
from pensieve.errors import Internal
from pensieve.http.common.answers import SentText, SentTokens


def told(*texts: str | None) -> list[str | None]:
    """What is sent of these texts; None: the answer begins anew."""
    sent = SentText()
    return [sent.new_text(Piece(restarted=True) if text is None else Piece(text=text)) for text in texts]


def test_the_same_answer_goes_on_behind_what_was_sent() -> None:
    assert told("he", "llo", None, "h", "ell", "o wor", "ld") == ["he", "llo", None, None, None, " wor", "ld"]
    assert told("he", None, "he", "llo") == ["he", None, None, "llo"]
    assert told("he", None, "h", None, "hel", "lo") == ["he", None, None, None, "l", "lo"]
    assert told(None, "he", "") == [None, "he", ""]


def test_another_answer_is_an_error() -> None:
    for texts in (("he", None, "she"), ("hello", None, "hel", "p me")):
        with pytest.raises(Internal):
            told(*texts)


def test_candidates_are_apart() -> None:
    sent = SentText()
    assert [sent.new_text(Piece(text=text, candidate=n)) for n, text in enumerate(("a", "b"))] == ["a", "b"]
    assert sent.new_text(Piece(restarted=True)) is None
    assert sent.new_text(Piece(text="bc", candidate=1)) == "c"
    assert sent.new_text(Piece(text="a")) is None


def scored(ids: tuple[int, ...], offset: int, base: float = 0.0) -> Piece:
    """Tokens of an answer; ``base`` tells attempts apart."""
    return Piece(
        token_ids=ids, token_offset=offset, logprobs=tuple(TokenLogprob(one, base - one) for one in ids)
    )


def test_tokens_are_sent_once_whatever_begins_anew() -> None:
    sent = SentTokens(wanted=True)
    assert sent.new_tokens(scored((5, 6), 0)) == ((5, 6), (TokenLogprob(5, -5), TokenLogprob(6, -6)))
    assert sent.new_tokens(Piece(restarted=True)) == ((), ())
    assert sent.new_tokens(scored((5,), 0, 0.5)) == ((), ())
    ids, scores = sent.new_tokens(scored((6, 7), 1, 0.5))
    assert ids == (7,) and scores == (TokenLogprob(7, -6.5),)
    assert SentTokens(wanted=False).new_tokens(scored((5,), 0)) == ((), ())


def test_other_tokens_of_the_same_text_are_an_error_where_tokens_are_shown() -> None:
    sent = SentTokens(wanted=True)
    sent.new_tokens(scored((5, 6), 0))
    with pytest.raises(Internal):
        sent.new_tokens(scored((5, 8), 0))
