"""Turns text into token ids, and separates the template's text strictly from messages.

The tokenizer finds its added words itself; text between two of them is one run. A message's text never
becomes a control token: the caller passes the places where a message spells one (``shields``), and these runs
are encoded again with control tokens disabled. So ``<|im_end|>`` typed by a user is just nine characters.
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from pensieve.errors import InvalidArgument
from pensieve.tokenizer.detokenizer import byte_alphabet

SLICE_CHARS: Final = 32_768
"""Longer texts are encoded in slices, so that work for a disconnected caller can be aborted between them."""
_FILL: Final = "\ue002"


class Preceding(enum.Enum):
    """The kind of text before a run; prefix spaces depend on it."""

    NOTHING = "nothing"
    CONTROL = "control"
    TEXT = "text"


@dataclass(slots=True)
class Encoded:
    """Token ids of a text, and where each begins and ends in it, in characters."""

    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def extend(self, other: Encoded, shift: int, first: int = 0, last: int | None = None) -> None:
        """Append tokens ``first`` to ``last`` of another text, which begins at ``shift`` in this one."""
        self.ids += other.ids[first:last]
        self.starts += [start + shift for start in other.starts[first:last]]
        self.ends += [end + shift for end in other.ends[first:last]]


class TextEncoder:
    """Encodes texts of conversations. Immutable, so thread-safe. Keeps ``backend``."""

    def __init__(self, backend: Tokenizer, control: Iterable[str] | None = None) -> None:
        """``control``: the added words that only the template may write; None means all."""
        backend.no_truncation()
        backend.no_padding()
        self._raw = backend
        spec = json.loads(backend.to_str())
        added = [token for token in spec["added_tokens"] if token["content"].strip()]
        chosen = {token["content"] for token in added} if control is None else set(control)
        self._control = {token["content"]: token for token in added if token["content"] in chosen}
        self.control_ids = frozenset(token["id"] for token in self._control.values())
        self._added = {token["id"]: token["content"].strip() for token in spec["added_tokens"]}
        self._control_pattern = _alternation(self._control)
        self._beginnings = _alternation({text[0] for text in self._control})
        # Texts may be cut where these begin: they strip nothing before them, and no run spans them.
        self._safe_cuts = _alternation(
            text for text, token in self._control.items() if not token["lstrip"] and not token["single_word"]
        )
        # A secret token precedes runs inside a conversation: tokenizers treat the start of a text differently
        # from text after a token.
        self._mark = f"\ue000{secrets.token_hex(16)}\ue001"
        self._has_prefix = without_prefix_space(spec) != spec
        self._parsing = self._with_mark(spec)
        for token in spec["added_tokens"]:
            # ``encode_special_tokens`` makes special tokens plain text: here these are the control tokens.
            token["special"] = token["content"] in self._control
        continuing = without_prefix_space(spec)
        self._fresh = self._with_mark(spec, plain=True)
        self._continuing = self._with_mark(continuing, plain=True) if self._has_prefix else self._fresh
        self._vocab = backend.get_vocab(with_added_tokens=False)
        self._byte_chars = {byte: char for char, byte in byte_alphabet().items()}

    def _with_mark(self, spec: dict[str, Any], *, plain: bool = False) -> Tokenizer:
        tokenizer = Tokenizer.from_str(json.dumps(spec))
        tokenizer.encode_special_tokens = plain
        tokenizer.add_tokens([AddedToken(self._mark, special=False, normalized=False)])
        return tokenizer

    def encode(
        self,
        text: str,
        before: Preceding,
        shields: Sequence[tuple[int, int]] = (),
        check: Callable[[], None] | None = None,
    ) -> Encoded:
        """The tokens of a conversation's text. ``shields``: ranges of ``text``, in order, in which a message
        spells a control token. ``check``: called between slices; its errors abort the work. Raises
        InvalidArgument on lone surrogates."""
        _check_text(text)
        shown = fill_shields(text, shields) if shields else text
        made = Encoded()
        at = 0
        while at < len(shown):
            cut = self._safe_cuts.search(shown, at + SLICE_CHARS) if len(shown) - at > SLICE_CHARS else None
            end = cut.start() if cut is not None else len(shown)
            if check is not None and at:
                check()
            made.extend(self._encode_part(shown[at:end], before if not at else Preceding.CONTROL), at)
            at = end
        return self._apply_shields(text, made, before, shields) if shields else made

    def ends_in_control(self, text: str) -> bool:
        """Whether the last token of a text is an added word, so that the next text begins a run."""
        (encoding,) = self._parsing.encode_batch_fast([text[-256:]], add_special_tokens=False)
        return bool(encoding.ids) and text.strip().endswith(self._added.get(encoding.ids[-1]) or "\0")

    def encode_raw(self, text: str, before: Preceding) -> list[int]:
        return self.encode(text, before).ids

    def control_spans(self, text: str, *, beginnings: bool = False) -> list[tuple[int, int]]:
        """Where a text spells control tokens. With ``beginnings`` also where one may begin: the first character."""
        found = dict(match.span() for match in self._beginnings.finditer(text)) if beginnings else {}
        return sorted((found | dict(match.span() for match in self._control_pattern.finditer(text))).items())

    def control_end(self, text: str, start: int) -> int | None:
        """Where the control token ends that a text spells at ``start``; None if it spells none there."""
        match = self._control_pattern.match(text, start)
        return None if match is None else match.end()

    def encode_text(self, text: str) -> list[int] | None:
        """The ids of a text that continues other text, without control tokens; None if it cannot do without them."""
        try:
            return self._encode_run(text, Preceding.TEXT)
        except InvalidArgument:
            return None

    def has_control(self, text: str, *, beginnings: bool = False) -> bool:
        """Whether a text spells a control token; with ``beginnings`` whether one may begin in it."""
        return (self._beginnings if beginnings else self._control_pattern).search(text) is not None

    def count_control(self, text: str) -> int:
        """Number of control tokens in a text: a lower bound of its tokens."""
        return len(self.control_spans(text))

    def _encode_part(self, text: str, before: Preceding) -> Encoded:
        if before is Preceding.NOTHING:
            return _encoded(self._raw, text)
        made = _encoded(self._parsing, text, self._mark)
        if before is Preceding.TEXT and self._has_prefix:
            # Only the first run continues earlier text; after a token the prefix is added again.
            added = next((n for n in range(len(made.ids)) if self._is_added(made, n, text)), len(made.ids))
            end = made.starts[added] if added < len(made.ids) else len(text)
            again = self._run(text[:end], before)
            again.extend(made, 0, added)
            return again
        return made

    def _apply_shields(
        self, text: str, made: Encoded, before: Preceding, shields: Sequence[tuple[int, int]]
    ) -> Encoded:
        """``made``, with the runs that contain shields encoded again without control tokens."""
        starts = [start for start, _ in shields]
        result = Encoded()
        token = begin = 0
        while token <= len(made.ids):
            stop = token
            while stop < len(made.ids) and not self._is_added(made, stop, text):
                stop += 1
            end = made.starts[stop] if stop < len(made.ids) else len(text)
            place = bisect_left(starts, begin)
            if place < len(starts) and starts[place] < end:
                run = self._run(text[begin:end], before if not begin else Preceding.CONTROL)
                result.extend(run, begin)
            else:
                result.extend(made, 0, token, stop)
            if stop < len(made.ids):
                result.extend(made, 0, stop, stop + 1)
                begin = made.ends[stop]
            token = stop + 1
        return result

    def _is_added(self, made: Encoded, number: int, text: str) -> bool:
        """Whether a token is an added word that the text spells; the unknown token also stands for other texts."""
        content = self._added.get(made.ids[number])
        return content is not None and text[made.starts[number] : made.ends[number]].strip() == content

    def _encode_run(self, text: str, before: Preceding) -> list[int]:
        return self._run(text, before).ids

    def _run(self, text: str, before: Preceding) -> Encoded:
        """Encode a run of text that spells control tokens."""
        if not text:
            return Encoded()
        _check_text(text)
        tokenizer = self._continuing if before is Preceding.TEXT else self._fresh
        made = _encoded(tokenizer, text, "" if before is Preceding.NOTHING else self._mark)
        if self.control_ids.isdisjoint(made.ids):
            return made
        # A vocabulary may hold a control token as an ordinary piece (Unigram): spell it out.
        result = Encoded()
        for number, token in enumerate(made.ids):
            ids = self._pieces_of(token)
            count = len(ids)
            result.extend(Encoded(ids, [made.starts[number]] * count, [made.ends[number]] * count), 0)
        return result

    def _pieces_of(self, token_id: int) -> list[int]:
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


def added_words(backend: Tokenizer) -> list[tuple[str, bool]]:
    """The added words of a tokenizer, and whether each is special."""
    return [(one.content, one.special) for one in backend.get_added_tokens_decoder().values()]


def fill_shields(text: str, shields: Sequence[tuple[int, int]]) -> str:
    """``text`` with its shielded ranges filled with a character that no added word contains."""
    parts, at = [], 0
    for start, end in shields:
        parts += [text[at:start], _FILL * (end - start)]
        at = end
    return "".join([*parts, text[at:]])


def _encoded(tokenizer: Tokenizer, text: str, mark: str = "") -> Encoded:
    # A batch of one: ``encode`` holds the interpreter lock, for seconds per megabyte, and blocks the event
    # loop.
    (encoding,) = tokenizer.encode_batch([mark + text], add_special_tokens=False)
    offsets = encoding.offsets
    made = Encoded(encoding.ids, [start for start, _ in offsets], [end for _, end in offsets])
    if not mark:
        return made
    shifted = Encoded()
    shifted.extend(made, -len(mark), 1)
    return shifted


def _alternation(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument.field("text", "has a surrogate that is not part of a pair") from error


def without_prefix_space(node: Any) -> Any:
    """The tokenizer specification without a space before the text; for text that continues other text."""
    if isinstance(node, list):
        return [without_prefix_space(part) for part in node if _kind(part) != "Prepend"]
    if not isinstance(node, dict) or _kind(node) == "Prepend":
        return None if isinstance(node, dict) else node
    changed = {
        key: without_prefix_space(value)
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
