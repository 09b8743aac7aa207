"""Definitions of functions as chat templates take them, and what tells how a model writes its calls."""

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
"""Stands for the id of a call while a template is looked at. Nine characters: Mistral's takes no others."""
_ID_CHARS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
MAX_DEPTH: Final = 64
"""Of definitions: schemas are not deeper, and templates go through them by recursion."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORMS: Final = (
    ("[TOOL_CALLS]", CallForm.MISTRAL),
    ("<tool_call>", CallForm.HERMES),
    ("<|python_tag|>", CallForm.LLAMA3),
    ('"parameters": ', CallForm.LLAMA3),
)


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that a conversation's model may call. Falsy when there are none."""

    text: str = ""
    """A JSON array of definitions, each ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

    def __bool__(self) -> bool:
        return bool(self.text)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.text) if self.text else []
        return found

    def check(self) -> None:
        """Raises InvalidArgument unless it is what its text says to be."""
        try:
            found = json.loads(self.text, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise _invalid("is not JSON") from error
        if not isinstance(found, list) or not found:
            raise _invalid("is not an array with a definition in it")
        names = []
        for number, one in enumerate(found):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict) or one.get("type") != "function":
                raise _invalid(f"element {number} is not of the form {{type: function, function: {{...}}}}")
            name, parameters = function.get("name"), function.get("parameters", {})
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _invalid(f"element {number} has no name like {_NAME.pattern}")
            if not isinstance(parameters, dict):
                raise _invalid(f"the parameters of element {number} are not an object")
            names.append(name)
        if len(set(names)) < len(names):
            raise _invalid("defines a function twice")
        for _ in self.strings():
            pass  # sees that it is not too deep

    def strings(self) -> Iterator[str]:
        """Every text in it, names of fields too. Raises InvalidArgument when it is nested too deep."""
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
"""What a template is tried with."""


def call_form_for(template: str) -> CallForm | None:
    """How models with this chat template write calls, by the marks in its source; None when it is not known."""
    return next((form for mark, form in _FORMS if mark in template), None)


def id_marker(index: int) -> str:
    """Stands for the id of message ``index``."""
    return f"z{index:08d}"


def template_id(call_id: str, index: int) -> str:
    """An id as all templates take it: itself if it is one, else one made of it or of the message's place."""
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
