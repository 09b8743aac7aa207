"""Where something stands in a TOML file: the parser tells what is written, not on which line."""

from __future__ import annotations

import re

_HEADING = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_FIELD = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]")


def line_of(text: str, heading: str, number: int = 0, field: str = "") -> int | None:
    """The line, from 1, of a field below the ``number``-th such heading (0 first), or of that heading.

    ``heading`` is without brackets (``key``, ``tenants.acme``), "" for what stands before the first one. None when the
    file does not write it so: as an inline table, say.
    """
    inside, found = heading == "", 1 if heading == "" else None
    for at, line in enumerate(text.splitlines(), 1):
        if title := _HEADING.fullmatch(line):
            if inside:
                break
            if re.sub(r"[\"'\s]", "", title[1]) == heading:
                inside, found = number == 0, at if number == 0 else None
                number -= 1
        elif inside and field and (name := _FIELD.match(line)) and name[1] == field:
            return at
    return found
