"""A chat template rendered with unique markers for contents, in a sandbox: templates come with downloaded models."""

from __future__ import annotations

import datetime as dt
import json
import secrets
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pensieve.core import Role
from pensieve.tokenizer.tools import NO_TOOLS, Tools, id_marker

_CHECKED_PIECES: Final = 64
_SECRET: Final = secrets.token_hex(8)
ROLE_NAMES: Final = {
    Role.SYSTEM: "system",
    Role.USER: "user",
    Role.ASSISTANT: "assistant",
    Role.TOOL: "tool",
}
Roles = tuple[Role, ...]
ANY_TIME: Final = dt.datetime(2001, 2, 3, 4, 5, 6)


class _GenerationBlock(Extension):
    """``{% generation %}`` marks answers for training; rendering passes its body through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def compile_template(source: str) -> jinja2.Template:
    """Compile a Jinja source in a sandbox. Raises jinja2.TemplateSyntaxError."""
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def words_looked_for(source: str) -> set[str]:
    """The texts that a template looks for in others, such as messages: ``'/no_think' in message.content``."""
    tree = _environment().parse(source)
    found: list[nodes.Expr] = []
    for compared in tree.find_all(nodes.Compare):
        if any(one.op in ("in", "notin") for one in compared.ops):
            found.append(compared.expr)
    for called in tree.find_all(nodes.Call):
        if isinstance(called.node, nodes.Getattr) and called.node.attr in ("startswith", "endswith"):
            found += called.args
    return {one.value for one in found if isinstance(one, nodes.Const) and isinstance(one.value, str)} - {""}


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )


class TemplateRefused(Exception):
    """The template raised, or does not show a message. The text says which."""


class MarkedTemplate:
    """A compiled template. Thread-safe."""

    def __init__(self, template: jinja2.Template, bos_token: str, eos_token: str) -> None:
        self._template = template
        self._bos, self._eos = bos_token, eos_token
        self.needs_calls = False
        """Whether an answer before a tool result must be a call (Mistral): text is refused there."""
        roles = (Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT)
        try:
            self.text(roles)
        except TemplateRefused:
            self.needs_calls = True

    def messages(self, roles: Roles, contents: Sequence[str]) -> list[dict[str, object]]:
        """The template's input. The content of an answer that must be a call becomes its function name."""
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
        """Render messages. ``when``: the time for the template; ``check``: called regularly. Raises
        TemplateRefused, and the errors of ``check``."""
        pieces = self._template.generate(
            messages=messages,
            add_generation_prompt=prompt,
            bos_token=self._bos,
            eos_token=self._eos,
            tools=tools.definitions or None,
            documents=None,
            strftime_now=when.strftime,
        )
        written = []
        try:
            for number, piece in enumerate(pieces):
                if check is not None and not number % _CHECKED_PIECES:
                    check()
                written.append(piece)
            return "".join(written)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            AttributeError,
            LookupError,
            RecursionError,
        ) as error:
            # The other types: errors of a template's own expressions on a message that it does not expect.
            raise TemplateRefused(f"it says: {error}") from error

    def text(self, roles: Roles, tools: Tools = NO_TOOLS, *, prompt: bool = False) -> str:
        """The conversation with markers as contents. Raises TemplateRefused."""
        text = self.say(self.messages(roles, markers(len(roles))), tools=tools, prompt=prompt)
        if not self.needs_calls:
            return text
        for index, (role, after) in enumerate(pairwise(roles)):
            if role is Role.ASSISTANT and after is Role.TOOL:
                # The call's name stands for the answer's content: cut the rest of the call.
                _, end = find_marker(text, index)
                closing = text.find(self._eos, end) if self._eos else -1
                text = text[:end] + text[max(closing, end) :]
        return text

    def closing(self, roles: Roles, tools: Tools = NO_TOOLS) -> str:
        """The text after the last content; empty when the template cannot end there."""
        try:
            text = self.text(roles, tools)
            return text[find_marker(text, len(roles) - 1)[1] :]
        except TemplateRefused:
            return ""


def marker(index: int) -> str:
    """Stands for the content of message ``index``. Another one in each process: no message holds it."""
    return f"zq{_SECRET}Slot{index}qz"


def markers(count: int) -> list[str]:
    return [marker(index) for index in range(count)]


def find_marker(text: str, index: int) -> tuple[int, int]:
    """Start and end of marker ``index``. Raises TemplateRefused unless it occurs exactly once."""
    wanted = marker(index)
    if text.count(wanted) != 1:
        raise TemplateRefused("a message does not appear exactly once in it")
    start = text.index(wanted)
    return start, start + len(wanted)
