"""Methods that take a table of options show each of them in ``help``, at a prompt and to ``inspect``.

For type checkers and editors such a method has ``**options: Unpack[SomeTable]``: they expand that by themselves. Python
does not. So the decorator here puts every option of the table into the signature that Python shows, and what each means
into the docstring. The table, a TypedDict with a docstring below each key, stays the only place where an option is
written down: eight methods share one table of 34, and eight written copies would soon differ.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 100


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


def documented(table: type) -> type:
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
    """Of every class in a module, its annotated names with the docstrings below them."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}  # A frozen program without sources.
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
