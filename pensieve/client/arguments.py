"""Arguments of the SDK: tables of options and their meanings, names in other APIs, and request ids.

These tables and ``core.SamplingOptions`` are the only place that states an option's unit and meaning: eight
methods share one table. Such a method takes ``**options: Unpack[SomeTable]``, which type checkers and editors
expand. At run time ``with_options`` adds each option to the signature that ``help`` and ``inspect`` show, and
its meaning to the docstring.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import re
import sys
import textwrap
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

from pensieve.core import SAMPLING, SamplingOptions
from pensieve.errors import InvalidArgument

MAX_REQUEST_ID_CHARS = 128
UUID_PATTERN = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_NAMES = uuid.UUID("5f0a4f0e-6b5c-5e0f-9d53-3e8b7f0a9c11")
"""Namespace of the UUIDs made from names. Changing it would change the turn that a name stands for."""


def new_request_id() -> str:
    return str(uuid.uuid4())


def request_id(scope: str, given: str | uuid.UUID | None) -> str:
    """Return the UUID for ``given``. ``scope`` is the name of its session, or "" if there is none yet.

    None gives a fresh UUID, and a UUID is returned as it is. Any other text of 1 to 128 printable characters is
    a name: the same name in the same scope always gives the same UUID (version 5), so it can serve as an
    idempotency key. Raises InvalidArgument.
    """
    if given is None:
        return new_request_id()
    text = str(given) if isinstance(given, uuid.UUID) else given
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_REQUEST_ID_CHARS or not text.isprintable():
        raise InvalidArgument.field(
            "request_id", f"must be a UUID or 1 to {MAX_REQUEST_ID_CHARS} printable characters"
        )
    return text if UUID_PATTERN.fullmatch(text) else str(uuid.uuid5(_NAMES, f"{scope}\n{text}"))


SIMILAR_NAMES = {
    **{other: name for name, row in SAMPLING.items() for other in row.aliases},
    "deadline": "timeout",
    "grammar": "lark",
    "guided_choice": "choice",
    "guided_grammar": "lark",
    "guided_json": "schema",
    "guided_regex": "regex",
    "idempotency_key": "request_id",
    "json_schema": "schema",
    "logprobs": "top_logprobs",
    "metadata": "annotations",
    "request_timeout": "timeout",
    "response_format": "schema",
    "response_model": "schema",
}
"""Name in another API → name here."""

NAME_ADVICE = {
    "content": "pass the text first, without a keyword: send('Hi')",
    "do_sample": "temperature=0 is greedy, a higher temperature samples",
    "functions": "functions belong to the session: create_session(tools=...)",
    "history": "the server keeps it; to import one: create_session(initial_items=[('user', 'Hi'), ...])",
    "input": "pass the text first, without a keyword: send('Hi'); for several items: items=[...]",
    "instructions": "it belongs to the session: create_session(system_prompt=...)",
    "message": "pass the text first, without a keyword: send('Hi')",
    "messages": "send only the new message: send('Hi'), or items=[...]; the server keeps the earlier ones",
    "model": "it belongs to the session: create_session(model=...)",
    "prompt": "pass the text first, without a keyword: send('Hi')",
    "stream": "session.stream(...) streams, session.send(...) waits for the whole turn",
    "system": "it belongs to the session: create_session(system_prompt=...)",
    "system_prompt": "it belongs to the session: create_session(system_prompt=...)",
    "tools": "functions belong to the session: create_session(tools=...)",
}
"""Name in another API → advice, if the SDK has no such option."""


def check_names(options: Mapping[str, object], allowed: frozenset[str]) -> None:
    """Raise TypeError for an unknown option, as Python does for an unknown keyword, and suggest the likely one."""
    for name in sorted(options.keys() - allowed):
        raise TypeError(f"unknown option {name!r}{_advice(name, allowed)}")


def _advice(name: str, allowed: frozenset[str]) -> str:
    if SIMILAR_NAMES.get(name) in allowed:
        return f": here it is {SIMILAR_NAMES[name]!r}"
    if name in NAME_ADVICE:
        return f": {NAME_ADVICE[name]}"
    close = difflib.get_close_matches(name, allowed, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(allowed))}"


F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100


_TABLE = re.compile(r"^class \w+\(.*total=False\):\n(?:[ \t].*\n|\n)+", re.MULTILINE)
"""Matches the source of a table of options."""


class OptionText(NamedTuple):
    """The type and meaning of one key of a table, as its source states them."""

    kind: str
    meaning: str


class _Verbatim(str):
    """A string whose ``repr`` has no quotes, for ``inspect.signature``."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def with_options(table: type) -> Callable[[F], F]:
    """Decorate a method whose ``**`` parameter is this TypedDict: document its keys. Calls are unaffected."""

    def decorate(method: F) -> F:
        shown = inspect.signature(method)
        first = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
        texts = {name: text for name, text in option_texts(table).items() if name not in shown.parameters}
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_Verbatim("..."),
                annotation=_Verbatim(text.kind),
            )
            for name, text in texts.items()
        ]
        written = [
            p.replace(annotation=_Verbatim(p.annotation)) if p.annotation is not p.empty else p for p in first
        ]
        result = shown.return_annotation
        method.__signature__ = shown.replace(  # type: ignore[attr-defined]
            parameters=[*written, *more], return_annotation=_Verbatim(result)
        )
        method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:\n{_format_options(texts)}"
        return method

    return decorate


