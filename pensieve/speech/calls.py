"""Function calls in the forms of model families: parsed from JSON text and rendered to it."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

OPEN_CALL: Final = "<tool_call>"
CLOSE_CALL: Final = "</tool_call>"
PYTHON_TAG: Final = "<|python_tag|>"
TOOL_CALLS: Final = "[TOOL_CALLS]"
ARGUMENTS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
SHOWN_MARKS: Final = frozenset(
    {OPEN_CALL, CLOSE_CALL, PYTHON_TAG, TOOL_CALLS, ARGUMENTS, CALL_ID, "<think>", "</think>"}
)
"""Control tokens that are part of an answer's text."""


class CallForm(enum.StrEnum):
    HERMES = "hermes"
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number: Hermes, Qwen 2.5, Qwen 3."""
    LLAMA3 = "llama3"
    """``{"name": …, "parameters": {…}}`` as the whole answer or behind ``<|python_tag|>``: Llama 3.1 to 3.3."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`` or ``[TOOL_CALLS]name[ARGS]{…}``, at the end: Mistral."""


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""
    id: str = ""
    """The call's id, which its result refers to; "" if it has none."""


class _WrittenCall(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None


class StringState:
    """Tracks whether a JSON text that comes in pieces is inside a string."""

    def __init__(self) -> None:
        self.inside = False
        self._escaped = False

    def push(self, text: str) -> None:
        for char in text:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = self.inside
            elif char == '"':
                self.inside = not self.inside


_NAMED: Final = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\s*(\w+))?\s*(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)
"""Mistral's later form, without ``[TOOL_CALLS]``."""


def parse_call(text: str, *, needs_arguments: bool = False) -> FunctionCall | None:
    """Parse one JSON object; None if it is not a call."""
    found = _decode(text, _WrittenCall)
    return None if found is None else _call(found, needs_arguments)


def parse_llama_calls(text: str) -> tuple[FunctionCall, ...]:
    """Parse calls separated by white space, semicolons or tags. Return () unless all of ``text`` is calls."""
    calls = []
    rest = _strip_separators(text)
    while rest:
        end = _object_end(rest)
        # A plain answer may be a JSON object with a name: only arguments make it a call.
        call = parse_call(rest[:end], needs_arguments=True) if end else None
        if call is None:
            return ()
        calls.append(call)
        rest = _strip_separators(rest[end:])
    return tuple(calls)


def parse_mistral_calls(text: str) -> tuple[FunctionCall, ...]:
    """Parse the calls after the first ``[TOOL_CALLS]``. Return () unless all of ``text`` is calls."""
    if text.lstrip().startswith("["):
        # With ``FirstCall`` the answer may end before the list's bracket.
        listed = _decode(text, list[_WrittenCall]) or _decode(f"{text}]", list[_WrittenCall]) or []
        calls = [_call(one, False) for one in listed]
    else:
        calls = [_parse_named_call(part) for part in text.split(TOOL_CALLS)]
    whole = [call for call in calls if call is not None]
    return tuple(whole) if len(whole) == len(calls) else ()


def render_answer(words: str, calls: Sequence[FunctionCall], form: CallForm) -> str:
    """Render words and calls as a model of the family would have written them. ``read`` parses the text back."""
    match form:
        case CallForm.HERMES:
            texts = [f"{OPEN_CALL}\n{_json(call, 'arguments')}\n{CLOSE_CALL}" for call in calls]
            return "\n".join([*([words] if words else []), *texts])
        case CallForm.LLAMA3:
            head = f"{words}{PYTHON_TAG}" if words and calls else words
            return head + "; ".join(_json(call, "parameters") for call in calls)
        case CallForm.MISTRAL:
            texts = [_json(call, "arguments", with_id=True) for call in calls]
            return f"{words}{TOOL_CALLS} [{', '.join(texts)}]" if calls else words


def call_prefix(name: str, form: CallForm, template: str) -> str:
    """Return the beginning of an answer that calls this function, or any ("").

    It ends at a boundary where a tokenizer would split the call too. ``template``: source of the chat template,
    which shows the form that a Mistral model knows.
    """
    if form is CallForm.MISTRAL and ARGUMENTS in template:
        return f"{TOOL_CALLS}{name}{CALL_ID if CALL_ID in template else ARGUMENTS}" if name else TOOL_CALLS
    key = "parameters" if form is CallForm.LLAMA3 else "arguments"
    call = f'{{"name": "{name}", "{key}":' if name else '{"name": "'
    match form:
        case CallForm.HERMES:
            return f"{OPEN_CALL}\n{call}"
        case CallForm.LLAMA3:
            return call
        case CallForm.MISTRAL:
            return f"{TOOL_CALLS}{' ' if f'{TOOL_CALLS} [' in template else ''}[{call}"


def is_json_object(text: str) -> bool:
    return _decode(text, dict[str, Any]) is not None


def _json(call: FunctionCall, key: str, *, with_id: bool = False) -> str:
    named = f', "id": {json.dumps(call.id)}' if with_id and call.id else ""
    return f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "{key}": {call.arguments}{named}}}'


def _parse_named_call(text: str) -> FunctionCall | None:
    found = _NAMED.fullmatch(text)
    if found is None or not is_json_object(found[3]):
        return None
    return FunctionCall(found[1], found[3].strip(), found[2] or "")


def _call(found: _WrittenCall, needs_arguments: bool) -> FunctionCall | None:
    arguments = (bytes(found.arguments) or bytes(found.parameters)).decode().strip()
    if not found.name or (needs_arguments and not arguments):
        return None
    if arguments and not is_json_object(arguments):
        return None
    return FunctionCall(found.name, arguments or "{}", found.id or "")


def _decode(text: str, kind: Any) -> Any:
    """Decode ``text`` as this type; None if it is invalid. A model may write anything."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _strip_separators(text: str) -> str:
    while True:
        shorter = text.lstrip(" \t\r\n;").removeprefix(PYTHON_TAG)
        if shorter == text:
            return text
        text = shorter


def _object_end(text: str) -> int:
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return 0
    return end
