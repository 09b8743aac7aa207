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

from pensieve.core import TokenArray, TokenText
from pensieve.errors import InvalidArgument
from pensieve.speech import SHOWN_MARKS, CallForm, SpeechForm, opened
from pensieve.tokenizer.delta import (
    DeltaRenderer,
    HistoryItem,
    RawMessage,
    TextMessage,
    TokenMessage,
    together,
)
from pensieve.tokenizer.detokenizer import Detokenizer, TokenBytes
from pensieve.tokenizer.encoding import Before, Part, TextEncoder
from pensieve.tokenizer.folder import TokenizerFolder, read_folder
from pensieve.tokenizer.template import PLAIN_TEMPLATE, ChatTemplate, TemplateError
from pensieve.tokenizer.tools import Tools, form_of


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
        special = {
            i
            for i, token in folder.backend.get_added_tokens_decoder().items()
            # Those that open a call are shown: they are what tells a call from words.
            if token.special and token.content not in SHOWN_MARKS
        }
        self._token_bytes = TokenBytes(folder.backend, folder.decoder, frozenset(special))
        self.vocab_size: int = folder.vocab_size
        """Ids below this are valid input."""
        self.eos_token_ids: tuple[int, ...] = folder.eos_token_ids
        self.bos_token_id: int | None = folder.bos_token_id
        self._adds_bos = folder.adds_bos
        self.sha256: str = folder.sha256
        """Hash over the tokenizer's files, its chat template excepted."""
        self.call_form: CallForm | None = None if template.tools_problem else form_of(template.source)
        """How the model writes calls of functions; None: conversations with tools cannot be had with it."""
        self.thinks: str = template.thinks
        """Whether answers may begin with thoughts: ``tags``, ``open`` (the template opens the block itself) or ""."""
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
        tools: str = "",
    ) -> Rendered:
        """Tokens that ``new`` adds behind ``history``; nothing earlier is looked at again.

        ``tools``: definitions of functions as JSON, which ``check_tools`` has let through; they stand before the first
        user's words. With nothing new, the generation prompt follows the history (regenerate). Raises TemplateError
        when the template does not take such a conversation, InvalidArgument on a token id outside the vocabulary.
        """
        delta = DeltaRenderer(self._template, self._encoder, self._eos_texts, history, Tools(tools))
        arrays: list[TokenArray] = []
        for group in together(new):
            if isinstance(group, RawMessage | TokenMessage):
                tokens = self._verbatim(group, delta.before)
                delta.verbatim(group.role, closed=self.is_closed(tokens))
                arrays.append(tokens)
            else:
                arrays += (np.asarray(ids, dtype=np.int32) for ids in delta.messages(group, self.is_closed))
        prompt = delta.generation_prompt() if generation_prompt else []
        return Rendered(tuple(arrays), np.asarray(prompt, dtype=np.int32))

    def check_tools(self, tools: str) -> None:
        """Raises InvalidArgument, or TemplateError, unless a conversation with these definitions can be rendered."""
        found = Tools(tools)
        found.check()
        if self._template.tools_problem or self.call_form is None:
            problem = self._template.tools_problem or "how the model writes calls is not known"
            raise TemplateError(f"the chat template does not take tools: {problem}")
        if any(self._encoder.has_control(text) for text in found.strings()):
            raise InvalidArgument.field("config.tools_json", "holds a control token of the model")

    def call_opening(self, name: str) -> tuple[int, ...]:
        """How an answer begins that calls this function, or any (""); the model has to have a ``call_form``."""
        assert self.call_form is not None
        # Where the template has begun a thought, it is an empty one, as templates write it that are told not to think.
        thought = "\n</think>\n\n" if self.thinks == "open" else ""
        text = thought + opened(name, self.call_form, self._template.source)
        return tuple(self._encoder.encode([Part(text, True)], Before.TEXT)[0])

    def control_token(self, text: str) -> int | None:
        """Id of the control token with this name; None: it is not one."""
        return self._encoder.control_token(text)

    def is_closed(self, tokens: TokenArray | Sequence[int]) -> bool:
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

    @property
    def speech(self) -> SpeechForm:
        """How answers with calls and thoughts are read."""
        return SpeechForm(self.call_form, bool(self.thinks), self.thinks == "open")

    def detokenizer(self) -> Detokenizer:
        """A detokenizer for one answer, from its first token on."""
        return Detokenizer(self._token_bytes)

    def max_chars(self, tokens: int) -> int:
        """No text with more characters than this fits into ``tokens`` tokens: refuse it before tokenising it."""
        return tokens * self._longest_token

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
