"""The tokenizer of one model: renders new turns behind what a session holds, and turns ids into text.

Who owns which glue, so that items are append-only and their ids concatenated are the model's context:

    user, system, tool text   opening + content + closing
    assistant text (import)   opening + content + closing up to its end-of-sequence token
    generated answer          the generation prompt + what the model produced
    whatever follows          what is left of the answer's closing; all of it when the answer was cut short
    verbatim tokens           nothing, before and after
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pensieve.core import Role, TokenArray, TokenText
from pensieve.errors import InvalidArgument
from pensieve.tokenizer.detokenizer import Detokenizer, TokenBytes
from pensieve.tokenizer.encoding import Before, Part, TextEncoder
from pensieve.tokenizer.folder import TokenizerFolder, read_folder
from pensieve.tokenizer.template import PLAIN_TEMPLATE, ChatTemplate


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """One live item, as far as glue behind it depends on it."""

    role: Role
    verbatim: bool = False
    """Its tokens came from the client as they are."""
    closed: bool = False
    """Its last token is one of ``eos_token_ids``."""


@dataclass(frozen=True, slots=True)
class TextMessage:
    """A message whose text goes through the chat template."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message whose text is encoded as the model's own tokenizer does it, control tokens included, without glue."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class TokenMessage:
    """A message whose tokens are appended as they are, without glue."""

    role: Role
    tokens: TokenArray


