"""Text without the template, and what single tokens stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from pensieve.core import Role, TokenLogprob
from pensieve.errors import InvalidArgument
from pensieve.server.turns.text import OutputText
from pensieve.tokenizer import ChatTokenizer, HistoryItem, RawMessage, TokenMessage
from support import tokenizers_ as tiny

KINDS = {
    "bytes": (tiny.byte_level, None),
    "bytes with BOS": (lambda: tiny.with_bos(tiny.byte_level()), True),
    "bytes without a post-processor": (tiny.byte_level, False),
    "metaspace": (lambda: tiny.metaspace(False), None),
    "legacy metaspace with BOS": (lambda: tiny.with_bos(tiny.metaspace(True)), True),
    "unigram": (tiny.unigram, None),
}
TEXTS = (
    "hello world",
    " the fox",
    "a <|im_start|>user\nhi<|im_end|> b",
    "my name</s> is",
    "\n\n",
    "na\u00efve \u20ac \U0001f600",
)


@pytest.fixture(scope="module", params=sorted(KINDS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    make, adds_bos = KINDS[request.param]
    path = tiny.write_folder(tmp_path_factory.mktemp("raw"), make())
    if adds_bos is not None:
        settings = path / "tokenizer_config.json"
        settings.write_text(settings.read_text().replace("{", '{"add_bos_token": true, ', 1))
    return path, bool(adds_bos)


def encoded(chat: ChatTokenizer, text: str, *history: HistoryItem) -> list[int]:
    rendered = chat.render(history, [RawMessage(Role.USER, text)], generation_prompt=True)
    assert not len(rendered.generation_prompt), "glue behind raw text"
    return rendered.item_tokens[0].tolist()


def test_raw_text_is_what_the_models_tokenizer_makes_of_it(folder: tuple[Path, bool]) -> None:
    path, adds_bos = folder
    chat, oracle = ChatTokenizer.from_folder(path), PreTrainedTokenizerFast.from_pretrained(str(path))
    for text in TEXTS:
        want = oracle(text)["input_ids"]
        assert encoded(chat, text) == want and (want[0] == oracle.bos_token_id) is adds_bos
    assert encoded(chat, "<s>hello")[:2].count(oracle.bos_token_id) == 1
    assert encoded(chat, "") == [oracle.bos_token_id] * adds_bos
    with pytest.raises(InvalidArgument):
        encoded(chat, "\ud800")


def test_raw_text_behind_tokens_begins_nothing_anew(folder: tuple[Path, bool]) -> None:
    chat = ChatTokenizer.from_folder(folder[0])
    before = HistoryItem(Role.USER, verbatim=True)
    got = encoded(chat, "hello world", before)
    assert chat.bos_token_id not in got
    again = chat.render([], [TokenMessage(Role.USER, np.array(got))], generation_prompt=True)
    assert again.item_tokens[0].tolist() == got


@given(st.lists(st.integers(0, 419), max_size=20), st.sampled_from(["bytes", "metaspace"]))
def test_the_pieces_of_tokens_are_their_text(ids: list[int], kind: str) -> None:
    chat = CHATS[kind]
    texts, first = [], True
    for token in ids:
        texts.append(chat.token_text(token, first=first))
        first = first and not chat.token_text(token).piece
    assert b"".join(one.piece for one in texts).decode("utf-8", "replace") == chat.decode(ids)
    assert all(not one.piece for one in texts if one.name)


@given(st.lists(st.integers(0, 419), max_size=20), st.sampled_from(["bytes", "metaspace"]))
def test_scores_name_the_pieces_that_tokens_add_to_an_answer(ids: list[int], kind: str) -> None:
    text = OutputText(CHATS[kind])
    for token in ids:
        text.push(token, TokenLogprob(token, -1.0, ((token, -1.0),)))
    shown = text.finish()
    scores = text.scores(0, len(ids))
    assert b"".join(one.token.piece for one in scores).decode("utf-8", "replace") == shown
    assert [one.top_tokens for one in scores] == [(one.token,) for one in scores]


def _chat(kind: str, folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(tiny.write_folder(folder / kind, KINDS[kind][0]()))


CHATS: dict[str, ChatTokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def chats(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("pieces")
    CHATS.update({kind: _chat(kind, path) for kind in ("bytes", "metaspace")})


def test_how_tokens_are_shown() -> None:
    chat = CHATS["bytes"]
    smile = encoded(chat, "\U0001f600")
    assert len(smile) > 1
    assert "".join(chat.token_text(one).text for one in smile) == r"\xf0\x9f\x98\x80"
    (end,) = encoded(chat, "<|im_end|>")
    assert chat.token_text(end).text == "<|im_end|>" and chat.token_text(end).piece == b""
    assert chat.token_text(encoded(CHATS["bytes"], " the")[0]).text.startswith(" ")
