"""What a model folder says about its tokenizer. Reads local files only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

# The module, not `from transformers import AutoTokenizer`: that one loads torch, which the front end does without.
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from pensieve.errors import InvalidArgument

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The parts that a ``ChatTokenizer`` is made of."""

    backend: Tokenizer
    decoder: dict[str, Any] | None
    """That entry of tokenizer.json."""
    template: str | None
    bos_token: str
    eos_token: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    named_tokens: tuple[str, ...]
    """Those that the tokenizer names for itself: padding, unknown, and so on."""
    adds_bos: bool
    """Whether the tokenizer puts BOS before a text by itself."""
    vocab_size: int
    sha256: str


def read_folder(folder: Path) -> TokenizerFolder:
    """What the folder says. Raises InvalidArgument when it has no tokenizer that can be read, and says how to get
    one."""
    config, settings = _read_json(folder / "config.json"), _read_json(folder / "tokenizer_config.json")
    tokenizer = _load(folder)
    backend = tokenizer.backend_tokenizer
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    first = backend.encode("a", add_special_tokens=True).ids[:1]
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return TokenizerFolder(
        backend=backend,
        decoder=json.loads(backend.to_str())["decoder"],
        template=template,
        bos_token=tokenizer.bos_token or "",
        eos_token=tokenizer.eos_token or "",
        bos_token_id=bos,
        eos_token_ids=_eos_ids(_read_json(folder / "generation_config.json"), config, eos),
        named_tokens=tuple(
            str(token) for name in _NAMED if isinstance(token := getattr(tokenizer, name, None), str)
        ),
        adds_bos=bos is not None and (first == [bos] or bool(settings.get("add_bos_token"))),
        # Rows of the embedding: an id behind them would crash the model, whatever the tokenizer knows.
        vocab_size=_text_config(config).get("vocab_size") or len(tokenizer),
        sha256=_hash_files(folder),
    )


def _load(folder: Path) -> Any:
    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if vocab.is_file() and merges.is_file():  # OPT and GPT-2 are published like this
        built = Tokenizer(BPE.from_file(str(vocab), str(merges)))
        built.pre_tokenizer = ByteLevel(add_prefix_space=False)
        built.decoder = ByteLevelDecoder()
        settings = _read_json(folder / "tokenizer_config.json") | _read_json(
            folder / "special_tokens_map.json"
        )
        names = {
            name: token["content"] if isinstance(token, dict) else token
            for name, token in settings.items()
            if name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        names = {"bos_token": "</s>", "eos_token": "</s>"} | names
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=built, **names)  # type: ignore[no-untyped-call]
        tokenizer.chat_template = settings.get("chat_template")
        return tokenizer
    raise InvalidArgument(
        f"no tokenizer in {folder}: neither tokenizer.json nor vocab.json with merges.txt. Make one with "
        "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
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


def _eos_ids(generation: dict[str, Any], config: dict[str, Any], of_tokenizer: int | None) -> tuple[int, ...]:
    """The ids that any of the three places names: models name their end of turn in one, their end of text in
    another."""
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), _text_config(config).get("eos_token_id"), of_tokenizer):
        values: Iterable[int | None] = value if isinstance(value, list) else (value,)
        ids += [token for token in values if token is not None and token not in ids]
    return tuple(ids)


def _hash_files(folder: Path) -> str:
    """SHA-256 (hex) of the files, without the chat template that the settings may hold: it has a hash of its own."""
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
