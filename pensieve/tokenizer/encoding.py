"""Turns text into token ids, with a hard line between what the template says and what people say.

Control tokens come from the template's glue only. Text between two of them, contents included, is encoded as one run
with special-token parsing off, as the whole conversation would be by ``apply_chat_template``; so a delta has the ids
that the model was trained on, and ``<|im_end|>`` typed by a user is just nine characters.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pensieve.errors import InvalidArgument
from pensieve.tokenizer.detokenizer import byte_alphabet


class Before(enum.Enum):
    """What lies before a run of text; prefix spaces depend on it."""

    NOTHING = "nothing"
    CONTROL = "control"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message: glue of the template, or somebody's text."""

    text: str
    is_glue: bool


class TextEncoder:
    """Encodes parts of messages. Thread-safe: nothing is written after it is made. Keeps ``backend``."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._raw = backend
        spec = json.loads(backend.to_str())
        added = spec["added_tokens"]
        self._control = {token["content"]: token for token in added if token["content"].strip()}
        self.control_ids = frozenset(token["id"] for token in self._control.values())
        longest_first = sorted(self._control, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        for token in self._control.values():
            token["special"] = True  # so that encode_special_tokens turns all of them into plain text
        # A token no user can know stands before runs inside a conversation: tokenizers treat the start of a text alone
        # in another way than the text behind a token.
        self._mark = f"\ue000{secrets.token_hex(16)}\ue001"
        self._fresh = self._plain_tokenizer(spec)
        self._continuing = self._plain_tokenizer(_without_prefix_space(spec))
        self._vocab = backend.get_vocab(with_added_tokens=False)
        self._byte_chars = {byte: char for char, byte in byte_alphabet().items()}

    def _plain_tokenizer(self, spec: dict[str, Any]) -> Tokenizer:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        tokenizer.encode_special_tokens = True
        tokenizer.add_tokens([AddedToken(self._mark, special=False, normalized=False)])
        return tokenizer

    def encode(self, parts: Iterable[Part], before: Before) -> tuple[list[int], Before]:
        """The ids of the parts, concatenated, and what lies behind them. Raises InvalidArgument on lone surrogates."""
        ids: list[int] = []
        run, strip_next = "", False
        for part in parts:
            rest = part.text
            # Control tokens are looked for in glue only: what people write cannot contain one.
            while part.is_glue and (match := self._control_pattern.search(rest)):
                token = self._control[match[0]]
                run += rest[: match.start()]
                run = run.lstrip() if strip_next else run
                ids += self._encode_run(run.rstrip() if token["lstrip"] else run, before)
                ids.append(token["id"])
                run, strip_next, before = "", token["rstrip"], Before.CONTROL
                rest = rest[match.end() :]
            run += rest
        run = run.lstrip() if strip_next else run
        if run:
            ids += self._encode_run(run, before)
            before = Before.TEXT
        return ids, before

    def encode_raw(self, text: str, before: Before) -> list[int]:
        """The ids of a text as the model's own tokenizer gives them, control tokens in it included."""
        if before is not Before.NOTHING:
            return self.encode([Part(text, True)], before)[0]
        _check_text(text)
        (encoding,) = self._raw.encode_batch_fast([text], add_special_tokens=False)
        return list(encoding.ids)

    def has_control(self, text: str) -> bool:
        """Whether a text spells a control token."""
        return self._control_pattern.search(text) is not None

    def control_token(self, text: str) -> int | None:
        """Id of the control token that a text is, all of it; None: it is none."""
        found = self._raw.token_to_id(text)
        return found if found in self.control_ids else None

    def _encode_run(self, text: str, before: Before) -> list[int]:
        if not text:
            return []
        tokenizer = self._continuing if before is Before.TEXT else self._fresh
        _check_text(text)
        mark = "" if before is Before.NOTHING else self._mark
        # As a batch of one: ``encode`` holds the interpreter lock, seconds for a megabyte, and with it the event loop.
        (encoding,) = tokenizer.encode_batch_fast([mark + text], add_special_tokens=False)
        ids: list[int] = encoding.ids[1:] if mark else encoding.ids
        if self.control_ids.isdisjoint(ids):
            return ids
        # A vocabulary may hold a control token as an ordinary piece (Unigram): spell it.
        return [i for token_id in ids for i in self._spelled(token_id)]

    def _spelled(self, token_id: int) -> list[int]:
        if token_id not in self.control_ids:
            return [token_id]
        content = next(t["content"] for t in self._control.values() if t["id"] == token_id)
        return [i for char in content for i in self._char_ids(char)]

    def _char_ids(self, char: str) -> list[int]:
        data = char.encode()
        for names in ([char], [self._byte_chars[b] for b in data], [f"<0x{b:02X}>" for b in data]):
            found = [self._vocab[name] for name in names if name in self._vocab]
            if len(found) == len(names) and self.control_ids.isdisjoint(found):
                return found
        raise InvalidArgument.field(
            "text", f"has a control token of the model, and no token for {char!r} alone"
        )


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field("text", "has a surrogate that is not part of a pair") from error


def _without_prefix_space(node: Any) -> Any:
    """The tokenizer specification without what puts a space before a text; for text that continues other text."""
    if isinstance(node, list):
        return [_without_prefix_space(part) for part in node if _kind(part) != "Prepend"]
    if not isinstance(node, dict) or _kind(node) == "Prepend":
        return None if isinstance(node, dict) else node
    changed = {
        key: _without_prefix_space(value)
        if key in ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")
        else value
        for key, value in node.items()
    }
    if _kind(node) == "Metaspace":
        changed["prepend_scheme"] = "never"
    if _kind(node) == "ByteLevel":
        changed["add_prefix_space"] = False
    return changed


def _kind(node: Any) -> Any:
    return node.get("type") if isinstance(node, dict) else None
