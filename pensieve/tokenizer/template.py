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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jinja2

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.tokenizer.jinja import compile_template, render

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

ROLE_NAMES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant", Role.TOOL: "tool"}
_OWN_TEMPLATE = "give a template that only appends with --chat-template FILE"
_OPTIONS = (
    f"{_OWN_TEMPLATE}, or accept with --allow-rewriting-template that the history keeps what was generated"
)
_DAYS = (dt.date(2001, 2, 3), dt.date(2014, 11, 25))

Roles = tuple[Role, ...]


class TemplateError(InvalidArgument):
    """The chat template cannot serve append-only conversations, or not this one; the message says what helps."""


class _Refused(Exception):
    """The template raised, or does not show a message. The text says which."""


@dataclass(frozen=True, slots=True)
class Glue:
    """The template's text around the last message of a conversation."""

    opening: str
    """Between the closing of the message before and this content; beginning-of-sequence included when it is first."""
    closing: str
    """After the content, if nothing follows yet."""


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
        self._bos, self._eos = bos_token, eos_token
        self._allow_rewriting = allow_rewriting
        self._today = today
        try:
            self._template = compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        self._remembered_glue = functools.lru_cache(maxsize=8192)(self._glue)
        self._remembered_prompt = functools.lru_cache(maxsize=8192)(self._generation_prompt)
        self._depends_on_date = self._probe_date()
        self._probe()
        self._system_problem = self._probe_system()
        self._strips = {role: self._probe_strip(role) for role in Role}

    def glue(self, roles: Roles) -> Glue:
        """The glue around the last of ``roles``. Raises TemplateError when the template does not take such a
        conversation."""
        if self._system_problem and roles[0] is Role.SYSTEM:
            raise TemplateError(
                f"the chat template does not take a system prompt: {self._system_problem}; {_OWN_TEMPLATE}"
            )
        return self._remembered_glue(roles, self._day())

    def generation_prompt(self, roles: Roles) -> str:
        """What introduces the assistant's answer after these messages; may be empty."""
        return self._remembered_prompt(roles, self._day())

    def clean(self, role: Role, content: str) -> str:
        """The content as the template would insert it: many strip white space around it."""
        left, right = self._strips[role]
        return content.lstrip(left).rstrip(right)

    # ---- rendering with markers

    def _day(self) -> dt.date:
        return self._today() if self._depends_on_date else _DAYS[0]

    def _render(self, roles: Roles, contents: Sequence[str], day: dt.date, prompt: bool = False) -> str:
        messages = [
            {"role": ROLE_NAMES[role], "content": text} for role, text in zip(roles, contents, strict=True)
        ]
        try:
            return render(
                self._template,
                messages,
                generation_prompt=prompt,
                bos_token=self._bos,
                eos_token=self._eos,
                day=day,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, LookupError) as error:
            # The last four: what a template's own expressions raise on a message they do not expect.
            raise _Refused(f"it says: {error}") from error

    def _render_markers(self, roles: Roles, day: dt.date, prompt: bool = False) -> str:
        return self._render(roles, [_marker(i) for i in range(len(roles))], day, prompt)

    def _closing(self, roles: Roles, day: dt.date) -> str:
        """The text after the last content; empty when the template cannot end there, and all belongs to what
        follows."""
        try:
            text = self._render_markers(roles, day)
            return text[_find(text, len(roles) - 1)[1] :]
        except _Refused:
            return ""

    def _glue(self, roles: Roles, day: dt.date) -> Glue:
        try:
            return self._cut(roles, day)
        except _Refused as refusal:
            names = ", ".join(ROLE_NAMES[role] for role in roles[-4:])
            raise TemplateError(
                f"the chat template does not take a conversation ending in {names}: {refusal}; {_OWN_TEMPLATE}"
            ) from refusal

    def _cut(self, roles: Roles, day: dt.date) -> Glue:
        last = len(roles) - 1
        closing = self._closing(roles, day)
        try:
            text = self._render_markers(roles, day)
            start, _ = _find(text, last)
        except _Refused:
            if roles[-1] is not Role.SYSTEM:
                raise
            # Some templates write a system prompt into the user message that follows (Llama 2).
            text = self._render_markers((*roles, Role.USER), day)
            start, _ = _find(text, last)
        if last == 0:
            return Glue(text[:start], closing)
        between = text[_find(text, last - 1)[1] : start]
        before = self._closing(roles[:-1], day)
        if not between.startswith(before) or any(_marker(i) in between for i in range(last)):
            raise _Refused("earlier text changes when a message follows")
        if not self._allow_rewriting:
            self._check_prefix(roles, text, start, day)
        return Glue(between[len(before) :], closing)

    def _check_prefix(self, roles: Roles, text: str, start: int, day: dt.date) -> None:
        try:
            shorter = self._render_markers(roles[:-1], day)
            _find(shorter, len(roles) - 2)
        except _Refused:
            return  # it cannot end there, so nothing was written yet that could change
        if not text[:start].startswith(shorter):
            raise _Refused("earlier text changes when a message follows")

    def _generation_prompt(self, roles: Roles, day: dt.date) -> str:
        try:
            text, prompted = self._render_markers(roles, day), self._render_markers(roles, day, prompt=True)
        except _Refused as refusal:
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
                self._generation_prompt(roles[:-1], day)
                self._cut(roles, day)
            thought = f"<think>\n{_marker(8)}\n</think>\n\n{_marker(1)}"
            first = self._render((user, assistant), [_marker(0), thought], day)
            later = self._render((user, assistant, user), [_marker(0), thought, _marker(2)], day)
        except _Refused as refusal:
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
        except _Refused as refusal:
            return str(refusal)
        return ""

    def _probe_date(self) -> bool:
        for roles in ((Role.USER,), (Role.SYSTEM, Role.USER)):
            try:
                early, late = (self._render_markers(roles, day) for day in _DAYS)
            except _Refused:
                continue
            if early != late:
                return True
        return False

    def _probe_strip(self, role: Role) -> tuple[str | None, str | None]:
        """What is stripped left and right of a content: "" nothing, None all white space, else these characters."""
        before: Roles = () if role in (Role.SYSTEM, Role.USER) else (Role.USER,)
        after: Roles = (Role.USER,) if role is Role.SYSTEM else ()
        roles = (*before, role, *after)
        at = len(before)

        def survives(pad: str) -> tuple[bool, bool]:
            contents = [_marker(i) for i in range(len(roles))]
            contents[at] = pad + _marker(at) + pad
            text = self._render(roles, contents, self._day())
            start, end = _find(text, at)
            return text[:start].endswith(pad), text[end:].startswith(pad)

        try:
            newline, space = survives("\n" * 7), survives(" " * 7)  # more than any glue ends or starts with
        except _Refused:
            return "", ""  # no such role here: a message of it is refused anyway
        left, right = (_stripped(newline[side], space[side]) for side in (0, 1))
        return left, right


def _stripped(newline_survives: bool, space_survives: bool) -> str | None:
    if newline_survives:
        return "" if space_survives else " "
    return "\n" if space_survives else None


def _marker(index: int) -> str:
    return f"zqSlot{index}qz"


def _find(text: str, index: int) -> tuple[int, int]:
    """Where marker ``index`` starts and ends. Raises _Refused unless it is there exactly once."""
    marker = _marker(index)
    if text.count(marker) != 1:
        raise _Refused("a message does not appear exactly once in it")
    start = text.index(marker)
    return start, start + len(marker)
