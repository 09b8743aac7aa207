"""The page on the SDK: signatures and docstrings of what ``pensieve.client`` exports, read without importing it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe
from staging import ROOT

_FIRST = ("Client", "Session", "TurnStream", "Turn", "Usage", "RetryPolicy", "AsyncClient", "AsyncSession")
"""What a reader looks for first; the rest follows by name."""


def page() -> str:
    """Markdown: classes with their public methods and fields."""
    package = griffe.load("pensieve.client", search_paths=[str(ROOT)])
    exported = [str(name) for name in package.exports or ()]
    lines = [
        "# SDK",
        "",
        "`from pensieve import Client, AsyncClient`; the rest from `pensieve.client`. Failures are the classes of",
        "`pensieve.errors`, which `pensieve` exports too: [errors](../errors.md).",
    ]
    for name in [*_FIRST, *sorted(set(exported) - set(_FIRST))]:
        found = package[name]
        lines += _thing(found.final_target if isinstance(found, griffe.Alias) else found)
    return "\n".join(lines) + "\n"


def _thing(found: griffe.Object) -> Iterator[str]:
    yield from ("", f"## {found.name}", "")
    if isinstance(found, griffe.Class):
        init = found.members.get("__init__")
        if isinstance(init, griffe.Function):
            yield from (_signature(init, found.name), "", _said(init), "")
        yield from (_said(found), "")
        members = [member for member in found.members.values() if isinstance(member, griffe.Object)]
        public = [member for member in members if not member.name.startswith("_")]
        fields = [member for member in public if isinstance(member, griffe.Attribute)]
        if fields:
            yield from ("| field | type | |", "|---|---|---|")
        for field in fields:
            kind = f"`{_type(field.annotation)}`" if field.annotation is not None else f"`= {field.value}`"
            yield f"| `{field.name}` | {kind} | {' '.join(_said(field).split())} |"
        for method in public:
            if isinstance(method, griffe.Function):
                yield from ("", f"### {found.name}.{method.name}", "", _signature(method), "", _said(method))
    elif isinstance(found, griffe.Attribute):
        yield from ("```python", f"{found.name} = {found.value}", "```", "", _said(found))
    else:
        yield _said(found)


def _type(annotation: object) -> object:
    """The type, without what ``Annotated`` says beside it."""
    match annotation:
        case griffe.ExprSubscript(
            left=griffe.ExprName(name="Annotated"), slice=griffe.ExprTuple(elements=[kind, *_])
        ):
            return kind
    return annotation


def _signature(function: griffe.Function, name: str = "") -> str:
    """As code, one parameter a line where it would be long."""
    parts, before = [], None
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is griffe.ParameterKind.keyword_only and before not in (
            griffe.ParameterKind.keyword_only,
            griffe.ParameterKind.var_positional,
        ):
            parts.append("*")
        before = parameter.kind
        star = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
        text = star.get(parameter.kind, "") + parameter.name
        text += f": {parameter.annotation}" if parameter.annotation is not None else ""
        is_open = parameter.kind in star
        parts.append(
            text + (f" = {parameter.default}" if parameter.default is not None and not is_open else "")
        )
    returned = f" -> {function.returns}" if function.returns is not None and not name else ""
    start = ("async " if "async" in function.labels else "") + "def " if not name else ""
    line = f"{start}{name or function.name}({', '.join(parts)}){returned}"
    if len(line) > 90:
        inside = "".join(f"    {part},\n" for part in parts)
        line = f"{start}{name or function.name}(\n{inside}){returned}"
    return f"```python\n{line}\n```"


def _said(found: griffe.Object) -> str:
    text = found.docstring.value if found.docstring else ""
    return re.sub(r"``([^`]+)``", r"`\1`", text).replace("<", "&lt;")
