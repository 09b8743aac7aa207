"""Finds every place that changes a field of a class, for the tests that each such class has one writer.

There are no types in a syntax tree, so a change counts by the name of the field: ``x.length = 3`` changes a ``length``.
It is another object's where the name ``x`` says so: it is annotated or made as another class in that function, or it is
``self`` in another class, or the caller of the check knows it (``others``).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from support.sources import tree

MUTATORS = frozenset((
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop", "popitem", "popleft",
    "remove", "reverse", "rotate", "setdefault", "sort", "update",
))  # fmt: skip
"""Methods of lists, deques, dicts and sets that change them."""


@dataclass(frozen=True)
class Owned:
    """A class and the one module that may write its fields."""

    name: str
    module: Path
    """Where it is defined, relative to the root of the repository."""
    allowed: frozenset[str] = frozenset()
    """Fields that other modules may write."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for another class with a field of the same name: ``manager.py:session`` → ``CachedSession``."""

    @cached_property
    def fields(self) -> frozenset[str]:
        """All fields that the class declares, or assigns to ``self``."""
        found = next(
            node
            for node in ast.walk(tree(self.module))
            if isinstance(node, ast.ClassDef) and node.name == self.name
        )
        declared = {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assigned = {
            node.attr
            for node in ast.walk(found)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        }
        return frozenset(declared | assigned) - self.allowed


def foreign_writes(owned: Owned, paths: Collection[Path]) -> list[str]:
    """Each place in these sources, outside the class's own module, that may change one of its fields."""
    return [
        f"{path}:{line}: {what}"
        for path in paths
        if path != owned.module
        for line, what in _writes(tree(path), owned, "", _known(owned, path))
    ]


def _writes(node: ast.AST, owned: Owned, inside: str, known: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Line and text of each change. ``inside``: the class around; ``known``: the class of each name."""
    if isinstance(node, ast.ClassDef):
        inside = node.name
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        known = {**known, **_annotated(node)}
    changed = _changed(node)
    if changed is not None and changed.attr in owned.fields:
        holder = ast.unparse(changed.value)
        stands_for = inside if holder == "self" else known.get(holder)
        if stands_for is None or stands_for == owned.name:
            yield changed.lineno, ast.unparse(node).splitlines()[0]
    for child in ast.iter_child_nodes(node):
        yield from _writes(child, owned, inside, known)


def writes_in(source: ast.Module, owned: Owned) -> list[tuple[int, str]]:
    """Line and text of each place in a source that may change a field."""
    return list(_writes(source, owned, "", {}))


def _known(owned: Owned, path: Path) -> dict[str, str]:
    names = (name.partition(":") for name in owned.others)
    return {name: owned.others[f"{file}:{name}"] for file, _, name in names if file == path.name}


def _changed(node: ast.AST) -> ast.Attribute | None:
    """The attribute that a node assigns, deletes, or changes the content of."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return _attribute(node.func.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
        named = node.args[1] if len(node.args) > 1 else None
        if isinstance(named, ast.Constant):
            return ast.Attribute(
                node.args[0], str(named.value), ast.Store(), lineno=node.lineno, col_offset=0
            )
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return node
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _attribute(node.value)
    return None


def _attribute(node: ast.expr) -> ast.Attribute | None:
    return node if isinstance(node, ast.Attribute) else None


def _annotated(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """The classes that annotations and constructors of a function name, by variable."""
    found: dict[str, str] = {}
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            found[argument.arg] = ast.unparse(argument.annotation).strip("'\"")
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = ast.unparse(node.annotation)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = ast.unparse(node.value.func)
            if made[:1].isupper() or made.lstrip("_")[:1].isupper():
                found.update((one.id, made) for one in node.targets if isinstance(one, ast.Name))
    return {name: kind.removesuffix(" | None") for name, kind in found.items()}