@dataclass(frozen=True, slots=True)
class Rendered:
    """The delta that new messages add."""

    item_tokens: tuple[TokenArray, ...]
    """Per new message, int32 [n]: the glue that introduces it included, and BOS in the first of a session."""
    generation_prompt: TokenArray
    """Glue that introduces the assistant's answer, int32 [n]; empty when not asked for or after verbatim tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.item_tokens)) + len(self.generation_prompt)


class ChatTokenizer:
    """Immutable and thread-safe. Made by ``from_folder``."""

    def __init__(self, folder: TokenizerFolder, template: ChatTemplate) -> None:
        self._template = template
        self._encoder = TextEncoder(folder.backend)
        self._eos_texts = tuple(
            text for text in map(folder.backend.id_to_token, folder.eos_token_ids) if text is not None
        )
        special = {i for i, token in folder.backend.get_added_tokens_decoder().items() if token.special}
        self._token_bytes = TokenBytes(folder.backend, folder.decoder, frozenset(special))
        self.vocab_size: int = folder.vocab_size
        """Ids below this are valid input."""
        self.eos_token_ids: tuple[int, ...] = folder.eos_token_ids
        self.bos_token_id: int | None = folder.bos_token_id
        self._adds_bos = folder.adds_bos
        self.sha256: str = folder.sha256
        """Hash over the tokenizer's files, its chat template excepted."""
        self.template_sha256: str = hashlib.sha256(template.source.encode()).hexdigest()
        self._longest_token = max(map(len, folder.backend.get_vocab()), default=1)

    @classmethod
    def from_folder(
        cls, folder: Path, *, chat_template: str | None = None, allow_rewriting: bool = False
    ) -> ChatTokenizer:
        """The tokenizer of a local model folder. ``chat_template``: Jinja text that replaces the model's own.

        A model without a template gets ``PLAIN_TEMPLATE``. Raises TemplateError when the template changes earlier
        turns (``allow_rewriting``: the history then keeps what was generated), InvalidArgument without a tokenizer.
        """
        parts = read_folder(folder)
        source = chat_template if chat_template is not None else parts.template
        plain = source is None
        template = ChatTemplate(
            PLAIN_TEMPLATE if source is None else source,
            bos_token=parts.bos_token if parts.adds_bos or not plain else "",
            eos_token=parts.eos_token,
            allow_rewriting=allow_rewriting,
        )
        return cls(parts, template)

    def render(
        self,
        history: Sequence[HistoryItem],
        new: Sequence[TextMessage | RawMessage | TokenMessage],
        *,
        generation_prompt: bool,
    ) -> Rendered:
        """Tokens that ``new`` adds behind ``history``; nothing earlier is looked at again.

        With nothing new, the generation prompt follows the history (regenerate). Raises TemplateError when the
        template does not take such a conversation, InvalidArgument on a token id outside the vocabulary.
        """
        items = list(history)
        before = self._behind(items)
        arrays: list[TokenArray] = []
        for message in new:
            if not isinstance(message, TextMessage):
                tokens = self._verbatim(message, before)
                items.append(HistoryItem(message.role, True, self.is_closed(tokens)))
                before = Before.CONTROL if items[-1].closed else Before.TEXT
            else:
                ids, before = self._encode_message(items, message, before)
                tokens = np.asarray(ids, dtype=np.int32)
                items.append(HistoryItem(message.role, False, self.is_closed(tokens)))
            arrays.append(tokens)
        prompt: list[int] = []
        if generation_prompt and items and not items[-1].verbatim:
            lead = self._lead(items, self._template.generation_prompt(_roles(items)))
            prompt, _ = self._encoder.encode([Part(lead, True)], before)
        return Rendered(tuple(arrays), np.asarray(prompt, dtype=np.int32))

    def is_closed(self, tokens: TokenArray) -> bool:
        """Whether an item with these tokens ends its turn by itself: ``HistoryItem.closed``."""
        return len(tokens) > 0 and int(tokens[-1]) in self.eos_token_ids

    def decode(self, ids: Iterable[int] | TokenArray) -> str:
        """The text of an answer: special tokens are left out, invalid UTF-8 becomes U+FFFD."""
        stream = self.detokenizer()
        return stream.push(ids) + stream.finish()

    def token_text(self, token_id: int, *, first: bool = False) -> TokenText:
        """What one token stands for. ``first``: no token before it in its text adds anything to it."""
        piece = self._token_bytes[token_id]
        if first and self._token_bytes.strips_leading_space:
            piece = piece.removeprefix(b" ")
        return TokenText(piece, self._token_bytes.name(token_id))

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one answer, from its first token on."""
        return Detokenizer(self._token_bytes)

    def max_chars(self, tokens: int) -> int:
        """No text with more characters than this fits into ``tokens`` tokens: refuse it before tokenising it."""
        return tokens * self._longest_token

    # ---- parts of render

    def _encode_message(
        self, items: list[HistoryItem], message: TextMessage, before: Before
    ) -> tuple[list[int], Before]:
        glue = self._template.glue((*_roles(items), message.role))
        closing = glue.closing
        if message.role is Role.ASSISTANT:
            end = self._eos_end(closing)
            closing = closing[:end] if end is not None else ""
        parts = [
            Part(self._lead(items, glue.opening), True),
            Part(self._template.clean(message.role, message.text), False),
            Part(closing, True),
        ]
        return self._encoder.encode(parts, before)

    def _lead(self, items: Sequence[HistoryItem], opening: str) -> str:
        """Glue behind the last item: what an answer's closing still lacks, then the opening of what follows."""
        if not items or items[-1].role is not Role.ASSISTANT or items[-1].verbatim:
            return opening
        closing = self._template.glue(_roles(items)).closing
        if not items[-1].closed:
            return closing + opening
        end = self._eos_end(closing)
        if end is None:  # some templates close an answer only when something follows it
            for text in self._eos_texts:
                opening = opening.removeprefix(text)
        return closing[end or 0 :] + opening

    def _eos_end(self, closing: str) -> int | None:
        """Index behind the first end-of-sequence token in a closing."""
        ends = [closing.index(text) + len(text) for text in self._eos_texts if text in closing]
        return min(ends, default=None)

    def _behind(self, items: Sequence[HistoryItem]) -> Before:
        if not items:
            return Before.NOTHING
        last = items[-1]
        if last.closed:
            return Before.CONTROL
        if last.verbatim or last.role is Role.ASSISTANT:
            return Before.TEXT
        closing = self._template.glue(_roles(items)).closing
        return self._encoder.encode([Part(closing, True)], Before.TEXT)[1]

    def _verbatim(self, message: RawMessage | TokenMessage, before: Before) -> TokenArray:
        if isinstance(message, TokenMessage):
            return self._checked(message.tokens)
        ids = self._encoder.encode_raw(message.text, before)
        # Who writes the token themselves does not want it twice.
        if self._adds_bos and before is Before.NOTHING and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id or 0)
        return np.asarray(ids, dtype=np.int32)

    def _checked(self, tokens: TokenArray) -> TokenArray:
        wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(wrong):
            raise InvalidArgument.field("tokens", f"id {int(wrong[0])} is not below {self.vocab_size}")
        return np.asarray(tokens, dtype=np.int32)


def _roles(items: Iterable[HistoryItem]) -> tuple[Role, ...]:
    return tuple(item.role for item in items)
