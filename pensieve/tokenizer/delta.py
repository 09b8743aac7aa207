"""Renders new messages after a history: the template writes all of them at once, after the history's last few
items.

The text is that of ``apply_chat_template``. Marks in the contents show where one item ends and the next
begins. The text is rendered with and without marks; if a template reacts to a mark, it is rendered again with
fewer.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import numpy as np

from pensieve.core import Role, TokenArray
from pensieve.speech import FunctionCall
from pensieve.tokenizer.encoding import Preceding, TextEncoder, fill_shields
from pensieve.tokenizer.marked import ROLE_NAMES, Roles, TemplateRefused, find_marker, marker
from pensieve.tokenizer.template import ChatTemplate, TemplateError
from pensieve.tokenizer.tools import NO_TOOLS, PROBE, Tools, template_id

_MARK_CHARS: Final = range(0x10F000, 0x10F100)
"""Private-use characters: the marks are made of one that occurs in no text."""


@dataclass(frozen=True, slots=True)
class HistoryItem:
    """The properties of a live item that the text after it depends on."""

    role: Role
    verbatim: bool = False
    """Its tokens came unchanged from the client."""
    ends_with_eos: bool = False
    """Its last token is one of ``eos_token_ids``."""
    complete: bool = False
    """Ends with the template's whole closing of an answer, including the end-of-sequence token."""
    closed_chars: int | None = None
    """Characters of the closing in the tokens of a result that another one followed in the same block. None: it is
    closed, or no result."""
    text: str = ""
    """The text of a client's message if the template looks for something that it has; else ""."""


@dataclass(frozen=True, slots=True)
class TextMessage:
    role: Role
    text: str
    calls: tuple[FunctionCall, ...] = ()
    """Calls in an assistant's message, after its text."""
    call_id: str = ""
    """The call that a tool's result belongs to."""


@dataclass(frozen=True, slots=True)
class RawMessage:
    """A message encoded as by the model's own tokenizer, including control tokens, without glue."""

    role: Role
    text: str


@dataclass(frozen=True, slots=True)
class TokenMessage:
    """A message whose tokens are appended unchanged, without glue."""

    role: Role
    tokens: TokenArray


Message = TextMessage | RawMessage | TokenMessage


@dataclass(frozen=True, slots=True)
class RenderContext:
    """The occasion of a rendering."""

    tools: Tools = NO_TOOLS
    """Function definitions, validated by ``check_tools``."""
    when: dt.datetime = field(default_factory=dt.datetime.now)
    """The current time, for templates that write a date."""
    check: Callable[[], None] | None = None
    """Called regularly; its errors abort the work."""


@dataclass(frozen=True, slots=True)
class EosTexts:
    """A model's end-of-sequence texts, and the ids that the template writes after one to close an answer."""

    texts: tuple[str, ...]
    behind: tuple[int, ...] = ()

    def after(self, text: str, start: int, stop: int) -> int | None:
        """Index after the first end-of-sequence token in ``text[start:stop]``."""
        found = [(text.find(one, start, stop), one) for one in self.texts]
        return min((at + len(one) for at, one in found if at >= 0), default=None)


def group_messages(
    new: Sequence[Message], needs_calls: bool
) -> Iterator[RawMessage | TokenMessage | tuple[TextMessage, ...]]:
    """``new`` in groups that the template renders at once. With ``needs_calls``, a text answer ends its group
    before a tool result, where the template accepts only a call."""

    def kinds() -> Iterator[tuple[int, Message]]:
        group = 0
        for number, one in enumerate(new):
            before = new[number - 1] if number else one
            text = isinstance(one, TextMessage) and isinstance(before, TextMessage)
            words = isinstance(before, TextMessage) and before.role is Role.ASSISTANT and not before.calls
            if not text or (needs_calls and words and one.role is Role.TOOL):
                group += 1
            yield group, one

    for _, group in groupby(kinds(), lambda numbered: numbered[0]):
        messages = [one for _, one in group]
        if isinstance(messages[0], TextMessage):
            yield tuple(one for one in messages if isinstance(one, TextMessage))
        else:
            yield messages[0]


