"""A chat template seen as an append-only protocol: what has to be written before and after each message.

Templates are programs over the whole conversation. Pensieve never renders a conversation again, so it asks the program
once per sequence of roles, with a unique marker in place of every content, and cuts the answer at the markers:

    <|im_start|>user\\n TEXT <|im_end|>\\n <|im_start|>assistant\\n TEXT <|im_end|>\\n ...
    `---- opening ---'      `-- closing -' `------ opening -------'      `-- closing -'

That is only right when a longer conversation starts with the text of the shorter one. ``ChatTemplate`` checks this when
it is made and for every new sequence of roles, and names the template when it does not hold.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.tokenizer.jinja import compile_template
from pensieve.tokenizer.marked import (
    ROLE_NAMES,
    MarkedTemplate,
    Roles,
    TemplateRefused,
    find,
    marker,
    markers,
)
from pensieve.tokenizer.tools import NO_TOOLS, PROBE, PROBE_NAME, Tools

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
"""The template of models that have none: one line per message, the end-of-sequence token after each answer."""

_OWN_TEMPLATE = "give a template that only appends with --chat-template FILE"
_OPTIONS = (
    f"{_OWN_TEMPLATE}, or accept with --allow-rewriting-template that the history keeps what was generated"
)
_DAYS = (dt.date(2001, 2, 3), dt.date(2014, 11, 25))


class TemplateError(InvalidArgument):
    """The chat template cannot serve append-only conversations, or not this one; the message says what helps."""


@dataclass(frozen=True, slots=True)
class Glue:
    """The template's text around the last message of a conversation."""

    opening: str
    """Between the closing of the message before and this content; beginning-of-sequence included when it is first."""
    closing: str
    """After the content, if nothing follows yet."""
    joins: bool = False
    """Both this and the message before are results of tools, and that one ends otherwise when this one follows: here
    ``opening`` begins right behind its content, in place of its closing."""


