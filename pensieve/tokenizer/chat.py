"""The tokenizer of one model: renders new messages after a session's history, and turns ids into text.

Items are append-only, and their concatenated ids are the model's context. Each item owns the glue before it:

    user, system, tool text   glue + content + closing
    imported answer           glue + content + closing up to its end-of-sequence token; the last message of an import
                              has all of its closing
    generated answer          the generation prompt + the model's output
    item after an answer      the rest of the answer's closing; all of it when the answer was cut short
    verbatim tokens           nothing, before and after
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from pensieve.core import Role, TokenArray, TokenText
from pensieve.errors import InvalidArgument
from pensieve.speech import SHOWN_MARKS, CallForm, FunctionCall, SpeechForm
from pensieve.tokenizer.delta import (
    DeltaRenderer,
    EosTexts,
    HistoryItem,
    RawMessage,
    RenderContext,
    TextMessage,
    TokenMessage,
    group_messages,
    map_strings,
)
from pensieve.tokenizer.detokenizer import Detokenizer, TokenBytes
from pensieve.tokenizer.encoding import Preceding, TextEncoder, added_words
from pensieve.tokenizer.folder import TokenizerFolder, hidden_ids, read_folder, words_without_embedding
from pensieve.tokenizer.marked import ANY_TIME, Roles, TemplateRefused
from pensieve.tokenizer.template import PLAIN_TEMPLATE, ChatTemplate, TemplateError, plain_text
from pensieve.tokenizer.tools import Tools, call_form_for

_PROBE_TOOLS: Final = (
    '[{"type":"function","function":{"name":"look","description":"d","parameters":{"type":"object"}}}]'
)
_WORDS: Final = re.compile(r"[\w .,$-]*")
"""Texts that are no part of a control token, and that templates may ask for (``object``)."""
_APART: Final = "\ue003"
_SYSTEM, _USER = TextMessage(Role.SYSTEM, "a"), TextMessage(Role.USER, "a")
_ANSWER = TextMessage(Role.ASSISTANT, "a")
_CALL = TextMessage(Role.ASSISTANT, "", (FunctionCall("call00000", "look", "{}"),))
_RESULT = TextMessage(Role.TOOL, "a", call_id="call00000")
_PLAIN: Final[tuple[tuple[TextMessage, ...], ...]] = ((_USER,), (_SYSTEM, _USER), (_USER, _ANSWER, _USER))
_WITH_TOOLS: Final[tuple[tuple[TextMessage, ...], ...]] = ((_USER,), (_USER, _CALL, _RESULT))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The delta that new messages add."""

    item_tokens: tuple[TokenArray, ...]
    """Per new message, int32 [n]: includes the glue before it, and BOS in the first of a session."""
    generation_prompt: TokenArray
    """Glue that introduces the assistant's answer, int32 [n]; empty when not requested or after verbatim tokens."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.item_tokens)) + len(self.generation_prompt)


class ChatTokenizer:
    """Immutable and thread-safe. Created by ``from_folder``."""

    def __init__(self, folder: TokenizerFolder, template: ChatTemplate) -> None:
        self._template = template
        eos_texts = tuple(
            text for text in map(folder.backend.id_to_token, folder.eos_token_ids) if text is not None
        )
        self._encoder = TextEncoder(folder.backend, _control_words(folder, template, eos_texts))
        closing = template.closings[Role.ASSISTANT]
        end = EosTexts(eos_texts).after(closing, 0, len(closing))
        behind = self._encoder.encode(closing[end:], Preceding.CONTROL).ids if end is not None else []
        self._ends = EosTexts(eos_texts, tuple(behind))
        self._closes_last = end is not None
        """Whether the template closes an answer that nothing follows."""
        rest = template.closings[Role.TOOL][len(template.shared_closing) :]
        # Only a control token, which no content has, tells whether a result was closed.
        tells = self._encoder.control_end(rest, 0) is not None
        self._result_rest = self._encoder.encode(rest, Preceding.TEXT).ids if tells else []
        special = hidden_ids(folder.backend)
        self._token_bytes = TokenBytes(folder.backend, folder.decoder, special)
        added = folder.backend.get_added_tokens_decoder().items()
        self._mark_ids = {
            token.content: i for i, token in added if token.content in SHOWN_MARKS and i < folder.vocab_size
        }
        self._control_ids = {self._token_bytes.name(token): token for token in special}
        self.vocab_size: int = folder.vocab_size
        """Ids below this are valid input."""
        self.eos_token_ids: tuple[int, ...] = folder.eos_token_ids
        self.bos_token_id: int | None = folder.bos_token_id
        self._adds_bos = folder.adds_bos
        self.sha256: str = folder.sha256
        """Hash of the tokenizer's files, without its chat template."""
        self.call_form: CallForm | None = None if template.tools_problem else call_form_for(template.source)
        """How the model writes function calls; None if conversations with tools are not supported."""
        self.thinks: str = template.thinks
        """Whether answers may begin with thoughts: ``tags``, ``open`` (the template opens the block itself) or ""."""
        self.template_sha256: str = hashlib.sha256(template.source.encode()).hexdigest()
        texts = (template.closings[role] for role in (Role.USER, Role.ASSISTANT, Role.TOOL))
        self._message_tokens = min(map(self._encoder.count_control, texts))
        self._longest_token = max(map(len, folder.backend.get_vocab()), default=1)

    @classmethod
    def from_folder(
        cls, folder: Path, *, chat_template: str | None = None, allow_rewriting: bool = False
    ) -> ChatTokenizer:
        """The tokenizer of a local model folder, with its own chat template, the given Jinja text, or
        ``PLAIN_TEMPLATE``. Raises TemplateError when the template changes earlier turns (unless
        ``allow_rewriting``: the history then keeps the original tokens), InvalidArgument without a tokenizer
        or when the folder's files are inconsistent."""
        parts = read_folder(folder)
        source = chat_template if chat_template is not None else _chosen_template(folder, parts)
        plain = source is None
        template = ChatTemplate(
            PLAIN_TEMPLATE if source is None else source,
            bos_token=parts.bos_token if parts.adds_bos or not plain else "",
            eos_token=parts.eos_token,
            allow_rewriting=allow_rewriting,
        )
        if chat_template is None and parts.tool_template:
            template.tools_problem = (
                "its folder has a separate one for them (tool_use), which is not supported"
            )
        made = cls(parts, template)
        _require_embeddings(folder, parts, made)
        return made

    def render(
        self,
        history: Sequence[HistoryItem],
        new: Sequence[TextMessage | RawMessage | TokenMessage],
        *,
        generation_prompt: bool,
        followed_by: Roles = (),
        context: RenderContext | None = None,
    ) -> Rendered:
        """Tokens that ``new`` adds after ``history``, of which the items of ``window`` suffice. Takes time
        linear in ``new``.

        ``followed_by``: roles of messages rendered later. ``context`` None: now, without tools. With nothing
        new, the generation prompt follows the history (regenerate). Raises TemplateError when the template
        refuses the conversation, InvalidArgument on a token id outside the vocabulary.
        """
        delta = DeltaRenderer(self._template, self._encoder, self._ends, history, context or RenderContext())
        arrays: list[TokenArray] = []
        for group in group_messages(new, self._template.needs_calls):
            if isinstance(group, RawMessage | TokenMessage):
                tokens = self._verbatim(group, delta.before)
                delta.verbatim(self.seen(group.role, tokens, verbatim=True))
                arrays.append(tokens)
            else:
                is_last = len(arrays) + len(group) == len(new)
                arrays += delta.messages(group, followed_by if is_last else (), self._rendered)
        prompt = delta.generation_prompt() if generation_prompt else []
        return Rendered(tuple(arrays), np.asarray(prompt, dtype=np.int32))

    def window(self, roles: Sequence[Role]) -> list[int]:
        """Indexes of the items of a history that ``render`` needs: few, however long it is."""
        return self._template.window(roles)

    def seen(
        self, role: Role, tokens: TokenArray | Sequence[int], *, verbatim: bool = False, text: str = ""
    ) -> HistoryItem:
        """The ``HistoryItem`` for an item's tokens, of which the last ``tail_tokens`` suffice, and its text."""
        behind = len(self._ends.behind)
        is_whole = (
            role is Role.ASSISTANT
            and not verbatim
            and self._closes_last
            and tuple(map(int, tokens[len(tokens) - behind :])) == self._ends.behind
            and self.is_closed(tokens[: len(tokens) - behind])
        )
        is_result = role is Role.TOOL and not verbatim
        counts = role in (Role.SYSTEM, Role.USER) and not verbatim and self._template.looks_for.search(text)
        return HistoryItem(
            role,
            verbatim,
            self.is_closed(tokens),
            is_whole,
            self._closed_chars(list(map(int, tokens)), text) if is_result else None,
            text if counts else "",
        )

    def _rendered(self, message: TextMessage, tokens: Sequence[int]) -> HistoryItem:
        return self.seen(message.role, tokens, text=message.text)

    def _closed_chars(self, tokens: list[int], text: str) -> int | None:
        """``HistoryItem.closed_chars`` of a result. Its last token begins in its content."""
        rest = self._result_rest
        if not rest or not tokens or rest[0] in tokens[-len(rest) :]:
            return None
        pieces = [
            self._token_bytes[token].decode("utf-8", "replace") for token in tokens[-self.tail_tokens :]
        ]
        end, shared = "".join(pieces), self._template.shared_closing
        counts = [n for n in range(len(pieces[-1])) if end.endswith(shared[:n])]
        return max(
            (n for n in counts if end.endswith(text[-1:] + shared[:n])), default=max(counts, default=0)
        )

    @property
    def tail_tokens(self) -> int:
        return max(len(self._ends.behind), len(self._result_rest)) + 1

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._template.warnings

    @property
    def writes_date(self) -> bool:
        return self._template.writes_date

    def fewest_tokens(self, messages: int) -> int:
        """Lower bound of the tokens of a conversation with this many messages, known without rendering it."""
        return messages * self._message_tokens

    def check_tools(self, tools: str) -> None:
        """Raises InvalidArgument, or TemplateError, unless a conversation with these definitions can be rendered."""
        found = Tools(tools)
        found.check()
        if self._template.tools_problem or self.call_form is None:
            problem = self._template.tools_problem or "how the model writes calls is not known"
            raise TemplateError(f"the chat template does not take tools: {problem}")
        if any(map(self._encoder.has_control, found.strings())) or self._makes_control(found):
            raise InvalidArgument.field("config.tools_json", "holds a control token of the model")

    def _makes_control(self, tools: Tools) -> bool:
        """Whether the template makes a control token of a definition: Qwen3-Coder's writes field names in ``<>``."""

        def apart(text: str) -> str:
            return text if _WORDS.fullmatch(text) else _APART.join(text)

        in_parts = Tools(json.dumps(map_strings(tools.definitions, apart)))
        messages = self._template.marked((Role.USER,), ["a"])
        try:
            whole, parts = (self._template.say(messages, one, ANY_TIME) for one in (tools, in_parts))
        except TemplateRefused:
            return False  # rendering will say so
        return self._encoder.count_control(whole) != self._encoder.count_control(parts)

    def is_closed(self, tokens: TokenArray | Sequence[int]) -> bool:
        """Whether an item with these tokens ends its turn by itself: ``HistoryItem.ends_with_eos``."""
        return len(tokens) > 0 and int(tokens[-1]) in self.eos_token_ids

    def decode(self, ids: Iterable[int] | TokenArray) -> str:
        """The text of an answer: special tokens are omitted, invalid UTF-8 becomes U+FFFD."""
        stream = self.detokenizer()
        return stream.push(ids) + stream.finish()

    def token_text(self, token_id: int, *, first: bool = False) -> TokenText:
        """The text of one token. ``first``: no token before it adds text."""
        piece = self._token_bytes[token_id]
        if first and self._token_bytes.strips_leading_space:
            piece = piece.removeprefix(b" ")
        return TokenText(piece, self._token_bytes.name(token_id))

    @property
    def speech(self) -> SpeechForm:
        """How to parse answers with calls and thoughts."""
        return SpeechForm(self.call_form, bool(self.thinks), self.thinks == "open")

    def control_token(self, text: str) -> int | None:
        """The id of the control token (omitted by ``decode``) with exactly this name; None if there is none."""
        return self._control_ids.get(text)

    def encode_text(self, text: str) -> list[int] | None:
        """Return the ids of a text that an answer may be; None if it cannot do without control tokens."""
        return self._encoder.encode_text(text)

    def spell(self, text: str, behind: Sequence[int]) -> tuple[int, ...] | None:
        """Tokens that add exactly ``text`` to an answer that begins with the tokens ``behind`` (whole
        characters): from the tokenizer's own encoding, else the longest of the vocabulary. None when the
        vocabulary cannot spell it."""
        for spelling in (self._encoder.encode_text, self._token_bytes.spell):
            ids = spelling(text)
            stream = self.detokenizer()
            stream.push(behind)
            if ids is not None and stream.push(ids) == text and not stream.pending:
                return tuple(ids)
        return None

    def mark_id(self, mark: str) -> int | None:
        """The id of the token that stands for a mark of calls or thoughts; None if the vocabulary has none."""
        return self._mark_ids.get(mark)

    @property
    def template_source(self) -> str:
        return self._template.source

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._token_bytes)

    def max_chars(self, tokens: int) -> int:
        """No text with more characters than this fits into ``tokens`` tokens: refuse it before tokenising it."""
        return tokens * self._longest_token

    def _verbatim(self, message: RawMessage | TokenMessage, before: Preceding) -> TokenArray:
        if isinstance(message, TokenMessage):
            return self._checked(message.tokens)
        ids = self._encoder.encode_raw(message.text, before)
        # A client that writes the token itself does not want it twice.
        if self._adds_bos and before is Preceding.NOTHING and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id or 0)
        beyond = [i for i in ids if i >= self.vocab_size]
        if beyond:
            raise InvalidArgument.field(
                "text",
                f"has token id {beyond[0]}, for which the model has no embedding: it has {self.vocab_size}",
            )
        return np.asarray(ids, dtype=np.int32)

    def _checked(self, tokens: TokenArray) -> TokenArray:
        wrong = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(wrong):
            raise InvalidArgument.field("tokens", f"id {int(wrong[0])} is not below {self.vocab_size}")
        return np.asarray(tokens, dtype=np.int32)


