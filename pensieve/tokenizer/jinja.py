"""The Jinja environment that chat templates are written for, sandboxed: templates come with downloaded models."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CHECKED_PIECES: Final = 64


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
    """The template of a Jinja source, in a sandbox. Raises jinja2.TemplateSyntaxError."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def render(
    template: jinja2.Template,
    messages: Sequence[dict[str, Any]],
    *,
    tools: Sequence[dict[str, Any]],
    generation_prompt: bool,
    bos_token: str,
    eos_token: str,
    when: dt.datetime,
    check: Callable[[], None] | None = None,
) -> str:
    """The text of the messages. ``tools``: definitions of functions; ``when``: what the template takes the time to be.

    ``check`` is called while the template writes; what it raises ends the work. Raises jinja2.TemplateError, also where
    the template calls ``raise_exception``.
    """
    pieces = template.generate(
        messages=messages,
        add_generation_prompt=generation_prompt,
        bos_token=bos_token,
        eos_token=eos_token,
        tools=list(tools) or None,
        documents=None,
        strftime_now=when.strftime,
    )
    if check is None:
        return "".join(pieces)
    written = []
    for number, piece in enumerate(pieces):
        if not number % _CHECKED_PIECES:
            check()
        written.append(piece)
    return "".join(written)
