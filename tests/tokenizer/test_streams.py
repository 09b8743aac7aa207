"""Incremental text: detokenisation and stop strings give the same whatever the pieces are."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pensieve.tokenizer import ChatTokenizer, StopMatcher
from pensieve.tokenizer.detokenizer import TokenBytes
from support import tokenizers_ as tiny

KINDS = {
    "bytes": tiny.byte_level,
    "legacy": lambda: tiny.metaspace(True),
    "first": lambda: tiny.metaspace(False),
}


@functools.cache
def chat_of(kind: str) -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer.from_folder(tiny.write_folder(Path(folder), KINDS[kind](), vocab_size=700))


def cut(items: list[int] | str, at: list[int]) -> list[list[int] | str]:
    borders = [0, *sorted(min(i, len(items)) for i in at), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(ids=st.lists(st.integers(0, 699), max_size=40), at=st.lists(st.integers(0, 40), max_size=8))
def test_pieces_add_up(kind: str, ids: list[int], at: list[int]) -> None:
    chat = chat_of(kind)
    stream = chat.detokenizer()
    pieces = [stream.push(piece) for piece in cut(ids, at)]
    assert "".join(pieces) + stream.finish() == chat.decode(ids)


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(text=st.text())
def test_same_as_the_tokenizers_own_decoder(kind: str, text: str) -> None:
    backend = Tokenizer.from_str(KINDS[kind]())
    backend.encode_special_tokens = True
    ids = backend.encode(text, add_special_tokens=False).ids
    assert chat_of(kind).decode(ids) == backend.decode(ids, skip_special_tokens=True)


@given(ids=st.lists(st.integers(0, 419), max_size=30))
def test_invalid_bytes_as_the_byte_level_decoder_has_them(ids: list[int]) -> None:
    backend = Tokenizer.from_str(tiny.byte_level())
    assert chat_of("bytes").decode(ids) == backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_whole_code_points_only(kind: str) -> None:
    chat = chat_of(kind)
    backend = Tokenizer.from_str(KINDS[kind]())
    stream = chat.detokenizer()
    pieces = [stream.push([i]) for i in backend.encode("a\U0001f600b", add_special_tokens=False).ids]
    assert "".join(pieces) == "a\U0001f600b"
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces.count("") >= 3  # the face has four bytes
    first_byte = backend.encode("\U0001f600", add_special_tokens=False).ids[:-1]
    stream = chat.detokenizer()
    assert stream.push(first_byte).strip() == ""
    assert stream.finish() == "\ufffd"


def test_decoders_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        TokenBytes(Tokenizer.from_str(tiny.byte_level()), {"type": "WordPiece"}, frozenset())


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = ""
    for piece in pieces:
        result = matcher.push(piece)
        text += result.text
        if result.stop is not None:
            assert matcher.push("more").text == ""
            return text, result.stop
    return text + matcher.flush(), None


def test_stop_held_back_until_decided() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("hello\nUs").text == "hello"
    assert matcher.push("ual\nUser").text == "\nUsual"
    result = matcher.push(": hi")
    assert (result.text, result.stop) == ("", "\nUser:")
    assert matcher.flush() == ""


def test_end_of_text_releases_what_was_held() -> None:
    assert run(["stop"], ["do not st", "o"]) == ("do not sto", None)


def test_first_completed_stop_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")


def test_empty_stop() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    at=st.lists(st.integers(0, 30), max_size=10),
)
def test_stops_do_not_depend_on_the_pieces(text: str, stops: list[str], at: list[int]) -> None:
    emitted, stop = run(stops, cut(text, at))  # type: ignore[arg-type]
    ends = [(end, start) for end in range(len(text) + 1) for start in range(end) if text[start:end] in stops]
    if ends:
        end, start = min(ends)
        assert (emitted, stop) == (text[:start], text[start:end])
    else:
        assert (emitted, stop) == (text, None)
