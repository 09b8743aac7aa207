"""Definitions of functions for chat templates, and how a model writes its calls."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from pensieve.errors import InvalidArgument
from pensieve.speech import CallForm

ID_MARKER: Final = re.compile(r"z\d{8}")
"""Stands for the id of a call while a template is probed. Nine characters: Mistral's template requires that."""
_ID_CHARS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
MAX_DEPTH: Final = 64
"""Nesting limit of definitions: real schemas are shallower, and templates recurse through them."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMS: Final = (
    ("[TOOL_CALLS]", CallForm.MISTRAL),
    ("<tool_call>", CallForm.HERMES),
    ("<|python_tag|>", CallForm.LLAMA3),
    ('"parameters": ', CallForm.LLAMA3),
)


@dataclass(frozen=True, slots=True)
class Tools:
    """Falsy when there are none."""

    text: str = ""
    """A JSON array of ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    def __bool__(self) -> bool:
        return bool(self.text)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.text) if self.text else []
        return found

    def check(self) -> None:
        """Raises InvalidArgument unless the text is a valid array of definitions."""
        try:
            found = json.loads(self.text, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise _invalid("is not JSON") from error
        if not isinstance(found, list) or not found:
            raise _invalid("is not a non-empty array of definitions")
        names = []
        for number, one in enumerate(found):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict) or one.get("type") != "function":
                raise _invalid(f"element {number} is not of the form {{type: function, function: {{...}}}}")
            name, parameters = function.get("name"), function.get("parameters", {})
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _invalid(f"element {number} has no name that matches {_NAME.pattern}")
            if not isinstance(parameters, dict):
                raise _invalid(f"the parameters of element {number} are not an object")
            names.append(name)
        if len(set(names)) < len(names):
            raise _invalid("defines a function twice")
        for _ in self.strings():
            pass  # raises if it is nested too deep

    def strings(self) -> Iterator[str]:
        """Every string in it, including field names. Raises InvalidArgument when it is nested too deep."""
        return _strings(json.loads(self.text), MAX_DEPTH) if self.text else iter(())


NO_TOOLS: Final = Tools()
PROBE_NAME: Final = "zqProbeFunction"
PROBE: Final = Tools(
    json.dumps(
        [
            {
                "type": "function",
                "function": {
                    "name": PROBE_NAME,
                    "description": "d",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ]
    )
)
"""The definition that templates are probed with."""


def call_form_for(template: str) -> CallForm | None:
    """How models with this chat template write calls, from the marks in its source; None if unknown."""
    return next((form for mark, form in _FORMS if mark in template), None)


def id_marker(index: int) -> str:
    """Stands for the id of message ``index``."""
    return f"z{index:08d}"


def template_id(call_id: str, index: int) -> str:
    """An id that all templates accept: ``call_id`` itself, or one derived from it or from the message's index."""
    if len(call_id) == _ID_LENGTH and set(call_id) <= set(_ID_CHARS):
        return call_id
    digest = hashlib.blake2b((call_id or str(index)).encode("utf-8", "surrogatepass"), digest_size=_ID_LENGTH)
    return "".join(_ID_CHARS[byte % len(_ID_CHARS)] for byte in digest.digest())


def _strings(value: Any, depth: int) -> Iterator[str]:
    if not depth:
        raise _invalid(f"is nested deeper than {MAX_DEPTH} levels")
    match value:
        case str():
            yield value
        case list():
            for one in value:
                yield from _strings(one, depth - 1)
        case dict():
            for key, one in value.items():
                yield key
                yield from _strings(one, depth - 1)


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _invalid(problem: str) -> InvalidArgument:
    return InvalidArgument.field("config.tools_json", problem)
