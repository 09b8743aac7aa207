"""Reads the tokenizer of a model folder. Local files only."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pensieve.errors import InvalidArgument
from pensieve.model.arch import ModelError
from pensieve.model.families.parsing import declared_eos_ids, default_eos_ids, transformers_module
from pensieve.speech import SHOWN_MARKS
from pensieve.tokenizer.gguf import GgufTokenizer, read_tokenizer

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_GENERIC = "TokenizersBackend"
_GENERIC_NAMES = (_GENERIC, "PreTrainedTokenizer")
"""Names of that class: ``_class_name`` has taken ``Fast`` away."""
_GENERIC_FAMILIES = frozenset(
    (
        "glm", "glm4", "granite", "granitemoe", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "olmo2",
        "olmo3", "phi3", "stablelm",
    )
)  # fmt: skip
"""Families whose tokenizers are read by the generic class whatever their files name."""
_DEFAULT_CLASSES = {
    "cohere": "CohereTokenizer",
    "cohere2": "CohereTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "mamba2": "GPTNeoXTokenizer",
    "olmoe": "GPTNeoXTokenizer",
    "opt": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_text": "Qwen3_5Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "qwen3_next": "Qwen2Tokenizer",
    "starcoder2": "GPT2Tokenizer",
}
"""Class of a tokenizer whose files name none."""
_MISNAMED_FAMILIES = frozenset(("qwen2", "qwen3_5"))
"""Families whose published files name a wrong class: the default class reads them."""

log = logging.getLogger(__name__)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The tokenizer of a model folder or GGUF file, with the template and special tokens that belong to it."""

    backend: Tokenizer
    decoder: dict[str, Any] | None
    """The entry ``decoder`` of tokenizer.json."""
    template: str | None
    named_templates: tuple[str, ...]
    """Template names of a folder that has several, none of them ``default``; () otherwise."""
    tool_template: bool
    """Whether conversations with tools have a template of their own (``tool_use``)."""
    bos_token: str
    eos_token: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    named_tokens: tuple[str, ...]
    """Tokens with a role in the tokenizer: padding, unknown, and so on."""
    adds_bos: bool
    """Whether the tokenizer itself puts BOS before a text."""
    vocab_size: int
    sha256: str


def read_folder(folder: Path) -> TokenizerFolder:
    """The tokenizer of a folder or GGUF file. Raises InvalidArgument, with file and field."""
    if folder.is_file():
        return _from_gguf(read_tokenizer(folder))
    config, settings = _read_json(folder / "config.json"), _read_json(folder / "tokenizer_config.json")
    tokenizer = _load(folder, config, settings)
    backend = tokenizer.backend_tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first = backend.encode("a", add_special_tokens=True).ids[:1]
    # Rows of the embedding: an id beyond them would crash the model, even if the tokenizer knows it.
    vocab_size = _text_config(config).get("vocab_size", len(tokenizer))
    if not isinstance(vocab_size, int) or isinstance(vocab_size, bool) or vocab_size <= 0:
        raise InvalidArgument(
            f"{folder / 'config.json'}: vocab_size is {vocab_size!r}; it must be a whole number above 0"
        )
    _require_rows(folder, backend, vocab_size)
    templates = _templates(folder, tokenizer.chat_template)
    return TokenizerFolder(
        backend=backend,
        decoder=json.loads(backend.to_str())["decoder"],
        template=templates.get("default"),
        named_templates=() if "default" in templates else tuple(sorted(templates)),
        tool_template="tool_use" in templates,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        bos_token_id=bos,
        eos_token_ids=_eos_ids(folder, config, eos, vocab_size),
        named_tokens=tuple(
            str(token) for name in _NAMED if isinstance(token := getattr(tokenizer, name, None), str)
        ),
        adds_bos=bos is not None and first == [bos],
        vocab_size=vocab_size,
        sha256=_hash_files(folder),
    )


def _from_gguf(found: GgufTokenizer) -> TokenizerFolder:
    return TokenizerFolder(
        backend=found.backend,
        decoder=json.loads(found.backend.to_str())["decoder"],
        template=found.template,
        named_templates=(),
        tool_template=False,
        bos_token=found.bos_token,
        eos_token=found.eos_token,
        bos_token_id=found.bos_token_id,
        eos_token_ids=found.eos_token_ids,
        named_tokens=(),
        adds_bos=found.adds_bos,
        vocab_size=found.vocab_size,
        sha256=found.sha256,
    )


def words_without_embedding(folder: TokenizerFolder) -> dict[int, str]:
    """Added words without an embedding, by id: they were added, and the model was never resized."""
    added = folder.backend.get_added_tokens_decoder()
    return {i: token.content for i, token in added.items() if i >= folder.vocab_size}


def hidden_ids(backend: Tokenizer) -> frozenset[int]:
    """The special tokens that are no text. Those that open a call are shown: they distinguish a call from text."""
    added = backend.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special and token.content not in SHOWN_MARKS)


