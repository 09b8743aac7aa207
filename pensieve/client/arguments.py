"""What callers of the SDK write: options with their meanings, names that are nearly right, ids of their own.

With ``core.SamplingOptions``, the tables here are the only place where an option has its unit and meaning: eight
methods share one table, and eight written copies would soon differ. For type checkers and editors such a method
has ``**options: Unpack[SomeTable]``: they expand that by themselves. Python does not. So ``with_options`` puts every
option of the table into the signature that ``help``, a prompt and ``inspect`` show, and its meaning into the docstring.
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
"""Namespace of the ids that are made of names; another one would make other turns of the same names."""


def new_request_id() -> str:
    return str(uuid.uuid4())


def request_id(scope: str, given: str | uuid.UUID | None) -> str:
    """The UUID that stands for ``given`` in ``scope``, which is the name of a session, or "" where there is none yet.

    None: a fresh one. A UUID is itself. Any other text of 1 to 128 printable characters is a name: the same name in the
    same scope is always the same UUID (version 5), so that it may be used as one. Raises InvalidArgument.
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
    "idempotency_key": "request_id",
    "logprobs": "top_logprobs",
    "metadata": "annotations",
    "request_timeout": "timeout",
}
"""Name elsewhere → name here."""

NAME_ADVICE = {
    "content": "the text comes first, without a name: send('Hi')",
    "do_sample": "temperature=0 is greedy, anything above samples",
    "functions": "functions belong to the session: create_session(tools=...)",
    "history": "the server keeps it; one from elsewhere: create_session(initial_items=[('user', 'Hi'), ...])",
    "input": "the text comes first, without a name: send('Hi'); more than one item: items=[...]",
    "instructions": "it belongs to the session: create_session(system_prompt=...)",
    "message": "the text comes first, without a name: send('Hi')",
    "messages": "only what is new is sent: send('Hi'), or items=[...]; the server keeps the rest",
    "model": "it belongs to the session: create_session(model=...)",
    "prompt": "the text comes first, without a name: send('Hi')",
    "stream": "session.stream(...) streams, session.send(...) waits for the whole turn",
    "system": "it belongs to the session: create_session(system_prompt=...)",
    "system_prompt": "it belongs to the session: create_session(system_prompt=...)",
    "tools": "functions belong to the session: create_session(tools=...)",
}
"""Name elsewhere → what is done here instead, where that is no option of the same kind."""


def check_names(options: Mapping[str, object], allowed: frozenset[str]) -> None:
    """Raises TypeError, as a call with a keyword that does not exist, and says what may have been meant."""
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
"""The source of a table of options."""


class OptionText(NamedTuple):
    """What the source says of one key of a table."""

    kind: str
    meaning: str


