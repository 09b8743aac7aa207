"""Pages are written as GitHub reads them; mkdocs reads an older Markdown. This turns the one into the other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

_MARKER = re.compile(r"^( *)([*+-]|\d+[.)])( +)(?=\S)")
_FENCE = re.compile(r"^\s*(```+|~~~+)")


def anchor(title: str, separator: str = "-") -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def lines_with_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it belongs to a fenced block, its fences included."""
    fence = ""
    for line in text.splitlines():
        found = _FENCE.match(line)
        inside = bool(fence) or found is not None
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence):
            fence = ""
        yield line, inside


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """``text`` with ``change`` done to each stretch of lines that is in no fenced block."""
    stretches = groupby(lines_with_fences(text), key=itemgetter(1))
    whole = (("\n".join(line for line, _ in lines), fenced) for fenced, lines in stretches)
    return "\n".join(part if fenced else change(part) for part, fenced in whole) + "\n"


def to_python_markdown(text: str) -> str:
    """The same page for Python-Markdown.

    Blank lines around what may follow a paragraph directly (lists, tables, headings), what belongs to an item of a
    list indented by four spaces for each level, and no backslash before a bar in a cell's code. (Python-Markdown's
    rules: https://python-markdown.github.io/#differences.)
    """
    out: list[str] = []
    offsets: list[int] = []  # where the text of each open list item begins
    blank, kind_before = True, ""
    for line, fenced in lines_with_fences(text):
        if not line.strip():
            out.append("")
            blank, kind_before = True, "" if not offsets else kind_before
            continue
        indent = len(line) - len(line.lstrip())
        marker = None if fenced else _MARKER.match(line)
        if marker or blank or _FENCE.match(line) or line.startswith(("#", "|")):
            while offsets and indent < offsets[-1]:
                offsets.pop()
        own = min(indent, offsets[-1]) if offsets else 0
        kind = _kind(line, marker, fenced, bool(offsets))
        if kind == "table":
            line = re.sub(r"`[^`]+`", lambda code: code[0].replace("\\|", "|"), line)
        if not blank and not fenced and _needs_gap(kind_before, kind):
            out.append("")
        out.append("    " * len(offsets) + line[own:] if offsets else line)
        if marker:
            offsets.append(len(marker[0]))
        blank, kind_before = False, kind
    return "\n".join(out) + "\n"


def _kind(line: str, marker: re.Match[str] | None, fenced: bool, in_list: bool) -> str:
    if fenced:
        return "code"
    if marker:
        return "item"
    if re.match(r"#{1,6} ", line):
        return "heading"
    if line.lstrip().startswith("|"):
        return "table"
    return "item" if in_list else "text"


def _needs_gap(before: str, now: str) -> bool:
    return before != now and (now in ("item", "table", "heading") or before in ("table", "heading"))
