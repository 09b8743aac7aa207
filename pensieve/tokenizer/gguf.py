"""The tokenizer and the chat template of a GGUF file.

For byte-level BPE, the file has only the *name* of the pre-tokenizer, not the regular expression that splits
text. Unknown names are refused: a tokenizer that splits elsewhere gives wrong tokens without any error.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pensieve.errors import InvalidArgument
from pensieve.gguf import GgufError, GgufFile, read_gguf
from pensieve.tokenizer.detokenizer import byte_alphabet

_CONTROL, _USER_DEFINED = 3, 4
"""Token types: control tokens, which text cannot spell, and user-defined words, which are never split."""
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    split: str = ""
    """Regular expression for one word; "" means GPT-2's."""
    single_digits: bool = False
    """Each digit is a word; split first."""
    ignore_merges: bool = False
    """A word in the vocabulary is one token, whatever the merges give."""
    composed: bool = False
    """Characters are composed first (NFC)."""
    adds_bos: bool = False
    """Whether BOS stands before a text if the file does not say."""


_GPT2 = _PreTokenizer()
_DIGITS = _PreTokenizer(single_digits=True)
_LLAMA3_BPE = _PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS: Final = {
    "gpt-2": _GPT2,
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral"), _LLAMA3_BPE),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _PreTokenizer(_LLAMA3)),
    "qwen2": _PreTokenizer(_QWEN2, composed=True),
    "deepseek-r1-qwen": _PreTokenizer(_QWEN2),
    "tekken": _PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
}
"""Known pre-tokenizer names, and how llama.cpp splits text for each."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    backend: Tokenizer
    template: str | None
    bos_token: str
    eos_token: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    adds_bos: bool
    vocab_size: int
    sha256: str
    """Over the file's tokenizer entries, without the chat template."""


def read_tokenizer(path: Path) -> GgufTokenizer:
    """The tokenizer of a GGUF file. Raises InvalidArgument when its kind is not supported."""
    try:
        return _read(read_gguf(path))
    except GgufError as error:
        raise InvalidArgument(str(error)) from error


def _read(file: GgufFile) -> GgufTokenizer:
    tokens = file.items("tokenizer.ggml.tokens", str)
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding is not None else len(tokens)
    if len(tokens) > rows:
        raise GgufError(
            f"{file.path}: {len(tokens)} tokens (tokenizer.ggml.tokens) and {rows} rows in token_embd.weight"
        )
    kind = file.text("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(file, tokens), True
    else:
        raise GgufError(
            f"{file.path}: tokenizer {kind!r} (tokenizer.ggml.model) is not supported (supported: gpt2, llama)"
        )
    types = _types(file, tokens)
    backend.add_special_tokens(_added(tokens, types, _CONTROL))
    backend.add_tokens(_added(tokens, types, _USER_DEFINED))
    bos = _token_id(file, "bos", tokens)
    eos = tuple(file.eos_token_ids())
    for name in ("eos", "eot", "eom"):
        _token_id(file, name, tokens)
    return GgufTokenizer(
        backend=backend,
        template=_template(file),
        bos_token=tokens[bos] if bos is not None else "",
        eos_token=tokens[eos[0]] if eos else "",
        bos_token_id=bos,
        eos_token_ids=eos,
        adds_bos=bos is not None and file.flag("tokenizer.ggml.add_bos_token", adds_bos),
        vocab_size=rows,
        sha256=_hash(file),
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether it puts BOS before a text unless the file says otherwise."""
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise GgufError(
            f"{file.path}: names no pre-tokenizer (tokenizer.ggml.pre), like files of early 2024; convert it anew"
        )
    words = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if words is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise GgufError(
            f"{file.path}: pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known (known: {known})"
        )
    alphabet = byte_alphabet()
    spelled = {byte: char for char, byte in alphabet.items()}
    types = _types(file, tokens)
    vocab = [
        # Normal tokens use the byte alphabet. One that does not was added to a tokenizer as plain text.
        token
        if types[index] in (_CONTROL, _USER_DEFINED) or alphabet.keys() >= set(token)
        else "".join(spelled[byte] for byte in token.encode())
        for index, token in enumerate(tokens)
    ]
    tokenizer = _bpe(file, vocab, _merges(file), ignore_merges=words.ignore_merges)
    cuts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if words.single_digits else []
    if words.split:
        cuts.append(pre_tokenizers.Split(Regex(words.split), behavior="isolated"))
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words.split))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.ByteLevel()
    if words.composed:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, words.adds_bos


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE, with the merges implied by its scores."""
    if "tokenizer.ggml.merges" in file.metadata:
        merges = _merges(file)
    else:
        merges = _implied_merges(tokens, file.items("tokenizer.ggml.scores", float), file)
    unknown = _token_id(file, "unknown", tokens)
    tokenizer = _bpe(
        file,
        tokens,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=tokens[unknown] if unknown is not None else None,
    )
    prefixed = file.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="first" if prefixed else "never", split=False
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", left=1)] if prefixed else parts)
    return tokenizer


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    parts = (merge.partition(" ") for merge in file.items("tokenizer.ggml.merges", str))
    return [(left, right) for left, _, right in parts]


def _implied_merges(tokens: list[str], scores: list[float], file: GgufFile) -> list[tuple[str, str]]:
    """All pairs that make a token, in order of the token's score, best first; for one token the lower ids first."""
    if len(scores) != len(tokens):
        raise GgufError(f"{file.path}: {len(tokens)} tokens and {len(scores)} scores (tokenizer.ggml.scores)")
    ids = {token: index for index, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, int, tuple[str, str]]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, -len(left), -len(right), ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _bpe(file: GgufFile, vocab: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocab)}
    if len(ids) < len(vocab):
        twice = next(token for index, token in enumerate(vocab) if ids[token] != index)
        raise GgufError(f"{file.path}: token {twice!r} occurs twice in tokenizer.ggml.tokens")
    wrong = next((pair for pair in merges if not ids.keys() >= {*pair, "".join(pair)}), None)
    if wrong is not None:
        raise GgufError(
            f"{file.path}: tokenizer.ggml.merges joins {wrong[0]!r} and {wrong[1]!r}: not all of them are tokens"
        )
    return Tokenizer(BPE(vocab=ids, merges=merges, **options))


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    if "tokenizer.ggml.token_type" not in file.metadata:
        return [1] * len(tokens)
    types = file.items("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise GgufError(
            f"{file.path}: {len(tokens)} tokens and {len(types)} types (tokenizer.ggml.token_type)"
        )
    return types


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, found in zip(tokens, types, strict=True)
        if found == kind and token
    ]


def _token_id(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    value = file.integer(key)
    if not 0 <= value < len(tokens):
        raise GgufError(f"{file.path}: {key} is {value}, and there are {len(tokens)} tokens")
    return value


def _template(file: GgufFile) -> str | None:
    if "tokenizer.chat_template" in file.metadata:
        return file.text("tokenizer.chat_template")
    named = sorted(key for key in file.metadata if key.startswith("tokenizer.chat_template."))
    if named:
        raise GgufError(
            f"{file.path}: has chat templates of several names and none by default; give one with --chat-template FILE"
        )
    return None


def _hash(file: GgufFile) -> str:
    said = {
        key: value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.") and not key.startswith("tokenizer.chat_template")
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
