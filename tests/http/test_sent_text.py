"""What is sent of an answer that begins anew in the middle of a stream."""

from __future__ import annotations

import pytest

from pensieve.client import Piece
from pensieve.errors import Internal
from pensieve.http.common.answers import SentText


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
