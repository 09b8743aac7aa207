"""What a page of a report holds, read with the parser of the standard library."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class TableRead:
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    numbers: list[tuple[str, str, str]] = field(default_factory=list)
    """(path, exact value or "", text) of the cells that say where they are from."""


class Page(HTMLParser):
    """Raises AssertionError where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.tables: dict[str, TableRead] = {}
        self.figures: dict[str, str] = {}
        """Id → all text in it."""
        self.problems: list[str] = []
        self._text: dict[str, str] = {}
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The embedded ones."""
        found: list[dict[str, Any]] = json.loads(self._text["script"])
        return found

    @property
    def title(self) -> str:
        return self._text["title"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag not in VOID:
            self._open.append((tag, attributes))
            self._text[tag] = ""
        table = self._table
        if tag == "tr" and table is not None:
            table.rows.append([])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        opened, attributes = self._open[-1] if self._open else ("", {})
        assert opened == tag, f"</{tag}> closes <{opened}>"
        text, table = self._text[tag].strip(), self._table
        if table is not None and tag in ("th", "td"):
            if attributes.get("scope") == "col":
                table.heads.append(text)
            else:
                table.rows[-1].append(text)
            if "data-path" in attributes:
                table.numbers.append((attributes["data-path"], attributes.get("data-value", ""), text))
        if tag == "li":
            self.problems.append(text)
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for tag, attributes in self._open:
            self._text[tag] += data
            if tag == "figure":
                self.figures[attributes["id"]] = self.figures.get(attributes["id"], "") + data

    @property
    def _table(self) -> TableRead | None:
        for tag, attributes in self._open:
            if tag == "table":
                return self.tables.setdefault(attributes["id"], TableRead())
        return None
