"""What new messages add behind a history: one rendering, message by message."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Final

from pensieve.core import Role, TokenArray
from pensieve.speech import FunctionCall
from pensieve.tokenizer.encoding import Before, Part, TextEncoder
from pensieve.tokenizer.template import ChatTemplate, TemplateError
from pensieve.tokenizer.tools import ID_MARKER, Tools, template_id

_WORDS: Final = "zqWordsqz"
_CALLED: Final = re.compile(r'zqWordsqz|zqName(\d+)qz|"?zqArgs(\d+)qz"?')
"""Markers in a message with calls. A template that writes arguments as JSON puts quotes around theirs."""


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
    calls: tuple[FunctionCall, ...] = ()
    """Of an assistant's message: what it calls, behind its text."""
    call_id: str = ""
    """Of a tool's result: the call that it belongs to."""


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


Message = TextMessage | RawMessage | TokenMessage


def together(new: Iterable[Message]) -> Iterator[RawMessage | TokenMessage | tuple[TextMessage, ...]]:
    """``new`` in groups that have to be rendered at once: results of tools that follow each other. Others are alone."""

    def kind(numbered: tuple[int, Message]) -> int:
        number, one = numbered
        return -1 if isinstance(one, TextMessage) and one.role is Role.TOOL else number

    for _, group in groupby(enumerate(new), kind):
        messages = [one for _, one in group]
        if isinstance(messages[0], TextMessage):
            yield tuple(one for one in messages if isinstance(one, TextMessage))
        else:
            yield messages[0]


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A message as parts; ``joins``: it begins right behind the content of the one before."""

    body: list[Part]
    closing: list[Part]
    joins: bool = False


class DeltaRenderer:
    """Renders behind a history, and then behind what it has rendered. Not thread-safe."""

    def __init__(
        self,
        template: ChatTemplate,
        encoder: TextEncoder,
        eos_texts: Sequence[str],
        history: Sequence[HistoryItem],
        tools: Tools,
    ) -> None:
        self._template = template
        self._encoder = encoder
        self._eos_texts = eos_texts
        self._tools = tools
        self._items = list(history)
        self._call_ids: dict[int, str] = {}
        """Of new results of tools, by their place among the items."""
        self._before = self._behind()

    @property
    def before(self) -> Before:
        """What lies before the next message."""
        return self._before

    def verbatim(self, role: Role, *, closed: bool) -> None:
        """Note a message whose tokens are appended without glue."""
        self._items.append(HistoryItem(role, True, closed))
        self._before = Before.CONTROL if closed else Before.TEXT

    def messages(
        self, group: Sequence[TextMessage], is_closed: Callable[[Sequence[int]], bool]
    ) -> list[list[int]]:
        """Token ids of each message of a group (see ``together``)."""
        body: list[Part] = []
        closing: list[Part] = []
        shorter: list[list[int]] = []
        before = self._before
        for message in group:
            around = self._around(message, first=not body)
            body = [*body, *([] if around.joins else closing), *around.body]
            closing = around.closing
            ids, self._before = self._encoder.encode([*body, *closing], before)
            shorter.append(ids)
            self._items.append(HistoryItem(message.role, False, is_closed(ids)))
        # Text and glue around it are one run of text: where the first message of two ends is seen by encoding it alone.
        ids = shorter.pop()
        cuts = [0, *(_common(one, ids) for one in shorter), len(ids)]
        return [ids[start:end] for start, end in pairwise(cuts)]

    def generation_prompt(self) -> list[int]:
        """Token ids of the glue that introduces an answer; none behind verbatim tokens."""
        if not self._items or self._items[-1].verbatim:
            return []
        lead = self._lead(self._template.generation_prompt(_roles(self._items), self._tools))
        return self._encoder.encode([Part(lead, True)], self._before)[0]

    # ---- one message

    def _around(self, message: TextMessage, *, first: bool) -> _Rendered:
        """``first``: of its group."""
        if message.calls:
            return _Rendered(self._with_calls(message), [])
        items = self._items
        glue = self._template.glue((*_roles(items), message.role), self._tools)
        if glue.joins and first:
            # Behind results that were rendered earlier, and so are closed, others begin anew.
            items = items[: max(n for n, item in enumerate(items) if item.role is not Role.TOOL) + 1]
            glue = self._template.glue((*_roles(items), message.role), self._tools)
        self._call_ids[len(items)] = self._call_ids[len(self._items)] = message.call_id
        closing = glue.closing
        if message.role is Role.ASSISTANT:
            end = self._eos_end(closing)
            closing = closing[:end] if end is not None else ""
        opening = glue.opening if glue.joins else self._lead(glue.opening)
        text = Part(self._template.clean(message.role, message.text), False)
        return _Rendered([*self._glue_parts(opening), text], list(self._glue_parts(closing)), glue.joins)

    def _with_calls(self, message: TextMessage) -> list[Part]:
        """An assistant's message with calls, as the template writes it, up to its end-of-sequence token."""
        calls = [
            {
                "id": template_id(call.id, number),
                "type": "function",
                "function": {"name": f"zqName{number}qz", "arguments": f"zqArgs{number}qz"},
            }
            for number, call in enumerate(message.calls)
        ]
        shown: dict[str, object] = {
            "role": "assistant",
            "content": _WORDS if message.text else "",
            "tool_calls": calls,
        }
        text = self._lead(
            self._template.with_calls((*_roles(self._items), Role.ASSISTANT), shown, self._tools)
        )
        found = list(_CALLED.finditer(text))
        end = self._eos_end(text[found[-1].end() :]) if found else None
        if end is None:
            raise TemplateError("the chat template does not show calls of functions in earlier answers")
        parts: list[Part] = []
        at = 0
        for match in found:
            parts += [Part(text[at : match.start()], True), Part(_value(match, message), False)]
            at = match.end()
        return [*parts, Part(text[at : at + end], True)]

    def _glue_parts(self, glue: str) -> Iterator[Part]:
        """Glue, with ids of calls where the template shows them."""
        at = 0
        for match in ID_MARKER.finditer(glue):
            index = int(match[0][1:])
            if index in self._call_ids:
                yield Part(glue[at : match.start()], True)
                yield Part(template_id(self._call_ids[index], index), False)
                at = match.end()
        yield Part(glue[at:], True)

    def _lead(self, opening: str) -> str:
        """Glue behind the last item: what an answer's closing still lacks, then the opening of what follows."""
        if not self._items or self._items[-1].role is not Role.ASSISTANT or self._items[-1].verbatim:
            return opening
        closing = self._template.glue(_roles(self._items), self._tools).closing
        if not self._items[-1].closed:
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

    def _behind(self) -> Before:
        if not self._items:
            return Before.NOTHING
        last = self._items[-1]
        if last.closed:
            return Before.CONTROL
        if last.verbatim or last.role is Role.ASSISTANT:
            return Before.TEXT
        closing = self._template.glue(_roles(self._items), self._tools).closing
        return self._encoder.encode([Part(closing, True)], Before.TEXT)[1]


def _roles(items: Iterable[HistoryItem]) -> tuple[Role, ...]:
    return tuple(item.role for item in items)


def _value(match: re.Match[str], message: TextMessage) -> str:
    """What a marker of a message with calls stands for."""
    if match[1] is not None:
        return message.calls[int(match[1])].name
    if match[2] is not None:
        arguments = message.calls[int(match[2])].arguments
        try:
            return json.dumps(json.loads(arguments), ensure_ascii=False)
        except RecursionError:
            return arguments
    return message.text


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