class _Verbatim(str):
    """Shows as the text that it is, where ``inspect`` would show quotes around it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def with_options(table: type) -> Callable[[F], F]:
    """Decorates a method whose ``**`` is this TypedDict. Changes nothing of how it is called."""

    def decorate(method: F) -> F:
        shown = inspect.signature(method)
        first = [one for one in shown.parameters.values() if one.kind is not one.VAR_KEYWORD]
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
            one.replace(annotation=_Verbatim(one.annotation)) if one.annotation is not one.empty else one
            for one in first
        ]
        result = shown.return_annotation
        method.__signature__ = shown.replace(  # type: ignore[attr-defined]
            parameters=[*written, *more], return_annotation=_Verbatim(result)
        )
        method.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\nOptions:\n{_listed(texts)}"
        return method

    return decorate


def document_keys(table: type) -> type:
    """Decorates the TypedDict itself: its keys and what they mean are added to its docstring."""
    table.__doc__ = f"{inspect.cleandoc(table.__doc__ or '')}\n\nKeys:\n{_listed(option_texts(table))}"
    return table


def option_texts(table: type) -> dict[str, OptionText]:
    """Every key of a TypedDict, those of its bases first. Without sources: keys without meanings."""
    found = _tables(table.__module__).get(table.__name__, {})
    return {name: found.get(name, OptionText("", "")) for name in table.__annotations__}


def _listed(texts: dict[str, OptionText]) -> str:
    lines = []
    for name, (kind, meaning) in texts.items():
        lines.append(f"  {name}: {kind}")
        lines += textwrap.wrap(meaning, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


@functools.cache
def _tables(module: str) -> dict[str, dict[str, OptionText]]:
    """The tables of a module by name: the annotated names of each, with the docstrings below them."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}  # A frozen program without sources.
    # To parse all of a module would take milliseconds of each import.
    tree = ast.parse("".join(_TABLE.findall(source)))
    tables: dict[str, dict[str, OptionText]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            mine = tables.setdefault(node.name, {})
            for base in map(ast.unparse, node.bases):
                imported = getattr(sys.modules[module], base, None)
                if base in tables:
                    mine |= tables[base]
                elif hasattr(imported, "__total__"):  # a TypedDict of another module
                    mine |= _tables(imported.__module__).get(base, {})
            for at, line in enumerate(node.body):
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    below = node.body[at + 1 : at + 2]
                    mine[line.target.id] = OptionText(_kind(line.annotation), _docstring(below))
    return tables


def _kind(annotation: ast.expr) -> str:
    """The type, without what ``Annotated`` says beside it."""
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
"""Definitions of functions, ``{"type": "function", "function": {"name", "description", "parameters"}}`` each, or all of
them as the text of a JSON array."""
Overflow = Literal["reject", "drop_oldest_turns", "drop_oldest"]
"""The last two are the same."""
Keep = Literal["partial", "nothing"]
OnDisconnect = Literal["cancel", "finish"]


document_keys(SamplingOptions)


@document_keys
class TurnOptions(SamplingOptions, total=False):
    """Everything that may go with a turn beside its input."""

    request_id: str
    """Names the turn within its session: the same id and content never append twice. A UUID, or a name of 1 to 128
    characters, from which a UUID is made; left out: a fresh one."""
    expected_revision: int | None
    """Raise RevisionMismatch unless the session is at this revision; None: whatever it is at."""
    replace_after_item: int
    """Replace everything after this item, in the same commit as the new turn."""
    token_ids: bool
    """Whether pieces carry token ids; default True."""
    top_logprobs: int
    """Log-probabilities of so many of the likeliest tokens at each place; 0: of the chosen one only; default: none."""
    max_chunk_tokens: int
    """A piece has at most so many tokens; default: as many as there are when it is sent."""
    max_chunk_delay: float
    """Seconds that tokens may wait to be sent together."""
    pad_chunks: bool
    """Make messages alike in size, so that their sizes tell nobody on the way what is said."""
    max_duration: float
    """Seconds after which the server ends the turn as TIME_LIMIT, committed."""
    priority: int
    """Among the turns of the same tenant: each level counts as ten seconds of waiting; default 0."""
    next_turn_in: float
    """Hint: seconds from the end of this turn to the next one, as expected. ``Turn.hints`` says what was taken."""
    importance: float
    """Hint: worth of the session's cached state after this turn, against 1 for any other session."""
    session_finished: bool
    """Hint: no further turn is expected."""
    annotations: Mapping[str, str]
    """Kept with the turn and given back with it (``Turn.annotations``); the model never sees them."""
    mark: str
    """By this, also together with its answer, ``find_turn`` finds the turn once it is committed."""
    must_call: str
    """Begin the answer as a call of this function of the session's, or of any if empty. The arguments are the model's
    own."""
    turn_system_prompt: str
    """In place of the session's system prompt, for this turn alone; the session keeps its own."""
    turn_tools: Tools
    """Functions that the model may call, in place of the session's, for this turn alone."""
    single_call: bool
    """End the answer with its first whole call of a function."""
    on_disconnect: OnDisconnect
    """What becomes of the turn when this client goes away for good; default ``cancel``."""
    timeout: float
    """Seconds for the whole turn, resumes included; then DeadlineExceeded, and nothing is committed."""
    wait_if_busy: bool
    """Wait for another turn of this session to end, instead of raising TurnInProgress."""


@document_keys
class SessionChanges(TypedDict, total=False):
    """What may be changed of a session."""

    labels: Mapping[str, str]
    """In place of all labels that it has."""
    system_prompt: str
    """What the model is told first."""
    default_sampling: SamplingOptions
    """For turns that do not say otherwise, in place of all defaults before."""
    ttl: float
    """Seconds without use after which the session is erased; 0: never."""
    overflow: Overflow
    """What happens to a turn that does not fit the context: refuse it, or leave the oldest turns out of the context."""
    share_prefixes: bool
    """Whether cached state of common beginnings is shared with other sessions of the tenant."""
    tools: Tools
    """Functions that the model may call, in place of those before; an empty list or text: none."""
    rebind: bool
    """Move the session to the model that is served: ``Session.rebind``."""


SAMPLING_KEYS = frozenset(SAMPLING)
TURN_KEYS = frozenset(TurnOptions.__annotations__)
CHANGE_KEYS = frozenset(SessionChanges.__annotations__)
