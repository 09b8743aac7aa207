"""The vocabulary of grammars: the same bytes as the text of an answer, special tokens by name only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer

from pensieve.errors import InvalidArgument
from pensieve.tokenizer.detokenizer import Detokenizer, TokenBytes
from pensieve.tokenizer.folder import TokenizerFolder, hidden_ids, read_folder
from pensieve.tokenizer.matching import grammar_tokenizer, read_grammar_tokenizer
from support.engine.checkpoints import tiny_checkpoint
from support.gguf_files import write_gguf
from support.tokenizers_ import CHATML, byte_level, metaspace, write_folder

KINDS: dict[str, Callable[[], str]] = {
    "byte-level": byte_level,
    "metaspace": lambda: metaspace(legacy=False),
}


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> TokenizerFolder:
    write_folder(tmp_path, KINDS[request.param](), CHATML, bos=None, eos="<|im_end|>")
    return read_folder(tmp_path)


def test_tokens_have_the_bytes_of_the_text(folder: TokenizerFolder) -> None:
    made, hidden = grammar_tokenizer(folder, folder.eos_token_ids), hidden_ids(folder.backend)
    table = TokenBytes(folder.backend, folder.decoder, hidden)
    assert made.vocab_size == folder.vocab_size
    for token in range(folder.vocab_size):
        if token in hidden:
            assert made.is_special_token(token)
        elif table[token] != b"\xff":  # no text has it; the library uses it for special tokens
            assert made.decode_bytes([token]) == table[token]


def allowed(made: LLTokenizer, lark: str) -> list[int]:
    """The tokens that an answer may begin with."""
    matcher = LLMatcher(made, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    mask = matcher.compute_bitmask()
    return [token for token in range(made.vocab_size) if mask[token // 8] >> token % 8 & 1]


def test_special_tokens_by_name_only(folder: TokenizerFolder) -> None:
    made, hidden = grammar_tokenizer(folder, folder.eos_token_ids), hidden_ids(folder.backend)
    (end,) = folder.eos_token_ids
    assert allowed(made, "start: <|im_end|>") == [end]
    spelled = allowed(made, 'start: "<|im_end|>"')
    assert spelled and hidden.isdisjoint(spelled)
    # The end of a turn is allowed where the grammar may end.
    assert hidden.intersection(allowed(made, "start: /[a-z]*/")) == {end}
    assert hidden.isdisjoint(allowed(made, "start: /[a-z]+/"))


def test_an_answer_reads_as_the_grammar_says(folder: TokenizerFolder) -> None:
    made = grammar_tokenizer(folder, folder.eos_token_ids)
    table = TokenBytes(folder.backend, folder.decoder, hidden_ids(folder.backend))
    matcher = LLMatcher(made, LLMatcher.grammar_from_lark('start: "{" /[a-z ]{4}/ "e\u0301 }"'))
    output: list[int] = []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        token = next(one for one in range(made.vocab_size) if mask[one // 8] >> one % 8 & 1)
        assert matcher.consume_token(token)
        output.append(token)
    text = Detokenizer(table)
    assert len(found := text.push(output) + text.finish()) == 9 and found.endswith("e\u0301 }")


def test_gguf_files(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama3", tmp_path, vocab_size=432)
    path = write_gguf(tmp_path / "model.gguf", checkpoint, tokenizer=byte_level())
    made = read_grammar_tokenizer(path, [3])
    assert (made.eos_tokens, made.vocab_size) == ([3], 432)
    assert made.decode_bytes(made.tokenize_str("hello")) == b"hello"


def test_a_model_without_an_end_is_refused(folder: TokenizerFolder) -> None:
    with pytest.raises(InvalidArgument, match="end-of-turn"):
        grammar_tokenizer(folder, [])
