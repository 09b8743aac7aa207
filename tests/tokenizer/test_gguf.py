"""The tokenizer of a GGUF file: the ids of the folder that it was made of, and files that do not say enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.tokenizer import ChatTokenizer, TextMessage
from pensieve.tokenizer.folder import read_folder
from pensieve.tokenizer.gguf import PRE_TOKENIZERS
from support import tokenizers_ as tiny
from support.engine.checkpoints import tiny_checkpoint
from support.gguf_files import write_gguf

TEXTS = (
    "hello world, what is my name?", "  two  spaces\n\nlines\t", "naïve café e\u0301 日本語 🙂", "User: 12345 apples",
    "", "the word </s> and <|im_end|> and <think> in it",
)  # fmt: skip


def made(path: Path, tokenizer: str, folder: Path, **keys: Any) -> Path:
    """A model with this tokenizer: its embedding has a row for each token."""
    rows = len(tiny_vocabulary(tokenizer))
    return write_gguf(path, tiny_checkpoint("llama3", folder, vocab_size=rows), tokenizer=tokenizer, **keys)


def tiny_vocabulary(tokenizer: str) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_the_same_ids_as_the_folder(kind: str, folder: Path, tmp_path: Path) -> None:
    source = tiny.byte_level() if kind == "bytes" else tiny.metaspace(False)
    chat = ChatTokenizer.from_folder(
        made(tmp_path / "m.gguf", source, folder, tokenizer__ggml__eos_token_id=4)
    )
    wanted = ChatTokenizer.from_folder(
        tiny.write_folder(tmp_path / "hf", source, tiny.CHATML, eos="<|im_end|>")
    )
    assert chat.eos_token_ids == wanted.eos_token_ids and chat.vocab_size == wanted.vocab_size
    for text in TEXTS:
        said = [TextMessage(Role.USER, text), TextMessage(Role.ASSISTANT, text), TextMessage(Role.USER, text)]
        found, right = (one.render([], said, generation_prompt=True) for one in (chat, wanted))
        assert [ids.tolist() for ids in found.item_tokens] == [ids.tolist() for ids in right.item_tokens]
        for ids in found.item_tokens:
            assert chat.decode(ids) == wanted.decode(ids)


def test_as_transformers_reads_it(folder: Path, tmp_path: Path) -> None:
    for source, name in ((tiny.byte_level(), "bytes.gguf"), (tiny.metaspace(False), "spm.gguf")):
        path = made(tmp_path / name, source, folder)
        wanted = PreTrainedTokenizerFast.from_pretrained(str(tmp_path), gguf_file=name).backend_tokenizer
        found = read_folder(path).backend
        for text in TEXTS:
            assert (
                found.encode(text, add_special_tokens=False).ids
                == wanted.encode(text, add_special_tokens=False).ids
            )


def test_transformers_is_not_imported(folder: Path, tmp_path: Path) -> None:
    """It takes half of the start of a server."""
    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder)
    code = (
        "import pathlib, sys; sys.modules['transformers'] = None; import pensieve.server.app;"
        f"from pensieve.tokenizer import ChatTokenizer; ChatTokenizer.from_folder(pathlib.Path({str(path)!r}))"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "in 1234  5", ["in", "Ġ1234", "Ġ", "Ġ5"]),
        ("smollm", "in 1234  5", ["in", "Ġ", "1", "2", "3", "4", "ĠĠ", "5"]),
        ("llama-bpe", "in 1234  5", ["in", "Ġ", "123", "4", "Ġ", "Ġ", "5"]),
        ("qwen2", "in 1234  5", ["in", "Ġ", "1", "2", "3", "4", "Ġ", "Ġ", "5"]),
        ("tekken", "inTo 12", ["in", "To", "Ġ", "1", "2"]),
        ("qwen2", "e\u0301", ["Ã©"]),  # composed to one character
        ("deepseek-r1-qwen", "e\u0301", ["e", "ÌģĠ"[:2]]),
    ],
)
def test_words_are_cut_as_the_name_says(
    name: str, text: str, words: list[str], folder: Path, tmp_path: Path
) -> None:
    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder, tokenizer__ggml__pre=name)
    backend = read_folder(path).backend
    normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert backend.pre_tokenizer is not None
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)] == words


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_name_gives_the_text_back(name: str, folder: Path, tmp_path: Path) -> None:
    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder, tokenizer__ggml__pre=name)
    found = read_folder(path)
    assert found.adds_bos == (
        name in ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "tekken")
    )
    for text in TEXTS[:2]:
        assert found.backend.decode(found.backend.encode(text).ids) == text


def test_beginning_of_sequence(folder: Path, tmp_path: Path) -> None:
    def begins(source: str, **keys: Any) -> bool:
        chat = ChatTokenizer.from_folder(made(tmp_path / "m.gguf", source, folder, template=None, **keys))
        first = chat.render([], [TextMessage(Role.USER, "hi")], generation_prompt=False).item_tokens[0]
        return int(first[0]) == 1

    spm, byte_level = tiny.metaspace(False), tiny.byte_level()
    assert [begins(spm), begins(byte_level)] == [True, False]
    assert not begins(spm, tokenizer__ggml__add_bos_token=False)
    assert begins(byte_level, tokenizer__ggml__add_bos_token=True)


def test_no_space_before_the_first_word(folder: Path, tmp_path: Path) -> None:
    path = made(tmp_path / "m.gguf", tiny.metaspace(False), folder, tokenizer__ggml__add_space_prefix=False)
    backend = read_folder(path).backend
    assert not str(backend.encode("hello").tokens[0]).startswith("▁")
    assert backend.decode(backend.encode(" hello").ids) == " hello"


def test_end_tokens_are_united(folder: Path, tmp_path: Path) -> None:
    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder, tokenizer__ggml__eot_token_id=8)
    found = read_folder(path)
    assert (found.eos_token_ids, found.eos_token, found.bos_token) == ((2, 8), "</s>", "<s>")


def test_the_hash_is_that_of_the_tokenizer_alone(folder: Path, tmp_path: Path) -> None:
    hashes = [
        read_folder(made(tmp_path / "m.gguf", tiny.byte_level(), folder, **keys)).sha256
        for keys in (
            {},
            {"template": tiny.LLAMA3},
            {"tokenizer__ggml__pre": "smollm"},
            {"general__name": "x"},
        )
    ]
    assert hashes[0] == hashes[1] == hashes[3] != hashes[2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"tokenizer__ggml__pre": "wibble"}, r"pre-tokenizer 'wibble' \(tokenizer.ggml.pre\) is not known"),
    "default": ({"tokenizer__ggml__pre": "default"}, "pre-tokenizer 'default'"),
    "none": ({"tokenizer__ggml__pre": None}, "names no pre-tokenizer"),
    "kind": ({"tokenizer__ggml__model": "t5"}, r"tokenizer 't5' \(tokenizer.ggml.model\) is not supported"),
    "no kind": ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model is missing"),
    "no words": ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
    "end": ({"tokenizer__ggml__eos_token_id": 99999}, r"tokenizer.ggml.eos_token_id is 99999, and there"),
    "types": ({"tokenizer__ggml__token_type": [1, 1]}, "2 types"),
    "merges": ({"tokenizer__ggml__merges": ["h zz"]}, "joins 'h' and 'zz'"),
    "templates": ({"template": None, "tokenizer__chat_template__rag": "x"}, "several names and none by default"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_is_refused_by_name(case: str, folder: Path, tmp_path: Path) -> None:
    keys, message = REFUSED[case]
    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder, **keys)
    with pytest.raises(InvalidArgument, match=message) as error:
        ChatTokenizer.from_folder(path)
    assert error.value.message.startswith(str(path)) and "\n" not in error.value.message


def test_a_token_without_a_row(folder: Path, tmp_path: Path) -> None:
    def shorter(keys: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["token_embd.weight"] = np.ascontiguousarray(tensors["token_embd.weight"][:-1])

    path = made(tmp_path / "m.gguf", tiny.byte_level(), folder, change=shorter)
    with pytest.raises(InvalidArgument, match=r"368 tokens \(tokenizer.ggml.tokens\) and 367 rows"):
        ChatTokenizer.from_folder(path)
