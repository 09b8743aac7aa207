"""Finds the problem of a grammar, and its place."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from llguidance import LLMatcher

from pensieve.speech import GrammarPart, grammar_text

_UNSUPPORTED: Final = re.compile(r'Unimplemented keys: \["(.*?)"')
_NAMES_TOKENS: Final = "no tokenizer"
"""Begins the library's warning about a token in a grammar."""
_LOCATE_CPU_S: Final = 0.2
"""Time to look for the place of a problem."""
_MAX_PROBLEM_CHARS: Final = 300
_MAPS: Final = ("$defs", "definitions", "properties", "patternProperties")
"""Definitions first: a problem in one of them shows at each reference to it too."""
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems")


class GrammarProblem(NamedTuple):
    text: str
    path: str = ""
    """JSON pointer to the part of the schema that is wrong; "" for the whole, and for other grammars."""

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


def find_problem(part: GrammarPart) -> GrammarProblem | None:
    """Return the problem of a grammar; None if it compiles."""
    message = _message(part)
    if message is None:
        return None
    if message.startswith(_NAMES_TOKENS):
        return GrammarProblem("names tokens of the model: write their text in quotes")
    schema = part.get("json_schema")
    if schema is None:
        return GrammarProblem(_readable(message))
    return GrammarProblem(_readable(message), _Places(part, message).find())


def _message(part: GrammarPart) -> str | None:
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar_text(part))
    tokens = (one for one in messages if one.startswith(_NAMES_TOKENS))
    return messages[0] if failed else next(tokens, None)


def _readable(message: str) -> str:
    """The library's message in one line, in our words where it is about a keyword."""
    if found := _UNSUPPORTED.search(message):
        return f"the keyword {found[1]!r} is not supported"
    if message.startswith("oneOf constraints"):
        return "the keyword 'oneOf' is supported only for schemas that exclude each other: use anyOf"
    if message.startswith("Resource "):
        return "a $ref can lead only to another part of the same schema"
    if "regex parse error" in message:
        # The pattern itself stands between, with a line that points into it.
        message = f"not a regular expression: {message.rpartition('error: ')[2]}"
    line = " ".join(message.partition("\n   1 |")[0].split())
    return line if len(line) <= _MAX_PROBLEM_CHARS else f"{line[:_MAX_PROBLEM_CHARS]}…"


class _Places:
    """Looks for the smallest part of a schema that has the same problem alone."""

    def __init__(self, part: GrammarPart, message: str) -> None:
        self._root: dict[str, Any] = part["json_schema"]
        self._message = message
        self._guidance = self._root.get("x-guidance", {})
        self._shared = {name: self._root[name] for name in ("$defs", "definitions") if name in self._root}
        self._until = time.process_time() + _LOCATE_CPU_S

    def find(self) -> str:
        path, node, seen = "", self._root, set[str]()
        while path not in seen:
            seen.add(path)
            for inner, child in _children(node):
                if self._is_wrong(child):
                    path, node = f"{path}/{inner}", child
                    break
        return path

    def _is_wrong(self, node: Any) -> bool:
        if not isinstance(node, dict) or time.process_time() > self._until:
            return False
        alone = {**self._shared, **node, "x-guidance": self._guidance}
        return _message({"name": "part", "json_schema": alone}) == self._message


def _children(node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, each with its place."""
    for keyword in _MAPS:
        inner = node.get(keyword)
        if isinstance(inner, dict):
            for name, one in inner.items():
                yield f"{keyword}/{name.replace('~', '~0').replace('/', '~1')}", one
    for keyword in _LISTS:
        inner = node.get(keyword)
        if isinstance(inner, list):
            for number, one in enumerate(inner):
                yield f"{keyword}/{number}", one
    for keyword in _SINGLE:
        yield keyword, node.get(keyword)
