"""Turns token ids into text, token by token, and finds stop strings in it.

Text is defined on bytes: every token has a fixed byte string, and the text is the UTF-8 decoding of their
concatenation, with each maximal invalid part replaced by U+FFFD. So the text is a pure function of the token
prefix. It equals the output of the ``tokenizers`` decoders on valid UTF-8; on invalid byte-fallback sequences
those also blank out neighbouring valid characters, which a stream cannot do in hindsight.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import Tokenizer

MAX_TOKEN_BYTES: Final = 64
"""Longer tokens are not considered when a text is spelled."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str
    """Text that may be shown: no part of it belongs to a stop string, found or still possible."""
    stop: str | None = None
    """The stop string that was found. Everything from its first character on is withheld."""


class StopMatcher:
    """Finds the stop string that is completed first; of two that end together, the one that starts earlier."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError on an empty stop string."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._found: str | None = None

    def push(self, text: str) -> StopResult:
        """Add text; return the text that is certainly not part of a stop string, nothing after a match."""
        if self._found is not None:
            return StopResult("", self._found)
        if not self._stops:
            return StopResult(text)
        text = self._held + text
        hit = self._first_match(text)
        if hit is not None:
            start, self._found = hit
            self._held = ""
            return StopResult(text[:start], self._found)
        keep = self._possible_start(text)
        self._held = text[keep:]
        return StopResult(text[:keep])

    def flush(self) -> str:
        """The withheld beginning of a stop string that was not completed. Call it once, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        starts = ((text.find(stop), stop) for stop in self._stops)
        found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_start(self, text: str) -> int:
        """Smallest index from which ``text`` is a proper prefix of a stop string; its length if there is none."""
        longest = max(len(stop) for stop in self._stops) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)


def byte_alphabet() -> dict[str, int]:
    """The printable character for each byte in byte-level vocabularies, as character to byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL = byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    if all(char in _BYTE_LEVEL for char in token):
        return bytes(_BYTE_LEVEL[char] for char in token)
    return token.encode()  # an added token: its content is plain text


def _metaspace_bytes(token: str, replacement: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
        return bytes([int(match[1], 16)])
    return token.replace(replacement, " ").encode()


class TokenBytes:
    """The byte string of each token id. Special tokens and unassigned ids have none."""

    def __init__(self, tokenizer: Tokenizer, decoder: dict[str, Any] | None, special: frozenset[int]) -> None:
        """``decoder``: that entry of tokenizer.json. Raises ValueError on a kind that is not byte-based."""
        self._tokenizer = tokenizer
        self._special = special
        self._cache: dict[int, bytes] = {}
        self._by_bytes: dict[bytes, int] | None = None
        self.strips_leading_space = False
        self._to_bytes = self._reader(decoder)

    def name(self, token_id: int) -> str:
        """The name of a special token; empty for any other id."""
        return (self._tokenizer.id_to_token(token_id) or "") if token_id in self._special else ""

    def __getitem__(self, token_id: int) -> bytes:
        data = self._cache.get(token_id)
        if data is None:
            token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
            data = self._cache[token_id] = b"" if token is None else self._to_bytes(token)
        return data

    def spell(self, text: str) -> list[int] | None:
        """Ids whose bytes are those of ``text``, longest token first; None when the vocabulary has no such ids."""
        if self._by_bytes is None:
            self._by_bytes = {}
            for token_id in sorted(self._tokenizer.get_vocab(with_added_tokens=False).values(), reverse=True):
                self._by_bytes[self[token_id]] = token_id  # the lowest id of equal ones
        data, ids = text.encode(), list[int]()
        while data:
            ends = range(min(len(data), MAX_TOKEN_BYTES), 0, -1)
            end = next((end for end in ends if data[:end] in self._by_bytes), 0)
            if not end:
                return None
            ids.append(self._by_bytes[data[:end]])
            data = data[end:]
        return ids

    def _reader(self, decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
        steps = (decoder or {}).get("decoders", [decoder] if decoder else [])
        kinds = [step["type"] for step in steps]
        if "ByteLevel" in kinds:
            return _byte_level_bytes
        if set(kinds) <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
            replacement = "\u2581"
            for step in steps:
                if step["type"] == "Metaspace":
                    replacement = step.get("replacement", replacement)
                    self.strips_leading_space |= step.get("prepend_scheme", "always") != "never"
                elif step["type"] == "Replace":
                    replacement = step["pattern"].get("String", replacement)
                elif step["type"] == "Strip":
                    self.strips_leading_space |= step.get("start", 0) > 0
            byte_fallback = "ByteFallback" in kinds
            return lambda token: _metaspace_bytes(token, replacement, byte_fallback)
        raise ValueError(
            f"the tokenizer's decoder ({' + '.join(kinds)}) is neither byte-level nor Metaspace; "
            "Pensieve serves decoder-only models, whose tokenizers are one or the other"
        )


class Detokenizer:
    """Turns ids into text incrementally. The pieces, concatenated, are the decoding of all ids."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = table.strips_leading_space

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete code point wait for more ids."""
        return bool(self._utf8.getstate()[0])

    def push(self, ids: Iterable[int]) -> str:
        """The text of more ids, in whole code points; bytes of an incomplete one are held back."""
        return self._strip_start(self._utf8.decode(b"".join(self._table[int(i)] for i in ids)))

    def finish(self) -> str:
        """The held-back bytes as U+FFFD. Call it after the last id."""
        return self._strip_start(self._utf8.decode(b"", True))

    def _strip_start(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