class ChatTemplate:
    """A template and its answers, remembered per sequence of roles so that a long session stays cheap. Thread-safe."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        allow_rewriting: bool = False,
        today: Callable[[], dt.date] = dt.date.today,
    ) -> None:
        """Raises TemplateError when conversations without a system prompt cannot be rendered by appending."""
        self.source = source
        self._allow_rewriting = allow_rewriting
        self._today = today
        try:
            self._marked = MarkedTemplate(compile_template(source), bos_token, eos_token)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        self._remembered_glue = functools.lru_cache(maxsize=8192)(self._glue)
        self._remembered_prompt = functools.lru_cache(maxsize=8192)(self._generation_prompt)
        self.tools_problem = "" if "tools" in source else "it has no place for them"
        """Why conversations with tools cannot be rendered; empty when they can."""
        self._depends_on_date = self._probe_date()
        self._probe()
        self._system_problem = self._probe_system()
        self._escapes = {role: self._probe_escape(role) for role in Role}
        self._strips = {role: ("", "") if self._escapes[role] else self._probe_strip(role) for role in Role}
        self.tools_problem = self.tools_problem or self._probe_tools()
        self.thinks = self._probe_thinking()
        """``tags``: the template knows of <think> blocks; ``open``: it opens one for each answer itself; else ""."""

    def glue(self, roles: Roles, tools: Tools = NO_TOOLS) -> Glue:
        """The glue around the last of ``roles``. Raises TemplateError when the template does not take such a
        conversation."""
        if self._system_problem and roles[0] is Role.SYSTEM:
            raise TemplateError(
                f"the chat template does not take a system prompt: {self._system_problem}; {_OWN_TEMPLATE}"
            )
        if tools and self.tools_problem:
            raise TemplateError(
                f"the chat template does not take tools: {self.tools_problem}; {_OWN_TEMPLATE}"
            )
        if not tools or Role.USER in roles[:-1]:
            # Definitions stand before the first user's words, as ``_probe_tools`` has seen. What comes behind is the
            # same for all of them, and is remembered once.
            return self._remembered_glue(roles, self._day(), PROBE if tools else NO_TOOLS)
        return self._glue(roles, self._day(), tools)

    def generation_prompt(self, roles: Roles, tools: Tools = NO_TOOLS) -> str:
        """What introduces the assistant's answer after these messages; may be empty."""
        return self._remembered_prompt(roles, self._day(), PROBE if tools else NO_TOOLS)

    def clean(self, role: Role, content: str) -> str:
        """The content as the template would insert it: many strip white space around it."""
        if self._escapes[role]:
            return json.dumps(content, ensure_ascii=False)[1:-1]
        left, right = self._strips[role]
        return content.lstrip(left).rstrip(right)

    def with_calls(self, roles: Roles, message: dict[str, object], tools: Tools) -> str:
        """What a conversation adds behind the last but one content when its last message is this one, an assistant's.

        Raises TemplateError. Markers in the message are for the caller to find.
        """
        day = self._day()
        try:
            messages = [*self._marked.messages(roles[:-1], markers(len(roles) - 1)), message]
            text = self._marked.say(messages, day, tools)
            if len(roles) == 1:
                return text
            between = text[find(text, len(roles) - 2)[1] :]
            before = self._marked.closing(roles[:-1], day, tools)
            if not between.startswith(before):
                raise TemplateRefused("earlier text changes when a message follows")
        except TemplateRefused as refusal:
            raise TemplateError(
                f"the chat template does not take these calls: {refusal}; {_OWN_TEMPLATE}"
            ) from refusal
        return between[len(before) :]

    # ---- rendering with markers

    def _day(self) -> dt.date:
        return self._today() if self._depends_on_date else _DAYS[0]

    def _render(self, roles: Roles, contents: Sequence[str]) -> str:
        return self._marked.say(self._marked.messages(roles, contents), self._day(), NO_TOOLS)

    def _glue(self, roles: Roles, day: dt.date, tools: Tools) -> Glue:
        try:
            return self._cut(roles, day, tools)
        except TemplateRefused as refusal:
            names = ", ".join(ROLE_NAMES[role] for role in roles[-4:])
            raise TemplateError(
                f"the chat template does not take a conversation ending in {names}: {refusal}; {_OWN_TEMPLATE}"
            ) from refusal

    def _cut(self, roles: Roles, day: dt.date, tools: Tools = NO_TOOLS) -> Glue:
        last = len(roles) - 1
        closing = self._marked.closing(roles, day, tools)
        try:
            text = self._marked.text(roles, day, tools)
            start, _ = find(text, last)
        except TemplateRefused:
            if roles[-1] is not Role.SYSTEM:
                raise
            # Some templates write a system prompt into the user message that follows (Llama 2).
            text = self._marked.text((*roles, Role.USER), day, tools)
            start, _ = find(text, last)
        if last == 0:
            return Glue(text[:start], closing)
        between = text[find(text, last - 1)[1] : start]
        if any(marker(i) in between for i in range(last)):
            raise TemplateRefused("earlier text changes when a message follows")
        before = self._marked.closing(roles[:-1], day, tools)
        if not between.startswith(before):
            if roles[-2:] == (Role.TOOL, Role.TOOL):
                return Glue(between, closing, joins=True)
            raise TemplateRefused("earlier text changes when a message follows")
        if not self._allow_rewriting:
            self._check_prefix(roles, text, start, day, tools)
        return Glue(between[len(before) :], closing)

    def _check_prefix(self, roles: Roles, text: str, start: int, day: dt.date, tools: Tools) -> None:
        try:
            # An answer before a result may be shown as a call: what stands before that answer is compared then.
            count = len(roles) - (2 if roles[-2:] == (Role.ASSISTANT, Role.TOOL) else 1)
            shorter = self._marked.text(roles[:count], day, tools)
            find(shorter, count - 1)
        except TemplateRefused:
            return  # it cannot end there, so nothing was written yet that could change
        if not text[:start].startswith(shorter):
            raise TemplateRefused("earlier text changes when a message follows")

    def _generation_prompt(self, roles: Roles, day: dt.date, tools: Tools) -> str:
        try:
            text = self._marked.text(roles, day, tools)
            prompted = self._marked.text(roles, day, tools, prompt=True)
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
        if self._depends_on_date and not self._allow_rewriting:
            raise TemplateError(
                f"the chat template writes the current date, so a conversation changes overnight; {_OPTIONS}"
            )
        day = self._day()
        try:
            for turns in (1, 2, 3):
                roles = (user, assistant) * turns
                self._cut(roles[:-1], day)
                self._generation_prompt(roles[:-1], day, NO_TOOLS)
                self._cut(roles, day)
            thought = f"<think>\n{marker(8)}\n</think>\n\n{marker(1)}"
            first = self._render((user, assistant), [marker(0), thought])
            later = self._render((user, assistant, user), [marker(0), thought, marker(2)])
        except TemplateRefused as refusal:
            raise TemplateError(
                f"the chat template does not only append to a conversation: {refusal}; {_OPTIONS}"
            ) from refusal
        if not later.startswith(first) and not self._allow_rewriting:
            raise TemplateError(f"the chat template takes <think> blocks out of earlier answers; {_OPTIONS}")

    def _probe_system(self) -> str:
        """Why a system prompt cannot be used; empty when it can."""
        dialogue = (Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER)
        try:
            for length in range(1, len(dialogue) + 1):
                self._cut(dialogue[:length], self._day())
        except TemplateRefused as refusal:
            return str(refusal)
        return ""

    def _probe_date(self) -> bool:
        for roles in ((Role.USER,), (Role.SYSTEM, Role.USER)):
            try:
                early, late = (self._marked.text(roles, day, NO_TOOLS) for day in _DAYS)
            except TemplateRefused:
                continue
            if early != late:
                return True
        return False

    def _probe_tools(self) -> str:
        """Why tools cannot be used: their definitions have to stay where they were, before the first user's words."""
        user, assistant, tool = Role.USER, Role.ASSISTANT, Role.TOOL
        called = (user, assistant, tool)
        try:
            for dialogue in (
                (*called, assistant, user),
                (*called, tool, assistant, user),
                (user, assistant, user),
            ):
                for length in range(1, len(dialogue) + 1):
                    glue = self._cut(dialogue[:length], self._day(), PROBE)
                    shows = PROBE_NAME in glue.opening
                    if shows is not (length == 1) or PROBE_NAME in glue.closing:
                        return "it does not show them once, at the beginning of the conversation"
            self._generation_prompt(called, self._day(), PROBE)
        except (TemplateRefused, TemplateError) as refusal:
            return str(refusal)
        return ""

    def _probe_thinking(self) -> str:
        if "<think>" not in self.source:
            return ""
        _, opened, behind = self.generation_prompt((Role.USER,)).rpartition("<think>")
        return "open" if opened and "</think>" not in behind else "tags"

    def _probe_escape(self, role: Role) -> bool:
        """Whether contents are written as JSON strings."""
        before: Roles = (Role.USER, Role.ASSISTANT) if role is Role.TOOL else ()
        roles = (*before, role)
        contents = markers(len(roles))
        contents[-1] = f'"{contents[-1]}'
        try:
            text = self._render(roles, contents)
            return text[: find(text, len(before))[0]].endswith('\\"')
        except TemplateRefused:
            return False

    def _probe_strip(self, role: Role) -> tuple[str | None, str | None]:
        """What is stripped left and right of a content: "" nothing, None all white space, else these characters."""
        before: Roles = () if role in (Role.SYSTEM, Role.USER) else (Role.USER,)
        after: Roles = (Role.USER,) if role is Role.SYSTEM else ()
        roles = (*before, role, *after)
        at = len(before)

        def survives(pad: str) -> tuple[bool, bool]:
            contents = markers(len(roles))
            contents[at] = pad + marker(at) + pad
            text = self._render(roles, contents)
            start, end = find(text, at)
            return text[:start].endswith(pad), text[end:].startswith(pad)

        try:
            newline, space = survives("\n" * 7), survives(" " * 7)  # more than any glue ends or starts with
        except TemplateRefused:
            return "", ""  # no such role here: a message of it is refused anyway
        left, right = (_stripped(newline[side], space[side]) for side in (0, 1))
        return left, right


def _stripped(newline_survives: bool, space_survives: bool) -> str | None:
    if newline_survives:
        return "" if space_survives else " "
    return "\n" if space_survives else None