class DeltaRenderer:
    """Renders after a history, then after its own output. Not thread-safe."""

    def __init__(
        self,
        template: ChatTemplate,
        encoder: TextEncoder,
        ends: EosTexts,
        history: Sequence[HistoryItem],
        inputs: RenderContext,
    ) -> None:
        self._template = template
        self._encoder = encoder
        self._ends = ends
        self._inputs = inputs
        self._items = list(history)
        self._prune()

    @property
    def before(self) -> Preceding:
        if not self._items:
            return Preceding.NOTHING
        last = self._items[-1]
        if last.ends_with_eos:
            return Preceding.CONTROL
        if (
            last.verbatim
            or last.closed_chars is not None
            or (last.role is Role.ASSISTANT and not last.complete)
        ):
            return Preceding.TEXT
        closing = self._template.closings[last.role]
        return Preceding.CONTROL if self._encoder.ends_in_control(closing) else Preceding.TEXT

    def verbatim(self, item: HistoryItem) -> None:
        """Record a message that is appended without glue."""
        self._items.append(item)
        self._prune()

    def messages(
        self,
        group: Sequence[TextMessage],
        followed_by: Roles,
        seen: Callable[[TextMessage, Sequence[int]], HistoryItem],
    ) -> list[TokenArray]:
        """Token ids of each message of a group, int32. ``followed_by``: roles of messages rendered later."""
        before = self.before
        renderer = _GroupRenderer(self._template, self._encoder, self._ends, self._items, group, self._inputs)
        text, ends, shields = renderer.text(followed_by)
        made = self._encoder.encode(text, before, shields, self._inputs.check)
        # A token belongs to the item in which it begins.
        cuts = np.searchsorted(np.asarray(made.starts, dtype=np.int64), np.asarray(ends[:-1]), side="left")
        parts = np.split(np.asarray(made.ids, dtype=np.int32), cuts)
        self._items += [seen(one, part[-8:].tolist()) for one, part in zip(group, parts, strict=True)]
        self._prune()
        return parts

    def generation_prompt(self) -> list[int]:
        """Token ids of the glue that introduces an answer; none after verbatim tokens."""
        if not self._items or self._items[-1].verbatim:
            return []
        last = self._items[-1]
        texts = [item.text for item in self._items]
        prompt = self._template.generation_prompt(
            _roles(self._items), self._inputs.tools, texts, self._inputs.when
        )
        if last.closed_chars is not None:
            prompt = self._template.closings[Role.TOOL][last.closed_chars :] + prompt
        if last.role is Role.ASSISTANT and not last.complete:
            closing = self._template.closings[Role.ASSISTANT]
            end = self._ends.after(closing, 0, len(closing))
            if not last.ends_with_eos:
                prompt = closing + prompt
            elif end is None:  # some templates close an answer only when something follows it
                for text in self._ends.texts:
                    prompt = prompt.removeprefix(text)
            else:
                prompt = closing[end:] + prompt
        return self._encoder.encode(prompt, self.before).ids

    def _prune(self) -> None:
        if len(self._items) > 1:
            self._items = [self._items[index] for index in self._template.window(_roles(self._items))]


