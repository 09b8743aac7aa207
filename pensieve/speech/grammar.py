"""One grammar for a whole answer: its thought, its calls and the form that the caller wants.

The grammar is Lark as llguidance reads it (its ``docs/syntax.md``). ``read`` finds in the answer what the grammar
let through: a thought, then words, calls, or an answer in the caller's form.

A mark such as ``<tool_call>`` is one token of most models; the grammar then names the token, and its spelling by other
tokens is not allowed. Where the vocabulary has no such token, the grammar spells it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pensieve.speech.calls import (
    ARGUMENTS,
    CALL_ID,
    CLOSE_CALL,
    OPEN_CALL,
    PYTHON_TAG,
    TOOL_CALLS,
    CallForm,
)
from pensieve.speech.reader import CLOSE_THOUGHT, OPEN_THOUGHT, SpeechForm

MAX_SPACES: Final = 8
"""White-space characters that may follow each other between the values of a JSON answer. Without a limit, a model
may write white space for ever."""
_SPACE: Final = f"[ \\t\\r\\n]{{1,{MAX_SPACES}}}"
_BLANK: Final = r"[\s\x1c-\x1f]*"
"""The white space that ``str.lstrip`` removes."""
_GUIDANCE: Final = {"whitespace_pattern": _SPACE}
"""llguidance's options for JSON schemas."""
_OBJECT: Final = {"type": "object"}
_ANSWER: Final = "answer"


class FormatKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    LARK = "lark"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The form that a caller wants an answer in."""

    kind: FormatKind
    text: str = ""
    """The schema as JSON, the regular expression, or the Lark grammar."""
    choices: tuple[str, ...] = ()
    """The texts to choose from."""

    @property
    def costly(self) -> bool:
        """Whether the caller wrote the grammar itself, so that one token may need unusually much work."""
        return self.kind in (FormatKind.REGEX, FormatKind.LARK)


@dataclass(frozen=True, slots=True)
class OfferedFunction:
    """A function that an answer may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of the arguments; None: it takes none."""
    strict: bool = False
    """Each keyword of ``parameters`` is enforced. Otherwise keywords that are not supported have no effect."""


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The parts that an answer may consist of."""

    form: SpeechForm
    functions: tuple[OfferedFunction, ...] = ()
    must_call: bool = False
    """The answer begins with a call, after its thought."""
    one_call: bool = False
    """It ends with its first call."""
    format: AnswerFormat | None = None
    """Its form, unless it calls functions; None: any text, in which calls may stand."""
    template: str = ""
    """Source of the chat template, which shows the form of calls that a Mistral model knows."""


GrammarPart = dict[str, Any]
"""One grammar of several that refer to each other by name."""


def format_grammar(wanted: AnswerFormat) -> GrammarPart:
    """Return the grammar of an answer in this form, without a thought. Raises ValueError for a schema that is not
    JSON."""
    match wanted.kind:
        case FormatKind.JSON_SCHEMA:
            return _schema_part(_ANSWER, json.loads(wanted.text))
        case FormatKind.JSON_OBJECT:
            return _schema_part(_ANSWER, _OBJECT)
        case FormatKind.REGEX:
            return _lark_part(_ANSWER, f"start: {_regex(wanted.text)}")
        case FormatKind.LARK:
            return _lark_part(_ANSWER, wanted.text)
        case FormatKind.CHOICE:
            return _lark_part(_ANSWER, f"start: {' | '.join(map(json.dumps, wanted.choices))}")


def arguments_grammar(function: OfferedFunction, name: str = _ANSWER) -> GrammarPart:
    """Return the grammar of a call's arguments, which are always an object."""
    if function.parameters is None:
        return _schema_part(name, {**_OBJECT, "additionalProperties": False})
    return _schema_part(name, {**function.parameters, **_OBJECT}, lenient=not function.strict)


def grammar_text(*parts: GrammarPart) -> str:
    """Return the grammars in the form that llguidance reads. The first is that of the answer."""
    return json.dumps({"grammars": parts}, allow_nan=False)


