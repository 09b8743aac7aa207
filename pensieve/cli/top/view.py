"""What of the sessions is shown, and what keys do to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pensieve.cli.top.strips import chunks
from pensieve.feed import MOST_LISTED, SessionLine

_Order = Callable[[SessionLine], float]
ORDERS: Final[dict[str, _Order | None]] = {
    "activity": None,
    "tokens": lambda row: -row.tokens,
    "device": lambda row: -chunks(row.strip, "dbi"),
    "host": lambda row: -chunks(row.strip, "hbo"),
    "dropped": lambda row: -chunks(row.strip, "xr"),
    "idle": lambda row: -row.idle_s,
}
"""Name → smallest first; None: as the server sends them, those that run first."""
_KEYS: Final = re.compile(r"\x1b(?:\[[0-9;]*[~A-Za-z]|O[A-Za-z])|[\s\S]")
_MOVES: Final = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "g": "home",
}  # fmt: skip


@dataclass
class View:
    """Order, filter and place in the list. One writer: the loop that reads keys."""

    order: str = "activity"
    filter: str = ""
    first: int = 0
    """Sessions above the first that is shown."""
    typing: bool = False
    """What is typed goes into the filter."""
    page: int = 10
    """Rows of the list; set by who draws."""
    done: bool = False

    @property
    def wanted(self) -> int:
        """How many sessions to ask for: all where the server's order is not the one to show."""
        if self.order == "activity" and not self.filter:
            return min(self.first + 2 * self.page + 10, MOST_LISTED)
        return MOST_LISTED

    def choose(self, rows: Sequence[SessionLine]) -> list[SessionLine]:
        """The rows to show, from the first in order; ``first`` is brought back to where there are any."""
        found = [row for row in rows if self.filter.lower() in _searched(row)] if self.filter else list(rows)
        order = ORDERS[self.order]
        if order is not None:
            found.sort(key=order)
        self.first = max(min(self.first, len(found) - 1), 0)
        return found[self.first :]

    def press(self, typed: str) -> None:
        """Take in what came from the keyboard."""
        for key in keys(typed):
            if self.typing:
                self._type(key)
            else:
                self._command(key)

    def _type(self, key: str) -> None:
        if key == "\x1b":
            self.typing, self.filter = False, ""
        elif key in "\r\n":
            self.typing = False
        elif key in "\x7f\b":
            self.filter = self.filter[:-1]
        elif key == "\x15":
            self.filter = ""
        elif key.isprintable():
            self.filter += key
        self.first = 0

    def _command(self, key: str) -> None:
        if key in "qQ":
            self.done = True
        elif key == "s":
            names = list(ORDERS)
            self.order = names[(names.index(self.order) + 1) % len(names)]
            self.first = 0
        elif key == "/":
            self.typing = True
        elif key == "\x1b":
            self.filter, self.first = "", 0
        elif key in _MOVES:
            steps = {"up": -1, "down": 1, "page up": -self.page, "page down": self.page, "home": -self.first}
            self.first = max(self.first + steps[_MOVES[key]], 0)


def keys(typed: str) -> Iterator[str]:
    """Single keys; a cursor key is one."""
    yield from _KEYS.findall(typed)


def _searched(row: SessionLine) -> str:
    labels = " ".join(f"{key}={value}" for key, value in (row.labels or {}).items())
    return f"{row.session} {row.state} {labels}".lower()