def document_keys(table: type) -> type:
    """Decorate the TypedDict itself: add its keys and their meanings to its docstring."""
    table.__doc__ = (
        f"{inspect.cleandoc(table.__doc__ or '')}\n\nKeys:\n{_format_options(option_texts(table))}"
    )
    return table


def option_texts(table: type) -> dict[str, OptionText]:
    """Return every key of a TypedDict, base classes first. Without source files the texts are empty."""
    found = _tables(table.__module__).get(table.__name__, {})
    return {name: found.get(name, OptionText("", "")) for name in table.__annotations__}


def _format_options(texts: dict[str, OptionText]) -> str:
    lines = []
    for name, (kind, meaning) in texts.items():
        lines.append(f"  {name}: {kind}")
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


@functools.cache
def _tables(module: str) -> dict[str, dict[str, OptionText]]:
    """Return the tables of a module by name: their annotated keys, with the docstrings below them."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}  # A frozen program without sources.
    # Parse only the tables: parsing the whole module would add milliseconds to each import.
    tree = ast.parse("".join(_TABLE.findall(source)))
    tables: dict[str, dict[str, OptionText]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            keys = tables.setdefault(node.name, {})
            for base in map(ast.unparse, node.bases):
                imported = getattr(sys.modules[module], base, None)
                if base in tables:
                    keys |= tables[base]
                elif hasattr(imported, "__total__"):  # a TypedDict of another module
                    keys |= _tables(imported.__module__).get(base, {})
            for at, line in enumerate(node.body):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    below = node.body[at + 1 : at + 2]
                    keys[line.target.id] = OptionText(_type_text(line.annotation), _docstring(below))
    return tables


def _type_text(annotation: ast.expr) -> str:
    """Return the source of a type, unwrapping ``Annotated``."""
    match annotation:
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[kind, *_])):
            return ast.unparse(kind)
    return ast.unparse(annotation)


def _docstring(below: list[ast.stmt]) -> str:
    match below:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return " ".join(text.split())
    return ""


Tools = str | Sequence[Mapping[str, Any]]
"""Definitions ``{"type": "function", "function": {"name", "description", "parameters"}}``, or their JSON array
as text."""
Schema = str | Mapping[str, Any] | type[Any]
"""A JSON schema as a mapping or as text, or a pydantic model's class."""
Overflow = Literal["reject", "drop_oldest_turns", "drop_oldest"]
"""``drop_oldest`` is short for ``drop_oldest_turns``."""
Keep = Literal["partial", "nothing"]
OnDisconnect = Literal["cancel", "finish"]


document_keys(SamplingOptions)