def _control_words(folder: TokenizerFolder, template: ChatTemplate, eos_texts: Sequence[str]) -> set[str]:
    """The added words that only the chat template may write; in a message they are plain text. These are
    special words that the template writes, words that begin or end a text, others around the messages of a
    plain conversation, and words without an embedding."""
    system, user, assistant, tool = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
    plain = "".join(plain_text(template, roles) for roles in ((user, assistant, user), (system, user)))
    tools = plain_text(template, (user, assistant, tool, assistant))
    named = {folder.bos_token, folder.eos_token, *eos_texts, *folder.named_tokens}
    return {
        text
        for text, special in added_words(folder.backend)
        if text.strip()
        and (text in named or text in plain or (special and (text in tools or text in template.source)))
    } - {"<think>", "</think>"} | set(words_without_embedding(folder).values())


def _chosen_template(folder: Path, parts: TokenizerFolder) -> str | None:
    """The chat template of a folder or None. Raises InvalidArgument when it has several without a ``default``."""
    if parts.named_templates:
        names = ", ".join(parts.named_templates)
        raise InvalidArgument(
            f"{folder}: chat_template has the templates {names} and none that is called default; choose one with "
            "--chat-template FILE"
        )
    return parts.template


def _require_embeddings(folder: Path, parts: TokenizerFolder, tokenizer: ChatTokenizer) -> None:
    """Raises InvalidArgument, with token and file, when the template writes a word without an embedding."""
    words = words_without_embedding(parts)
    if not words:
        return
    if parts.adds_bos and parts.bos_token_id in words:
        raise _refusal(folder, "the tokenizer begins each text with", parts.bos_token_id, parts)
    dialogues = [(dialogue, "") for dialogue in _PLAIN]
    if tokenizer.call_form is not None:
        dialogues += [(dialogue, _PROBE_TOOLS) for dialogue in _WITH_TOOLS]
    for messages, given in dialogues:
        try:
            rendered = tokenizer.render(
                (), messages, generation_prompt=True, context=RenderContext(Tools(given))
            )
        except InvalidArgument:
            continue  # the template refuses such a conversation
        for ids in (*rendered.item_tokens, rendered.generation_prompt):
            for token in ids.tolist():
                if token in words:
                    raise _refusal(folder, "the chat template writes", token, parts)


def _refusal(folder: Path, what: str, token: int, parts: TokenizerFolder) -> InvalidArgument:
    word = words_without_embedding(parts)[token]
    return InvalidArgument(
        f"{folder / 'tokenizer.json'}: {what} {word!r}, id {token}, but config.json: vocab_size is "
        f"{parts.vocab_size}: the model has no embedding for it"
    )