def answer_grammar(shape: AnswerShape, mark_id: Callable[[str], int | None]) -> str:
    """Return the grammar of a whole answer. ``mark_id``: id of the token that stands for a mark; None if there is
    none.

    ``shape`` needs a format, or functions and a form of calls.
    """
    writer = _Writer(shape, mark_id)
    lark = "\n".join(writer.rules())
    parts = [_lark_part("turn", lark)]
    parts += [arguments_grammar(one, _arguments(number)) for number, one in enumerate(shape.functions)]
    if shape.format is not None:
        parts.append(format_grammar(shape.format))
    return grammar_text(*parts)


@dataclass(slots=True)
class _Writer:
    """Writes the rules of one answer. Each method returns the text of an expression, and may add rules."""

    shape: AnswerShape
    mark_id: Callable[[str], int | None]
    added: dict[str, str] = field(default_factory=dict)
    """Rules by their heads."""

    def rules(self) -> Iterator[str]:
        begin = self._thought()
        body = self._body()
        yield f"start: {begin} ({body})" if begin else f"start: {body}"
        for head, rule in self.added.items():
            yield f"{head}: {rule}"

    def _thought(self) -> str:
        """An expression for the thought with which the answer begins, with the white space after it."""
        form = self.shape.form
        if not (form.thinks or form.begins_thinking):
            return ""
        thought = f"{self._until('thought', CLOSE_THOUGHT)} SPACE?"
        self.added["SPACE"] = f"/{_SPACE}/"
        return thought if form.begins_thinking else f"({self._mark(OPEN_THOUGHT)} {thought})?"

    def _body(self) -> str:
        shape = self.shape
        calls = self._calls() if shape.functions else ""
        if shape.format is not None:
            wanted = f"@{_ANSWER}"
            if not calls:
                return wanted
            # Bare calls of Llama begin as a JSON answer does: here they need their tag.
            called = f"{self._mark(PYTHON_TAG)} {calls}" if shape.form.calls is CallForm.LLAMA3 else calls
            return called if shape.must_call else f"{wanted} | {called}"
        if shape.must_call:
            tag = f"{self._mark(PYTHON_TAG)}? " if shape.form.calls is CallForm.LLAMA3 else ""
            return f"{tag}{calls}"
        return self._words_and_calls()

    def _words_and_calls(self) -> str:
        """Any text, in which a mark begins a call."""
        match self.shape.form.calls:
            case CallForm.HERMES:
                text, call = self._text(OPEN_CALL), f"{self._until('words', OPEN_CALL)} {self._hermes()}"
                return f"{text} | {call}" if self.shape.one_call else f"({call})* {text}"
            case CallForm.LLAMA3:
                # Words that begin with a brace would be read as calls.
                brace = rf"{_BLANK}\{{"
                words = self._until("words", PYTHON_TAG, brace)
                return f"{self._text(PYTHON_TAG, brace)} | {words}? {self._calls()}"
            case CallForm.MISTRAL:
                return f"{self._text(TOOL_CALLS)} | {self._until('words', TOOL_CALLS)} {self._mistral()}"
        raise ValueError("a model without calls has no functions")

    def _calls(self) -> str:
        """Calls from the first character on."""
        more = not self.shape.one_call
        match self.shape.form.calls:
            case CallForm.HERMES:
                call = f"{self._mark(OPEN_CALL)} {self._hermes()}"
                return f'{call} ("\\n" {call})*' if more else call
            case CallForm.LLAMA3:
                call = self._any_call("parameters")
                return f'{call} ("; " {call})*' if more else call
            case CallForm.MISTRAL:
                return f"{self._mark(TOOL_CALLS)} {self._mistral()}"
        raise ValueError("a model without calls has no functions")

    def _hermes(self) -> str:
        """A call after its opening mark."""
        return f'"\\n" {self._any_call("arguments")} "\\n" {self._mark(CLOSE_CALL)}'

    def _mistral(self) -> str:
        """Calls after the first mark, in the form that the template shows."""
        template, more = self.shape.template, not self.shape.one_call
        if ARGUMENTS not in template:
            call = self._any_call("arguments")
            begin = '" ["' if f"{TOOL_CALLS} [" in template else '"["'
            return f'{begin} {call} (", " {call})* "]"' if more else f'{begin} {call} "]"'
        between = self._mark(ARGUMENTS)
        if CALL_ID in template:
            between = f"{self._mark(CALL_ID)} /[A-Za-z0-9]{{9}}/ {between}"
        names = self._functions(lambda name, arguments: f"{json.dumps(name)} {between} {arguments}")
        return f"{names} ({self._mark(TOOL_CALLS)} {names})*" if more else names

    def _any_call(self, key: str) -> str:
        """A call of any function as one JSON object."""
        return self._functions(
            lambda name, arguments: f'{json.dumps(f"""{{"name": "{name}", "{key}": """)} {arguments} "}}"'
        )

    def _functions(self, call: Callable[[str, str], str]) -> str:
        functions = enumerate(self.shape.functions)
        calls = [call(one.name, f"@{_arguments(number)}") for number, one in functions]
        self.added["call"] = " | ".join(calls)
        return "call"

    def _mark(self, mark: str) -> str:
        token = self.mark_id(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _text(self, mark: str, *beginnings: str) -> str:
        """Text without the mark that begins with none of these expressions."""
        text = ["/(?s:.*)/", f"~/(?s:.*){_literal(mark)}(?s:.*)/"]
        self.added["TEXT"] = " & ".join([*text, *self._not_begun(beginnings)])
        return "TEXT"

    def _until(self, name: str, mark: str, *beginnings: str) -> str:
        """Text up to the first such mark and with it."""
        token = self.mark_id(mark)
        terminal = name.upper()
        if token is None:
            text = [f"/(?s:.*){_literal(mark)}/"]
            self.added[f"{name}[lazy]"] = terminal
        else:
            text = ["/(?s:.*)/", f"~/(?s:.*){_literal(mark)}(?s:.*)/"]
            self.added[name] = f"{terminal} <[{token}]>"
        begun = () if mark == CLOSE_THOUGHT else self._not_begun(beginnings)
        self.added[terminal] = " & ".join([*text, *begun])
        return name

    def _not_begun(self, beginnings: Sequence[str]) -> Iterator[str]:
        """Words do not begin as a thought does: they would be read as one."""
        thought = (f"{_BLANK}{_literal(OPEN_THOUGHT)}",) if self.shape.form.thinks else ()
        for one in (*beginnings, *thought):
            yield f"~/{one}(?s:.*)/"


def _arguments(number: int) -> str:
    return f"arguments{number}"


def _lark_part(name: str, text: str) -> GrammarPart:
    return {"name": name, "lark_grammar": text}


def _schema_part(name: str, schema: Any, *, lenient: bool = False) -> GrammarPart:
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    guidance = {**_GUIDANCE, "lenient": True} if lenient else _GUIDANCE
    return {"name": name, "json_schema": {**schema, "x-guidance": guidance}}


def _literal(mark: str) -> str:
    """A regular expression of this text, within slashes."""
    return re.escape(mark).replace("/", r"\/")


def _regex(text: str) -> str:
    """A regular expression within slashes. Raises ValueError for a backslash at its end, which would take the slash
    away."""
    escaped, after_backslash = [], False
    for char in text:
        if after_backslash:
            char = {"/": r"\/", "\n": r"\n"}.get(char, f"\\{char}")
        elif char != "\\":
            char = {"/": r"\/", "\n": r"\n"}.get(char, char)
        after_backslash = char == "\\"
        escaped.append("" if after_backslash else char)
    if after_backslash:
        raise ValueError("it ends with a single backslash")
    return f"/{''.join(escaped)}/"