class _GroupRenderer:
    def __init__(
        self,
        template: ChatTemplate,
        encoder: TextEncoder,
        ends: EosTexts,
        items: Sequence[HistoryItem],
        group: Sequence[TextMessage],
        inputs: RenderContext,
    ) -> None:
        self._template, self._encoder, self._ends = template, encoder, ends
        self._group = group
        self._inputs = inputs
        if items and items[-1].role is group[0].role is Role.TOOL and items[-1].closed_chars is None:
            # Results that were rendered earlier are closed, as a rule: new ones begin a new block.
            items = items[
                : max((n + 1 for n, item in enumerate(items) if item.role is not Role.TOOL), default=0)
            ]
        self._items = items
        texts = [text for one in group for text in _strings(one)]
        self._mark_char = next(
            sign
            for sign in map(chr, _MARK_CHARS)
            if not any(sign in text for text in (*texts, *(item.text for item in items)))
        )
        self._mark_pattern = re.compile(f"{self._mark_char}([0-9]*){self._mark_char}")
        self._spells_control = any(map(encoder.has_control, texts))
        self._has_control = self._spells_control or (
            template.takes_out and any(encoder.has_control(text, beginnings=True) for text in texts)
        )
        """Whether the template may write a control token out of contents."""
        self._rests: dict[int, str] = {}
        """The part of a message's content after its mark."""

    def text(self, followed_by: Roles) -> tuple[str, list[int], list[tuple[int, int]]]:
        """The group's text, where each message ends in it, and the shields for ``TextEncoder``. Raises
        TemplateError."""
        before = _roles(self._items)
        roles = (*before, *(one.role for one in self._group))
        self._template.check(roles[0], self._inputs.tools)
        if before:
            self._template.check_appends(before, self._group[0].role, self._inputs.tools)
        if any(one.calls for one in self._group) and self._template.call_style is None:
            raise TemplateError("the chat template does not show function calls in earlier answers")
        try:
            if roles[-1] is Role.SYSTEM and not followed_by and not self._shows_last(roles):
                # Some templates write a system prompt into the user message that follows it.
                followed_by = (Role.USER,)
            text, marks, shields = self._rendered((*roles, *followed_by))
            shown = fill_shields(text, shields) if shields else text
            start = self._start(shown)
            # The group ends before the content of the message that follows it.
            limit = find_marker(text, len(roles))[0] if followed_by else len(text)
        except TemplateRefused as refusal:
            raise self._template.refusal_error(roles, refusal) from refusal
        if before and any(at < start for at in marks.values()):
            raise self._template.refusal_error(
                roles, TemplateRefused("earlier text changes when a message follows")
            )
        ends = self._message_ends(shown, start, marks, limit)
        if not followed_by:
            ends[-1] = len(text)
        behind = [(a - start, b - start) for a, b in shields if start <= a < ends[-1]]
        return text[start : ends[-1]], [end - start for end in ends], behind

    def _shows_last(self, roles: Roles) -> bool:
        """Whether the template shows the last message when none follows."""
        try:
            return len(self._group) - 1 in self._rendered(roles)[1]
        except TemplateRefused:
            return False

    # ---- the text, with marks removed

    def _rendered(self, roles: Roles) -> tuple[str, dict[int, int], list[tuple[int, int]]]:
        """The text of the conversation, where the content of each message of the group ends, and its shields."""
        plain = self._say(roles, None)
        for is_marked in (_always, _unless_silent, _has_words, _is_plain_text):
            try:
                text, marks, shields = self._remove_marks(self._say(roles, is_marked))
            except TemplateRefused:
                continue
            if text == plain:
                return text, marks, shields
        if not self._has_control:
            return plain, {}, []
        broken, count = self._say(roles, _is_plain_text), self._encoder.count_control
        if not self._spells_control and count(broken) == count(plain):
            return plain, {}, []
        # The template reacts to control tokens in contents. Give it contents with those broken up.
        return self._remove_marks(broken)

    def _say(self, roles: Roles, is_marked: Callable[[TextMessage], bool] | None) -> str:
        count, end = len(self._items), len(self._items) + len(self._group)
        contents = [marker(n) for n in range(len(roles))]
        # Earlier messages, too, say what the template looks for. A marker shows where the last one ends.
        known = [item.text or contents[n] for n, item in enumerate(self._items)]
        if known:
            known[-1] = self._items[-1].text + contents[count - 1]
        messages = self._template.marked(roles[: count + 1], [*known, contents[count]])[:count]
        for number, message in enumerate(self._group):
            messages.append(self._message(number, message, is_marked))
        messages += self._template.marked(roles[end:], contents[end:])
        # Definitions stand before the first user message: after that, their content does not matter.
        spoken = any(item.role is Role.USER for item in self._items)
        tools = PROBE if self._inputs.tools and spoken else self._inputs.tools
        return self._template.say(messages, tools, self._inputs.when, self._inputs.check)

    def _message(
        self, number: int, message: TextMessage, is_marked: Callable[[TextMessage], bool] | None
    ) -> dict[str, object]:
        text, place = message.text, len(self._items) + number
        if is_marked is not None:
            text = self._marked_content(number, text) if is_marked(message) else self._broken(text)
        shown: dict[str, object] = {"role": ROLE_NAMES[message.role], "content": text}
        if message.role is Role.TOOL:
            shown["tool_call_id"] = template_id(message.call_id, place)
        if message.calls and self._template.call_style is not None:
            style, broken = self._template.call_style, self._broken if is_marked is not None else str
            if style.null_content and not message.text:
                shown["content"] = None
            shown["tool_calls"] = [
                {
                    "id": template_id(call.id, at),
                    "type": "function",
                    "function": {
                        "name": broken(call.name),
                        "arguments": broken(call.arguments)
                        if style.text_arguments
                        else _arguments(call.arguments, broken),
                    },
                }
                for at, call in enumerate(message.calls)
            ]
        return shown

    def _marked_content(self, number: int, text: str) -> str:
        """``text`` with its message's mark at the least disturbing place, and its control tokens broken up."""
        end = _mark_place(text)
        if self._has_control:
            end = min([end, *(a for a, b in self._control_spans(text) if a < end < b)])
        self._rests[number] = text[end:]
        return (
            f"{self._broken(text[:end])}{self._mark_char}{number}{self._mark_char}{self._broken(text[end:])}"
        )

    def _broken(self, text: str) -> str:
        """``text`` with mark characters after the first character of each control token."""
        if not self._has_control:
            return text
        parts, at = [], 0
        for start, _ in self._control_spans(text):
            parts += [text[at : start + 1], self._mark_char * 2]
            at = start + 1
        return "".join([*parts, text[at:]])

    def _control_spans(self, text: str) -> list[tuple[int, int]]:
        return self._encoder.control_spans(text, beginnings=self._template.takes_out)

    def _remove_marks(self, marked: str) -> tuple[str, dict[int, int], list[tuple[int, int]]]:
        parts: list[str] = []
        marks: dict[int, int] = {}
        broken: list[int] = []
        at = length = 0
        for match in self._mark_pattern.finditer(marked):
            parts.append(marked[at : match.start()])
            length += len(parts[-1])
            at = match.end()
            if match[1]:
                marks[int(match[1])] = length
            else:
                broken.append(length - 1)
        text = "".join([*parts, marked[at:]])
        shields: list[tuple[int, int]] = []
        for start in broken:
            end = self._encoder.control_end(text, start)
            if end is not None and (not shields or start >= shields[-1][1]):
                shields.append((start, end))
        # Extend from the mark to the end of the content, as far as the template has kept it: a space there may also
        # be the first character of a closing.
        for number, place in marks.items():
            rest, role = self._rests[number], self._group[number].role
            ends = [
                place + len(kept)
                for kept in (rest, json.dumps(rest, ensure_ascii=False)[1:-1], rest.rstrip())
                if text.startswith(kept, place)
            ]
            closed = (end for end in ends if self._template.closing_end(role, text, end) is not None)
            marks[number] = next(closed, ends[0] if ends else place)
        return text, marks, shields

    # ---- boundaries in the text

    def _start(self, text: str) -> int:
        """Where the group begins: after the stored part of the last item."""
        if not self._items:
            return 0
        last, (_, end) = self._items[-1], find_marker(text, len(self._items) - 1)
        if last.closed_chars is not None:
            return end + last.closed_chars
        after = self._closing_end(last.role, text, end, is_first=len(self._items) == 1)
        if last.verbatim or last.role is not Role.ASSISTANT:
            return after
        stop = self._ends.after(text, end, len(text))
        if self._template.needs_calls and self._group[0].role is Role.TOOL and stop is not None:
            # The template shows the answer as a call. Only the end-of-sequence token of its text counts here.
            eos = max((one for one in self._ends.texts if text.endswith(one, 0, stop)), key=len)
            return stop if last.ends_with_eos or last.complete else stop - len(eos)
        if last.complete:
            return after
        return stop if last.ends_with_eos and stop is not None else end

    def _message_ends(self, text: str, start: int, marks: dict[int, int], limit: int) -> list[int]:
        """Where each message of the group ends. ``limit``: where the content after the group begins."""
        limits: list[int] = []
        for number in range(len(self._group) - 1, -1, -1):
            limits.append(limit)
            limit = min(limit, marks.get(number, limit))
        limits.reverse()
        ends: list[int] = []
        at = start
        if self._items:  # The rest of the last item's closing belongs to no message.
            end = find_marker(text, len(self._items) - 1)[1]
            at = max(at, self._closing_end(self._items[-1].role, text, end, is_first=len(self._items) == 1))
        for number, message in enumerate(self._group):
            place = marks.get(number, -1)
            is_first = not number and not self._items
            if message.role is Role.SYSTEM and is_first and place >= at:
                at = self._closing_end(message.role, text, place, is_first=True)
            else:
                at = self._message_end(text, message.role, at, place if place >= at else None, limits[number])
            ends.append(at)
        return ends

    def _message_end(self, text: str, role: Role, at: int, content_end: int | None, limit: int) -> int:
        if role is Role.ASSISTANT:
            stop = self._ends.after(text, at if content_end is None else content_end, limit)
            return stop if stop is not None else at if content_end is None else content_end
        if content_end is None:
            closed = self._template.next_closing_end(role, text, at, limit)
            return closed if closed is not None else at
        return self._closing_end(role, text, content_end, is_first=False)

    def _closing_end(self, role: Role, text: str, start: int, *, is_first: bool) -> int:
        """Where the closing after a content that ends at ``start`` ends; ``start`` if there is none. After
        the first system prompt of a conversation, it may include the tools."""
        if role is Role.SYSTEM and is_first:
            prompt = self._items[0].text if self._items else ""
            closing = self._template.system_closing(prompt, self._inputs.tools, self._inputs.when)
            return start + len(closing) if text.startswith(closing, start) else start
        closed = self._template.closing_end(role, text, start)
        return closed if closed is not None else start