def _load(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The tokenizer, built by the class that transformers' AutoTokenizer would choose."""
    files = [folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt")]
    has_json, *has_parts = (file.is_file() for file in files)
    if not has_json and not all(has_parts):
        raise InvalidArgument(
            f"no tokenizer in {folder}: neither tokenizer.json nor vocab.json with merges.txt. Make one with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    spec = _read_json(files[0])
    name = _class_name(config, settings, spec)
    if not has_json and name == _GENERIC:
        name = "GPT2Tokenizer"  # the class of a vocabulary with merges
    # Late: GGUF files and refused options need not wait for it. Not AutoTokenizer: it loads torch, which the front
    # end does without.
    generic = transformers_module("tokenization_utils_tokenizers").TokenizersBackend
    chosen = generic
    if name not in _GENERIC_NAMES:
        import transformers

        found = getattr(transformers, name, None)
        chosen = found if isinstance(found, type) and issubclass(found, generic) else generic
    try:
        return chosen.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:
        # It reads several files of unknown origin and raises whatever goes wrong first.
        said = " ".join(str(error).split()) or type(error).__name__
        raise InvalidArgument(
            f"{folder}: the tokenizer (tokenizer.json, tokenizer_config.json) cannot be read: {said}"
        ) from error


def _class_name(config: dict[str, Any], settings: dict[str, Any], spec: dict[str, Any]) -> str:
    """AutoTokenizer's choice for the supported families; a test compares the two. ``tokenizer_class`` may be
    wrong."""
    family = str(config.get("model_type"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    if family in _GENERIC_FAMILIES:
        return _GENERIC
    if named is None or family in _MISNAMED_FAMILIES:
        return _DEFAULT_CLASSES.get(family, _GENERIC)
    if named == "LlamaTokenizer" and _is_byte_level(spec):
        return _GENERIC
    return named


def _is_byte_level(spec: dict[str, Any]) -> bool:
    return any('"ByteLevel"' in json.dumps(spec.get(part)) for part in ("pre_tokenizer", "decoder"))


def _templates(folder: Path, found: object) -> dict[str, str]:
    """Chat templates by name; a single one is ``default``."""
    templates: dict[str, Any] = (
        found if isinstance(found, dict) else {} if found is None else {"default": found}
    )
    for name, text in templates.items():
        if not isinstance(text, str):
            raise InvalidArgument(
                f"{folder / 'tokenizer_config.json'}: chat_template {name!r} is {text!r}, which is no template"
            )
    return templates


def _require_rows(folder: Path, backend: Tokenizer, vocab_size: int) -> None:
    """Raises InvalidArgument when ordinary text could become a token without an embedding."""
    if backend.get_vocab_size(with_added_tokens=False) <= vocab_size:
        return
    added = backend.get_added_tokens_decoder()
    words = backend.get_vocab(with_added_tokens=False)
    beyond = [(token_id, word) for word, token_id in words.items() if token_id >= vocab_size]
    beyond = [one for one in beyond if one[0] not in added]
    if beyond:
        token_id, word = min(beyond)
        raise InvalidArgument(
            f"{folder / 'tokenizer.json'}: token {word!r} has id {token_id}, but config.json: vocab_size is "
            f"{vocab_size}: the model has no embedding for it"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} is not a JSON object")
    return content


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def _eos_ids(
    folder: Path, config: dict[str, Any], tokenizer_eos: int | None, vocab_size: int
) -> tuple[int, ...]:
    """Ids from three files: some models list end of turn in one and end of text in another."""
    config, generation = _text_config(config), _read_json(folder / "generation_config.json")
    try:
        ids = declared_eos_ids(config, generation)
    except ModelError as error:
        raise InvalidArgument(f"{folder}/{error}") from error
    if tokenizer_eos is not None and tokenizer_eos not in ids:
        ids = (*ids, tokenizer_eos)
    ids = ids or default_eos_ids(config, generation)
    beyond = [one for one in ids if one >= vocab_size]
    if beyond:
        # The model never generates it, so it does no harm.
        log.warning(
            "%s: end of turn %d is not below vocab_size %d and is left out", folder, beyond[0], vocab_size
        )
    return tuple(one for one in ids if one < vocab_size)


def _hash_files(folder: Path) -> str:
    """SHA-256 (hex) of the files, without the chat template, which has a hash of its own."""
    digest = hashlib.sha256()
    for name in _FILES:
        path = folder / name
        if path.is_file():
            data = path.read_bytes()
            if name == "tokenizer_config.json":
                settings = _read_json(path)
                settings.pop("chat_template", None)
                data = json.dumps(settings, sort_keys=True).encode()
            digest.update(f"{name}\0".encode() + hashlib.sha256(data).digest())
    return digest.hexdigest()
