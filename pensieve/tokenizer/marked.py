"""A chat template rendered with unique markers in place of contents."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import jinja2

from pensieve.core import Role
from pensieve.tokenizer.jinja import render
from pensieve.tokenizer.tools import NO_TOOLS, Tools, id_marker

ROLE_NAMES: Final = {
    Role.SYSTEM: "system",
    Role.USER: "user",
    Role.ASSISTANT: "assistant",
    Role.TOOL: "tool",
}

Roles = tuple[Role, ...]
ANY_TIME: Final = dt.datetime(2001, 2, 3, 4, 5, 6)


class TemplateRefused(Exception):
    """The template raised, or does not show a message. The text says which."""


class MarkedTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, template: jinja2.Template, bos_token: str, eos_token: str) -> None:
        self._template = template
        self._bos, self._eos = bos_token, eos_token
        self.needs_calls = False
        """Whether an answer before a tool's result has to be shown as a call (Mistral): words are refused there."""
        roles = (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
        try:
            self.text(roles)
        except TemplateRefused:
            self.needs_calls = True

    def messages(self, roles: Roles, contents: Sequence[str]) -> list[dict[str, object]]:
        """What the template is given. The content of an answer that has to be a call is the name of what it calls."""
        messages: list[dict[str, object]] = []
        for index, (role, text) in enumerate(zip(roles, contents, strict=True)):
            message: dict[str, object] = {"role": ROLE_NAMES[role], "content": text}
            if role is Role.TOOL:
                message["tool_call_id"] = id_marker(index)
            if self.needs_calls and role is Role.ASSISTANT and roles[index + 1 : index + 2] == (Role.TOOL,):
                function = {"name": text, "arguments": {}}
                call = {"id": id_marker(index), "type": "function", "function": function}
                message |= {"content": "", "tool_calls": [call]}
            messages.append(message)
        return messages

    def say(
        self,
        messages: Sequence[dict[str, object]],
        *,
        tools: Tools = NO_TOOLS,
        when: dt.datetime = ANY_TIME,
        prompt: bool = False,
        check: Callable[[], None] | None = None,
    ) -> str:
        """What the template writes. Raises TemplateRefused, and what ``check`` does."""
        try:
            return render(
                self._template,
                messages,
                tools=tools.definitions,
                generation_prompt=prompt,
                bos_token=self._bos,
                eos_token=self._eos,
                when=when,
                check=check,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            RecursionError,
        ) as error:
            # The others: what a template's own expressions raise on a message they do not expect.
            raise TemplateRefused(f"it says: {error}") from error

    def text(self, roles: Roles, tools: Tools = NO_TOOLS, *, prompt: bool = False) -> str:
        """The conversation with markers as contents. Raises TemplateRefused."""
        text = self.say(self.messages(roles, markers(len(roles))), tools=tools, prompt=prompt)
        if not self.needs_calls:
            return text
        for index, (role, after) in enumerate(pairwise(roles)):
            if role is Role.ASSISTANT and after is Role.TOOL:
                # The call's name stands for what the answer is: the rest of the call is nobody's text.
                _, end = find(text, index)
                closing = text.find(self._eos, end) if self._eos else -1
                text = text[:end] + text[max(closing, end) :]
        return text

    def closing(self, roles: Roles, tools: Tools = NO_TOOLS) -> str:
        """The text after the last content; empty when the template cannot end there, and all belongs to what
        follows."""
        try:
            text = self.text(roles, tools)
            return text[find(text, len(roles) - 1)[1] :]
        except TemplateRefused:
            return ""


def marker(index: int) -> str:
    """Stands for the content of message ``index``."""
    return f"zqSlot{index}qz"


def markers(count: int) -> list[str]:
    return [marker(index) for index in range(count)]


def find(text: str, index: int) -> tuple[int, int]:
    """Where marker ``index`` starts and ends. Raises TemplateRefused unless it is there exactly once."""
    wanted = marker(index)
    if text.count(wanted) != 1:
        raise TemplateRefused("a message does not appear exactly once in it")
    start = text.index(wanted)
    return start, start + len(wanted)
