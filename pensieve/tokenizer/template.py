"""A chat template, and the dependencies of its text around messages.

Templates are programs over the whole conversation. Pensieve lets the program write only the new text, after
the last few messages, and keeps what was written before. That is correct if the text of a longer conversation
starts with the text of the shorter one. ``ChatTemplate`` verifies this at construction, with markers in place
of contents:

    <|im_start|>user\\n TEXT <|im_end|>\\n <|im_start|>assistant\\n TEXT <|im_end|>\\n ...
    `---- opening ---'      `-- closing -' `------ opening -------'      `-- closing -'

Templates that remove thoughts from earlier answers, or write a date, are served with a warning. Templates
that rewrite more are refused unless the operator allows it.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import jinja2

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.tokenizer.marked import (
    ANY_TIME,
    ROLE_NAMES,
    MarkedTemplate,
    Roles,
    TemplateRefused,
    compile_template,
    find_marker,
    marker,
    words_looked_for,
)
from pensieve.tokenizer.tools import ID_MARKER, NO_TOOLS, PROBE, PROBE_NAME, Tools, id_marker

PLAIN_TEMPLATE = """\
{{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content + '\n' }}
{%- elif message.role == 'user' %}{{ 'User: ' + message.content + '\n' }}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content + eos_token + '\n' }}
{%- else %}{{ message.role.capitalize() + ': ' + message.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
"""For models without a template: one line per message, the end-of-sequence token after each answer."""

_OWN_TEMPLATE = "give a template that only appends with --chat-template FILE"
_OPTIONS = (
    f"{_OWN_TEMPLATE}, or accept with --allow-rewriting-template that the history keeps what was generated"
)
_CHANGES = "earlier text changes when a message follows"
DROPS_THOUGHTS: Final = (
    "the chat template takes thoughts out of earlier answers: an answer that was generated here stays in the context "
    "as it was generated; a conversation that is imported is as the template writes it"
)
WRITES_DATE: Final = "the chat template writes the current date: a session keeps the date of its creation"
_LATE: Final = dt.datetime(2014, 11, 25, 16, 17, 18)
_TAGS: Final = ("think", "thinking", "thought", "reasoning", "seed:think")
_THOUGHT: Final = re.compile(
    rf"<({'|'.join(_TAGS)})>.*?</\1>\s*|\[THINK\].*?\[/THINK\]\s*", re.DOTALL | re.IGNORECASE
)
_TAKES_OUT: Final = re.compile(r"\b(?:replace|join|striptags)\b")
_LONG_TURNS: Final = 16
"""Turns of a conversation in which a template that shortens old messages is expected to show it."""
_MAX_WHOLE: Final = 8
"""Conversations up to this many messages are rendered whole."""
_MAX_TURN_MESSAGES: Final = 48
"""Turns that begin farther back are rendered without their middle."""
_KEPT_MESSAGES: Final = 16


class TemplateError(InvalidArgument):
    """The chat template cannot serve append-only conversations, or not this one; the message says how to fix it."""


@dataclass(frozen=True, slots=True)
class CallStyle:
    null_content: bool
    """An answer without text has the content null, not ""."""
    text_arguments: bool
    """Arguments are JSON text, not an object."""


class ChatTemplate:
    """A template and its answers, cached per sequence of the last few roles. Thread-safe."""

    def __init__(
        self, source: str, *, bos_token: str = "", eos_token: str = "", allow_rewriting: bool = False
    ) -> None:
        """Raises TemplateError when plain conversations cannot be rendered by appending."""
        self.source = source
        self._allow_rewriting = allow_rewriting
        try:
            self._marked = MarkedTemplate(compile_template(source), bos_token, eos_token)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        self._remembered_check = functools.lru_cache(maxsize=8192)(self._added)
        self._remembered_prompt = functools.lru_cache(maxsize=8192)(self._generation_prompt)
        self._counts = False
        """Whether text around a message depends on the number of messages before it."""
        self._counts_results = False
        """The same for conversations with tool results."""
        self._drops_thoughts = False
        self.looks_for = re.compile("|".join(map(re.escape, words_looked_for(source))) or r"(?!)")
        """Texts that it looks for in messages, so that what it writes around them may depend on them."""
        self.needs_calls = self._marked.needs_calls
        self.takes_out = _TAKES_OUT.search(source) is not None
        """Whether it may take something out of a message (SmolLM3: ``/no_think``), so that what stood around it becomes
        one word: a control token, perhaps."""
        self.tools_problem = "" if "tools" in source else "it has no place for them"
        """Why conversations with tools cannot be rendered; empty when they can."""
        self.writes_date = self._probe_date()
        self._probe()
        self._system_problem = self._probe_system()
        self.tools_problem = self.tools_problem or self._probe_tools()
        self.thinks = self._probe_thinking()
        """``tags``: the template handles <think> blocks; ``open``: it opens one for each answer itself; else ""."""
        self.closings = self._probe_closings()
        """The text after the content of a last message, by role; "" where a conversation cannot end so."""
        self.shared_closing = self._probe_shared_closing()
        """The beginning of a result's closing that is also written before another result; all of it if that has a
        block of its own."""
        self._closing_patterns = {role: _with_any_ids(text) for role, text in self.closings.items()}
        self.call_style = self._probe_calls()
        """Form of calls in earlier answers; None if the template does not show them."""
        dialogue, call = (Role.USER, Role.ASSISTANT), (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
        self._counts_results = self._probe_counting((*call, *dialogue * 6, *call[:3]), (*call * 5, Role.USER))
        self._counts = self._probe_counting(
            dialogue * 8, (*dialogue * 8, Role.USER), (Role.SYSTEM, *dialogue * 8, Role.USER)
        )
        self.warnings = (
            *([DROPS_THOUGHTS] if self._drops_thoughts else []),
            *([WRITES_DATE] if self.writes_date else []),
        )

    def check(self, first: Role, tools: Tools) -> None:
        """Raises TemplateError when the template refuses conversations that begin with this role."""
        if self._system_problem and first is Role.SYSTEM:
            raise TemplateError(
                f"the chat template does not take a system prompt: {self._system_problem}; {_OWN_TEMPLATE}"
            )
        if tools and self.tools_problem:
            raise TemplateError(
                f"the chat template does not take tools: {self.tools_problem}; {_OWN_TEMPLATE}"
            )

    def check_appends(self, before: Roles, role: Role, tools: Tools) -> None:
        """Raises TemplateError unless a message of this role leaves the earlier text unchanged."""
        roles = (*before, role)
        try:
            # Results rendered one at a time: the earlier ones were closed, and the next begins a new block.
            if roles[-2:] != (Role.TOOL, Role.TOOL):
                self._remembered_check(roles, PROBE if tools else NO_TOOLS)
        except TemplateRefused as refusal:
            raise self._refusal_error(roles, refusal) from refusal

    def say(
        self,
        messages: Sequence[dict[str, object]],
        tools: Tools,
        when: dt.datetime,
        check: Callable[[], None] | None = None,
    ) -> str:
        return self._marked.say(messages, tools=tools, when=when, check=check)

    def marked(self, roles: Roles, contents: Sequence[str]) -> list[dict[str, object]]:
        return self._marked.messages(roles, contents)

    def refusal_error(self, roles: Roles, refusal: TemplateRefused) -> TemplateError:
        return self._refusal_error(roles, refusal)

    def generation_prompt(
        self, roles: Roles, tools: Tools = NO_TOOLS, texts: Sequence[str] = (), when: dt.datetime = ANY_TIME
    ) -> str:
        """The text that introduces the assistant's answer after these messages; may be empty. ``texts``: what they
        say, or "" where that does not matter: SmolLM3 thinks or not by a word of its system prompt."""
        shown = PROBE if tools else NO_TOOLS
        prompt = self._remembered_prompt(roles, shown)
        if not any(texts):
            return prompt
        messages = self._marked.messages(roles, [one or marker(n) for n, one in enumerate(texts)])
        try:
            text, prompted = (
                self._marked.say(messages, tools=shown, when=when, prompt=one) for one in (False, True)
            )
        except TemplateRefused:
            return prompt
        # How an answer is parsed is settled for all of them: none begins in a thought unless all do.
        same = prompted.startswith(text) and _opens_thought(prompted[len(text) :]) is _opens_thought(prompt)
        return prompted[len(text) :] if same else prompt

    def window(self, roles: Sequence[Role]) -> list[int]:
        """Indexes of the messages on which text after the last one can depend: the system prompt and the last
        two turns, without the middle of very long turns."""
        roles = tuple(roles)
        count = len(roles)
        if count <= _MAX_WHOLE or self._counts or (self._counts_results and Role.TOOL in roles):
            return list(range(count))
        head = next((n for n, role in enumerate(roles) if role is not Role.SYSTEM), count)

        def begins(index: int) -> bool:
            return roles[index] is Role.USER and (index == head or roles[index - 1] is Role.ASSISTANT)

        near = range(count - 1, max(head, count - _MAX_TURN_MESSAGES) - 1, -1)
        starts = [index for index in near if begins(index)][:2]
        if starts:
            return [*range(head), *range(starts[-1], count)]
        first = [next((index for index in range(count - 1, head - 1, -1) if begins(index)), head)]
        start = next(
            (
                n
                for n in range(count - _KEPT_MESSAGES, count)
                if roles[n - 1 : n + 1] == (Role.TOOL, Role.ASSISTANT)
            ),
            count - _KEPT_MESSAGES,
        )
        return [*range(head), *first, *range(max(start, first[0] + 1), count)]

    def closing_end(self, role: Role, text: str, start: int) -> int | None:
        """Where the closing of a message ends whose content ends at ``start``; None when none begins there."""
        match = self._closing_patterns[role].match(text, start)
        return None if match is None else match.end()

    def system_closing(self, prompt: str, tools: Tools, when: dt.datetime) -> str:
        """The text after a lone system prompt, including tools; "" where a conversation cannot end so."""
        try:
            text = self._marked.say(
                self._marked.messages((Role.SYSTEM,), [prompt + marker(0)]), tools=tools, when=when
            )
            return text[find_marker(text, 0)[1] :]
        except TemplateRefused:
            return ""

    def next_closing_end(self, role: Role, text: str, start: int, stop: int) -> int | None:
        """Where a message ends in ``text[start:stop]`` whose content is not known: behind the first closing, or before
        that of a result in one block with the next. None when there is none, or closings are empty."""
        match = self._closing_patterns[role].search(text, start, stop) if self.closings[role] else None
        if role is Role.TOOL and 0 < len(self.shared_closing) < len(self.closings[role]):
            shared = text.find(self.shared_closing, start, stop)
            if shared >= 0 and (match is None or shared < match.start()):
                return shared
        return None if match is None else match.end()

    # ---- rendering with markers

    def _refusal_error(self, roles: Roles, refusal: TemplateRefused) -> TemplateError:
        names = ", ".join(ROLE_NAMES[role] for role in roles[-4:])
        return TemplateError(
            f"the chat template does not take a conversation ending in {names}: {refusal}; {_OWN_TEMPLATE}"
        )

    def _added(self, roles: Roles, tools: Tools = NO_TOOLS) -> str:
        """The text between the earlier text and the last content. Raises TemplateRefused if the earlier text
        changes."""
        last = len(roles) - 1
        try:
            text = self._marked.text(roles, tools)
            start, _ = find_marker(text, last)
        except TemplateRefused:
            if roles[-1] is not Role.SYSTEM:
                raise
            # Some templates write a system prompt into the user message that follows (Llama 2).
            text = self._marked.text((*roles, Role.USER), tools)
            start, _ = find_marker(text, last)
        if last == 0:
            return text[:start]
        between = text[find_marker(text, last - 1)[1] : start]
        if start < find_marker(text, last - 1)[1] or any(marker(i) in between for i in range(last)):
            raise TemplateRefused(_CHANGES)
        before = self._marked.closing(roles[:-1], tools)
        if not between.startswith(before):
            if roles[-2:] == (Role.TOOL, Role.TOOL):
                return between
            raise TemplateRefused(_CHANGES)
        if not self._allow_rewriting:
            self._check_prefix(roles, text[:start], tools)
        return between[len(before) :]

    def _check_prefix(self, roles: Roles, longer: str, tools: Tools) -> None:
        try:
            # An answer before a result may be shown as a call: compare only the text before that answer.
            count = len(roles) - (2 if roles[-2:] == (Role.ASSISTANT, Role.TOOL) else 1)
            shorter = self._marked.text(roles[:count], tools)
            find_marker(shorter, count - 1)
        except TemplateRefused:
            return  # it cannot end there, so there is no earlier text to change
        self._compare(shorter, longer)

    def _compare(self, shorter: str, longer: str) -> None:
        """Raises TemplateRefused when the longer conversation changes more of the shorter one than thoughts."""
        if longer.startswith(shorter):
            return
        if not _THOUGHT.sub("", longer).startswith(_THOUGHT.sub("", shorter)):
            raise TemplateRefused(_CHANGES)
        self._drops_thoughts = True

    def _generation_prompt(self, roles: Roles, tools: Tools) -> str:
        try:
            text = self._marked.text(roles, tools)
            prompted = self._marked.text(roles, tools, prompt=True)
        except TemplateRefused as refusal:
            raise TemplateError(f"the chat template refuses this conversation: {refusal}") from refusal
        if not prompted.startswith(text):
            raise TemplateError(
                f"the chat template rewrites the conversation to introduce the answer; {_OWN_TEMPLATE}"
            )
        return prompted[len(text) :]

    # ---- probes

    def _probe(self) -> None:
        """Raises TemplateError unless plain conversations can be rendered by appending."""
        user, assistant = Role.USER, Role.ASSISTANT
        try:
            for turns in (1, 2, 3):
                roles = (user, assistant) * turns
                self._added(roles[:-1])
                self._generation_prompt(roles[:-1], NO_TOOLS)
                self._added(roles)
            if not self._allow_rewriting:
                long = (user, assistant) * _LONG_TURNS
                self._compare(self._marked.text(roles[:-1]), self._marked.text(long[:-1]))
            # Only roles whose prefixes were compared are known to append: no other part of a conversation may
            # change.
            self._probe_thoughts()
        except TemplateRefused as refusal:
            raise TemplateError(
                f"the chat template does not only append to a conversation: {refusal}; {_OPTIONS}"
            ) from refusal

    def _probe_thoughts(self) -> None:
        tag = next((tag for tag in _TAGS if f"<{tag}>" in self.source), "think")
        thought = f"<{tag}>\n{marker(8)}\n</{tag}>\n\n{marker(1)}"
        dialogue = (Role.USER, Role.ASSISTANT, Role.USER)
        contents = [marker(0), thought, marker(2)]
        first, later = (
            self._marked.say(self._marked.messages(dialogue[:count], contents[:count])) for count in (2, 3)
        )
        if marker(8) not in later:
            self._drops_thoughts = True
        if not self._allow_rewriting:
            self._compare(first, later)

    def _probe_system(self) -> str:
        """Why a system prompt cannot be used, or ""."""
        dialogue = (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER)
        try:
            for length in range(1, len(dialogue) + 1):
                self._added(dialogue[:length])
        except TemplateRefused as refusal:
            return str(refusal)
        return ""

    def _probe_date(self) -> bool:
        for roles in ((Role.USER,), (Role.SYSTEM, Role.USER)):
            messages = self._marked.messages(roles, [marker(n) for n in range(len(roles))])
            try:
                early, late = (self._marked.say(messages, when=when) for when in (ANY_TIME, _LATE))
            except TemplateRefused:
                continue
            if early != late:
                return True
        return False

    def _probe_tools(self) -> str:
        """Why tools cannot be used, or "". Definitions must stay in place, before the first user message."""
        user, assistant, tool = Role.USER, Role.ASSISTANT, Role.TOOL
        called = (user, assistant, tool)
        try:
            for dialogue in (
                (*called, assistant, user),
                (*called, tool, assistant, user),
                (user, assistant, user),
            ):
                for length in range(1, len(dialogue) + 1):
                    added = self._added(dialogue[:length], PROBE)
                    closing = self._marked.closing(dialogue[:length], PROBE)
                    if (PROBE_NAME in added) is not (length == 1) or PROBE_NAME in closing:
                        return "it does not show them once, at the beginning of the conversation"
            self._generation_prompt(called, PROBE)
        except (TemplateRefused, TemplateError) as refusal:
            return str(refusal)
        return ""

    def _probe_thinking(self) -> str:
        if "<think>" not in self.source:
            return ""
        return "open" if _opens_thought(self.generation_prompt((Role.USER,))) else "tags"

    def _probe_closings(self) -> dict[Role, str]:
        user, assistant = Role.USER, Role.ASSISTANT
        return {
            # Some templates write a system message that is not the first in another way.
            Role.SYSTEM: self._marked.closing((user, Role.SYSTEM)) or self._marked.closing((Role.SYSTEM,)),
            user: self._marked.closing((user,)),
            assistant: self._marked.closing((user, assistant)),
            Role.TOOL: self._marked.closing((user, assistant, Role.TOOL)),
        }

    def _probe_shared_closing(self) -> str:
        roles, closing = (Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL), self.closings[Role.TOOL]
        try:
            text = self._marked.text(roles)
            between = text[find_marker(text, 2)[1] : find_marker(text, 3)[0]]
        except TemplateRefused:
            return closing
        return "".join(
            one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(closing, between, strict=False))
        )

    def _probe_calls(self) -> CallStyle | None:
        for style in (CallStyle(null, text) for text in (False, True) for null in (False, True)):
            call = {
                "id": id_marker(1),
                "type": "function",
                "function": {
                    "name": "zqName",
                    "arguments": '{"zqKey": "zqValue"}' if style.text_arguments else {"zqKey": "zqValue"},
                },
            }
            answer: dict[str, object] = {
                "role": ROLE_NAMES[Role.ASSISTANT],
                "content": None if style.null_content else "",
                "tool_calls": [call],
            }
            try:
                text = self._marked.say([*self._marked.messages((Role.USER,), [marker(0)]), answer])
            except TemplateRefused:
                continue
            if all(part in text for part in ("zqName", "zqKey", "zqValue")):
                return style
        return None

    def _probe_counting(self, *dialogues: Roles) -> bool:
        """Whether the text around the last of many messages differs from that around the last of a few."""
        for roles in dialogues:
            few = tuple(roles[index] for index in self.window(roles))
            try:
                whole, part = (
                    (self._added(some), self._marked.closing(some), self._generation_prompt(some, NO_TOOLS))
                    for some in (roles, few)
                )
            except (TemplateRefused, TemplateError):
                continue
            if whole != part:
                return True
        return False


def _opens_thought(prompt: str) -> bool:
    _, opened, behind = prompt.rpartition("<think>")
    return bool(opened) and "</think>" not in behind


def _with_any_ids(closing: str) -> re.Pattern[str]:
    """A pattern of the closing that matches any call's id in place of the marker's."""
    return re.compile("[0-9A-Za-z]{9}".join(map(re.escape, ID_MARKER.split(closing))))


def plain_text(template: ChatTemplate, roles: Roles) -> str:
    """A conversation of these roles with markers as contents; "" when the template refuses it."""
    try:
        return template.say(
            template.marked(roles, [marker(n) for n in range(len(roles))]), NO_TOOLS, ANY_TIME
        )
    except TemplateRefused:
        return ""