@document_keys
class TurnOptions(SamplingOptions, total=False):
    """All options of a turn beside its input."""

    request_id: str
    """Idempotency key of the turn within its session. A UUID, or a name of 1 to 128 characters from which a
    UUID is made; default: a fresh UUID."""
    expected_revision: int | None
    """Raise RevisionMismatch unless the session is at this revision; None: any revision."""
    replace_after_item: int
    """Replace all items after this one, in the same commit as the new turn."""
    token_ids: bool
    """Whether pieces carry token ids; default True."""
    top_logprobs: int
    """Return log-probabilities of this many likeliest tokens per position; 0: the chosen one's; default: none."""
    max_chunk_tokens: int
    """Most tokens in one piece; default: all tokens that are ready when it is sent."""
    max_chunk_delay: float
    """Longest time in seconds that tokens may be held back to be sent together."""
    pad_chunks: bool
    """Pad messages to similar sizes, so that an observer of the network cannot infer the text from them."""
    max_duration: float
    """Seconds after which the server ends the turn with TIME_LIMIT and commits it."""
    prediction: str
    """A text that the answer may be or contain. It makes the answer come sooner where it is right, and never changes
    it."""
    priority: int
    """Priority among the turns of the same tenant: each level counts as ten seconds of waiting; default 0."""
    next_turn_in: float
    """Hint: expected seconds from the end of this turn to the next. ``Turn.hints`` reports its use."""
    importance: float
    """Hint: value of the session's cached state after this turn, relative to 1 for any other session."""
    session_finished: bool
    """Hint: no further turn is expected."""
    annotations: Mapping[str, str]
    """Stored with the turn and returned with it (``Turn.annotations``); the model never sees them."""
    mark: str
    """Key by which ``find_turn`` finds the committed turn, alone or together with its answer."""
    must_call: str
    """Begin the answer with a call of this function, or of any if empty. The model chooses arguments."""
    turn_system_prompt: str
    """Replaces the session's system prompt for this turn only."""
    turn_tools: Tools
    """Functions that the model may call, replacing the session's for this turn only."""
    single_call: bool
    """End the answer after its first complete function call."""
    allowed_calls: Sequence[str]
    """Functions that the model may call; default: all that it sees."""
    strict_calls: Sequence[str]
    """Functions whose arguments must be valid for their parameters; an unsupported schema is refused."""
    no_calls: bool
    """With a form of the answer: do not let it call functions instead."""
    schema: Schema
    """JSON schema of the answer: a mapping, JSON text or the class of a pydantic model."""
    choice: Sequence[str]
    """The answer is one of these texts."""
    regex: str
    """The answer matches this regular expression. Needs a key with the scope ``grammars``."""
    lark: str
    """The answer follows this Lark grammar, as llguidance reads it. Needs a key with the scope ``grammars``."""
    on_disconnect: OnDisconnect
    """When this client is gone for good: ``cancel`` (default) discards the turn, ``finish`` completes it."""
    timeout: float
    """Seconds for the whole turn, retries included; then DeadlineExceeded, and nothing is committed."""
    wait_if_busy: bool
    """Wait for the end of the session's running turn, instead of raising TurnInProgress."""


@document_keys
class SessionChanges(TypedDict, total=False):
    """The settings of a session that can be changed."""

    labels: Mapping[str, str]
    """Replace all labels of the session."""
    system_prompt: str
    """Instructions that come before the conversation."""
    default_sampling: SamplingOptions
    """Sampling options of turns that do not set their own; replace all earlier defaults."""
    ttl: float
    """Seconds without use after which the session is erased; 0: never."""
    overflow: Overflow
    """For a turn that does not fit the context: ``reject`` it, or ``drop_oldest_turns`` from the context."""
    share_prefixes: bool
    """Whether cached state of common prefixes is shared with the tenant's other sessions."""
    tools: Tools
    """Functions that the model may call, replacing the earlier ones; an empty list or text: none."""
    subject: str
    """The person whom the session is about, by any name of yours; "": none."""
    compact_at: int
    """Tokens of context from which on the server compacts the session after a turn, while it is idle; 0: never."""
    keep_turns: int
    """Turns that such a compaction leaves as they are (2)."""
    rebind: bool
    """Move the session to the model that the server runs: ``Session.rebind``."""


SAMPLING_KEYS = frozenset(SAMPLING)
TURN_KEYS = frozenset(TurnOptions.__annotations__)
CHANGE_KEYS = frozenset(SessionChanges.__annotations__)