def _always(_: TextMessage) -> bool:
    return True


def _unless_silent(message: TextMessage) -> bool:
    """Whether a mark leaves it that an answer says something, beside its calls: templates ask for that."""
    return message.role is not Role.ASSISTANT or _has_words(message)


def _has_words(message: TextMessage) -> bool:
    """Whether a mark leaves it that a content has words."""
    return bool(message.text.strip())


def _is_plain_text(message: TextMessage) -> bool:
    """Whether templates do not inspect a text like this, so that a mark in it changes nothing."""
    shown = message.text.strip()
    return bool(shown) and "</" not in shown and shown[0] not in "<[{"


def _mark_place(text: str) -> int:
    """The least disturbing place for a mark: before trailing white space, and before a tag at the end, but behind the
    white space at the beginning."""
    end = len(text.rstrip())
    start = text.rfind("<", 0, end) if text.endswith(">", 0, end) else -1
    before = len(text[:start].rstrip()) if start > 0 and ">" not in text[start : end - 1] else 0
    return before or end


def _strings(message: TextMessage) -> Iterator[str]:
    yield message.text
    for call in message.calls:
        yield call.name
        yield call.arguments
        if "\\" in call.arguments:  # a control token may be spelled with escapes
            try:
                yield json.dumps(json.loads(call.arguments), ensure_ascii=False)
            except (ValueError, RecursionError):
                continue


def _arguments(text: str, broken: Callable[[str], str]) -> Any:
    """A call's arguments as an object, with control tokens in its strings broken up."""
    try:
        return map_strings(json.loads(text), broken)
    except (ValueError, RecursionError):
        return broken(text)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value``, as JSON has it, with each string changed, including field names."""
    match value:
        case str():
            return change(value)
        case list():
            return [map_strings(one, change) for one in value]
        case dict():
            return {change(key): map_strings(one, change) for key, one in value.items()}
    return value


def _roles(items: Iterable[HistoryItem]) -> Roles:
    return tuple(item.role for item in items)
